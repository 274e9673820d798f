"""Reactive W: a rank that is late against its plan runs the W's that it has instead of waiting, and puts others off.

The other ops keep their order, and the W's of a stage theirs, so that gradients stay the same bit for bit. Against what
`costs` promise nothing changes: a rank on time follows its plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from zerobubble.memory import held_after, peak_memory
from zerobubble.op import Kind, Op
from zerobubble.simulate import op_times

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerobubble.costs import Costs
    from zerobubble.schedule import Schedule

_ROUNDING = 1e-9
_PATIENCE = 2.0
"""So many times as long as a W takes a rank waits for what is late. Most of it comes sooner than a W would be through,
and a W that was used up is missing in a later gap; so short waits are borne, and long ones are not waited out."""
_ADDS = (Kind.W, Kind.BW)
"""What adds to the gradients of the weights: their order within a stage decides about the last bit."""


class Reactor:
    """Says which W, if any, one rank should run before its next other op.

    Args:
        rank: whose order it is.
        schedule: the plan.
        costs: what ops and hops take on a calm day, measured (`Pipeline.profile`) or planned with. Where they give no
            memory, every microbatch counts as one until its W.
    """

    def __init__(self, rank: int, schedule: Schedule, costs: Costs) -> None:
        order = schedule.orders[rank]
        found, unit = costs.resolve(schedule.placement), costs.seconds * 1e9
        starts, ends = op_times(schedule, found)
        first_end = ends[rank][0]
        times = list(zip(order, starts[rank], ends[rank], strict=True))
        self._starts = {op: (start - first_end) * unit for op, start, _ in times}
        self._ends = {op: (end - first_end) * unit for op, _, end in times}
        self._patience = _PATIENCE * unit * min((found.duration(op) for op in order if op.kind is Kind.W), default=0.0)
        self._memory = _with_memory(costs).resolve(schedule.placement)
        self._limit = peak_memory(order, self._memory) * (1 + _ROUNDING)
        self._position = {op: position for position, op in enumerate(order)}
        self._weights = [op for op in order if op.kind in _ADDS]
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._origin = 0
        self._drift = 0.0  # by how much (ns) the last F or B ended later than planned
        self._held = 0.0
        self._left: dict[int, deque[Op]] = {}  # per stage, the W and BW to come in their order
        for op in self._weights:
            self._left.setdefault(op.stage, deque()).append(op)
        self._ready: set[Op] = set()

    def ran(self, op: Op, now: int) -> None:
        """`op` was done at `now` (ns)."""
        if not self._origin:
            self._origin = now  # the first op may have waited long for its input: time is counted from its end
        if op.kind is not Kind.W:
            self._drift = max(now - self._origin - self._ends[op], 0.0)
        self._held = held_after(self._held, op, self._memory)
        if op.kind is Kind.B:
            self._ready.add(Op(op.stage, Kind.W, op.microbatch))
        if op.kind in _ADDS:
            self._left[op.stage].popleft()
            self._ready.discard(op)

    def weight_before(self, op: Op | None, now: int, arrived: Callable[[float], bool]) -> Op | None:
        """The W to run before `op` (None: the step's other ops are all done), or None for `op` itself.

        `arrived(seconds)` waits at most so long for what `op` takes in, and says whether it is there.
        """
        if op is not None and op.kind is Kind.BW and self._left[op.stage][0] != op:
            return self._left[op.stage][0]
        ready = (left[0] for left in self._left.values() if left and left[0] in self._ready)
        weight = min(ready, key=self._position.__getitem__, default=None)
        if weight is None or op is None or not self._fits(op):
            return weight
        planned_first = self._position[weight] < self._position[op]
        if planned_first and self._late(weight, now) <= 0:
            return weight
        patience = 0.0 if planned_first else max(self._drift + self._patience - self._late(op, now), 0) / 1e9
        return None if arrived(patience) else weight

    def _late(self, op: Op, now: int) -> float:
        """By how much (ns) `op`, if it started now, would be later than planned."""
        return now - self._origin - self._starts[op]

    def _fits(self, op: Op) -> bool:
        return op.kind is not Kind.F or self._held + self._memory.activation_memory[op.stage] <= self._limit


def _with_memory(costs: Costs) -> Costs:
    given = costs.activation_memory
    if any(given) if isinstance(given, tuple) else given:
        return costs
    return replace(costs, activation_memory=1.0, weight_memory=1.0)
