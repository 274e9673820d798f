"""A timeline: a schedule's ops with start and end times, simulated or measured, and the figures taken from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from zerobubble.dependencies import needs, result

if TYPE_CHECKING:
    from zerobubble.op import Op
    from zerobubble.schedule import Schedule


class Interval(NamedTuple):
    """An op of a timeline."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of every op. `starts[rank][i]` and `ends[rank][i]` belong to `schedule.orders[rank][i]`.

    Attributes:
        schedule: what ran.
        starts: start times per rank, in `unit`.
        ends: end times per rank, in `unit`.
        peak_memory: the largest activation memory per rank, in the unit of the costs; empty when not known.
        unit: unit of the times, "" when they have none.
        hop: latency per stage boundary, 0 within a rank; empty when there is none or it is not known.
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    peak_memory: tuple[float, ...] = ()
    unit: str = ""
    hop: tuple[float, ...] = ()

    def rows(self) -> list[list[Interval]]:
        """Per rank its ops with start and end, in the order in which they ran, which may not be that of the plan."""
        together = zip(self.schedule.orders, self.starts, self.ends, strict=True)
        return [sorted(map(Interval, *row), key=lambda one: (one.start, one.end)) for row in together]

    @property
    def spans(self) -> tuple[float, ...]:
        """Per rank, the end of its last op minus the start of its first."""
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(max(ends) - min(starts) if ends else 0.0 for starts, ends in rows)

    @property
    def cost(self) -> float:
        """The largest span of a rank. Iterations follow each other at this distance when nothing synchronises them."""
        return max(self.spans)

    @property
    def makespan(self) -> float:
        """Last end minus first start over all ranks."""
        return max(map(max, self.ends)) - min(map(min, self.starts)) if self.schedule.num_ops else 0.0

    @property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the sum of its op times."""
        return tuple(sum(map(sub, ends, starts)) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def work(self) -> float:
        """The largest per-rank sum of op times: no schedule of these ops costs less."""
        return max(self.busy)

    @property
    def bubble_rate(self) -> float:
        """(cost - work) / cost: the share of the busiest rank's span that it stands idle."""
        return max(self.cost - self.work, 0.0) / self.cost if self.cost > 0 else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, its span minus its op times."""
        return tuple(span - busy for span, busy in zip(self.spans, self.busy, strict=True))

    def scaled(self, factor: float, unit: str) -> Timeline:
        """The same with every time multiplied by `factor`, which makes `unit` its unit."""

        def times(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(time * factor for time in row) for row in rows)

        hop = tuple(latency * factor for latency in self.hop)
        return replace(self, starts=times(self.starts), ends=times(self.ends), unit=unit, hop=hop)

    def critical_path(self) -> list[Op]:
        """A chain of ops, first to last, that the rank with the largest span waits on: why the cost is what it is.

        From that rank's last op backwards, each op is preceded by the one that it waited for longest: the op before it
        on its rank, or one whose result it needs, which arrives a hop after its end. The chain stops at the first op
        that starts no later than the rank does, so that together with its hops it is at least as long as the cost.
        """
        orders = self.schedule.orders
        where = {result(op): (rank, i) for rank, order in enumerate(orders) for i, op in enumerate(order)}
        spans = self.spans
        rank = spans.index(max(spans))
        begin = self.starts[rank][0] if self.starts[rank] else 0.0
        at: tuple[int, int] | None = (rank, len(orders[rank]) - 1) if orders[rank] else None
        path: list[Op] = []
        while at is not None:
            rank, position = at
            op = orders[rank][position]
            path.append(op)
            at = self._awaited(rank, position, where) if self.starts[rank][position] > begin else None
        return path[::-1]

    def _awaited(self, rank: int, position: int, where: dict[Op, tuple[int, int]]) -> tuple[int, int] | None:
        """The place of the op that the one at `position` of `rank` waited for longest."""
        op = self.schedule.orders[rank][position]
        arrivals = [(self.ends[rank][position - 1], (rank, position - 1))] if position else []
        for need in needs(op, self.schedule.num_stages):
            source, i = where[need]
            latency = self.hop[min(need.stage, op.stage)] if self.hop and need.stage != op.stage else 0.0
            arrivals.append((self.ends[source][i] + latency, (source, i)))
        return max(arrivals, key=lambda arrival: arrival[0])[1] if arrivals else None
