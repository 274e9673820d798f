"""When every op of a schedule starts and ends, for given costs. Linear in the number of ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.memory import peak_memory
from zerobubble.timeline import Timeline
from zerobubble.validate import validate

if TYPE_CHECKING:
    from zerobubble.costs import StageCosts
    from zerobubble.op import Op
    from zerobubble.schedule import Schedule


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run `schedule` on paper: every op starts as soon as its rank is free and what it needs has arrived.

    Communication is pure latency: it delays the receiver and occupies nobody. Without `costs` every op takes 1
    and hops take nothing.

    Raises:
        ScheduleError: the schedule is invalid.
        CostsError: the costs do not fit the schedule's stages.
    """
    costs = costs or Costs()
    stage_costs = costs.resolve(schedule.placement)
    validate(schedule)
    starts, ends = op_times(schedule, stage_costs)
    peaks = tuple(peak_memory(order, stage_costs) for order in schedule.orders)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)), peaks, costs.unit, stage_costs.hop)


def op_times(schedule: Schedule, costs: StageCosts) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end times per rank, without checking that the schedule is valid and complete."""
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    free = [0.0] * len(schedule.orders)
    ended: dict[Op, float] = {}
    durations, hop, num_stages = costs.by_kind, costs.hop, schedule.num_stages
    for rank, position in schedule.progress.sequence:
        op = schedule.orders[rank][position]
        stage = op.stage
        start = free[rank]
        for need in needs(op, num_stages):
            ready = ended[need]
            if need.stage != stage:
                ready += hop[min(need.stage, stage)]
            if ready > start:
                start = ready
        end = start + durations[op.kind][stage]
        starts[rank].append(start)
        ends[rank].append(end)
        ended[result(op)] = free[rank] = end
    return starts, ends
