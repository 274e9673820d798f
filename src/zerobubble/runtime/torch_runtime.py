"""The same rehearsal in the schedule runtime of `torch.distributed.pipelining`, for comparison."""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from zerobubble import notation
from zerobubble.op import Kind, Op
from zerobubble.runtime.emulation import Times, emulated_loss, sleep_until, work
from zerobubble.runtime.live_memory import LiveMemory
from zerobubble.runtime.profile import timeline_of
from zerobubble.runtime.rehearsal import WARM_UP_STEPS, RankResult, timed_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerobubble.runtime.emulation import Emulation
    from zerobubble.schedule import Schedule

_Interval = tuple[int, int]


def run_in_torch(report: Callable[[Any], None], schedule: Schedule, stages: Emulation, steps: int) -> RankResult:
    """What each process does. `timelines` show when stages slept: torch runs stage 0's B within its W."""
    rank, count = dist.get_rank(), schedule.num_microbatches
    modules = {s: _Stage(s, stages) for s in schedule.placement.stages_of(rank)}
    example = torch.zeros(1, 1, dtype=torch.float64)
    holders = [
        PipelineStage(
            module, stage, schedule.num_stages, torch.device("cpu"),
            input_args=example.clone().requires_grad_(stage > 0), output_args=example.clone().requires_grad_(),
        )
        for stage, module in modules.items()
    ]  # fmt: skip
    runtime = _PipelineScheduleRuntime(holders, count, loss_fn=emulated_loss)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(notation.to_csv(schedule, "torch"), encoding="utf-8")
        runtime._load_csv(str(path), format="compute_only")
    is_first, is_last = 0 in modules, schedule.num_stages - 1 in modules
    inputs = (torch.zeros(count, 1, dtype=torch.float64),) if is_first else ()
    target = torch.zeros(count, 1) if is_last else None

    def step() -> None:
        runtime.step(*inputs, target=target)

    seconds = timed_steps(step, steps, report)
    own = [_rows(schedule, rank, modules, WARM_UP_STEPS + i) for i in range(steps)]
    with LiveMemory() as memory:
        step()
    gathered: list[Any] = [None] * schedule.num_ranks
    dist.all_gather_object(gathered, own)
    timelines = [timeline_of(schedule, rows) for rows in zip(*gathered)] if rank == 0 else []
    return RankResult(seconds, memory.peak, tuple(timelines))


class _Stage(nn.Module):
    """An emulated stage that torch can split: its weight joins the data in a node of its own.

    What it passes on is the time of sending, so that latency can be emulated as pure delay of the receiver.
    """

    def __init__(self, index: int, stages: Emulation) -> None:
        super().__init__()
        self.times: Times = stages.times[index]
        self.marks: dict[Kind, list[_Interval]] = {kind: [] for kind in (Kind.F, Kind.B, Kind.W)}
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.latency_before = stages.latency[index - 1] if index else None
        self.latency_after = stages.latency[index] if index < len(stages.latency) else None

    def forward(self, x: Tensor) -> Tensor:
        """Sleep T_F after the latency; returns the time [1, 1]."""
        _await(x, self.latency_before)
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        self.take(Kind.F, self.times.forward)
        through: Tensor = _Data.apply(x, self)  # type: ignore[no-untyped-call]
        weight: Tensor = _Weight.apply(self.weight, self)  # type: ignore[no-untyped-call]
        return through + weight

    def take(self, kind: Kind, seconds: float) -> None:
        """Sleep, and note when."""
        begin = perf_counter_ns()
        work(seconds)
        self.marks[kind].append((begin, perf_counter_ns()))


def _await(stamp: Tensor, latency: float | None) -> None:
    if latency is not None:
        sleep_until(int((stamp.detach().item() + latency) * 1e9))


class _Data(torch.autograd.Function):
    """The way of the data: the time of sending, and in the backward B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: _Stage) -> Tensor:
        ctx.stage = stage
        times = stage.times
        ctx.save_for_backward(torch.empty(max(times.activation_bytes - times.weight_bytes, 0), dtype=torch.uint8))
        return torch.full_like(x, perf_counter())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        stage: _Stage = ctx.stage
        _await(grad, stage.latency_after)
        stage.take(Kind.B, stage.times.backward_input)
        return torch.full_like(grad, perf_counter()), None


class _Weight(torch.autograd.Function):
    """The way of the weight: nothing, and in the backward W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: _Stage) -> Tensor:
        ctx.stage = stage
        ctx.save_for_backward(torch.empty(stage.times.weight_bytes, dtype=torch.uint8))
        return weight.new_zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _await(grad, ctx.stage.latency_after)  # undivided, autograd may come here before the input's gradient
        ctx.stage.take(Kind.W, ctx.stage.times.backward_weight)
        return grad.new_zeros(1), None


def _rows(schedule: Schedule, rank: int, modules: dict[int, _Stage], step: int) -> tuple[list[int], list[int]]:
    """When each op of the rank started and ended in a step. A stage runs the ops of a kind in the schedule's order."""
    count, taken = schedule.num_microbatches, dict.fromkeys(((s, k) for s in modules for k in Kind), 0)

    def interval(op: Op, kind: Kind) -> _Interval:
        position = taken[op.stage, kind]
        taken[op.stage, kind] += 1
        return modules[op.stage].marks[kind][step * count + position]

    rows: list[_Interval] = []
    for op in schedule.orders[rank]:
        if op.kind is Kind.BW:
            parts = interval(op, Kind.B), interval(op, Kind.W)
            rows.append((min(begin for begin, _ in parts), max(end for _, end in parts)))
        else:
            rows.append(interval(op, op.kind))
    return [begin for begin, _ in rows], [end for _, end in rows]
