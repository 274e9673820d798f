"""Profiles: from measured timelines, what ops and hops take; from traces of memory, what microbatches hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.op import Kind
from zerobubble.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zerobubble.costs import PerStage
    from zerobubble.schedule import Schedule

_QUARTILES = 1.349
"""The distance between the quartiles of a normal distribution, in standard deviations."""
_ENOUGH = 3
"""Latencies of one direction of a hop whose median does not hang on a single one, say of a process that was held up."""
_IDLE = 0.5
"""A receiver that was idle for more than this share of a message's way waited for it."""


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


def timeline_of(
    schedule: Schedule, rows: Sequence[Sequence[Sequence[int]]], ahead: Sequence[int] | None = None
) -> Timeline:
    """A measured timeline in ms from each rank's starts and ends in ns, whose clock is `ahead` by so many ns."""
    ahead = ahead or [0] * len(rows)
    begin = min(starts[0] - by for (starts, _), by in zip(rows, ahead, strict=True) if starts)

    def times(which: int) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple((t - by - begin) / 1e6 for t in row[which]) for row, by in zip(rows, ahead, strict=True))

    return Timeline(schedule, times(0), times(1), unit="ms")


@dataclass(frozen=True)
class Profile:
    """What the stages of a running pipeline take.

    Attributes:
        costs: medians over microbatches and steps; M_B and M_W are 0 where no memory was measured.
        spread: the distance between the quartiles, per stage, for `forward`, `backward_input`, `backward_weight` and
            `backward_full`, and per stage boundary for `communication`; 0 where there are less than two samples.
        steps: how many were measured.
        divided: whether every stage ran B and W as ops of their own, so that T_B and T_W are known.
    """

    costs: Costs
    spread: Mapping[str, tuple[float, ...]]
    steps: int
    divided: bool

    @property
    def jitter(self) -> float:
        """How much the times of ops vary: their standard deviation, as the quartiles say it, as a share of the median.

        The median over F, B and W of all stages.
        """
        shares = [
            spread / _QUARTILES / time
            for key in ("forward", "backward_input", "backward_weight")
            for spread, time in zip(self.spread.get(key, ()), listed(getattr(self.costs, key)))
            if time
        ]
        return median(shares or [0.0])

    def to_json(self) -> str:
        """The costs file."""
        return self.costs.to_json()


def measured_costs(timelines: Sequence[Timeline], memory: MemoryTrace | None = None) -> Costs:
    """Costs of the stages as `timelines` of one schedule show them: the `costs` of their `measured_profile`."""
    return measured_profile(timelines, memory).costs


def measured_profile(timelines: Sequence[Timeline], memory: MemoryTrace | None = None) -> Profile:
    """What the stages take as `timelines` of one schedule show it: medians over microbatches and steps.

    T_comm of a hop is taken where the receiver was idle for most of it: the mean of both directions (where each was
    seen some times), in which a difference of the two clocks cancels; 0 where that never happened. Where a stage runs
    BW only, T_B is taken as the whole of it and T_W as 0. M_B and M_W are those of `memory`, else 0.
    """
    schedule = timelines[0].schedule
    stages, boundaries = range(schedule.num_stages), range(schedule.num_stages - 1)
    samples = _Samples()
    for timeline in timelines:
        samples.take(timeline)

    def times(kind: Kind, of: Callable[[Sequence[float]], float] = median) -> tuple[float, ...]:
        return tuple(of(samples.durations.get((kind, stage), [0.0])) for stage in stages)

    activation, weight = memory.per_stage() if memory else (0.0, 0.0)
    full, b, w = times(Kind.BW), times(Kind.B), times(Kind.W)
    costs = Costs(
        forward=times(Kind.F),
        backward_input=tuple(part or both for part, both in zip(b, full, strict=True)),
        backward_weight=w,
        backward_full=tuple(both or sum(parts) for both, *parts in zip(full, b, w, strict=True)),
        communication=tuple(samples.latency(boundary) for boundary in boundaries),
        activation_memory=activation,
        weight_memory=weight,
        unit=timelines[0].unit,
    )
    spreads = {
        "forward": times(Kind.F, spread),
        "backward_input": times(Kind.B, spread),
        "backward_weight": times(Kind.W, spread),
        "backward_full": times(Kind.BW, spread),
        "communication": tuple(spread(samples.of_hop(boundary)) for boundary in boundaries),
    }
    divided = all((Kind.B, stage) in samples.durations for stage in stages)
    return Profile(costs, spreads, len(timelines), divided)


def spread(values: Sequence[float]) -> float:
    """The distance between the quartiles; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, method="inclusive")
    return third - first


def listed(value: PerStage) -> tuple[float, ...]:
    """The numbers of a key of costs as a tuple: of one number, that alone."""
    return value if isinstance(value, tuple) else (value,)


class _Samples:
    """Op times per kind and stage, and latencies per hop, that is per (producer's, consumer's) stage."""

    def __init__(self) -> None:
        self.durations: dict[tuple[Kind, int], list[float]] = {}
        self._latencies: dict[tuple[int, int], list[float]] = {}

    def of_hop(self, boundary: int) -> list[float]:
        """All latencies of a stage boundary, both directions."""
        there, back = (boundary, boundary + 1), (boundary + 1, boundary)
        return self._latencies.get(there, []) + self._latencies.get(back, [])

    def latency(self, boundary: int) -> float:
        """T_comm of a stage boundary."""
        there, back = (self._latencies.get((boundary + i, boundary + 1 - i), []) for i in (0, 1))
        if min(len(there), len(back)) >= _ENOUGH:
            return max((median(there) + median(back)) / 2, 0.0)
        return max(median(there + back or [0.0]), 0.0)

    def take(self, timeline: Timeline) -> None:
        """Add those of one step."""
        ended: dict[object, float] = {}
        ranks, stages = timeline.schedule.placement.ranks, timeline.schedule.num_stages
        rows = timeline.rows()
        for op, start, end in chain.from_iterable(rows):
            self.durations.setdefault((op.kind, op.stage), []).append(end - start)
            ended[result(op)] = end
        for row in rows:
            for (_, _, free), (op, start, _) in pairwise(row):
                for need in needs(op, stages):
                    latency = start - ended[need]
                    if ranks[need.stage] != ranks[op.stage] and start - free > _IDLE * latency:
                        self._latencies.setdefault((need.stage, op.stage), []).append(latency)
