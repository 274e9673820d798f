"""How a plan compares with the handcrafted schedules at the same memory limit, and one sentence on what to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerobubble.bounds import lower_bound
from zerobubble.errors import CostsError, OptionError
from zerobubble.generators import GENERATORS
from zerobubble.memory import peak_memory
from zerobubble.op import Kind
from zerobubble.simulate import op_times
from zerobubble.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerobubble.costs import Costs
    from zerobubble.schedule import Placement, Schedule

_PAYS = 0.02
"""A schedule without split backward that costs no more than this share above the plan is the better choice."""

_IDLE = 0.02
"""A bubble worth more memory."""

_LARGE = 10_000
"""Microbatches of all ranks above which it takes too long to make every schedule."""

_STRONG = ("one_f_one_b", "zb_h1", "zb_h2", "zb_v")
_VISIBLE = 0.0005
"""A smaller difference of costs is written as 0.0%."""

_MORE_MEMORY = (1.25, 1.5, 2.0)
_PROVEN = 1e-6


@dataclass(frozen=True)
class Handcrafted:
    """A generator's schedule with the costs of the plan.

    Attributes:
        name: the generator's.
        title: the name in the literature.
        timeline: its simulation.
        fits: whether it keeps the memory limit.
        lower_bound: what no schedule of its placement within the limit can beat; None if it does not fit.
    """

    name: str
    title: str
    timeline: Timeline
    fits: bool
    lower_bound: float | None

    @property
    def splits(self) -> bool:
        """Whether it splits the backward."""
        return any(op.kind is Kind.B for op in self.timeline.schedule.ops())


def per_rank(costs: Costs, num_ranks: int, chunks: int = 1) -> Costs:
    """The costs with lists of one entry per rank in place of single numbers: `chunks` times the number.

    Only so can placements with different numbers of stages be compared. Costs that have lists are left alone.
    """
    if costs.num_stages is not None:
        return costs
    keys = ("forward", "backward_input", "backward_weight", "backward_full", "activation_memory", "weight_memory")
    given = {key: getattr(costs, key) for key in keys}
    lists: dict[str, Any] = {key: (value * chunks,) * num_ranks for key, value in given.items() if value is not None}
    return replace(costs, **lists)


def handcrafted(
    costs_for: Callable[[Placement], Costs], num_ranks: int, num_microbatches: int, memory_limit: float | None
) -> list[Handcrafted]:
    """The generators' schedules, simulated; of large ones only those that the others cannot beat.

    Args:
        costs_for: the costs for a placement; generators for whose placement it raises an error are left out.
        num_ranks: p.
        num_microbatches: m.
        memory_limit: what `fits` asks for.
    """
    rows = []
    for generator in GENERATORS.values():
        if num_ranks * num_microbatches > _LARGE and generator.name not in _STRONG:
            continue
        schedule = generator.make(num_ranks, num_microbatches)
        try:
            costs = costs_for(schedule.placement)
            timeline = _simulated(schedule, costs)
        except (CostsError, OptionError):  # lists for more chunks than it has, or too few layers for its stages
            continue
        fits = memory_limit is None or max(timeline.peak_memory) <= memory_limit + 1e-9 * max(memory_limit, 1.0)
        placement = schedule.placement
        bound = lower_bound(costs.resolve(placement), placement, num_microbatches, memory_limit).value if fits else None
        rows.append(Handcrafted(generator.name, generator.title, timeline, fits, bound))
    return rows


def _simulated(schedule: Schedule, costs: Costs) -> Timeline:
    """As `simulate`, without the time that it takes to check a schedule that a generator made."""
    stage_costs = costs.resolve(schedule.placement)
    starts, ends = op_times(schedule, stage_costs)
    peaks = tuple(peak_memory(order, stage_costs) for order in schedule.orders)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)), peaks, costs.unit, stage_costs.hop)


def advice(
    timeline: Timeline,
    bound: float,
    rows: list[Handcrafted],
    memory_limit: float | None = None,
    with_limit: Callable[[float], Timeline | None] = lambda limit: None,
    tried: str = "the placements tried",
) -> str:
    """One sentence on what to do.

    Args:
        timeline: of the plan.
        bound: what no schedule of the placements tried can beat within the limit.
        rows: the handcrafted schedules.
        memory_limit: the plan's.
        with_limit: plans again with a larger limit, or gives None; asked when the plan leaves a bubble.
        tried: what the bound is for.
    """
    fitting = sorted(
        (row for row in rows if row.fits), key=lambda row: (row.timeline.cost, max(row.timeline.peak_memory))
    )
    plain = next((row for row in fitting if not row.splits), None)
    if plain is not None and plain.timeline.cost <= timeline.cost * (1 + _PAYS):
        more = plain.timeline.cost / timeline.cost - 1 if timeline.cost else 0.0
        costs = f"costs {more:.1%} more than" if more >= _VISIBLE else "costs no more than"
        return f"Zero bubble does not pay here: {plain.title} {costs} the plan and needs no split of the backward."
    if fitting and fitting[0].timeline.cost < timeline.cost * (1 - _VISIBLE):
        less, style = 1 - fitting[0].timeline.cost / timeline.cost, fitting[0].timeline.schedule.placement.style
        return f"Another placement is better here: {fitting[0].title} (placement {style}) costs {less:.1%} less."
    if memory_limit is not None and timeline.bubble_rate > _IDLE:
        return _more_memory(timeline, rows, memory_limit, with_limit) or _against_the_bound(
            timeline.cost, bound, plain, tried
        )
    return _against_the_bound(timeline.cost, bound, plain, tried)


def _more_memory(
    timeline: Timeline, rows: list[Handcrafted], memory_limit: float, with_limit: Callable[[float], Timeline | None]
) -> str | None:
    """The least memory known to halve the bubble: of new plans, else of the handcrafted schedules over the limit."""
    enough = timeline.bubble_rate / 2
    for limit in (factor * memory_limit for factor in _MORE_MEMORY):
        richer = with_limit(limit)
        if richer is not None and richer.bubble_rate <= enough:
            return (
                f"More memory would pay: with {limit:g} instead of {memory_limit:g} per rank "
                f"the bubble falls from {timeline.bubble_rate:.1%} to {richer.bubble_rate:.1%}."
            )
    larger = [row for row in rows if not row.fits and row.timeline.bubble_rate <= enough]
    least = min(larger, key=lambda row: max(row.timeline.peak_memory), default=None)
    if least is None:
        return None
    return (
        f"More memory would pay: {least.title} takes {max(least.timeline.peak_memory):g} instead of {memory_limit:g} "
        f"per rank and has a bubble of {least.timeline.bubble_rate:.1%} instead of {timeline.bubble_rate:.1%}."
    )


def _against_the_bound(cost: float, bound: float, plain: Handcrafted | None, tried: str) -> str:
    saved = f"The plan takes {1 - cost / plain.timeline.cost:.1%} less time than {plain.title}; " if plain else ""
    if cost <= bound * (1 + _PROVEN):
        rest = f"it is proven that no schedule of {tried} takes less."
    else:
        rest = f"at most {1 - bound / cost:.1%} more can be gained with {tried}."
    return saved + rest if saved else rest[0].upper() + rest[1:]
