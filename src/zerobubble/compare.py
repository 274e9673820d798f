"""A plan beside what was measured: which ops came late, how late, and whether they ran longer or waited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerobubble.costs import SECONDS
from zerobubble.dependencies import needs, result
from zerobubble.errors import OptionError

if TYPE_CHECKING:
    from zerobubble.op import Op
    from zerobubble.timeline import Timeline


@dataclass(frozen=True)
class Delay:
    """By how much later one op ended than planned, and why. Times in the timelines' unit; negative is earlier.

    Attributes:
        op: the op.
        rank: where it ran.
        behind: what it could not start before: the op in front of it on its rank, or one whose result it needs (of
            these the one that ended last in what was measured); None for an op that stands behind nothing.
        inherited: by how much later than planned the last of these ended.
        waited: how much longer than planned it then took until the op started: the hop, and whatever the runtime did.
        longer: how much longer than planned the op itself ran.
    """

    op: Op
    rank: int
    behind: Op | None
    inherited: float
    waited: float
    longer: float

    @property
    def late(self) -> float:
        """By how much later than planned the op ended."""
        return self.inherited + self.own

    @property
    def own(self) -> float:
        """The part that this op added."""
        return self.waited + self.longer

    @property
    def cause(self) -> str:
        """Where most of what the op added lies, in words."""
        if self.longer >= self.waited:
            return "ran longer"
        crosses = self.behind is not None and self.behind.stage != self.op.stage
        return f"waited for {self.behind}" if crosses else "started late"


def compare(plan: Timeline, measured: Timeline) -> list[Delay]:
    """Every op of two timelines, those first that added most to being late. Both count from their own first op.

    The orders may differ as long as every rank runs the same ops. Times are in the unit of `measured`.

    Raises:
        OptionError: a rank runs other ops, or one of the units is not known.
    """
    plan = in_unit(plan, measured.unit)
    if plan.schedule.placement != measured.schedule.placement:
        raise OptionError("the timelines cannot be compared: their stages lie on different ranks")
    planned, real = _Times(plan), _Times(measured)
    for rank, (ours, theirs) in enumerate(zip(plan.schedule.orders, measured.schedule.orders)):
        if odd := sorted(map(str, set(ours) ^ set(theirs))):
            raise OptionError(f"the timelines cannot be compared: on rank {rank} only one of them runs {odd[0]}")
    delays = []
    for op, rank in real.rank_of.items():
        ready, behind = real.ready(op)
        planned_ready, _ = planned.ready(op)
        waited = (real.start[op] - ready) - (planned.start[op] - planned_ready)
        longer = (real.end[op] - real.start[op]) - (planned.end[op] - planned.start[op])
        delays.append(Delay(op, rank, behind, ready - planned_ready, waited, longer))
    return sorted(delays, key=lambda delay: -delay.own)


def in_unit(timeline: Timeline, unit: str) -> Timeline:
    """The timeline in another unit. Raises `OptionError` where either is no unit of time."""
    if timeline.unit == unit:
        return timeline
    if timeline.unit not in SECONDS or unit not in SECONDS:
        raise OptionError(
            f"times in {timeline.unit!r} and {unit!r} cannot be compared; give the costs a "
            f'"unit" of {", ".join(SECONDS)}'
        )
    return timeline.scaled(SECONDS[timeline.unit] / SECONDS[unit], unit)


class _Times:
    """Start and end per op, from the first op of all, and what each op stands behind."""

    def __init__(self, timeline: Timeline) -> None:
        origin = min((starts[0] for starts in timeline.starts if starts), default=0.0)
        self.start: dict[Op, float] = {}
        self.end: dict[Op, float] = {}
        self.rank_of: dict[Op, int] = {}
        self._before: dict[Op, Op] = {}
        self._made_by: dict[Op, Op] = {}
        self._num_stages = timeline.schedule.num_stages
        for rank, row in enumerate(timeline.rows()):
            for i, (op, start, end) in enumerate(row):
                self.start[op], self.end[op] = start - origin, end - origin
                self.rank_of[op], self._made_by[result(op)] = rank, op
                if i:
                    self._before[op] = row[i - 1].op

    def ready(self, op: Op) -> tuple[float, Op | None]:
        """When the last of those ended that `op` stands behind, and which that is; 0 and None for none."""
        behind = [self._made_by[need] for need in needs(op, self._num_stages)]
        if op in self._before:
            behind.append(self._before[op])
        last = max(behind, key=self.end.__getitem__, default=None)
        return (0.0, None) if last is None else (self.end[last], last)
