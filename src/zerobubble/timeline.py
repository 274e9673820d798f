"""A timeline: a schedule's ops with start and end times, simulated or measured, and the figures taken from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerobubble.dependencies import needs, result

if TYPE_CHECKING:
    from zerobubble.op import Op
    from zerobubble.schedule import Schedule


@dataclass(frozen=True)
class Timeline:
    """Start and end of every op. `starts[rank][i]` and `ends[rank][i]` belong to `schedule.orders[rank][i]`.

    Attributes:
        schedule: what ran.
        starts: start times per rank, in `unit`.
        ends: end times per rank, in `unit`.
        peak_memory: the largest activation memory per rank, in the unit of the costs; empty when not known.
        unit: unit of the times, "" when they have none.
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    peak_memory: tuple[float, ...] = ()
    unit: str = ""

    @property
    def spans(self) -> tuple[float, ...]:
        """Per rank, the end of its last op minus the start of its first."""
        return tuple(ends[-1] - starts[0] if ends else 0.0 for starts, ends in zip(self.starts, self.ends, strict=True))

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
        return tuple(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def work(self) -> float:
        """The largest per-rank sum of op times: no schedule of these ops costs less."""
        return max(self.busy)

    @property
    def bubble_rate(self) -> float:
        """(cost - work) / cost: the share of the busiest rank's span that it stands idle."""
        return (self.cost - self.work) / self.cost if self.cost > 0 else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, its span minus its op times."""
        return tuple(span - busy for span, busy in zip(self.spans, self.busy, strict=True))

    def critical_path(self) -> list[Op]:
        """A chain of ops, first to last, that the rank with the largest span waits on: why the cost is what it is.

        From that rank's last op backwards, each op is preceded by whichever ended last of the op before it
        on its rank and the results it needs, until an op starts when its rank does.
        """
        schedule = self.schedule
        where = {result(op): (r, i) for r, order in enumerate(schedule.orders) for i, op in enumerate(order)}
        rank = max(range(schedule.num_ranks), key=lambda r: self.spans[r])
        at: tuple[int, int] | None = (rank, len(schedule.orders[rank]) - 1)
        path: list[Op] = []
        while at is not None:
            rank, position = at
            op = schedule.orders[rank][position]
            path.append(op)
            before = [(rank, position - 1)] if position else []
            before += [where[need] for need in needs(op, schedule.num_stages)]
            at = max(before, key=lambda place: self.ends[place[0]][place[1]], default=None)
        return path[::-1]
