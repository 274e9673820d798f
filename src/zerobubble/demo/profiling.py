"""What every process of `zerobubble profile` does: train the demo's GPT for some steps, and measure its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerobubble.demo.text import load_text
from zerobubble.models import gpt_layers, gpt_partition, next_token_loss
from zerobubble.runtime import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerobubble.demo.training import DemoConfig
    from zerobubble.runtime import Profile
    from zerobubble.schedule import Schedule

WARM_UP_STEPS = 2


def profile_all(report: Callable[[Any], None], schedule: Schedule, config: DemoConfig) -> Profile:
    """Train `config.steps` steps after two to warm up, then measure memory. Reports every step of rank 0."""
    text = load_text(config.data, config.model.context)
    partition = gpt_partition(config.model, schedule.num_stages)
    pipeline = Pipeline(gpt_layers(config.model), next_token_loss, schedule, partition=partition, seed=config.seed)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=config.learning_rate)
    for step in range(WARM_UP_STEPS + config.steps):
        pipeline.step(*text.batch(step, config.samples, config.model.context, config.seed))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            report(None)
    pipeline.measure_memory(*text.batch(0, config.samples, config.model.context, config.seed))
    return pipeline.profile(config.steps)
