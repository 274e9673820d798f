"""What every process of the demo does: train the same GPT with each schedule, in alternating blocks of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerobubble.demo.text import Text, load_text
from zerobubble.models import GPTConfig, gpt_layers, gpt_partition, next_token_loss
from zerobubble.runtime import MemoryTrace, Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerobubble.runtime import LateValue
    from zerobubble.schedule import Schedule
    from zerobubble.timeline import Timeline


@dataclass(frozen=True)
class DemoConfig:
    """What the demo trains, and for how long."""

    steps: int = 80
    samples: int = 16
    block: int = 10
    learning_rate: float = 1e-3
    seed: int = 0
    evaluation_batches: int = 4
    data: Path | None = None
    model: GPTConfig = field(default_factory=GPTConfig)


@dataclass
class ScheduleRun:
    """What one schedule showed.

    Attributes:
        schedule: the schedule.
        losses: training loss of every step, in nats per token.
        step_seconds: per step but the first of each block, from its start to the start of the step before, on rank 0.
        held_out_loss: after training, in nats per token.
        timelines: measured, of the last steps.
        memory: measured activation memory.
    """

    schedule: Schedule
    losses: list[float]
    step_seconds: list[float]
    held_out_loss: float
    timelines: list[Timeline]
    memory: MemoryTrace


@dataclass
class _Trainee:
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    losses: list[LateValue] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


def train_all(report: Callable[[Any], None], schedules: list[Schedule], config: DemoConfig) -> list[ScheduleRun]:
    """Train with every schedule, block of steps by block of steps in turn, so that noise of the machine meets all."""
    text = load_text(config.data, config.model.context)
    trainees = [_trainee(schedule, config) for schedule in schedules]
    for begin in range(0, config.steps, config.block):
        steps = range(begin, min(begin + config.block, config.steps))
        turn = begin // config.block % len(trainees)
        for trainee in trainees[turn:] + trainees[:turn]:
            dist.barrier()
            _train_block(trainee, text, steps, config)
            if dist.get_rank() == 0:
                report((trainee.pipeline.schedule.name, len(steps)))
    return [_finish(trainee, text, config) for trainee in trainees]


def _trainee(schedule: Schedule, config: DemoConfig) -> _Trainee:
    partition = gpt_partition(config.model, schedule.num_stages)
    pipeline = Pipeline(gpt_layers(config.model), next_token_loss, schedule, partition=partition, seed=config.seed)
    return _Trainee(pipeline, torch.optim.AdamW(pipeline.parameters(), lr=config.learning_rate))


def _train_block(trainee: _Trainee, text: Text, steps: range, config: DemoConfig) -> None:
    before = None
    for step in steps:
        inputs, targets = text.batch(step, config.samples, config.model.context, config.seed)
        begin = perf_counter()
        if before is not None:
            trainee.step_seconds.append(begin - before)
        before = begin
        trainee.losses.append(trainee.pipeline.step(inputs, targets))
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()


def _finish(trainee: _Trainee, text: Text, config: DemoConfig) -> ScheduleRun:
    pipeline = trainee.pipeline
    held_out = []
    for index in range(config.evaluation_batches):
        held_out.append(pipeline.evaluate(*text.held_out_batch(index, config.samples, config.model.context)))
    memory = pipeline.measure_memory(*text.batch(0, config.samples, config.model.context, config.seed))
    return ScheduleRun(
        pipeline.schedule,
        [loss.item() for loss in trainee.losses],
        trainee.step_seconds,
        sum(loss.item() for loss in held_out) / len(held_out),
        pipeline.timelines(last=config.steps),
        memory,
    )
