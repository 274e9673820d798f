"""What `zerobubble plan` asks of the planner, and what is made of its answer."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from zerobubble import planner
from zerobubble.costs import Costs
from zerobubble.errors import OptionError
from zerobubble.jitter import JitterResult, simulate_jitter
from zerobubble.planner.advice import Handcrafted, advice, handcrafted
from zerobubble.planner.partition import best_partitions, plan_layers, stage_costs_for
from zerobubble.planner.rivals import rivals
from zerobubble.schedule import Placement, Schedule
from zerobubble.simulate import simulate
from zerobubble.timeline import Timeline

_LARGE = 5_000
"""Ops above which nothing is planned again for the advice."""


@dataclass(frozen=True)
class Request:
    """What is to be planned, as given."""

    ranks: int
    microbatches: int
    costs: Costs
    memory_limit: float | None
    placement: str
    chunks: int | None
    effort: str
    time_limit: float | None
    layers: Costs | None = None


@dataclass(frozen=True)
class Answer:
    """A plan and what is said of it. `partition` and `jitter` are there when they were asked for."""

    timeline: Timeline
    lower_bound: float
    costs: Costs
    rows: list[Handcrafted]
    advice: str
    partition: tuple[int, ...] | None = None
    jitter: JitterResult | None = None

    @property
    def gap(self) -> float:
        """By how much the cost is over the bound, as a share of the cost."""
        return gap(self.timeline, self.lower_bound)


def answer_to(request: Request, jitter: float | None, samples: int) -> Answer:
    """Plan, compare with the handcrafted schedules, and say what to make of it.

    Raises:
        ZeroBubbleError: as `plan` and `plan_layers`.
    """
    limit, drawn = request.memory_limit, None
    with progress("planning") as tell:
        partition, costs, found = _plan(request, tell)
        timeline = found.timeline
        again = partial(_again, request, found.schedule.placement)
        planned_again = again if _may_plan_again(request, found.schedule) else lambda *_: None
        if jitter is not None:
            schedule, drawn = _steadiest(costs, found.schedule, limit, jitter, samples, again)
            timeline = simulate(schedule, costs)
        rows = handcrafted(partial(_costs_for, request), request.ranks, request.microbatches, limit)
        tried = "the placements tried" if partition is None else "this cut and placement"
        sentence = advice(timeline, found.lower_bound, rows, limit, partial(planned_again, costs), tried)
    return Answer(timeline, found.lower_bound, costs, rows, sentence, partition, drawn)


def _may_plan_again(request: Request, schedule: Schedule) -> bool:
    """Whether there is time to plan for more memory, only to say what it would do."""
    return request.effort != "quick" and request.time_limit is None and schedule.num_ops < _LARGE


def _costs_for(request: Request, placement: Placement) -> Costs:
    """The costs per stage, for layers those of the most even cut for `placement`."""
    if request.layers is None:
        return request.costs
    return stage_costs_for(request.layers, best_partitions(request.layers, placement)[0])


def _plan(request: Request, tell: Callable[..., None]) -> tuple[tuple[int, ...] | None, Costs, planner.Plan]:
    """Partition (with layers), costs per stage and plan."""
    options: dict[str, Any] = {
        "memory_limit": request.memory_limit,
        "placement": request.placement,
        "chunks": request.chunks,
        "effort": request.effort,
        "time_limit": request.time_limit,
        "progress": tell,
    }
    if request.layers is None:
        return None, request.costs, planner.plan(request.costs, request.ranks, request.microbatches, **options)
    cut, found = plan_layers(request.layers, request.ranks, request.microbatches, **options)
    return cut, stage_costs_for(request.layers, cut), found


def _again(request: Request, placement: Placement, costs: Costs, memory_limit: float | None) -> Timeline | None:
    """A quick plan for the same placement with other costs or another limit; None when there is none."""
    try:
        found = planner.plan(
            costs, request.ranks, request.microbatches, memory_limit=memory_limit, placement=placement, effort="quick"
        )
    except OptionError:
        return None
    return found.timeline


def _steadiest(
    costs: Costs,
    schedule: Schedule,
    memory_limit: float | None,
    jitter: float,
    samples: int,
    again: Callable[[Costs, float | None], Timeline | None],
) -> tuple[Schedule, JitterResult]:
    """Of the plan and its rivals, the one with the least mean cost under jitter."""

    def make_schedule(other: Costs) -> Schedule | None:
        found = again(other, memory_limit)
        return None if found is None else found.schedule

    candidates = [schedule, *rivals(schedule, costs, memory_limit, jitter, make_schedule)]
    drawn = [simulate_jitter(one, costs, jitter, samples) for one in candidates]
    best = min(range(len(candidates)), key=lambda i: drawn[i].mean)
    return candidates[best], drawn[best]


@contextmanager
def progress(what: str) -> Iterator[Callable[..., None]]:
    """Context: a line on a terminal's standard error with the time that has passed and the last news."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    silent = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=silent) as line:
        task = line.add_task(what, total=None)
        yield lambda *news: line.update(task, description=" ".join([what, *map(str, news)]))


def gap(timeline: Timeline, bound: float) -> float:
    """By how much the cost is over the bound, as a share of the cost."""
    return max(1 - bound / timeline.cost, 0.0) if timeline.cost else 0.0
