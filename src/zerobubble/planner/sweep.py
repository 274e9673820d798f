"""Bubble against memory limit: what each placement needs to get rid of it (the paper's figures 7 and 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerobubble.errors import CostsError, OptionError
from zerobubble.planner.advice import Handcrafted, handcrafted
from zerobubble.schedule import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zerobubble.costs import Costs
    from zerobubble.planner import Plan

SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 1.75, 2.0)
"""Limits that are swept, in p times the largest M_B of a rank: 1 is what 1F1B takes."""

STYLES: tuple[tuple[str, int | None], ...] = (("linear", None), ("v", None), ("wave", 4))
"""Placements that are swept, with the number of chunks where it can be chosen."""


@dataclass(frozen=True)
class Point:
    """A plan at a memory limit. `plan` may be one for a lower limit, where more memory gave nothing better."""

    memory_limit: float
    plan: Plan


@dataclass(frozen=True)
class Curve:
    """The plans of one placement, by rising limit; limits too low for any schedule are left out."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Sweep:
    """All families in one picture: a curve per placement, and the handcrafted schedules where they lie."""

    limits: tuple[float, ...]
    curves: tuple[Curve, ...]
    handcrafted: tuple[Handcrafted, ...]


def sweep_limits(costs: Costs, num_ranks: int) -> tuple[float, ...]:
    """The limits of `SHARES` for these costs."""
    placement = Placement.linear(num_ranks)
    chunks = max((costs.num_stages or num_ranks) // num_ranks, 1)
    if chunks > 1:
        placement = Placement.v(num_ranks) if chunks == 2 else Placement.loop(num_ranks, chunks)
    memory = costs.resolve(placement).activation_memory
    largest = max(sum(memory[stage] for stage in placement.stages_of(rank)) for rank in range(num_ranks))
    return tuple(share * num_ranks * largest for share in SHARES)


def sweep(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    make_plan: Callable[[float, str, int | None], Plan],
    styles: Sequence[tuple[str, int | None]] = STYLES,
    on_point: Callable[[], None] = lambda: None,
) -> Sweep:
    """Plan every placement at every limit.

    Args:
        costs: of the ranks, or of finer stages.
        num_ranks: p.
        num_microbatches: m.
        make_plan: plans for a limit, a placement and a number of chunks; `OptionError` when the limit is too low.
        styles: placements with their number of chunks.
        on_point: called after each plan.

    Raises:
        OptionError: no limit is high enough for any placement.
    """
    limits = sweep_limits(costs, num_ranks)
    curves = []
    for style, chunks in styles:
        points = tuple(_points(limits, lambda limit, s=style, c=chunks: make_plan(limit, s, c), on_point))  # type: ignore[misc]
        if points:
            curves.append(Curve(style if chunks is None else f"{style}, {chunks} chunks", points))
    if not curves:
        raise OptionError(f"no placement can be planned for these costs with up to {limits[-1]:g} of memory per rank")
    return Sweep(limits, tuple(curves), tuple(handcrafted(lambda _: costs, num_ranks, num_microbatches, None)))


def _points(
    limits: Sequence[float], make_plan: Callable[[float], Plan], on_point: Callable[[], None]
) -> Iterator[Point]:
    best: Plan | None = None
    for limit in limits:
        try:
            found = make_plan(limit)
        except (OptionError, CostsError):
            continue
        finally:
            on_point()
        if best is None or found.timeline.cost <= best.timeline.cost:
            best = found
        yield Point(limit, best)
