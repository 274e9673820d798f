"""A rehearsal: emulated stages on real processes, and what a step of them takes beside what the simulation says."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from zerobubble.runtime.emulation import emulated_loss, emulation
from zerobubble.runtime.launch import launch
from zerobubble.runtime.pipeline import Pipeline
from zerobubble.runtime.profile import spread
from zerobubble.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerobubble.costs import Costs
    from zerobubble.runtime.emulation import Emulation
    from zerobubble.schedule import Schedule
    from zerobubble.timeline import Timeline

WARM_UP_STEPS = 2
"""Steps that are not measured: in the first, shapes are agreed, and the pipeline must fill."""


@dataclass(frozen=True)
class RankResult:
    """What one rank measured.

    Attributes:
        step_seconds: from the start of each step to the start of the next.
        peak_bytes: the most that the emulated activations of this rank took.
        timelines: of the measured steps, oldest first, in ms; empty but on rank 0.
    """

    step_seconds: tuple[float, ...]
    peak_bytes: int
    timelines: tuple[Timeline, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """What emulated stages showed, beside what was simulated.

    Attributes:
        schedule: what ran.
        runtime: whose executor ran it, `zerobubble` or `torch`.
        steps: measured per rank.
        step_seconds: measured, from the start of each step to the start of the next, of all ranks.
        simulated: the plan in ms, stretched like the emulation.
        timelines: the measured steps, oldest first, in ms (of many the last ones).
        peak_memory: the most that each rank held, in the unit of the costs.
        bytes: that stood for one unit of memory.
    """

    schedule: Schedule
    runtime: str
    steps: int
    step_seconds: tuple[float, ...]
    simulated: Timeline
    timelines: tuple[Timeline, ...]
    peak_memory: tuple[float, ...]
    bytes: float

    @property
    def timeline(self) -> Timeline:
        """The measured step with the median cost."""
        return sorted(self.timelines, key=lambda timeline: timeline.cost)[len(self.timelines) // 2]

    @property
    def step_seconds_measured(self) -> float:
        """The median time of a step."""
        return median(self.step_seconds)

    @property
    def spread(self) -> float:
        """Between the quartiles of the step time, in seconds."""
        return spread(self.step_seconds)

    @property
    def step_seconds_simulated(self) -> float:
        """The cost of the plan."""
        return self.simulated.cost / 1e3

    @property
    def bubble_rate_measured(self) -> float:
        """The share of a measured step that the busiest rank does not spend asleep in its ops.

        The ops' times are those that were to be emulated: what the runtime adds to them counts as bubble.
        """
        return 1 - self.simulated.work / 1e3 / self.step_seconds_measured if self.step_seconds_measured else 0.0


def rehearse(
    schedule: Schedule,
    costs: Costs,
    steps: int,
    *,
    stretch: float = 1.0,
    runtime: str = "zerobubble",
    time_limit: float | None = None,
    on_step: Callable[[Any], None] = lambda _: None,
) -> Rehearsal:
    """Run `schedule` on one process per rank, with stages that sleep their times and hold their memory.

    No barrier stands between steps. Two warm-up steps are not measured.

    Args:
        schedule: valid.
        costs: times of the stages; in ms where they have no unit.
        steps: measured steps.
        stretch: by what all times are multiplied.
        runtime: `zerobubble`, or `torch` for that of `torch.distributed.pipelining`.
        time_limit: seconds after which it is given up.
        on_step: called in this process after every step of rank 0, warm-up and one last step included.

    Raises:
        ZeroBubbleError: the costs do not fit or cannot be emulated, or a process failed.
    """
    stages = emulation(costs, schedule, stretch)
    if runtime == "torch":
        from zerobubble.runtime.torch_runtime import run_in_torch as run
    else:
        run = _run
    ranks: list[RankResult] = launch(
        run, schedule.num_ranks, schedule, stages, steps, on_news=on_step, time_limit=time_limit
    )
    simulated = simulate(schedule, costs).scaled(stages.seconds * 1e3, "ms")
    return Rehearsal(
        schedule,
        runtime,
        steps,
        tuple(chain.from_iterable(rank.step_seconds for rank in ranks)),
        simulated,
        ranks[0].timelines,
        tuple(rank.peak_bytes / stages.bytes if stages.bytes else 0.0 for rank in ranks),
        stages.bytes,
    )


def _run(report: Callable[[Any], None], schedule: Schedule, stages: Emulation, steps: int) -> RankResult:
    """What each process does."""
    pipeline = Pipeline(stages.layers(), emulated_loss, schedule, wrap_transport=stages.delayed)
    batch = torch.ones(schedule.num_microbatches, 1)
    seconds = timed_steps(lambda: pipeline.step(batch), steps, report)
    timelines = pipeline.timelines(last=steps + 1)[:steps]
    own = torch.distributed.get_rank()
    peak = pipeline.measure_memory(batch).peaks[own]
    return RankResult(seconds, peak, tuple(timelines) if own == 0 else ())


def timed_steps(step: Callable[[], Any], steps: int, report: Callable[[Any], None]) -> tuple[float, ...]:
    """Seconds from the start of each measured step to the start of the next one; after the last comes another."""
    begins = []
    first = torch.distributed.get_rank() == 0
    for _ in range(WARM_UP_STEPS + steps + 1):
        begins.append(perf_counter())
        step()
        if first:
            report(None)
    return tuple(after - before for before, after in pairwise(begins[WARM_UP_STEPS:]))
