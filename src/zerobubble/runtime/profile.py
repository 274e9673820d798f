"""Costs from measured timelines: median op times per stage and median latency per hop."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.op import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerobubble.schedule import Schedule
    from zerobubble.timeline import Timeline


@dataclass(frozen=True)
class MemoryTrace:
    """Measured activation memory. `live_bytes[rank][i]` is held after the i-th op of `schedule.orders[rank]`."""

    schedule: Schedule
    live_bytes: tuple[tuple[int, ...], ...]

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes that each rank held after an op."""
        return tuple(max(row, default=0) for row in self.live_bytes)

    def per_stage(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """M_B and M_W per stage in bytes: what its F adds, and what its B leaves of that (0 where it runs BW)."""
        added: dict[tuple[Kind, int], list[float]] = {}
        for order, live in zip(self.schedule.orders, self.live_bytes, strict=True):
            for op, before, after in zip(order, (0, *live), live):
                added.setdefault((op.kind, op.stage), []).append(after - before)
        stages = range(self.schedule.num_stages)
        activation = tuple(median(added[Kind.F, stage]) for stage in stages)
        left = tuple(
            activation[stage] + median(added[Kind.B, stage]) if (Kind.B, stage) in added else 0.0 for stage in stages
        )
        return activation, tuple(max(bytes_, 0.0) for bytes_ in left)


def measured_costs(timelines: Sequence[Timeline], memory: MemoryTrace | None = None) -> Costs:
    """Costs of the stages as `timelines` of one schedule show them: medians over microbatches and steps.

    T_comm of a hop is taken where the receiver was idle, waiting for it; 0 where that never happened. Where a
    stage runs BW only, T_B is taken as the whole of it and T_W as 0. M_B and M_W are those of `memory`, else 0.
    """
    schedule = timelines[0].schedule
    durations: dict[tuple[Kind, int], list[float]] = {}
    latencies: list[list[float]] = [[] for _ in range(schedule.num_stages - 1)]
    for timeline in timelines:
        _collect(timeline, durations, latencies)

    def times(kind: Kind) -> tuple[float, ...]:
        return tuple(median(durations.get((kind, stage), [0.0])) for stage in range(schedule.num_stages))

    activation, weight = memory.per_stage() if memory else (0.0, 0.0)
    full = times(Kind.BW)
    split = tuple(b + w for b, w in zip(times(Kind.B), times(Kind.W), strict=True))
    return Costs(
        forward=times(Kind.F),
        backward_input=tuple(b or both for b, both in zip(times(Kind.B), full, strict=True)),
        backward_weight=times(Kind.W),
        backward_full=tuple(both or parts for both, parts in zip(full, split, strict=True)),
        communication=tuple(median(latency) if latency else 0.0 for latency in latencies),
        activation_memory=activation,
        weight_memory=weight,
        unit=timelines[0].unit,
    )


def _collect(timeline: Timeline, durations: dict[tuple[Kind, int], list[float]], latencies: list[list[float]]) -> None:
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
