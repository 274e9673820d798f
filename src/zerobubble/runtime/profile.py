"""Costs from measured timelines: median op times per stage and median latency per hop."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.op import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerobubble.timeline import Timeline


def measured_costs(timelines: Sequence[Timeline]) -> Costs:
    """Costs of the stages as `timelines` of one schedule show them: medians over microbatches and steps.

    T_comm of a hop is taken where the receiver was idle, waiting for it; 0 where that never happened. Where a
    stage runs BW only, T_B is taken as the whole of it and T_W as 0. Memory is not measured here (M_B = M_W = 0).
    """
    schedule = timelines[0].schedule
    durations: dict[tuple[Kind, int], list[float]] = {}
    latencies: list[list[float]] = [[] for _ in range(schedule.num_stages - 1)]
    for timeline in timelines:
        _collect(timeline, durations, latencies)

    def times(kind: Kind) -> tuple[float, ...]:
        return tuple(median(durations.get((kind, stage), [0.0])) for stage in range(schedule.num_stages))

    full = times(Kind.BW)
    split = tuple(b + w for b, w in zip(times(Kind.B), times(Kind.W), strict=True))
    return Costs(
        forward=times(Kind.F),
        backward_input=tuple(b or both for b, both in zip(times(Kind.B), full, strict=True)),
        backward_weight=times(Kind.W),
        backward_full=tuple(both or parts for both, parts in zip(full, split, strict=True)),
        communication=tuple(median(latency) if latency else 0.0 for latency in latencies),
        activation_memory=0.0,
        weight_memory=0.0,
        unit=timelines[0].unit,
    )


def _collect(
    timeline: Timeline, durations: dict[tuple[Kind, int], list[float]], latencies: list[list[float]]
) -> None:
    ended: dict[object, float] = {}
    rows = list(zip(timeline.schedule.orders, timeline.starts, timeline.ends, strict=True))
    for order, starts, ends in rows:
        for op, start, end in zip(order, starts, ends, strict=True):
            durations.setdefault((op.kind, op.stage), []).append(end - start)
            ended[result(op)] = end
    for order, starts, ends in rows:
        for op, start, free in zip(order[1:], starts[1:], ends):
            for need in needs(op, timeline.schedule.num_stages):
                crosses = timeline.schedule.placement.ranks[need.stage] != timeline.schedule.placement.ranks[op.stage]
                if crosses and ended[need] > free:
                    latencies[min(need.stage, op.stage)].append(max(start - ended[need], 0.0))
