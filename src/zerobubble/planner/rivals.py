"""Schedules that may hold up better than the fastest one when ops do not take exactly their times."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerobubble.planner.advice import handcrafted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerobubble.costs import Costs
    from zerobubble.schedule import Schedule

_SLACKS = (0.5, 1.0, 2.0)
"""Slack per hop, in standard deviations of the longest forward."""


def rivals(
    schedule: Schedule,
    costs: Costs,
    memory_limit: float | None,
    jitter: float,
    make_schedule: Callable[[Costs], Schedule | None],
) -> Iterator[Schedule]:
    """Other schedules of the same placement within the limit: candidates beside the plan `schedule`.

    The handcrafted ones are regular. Those planned as if every hop took longer have results ready before they are
    needed, so that a late op delays nobody.

    Args:
        schedule: the plan.
        costs: the true costs.
        memory_limit: the plan's.
        jitter: standard deviation of the times as a share of their mean.
        make_schedule: plans for other costs, with the plan's placement and limit; None when it cannot.
    """
    for row in handcrafted(lambda _: costs, schedule.num_ranks, schedule.num_microbatches, memory_limit):
        if row.fits and row.timeline.schedule.placement == schedule.placement:
            yield row.timeline.schedule
    longest = max(costs.resolve(schedule.placement).forward)
    for slack in _SLACKS:
        found = make_schedule(_with_slack(costs, slack * jitter * longest))
        if found is not None:
            yield found


def _with_slack(costs: Costs, slack: float) -> Costs:
    hops = costs.communication
    longer = tuple(hop + slack for hop in hops) if isinstance(hops, tuple) else hops + slack
    return replace(costs, communication=longer)
