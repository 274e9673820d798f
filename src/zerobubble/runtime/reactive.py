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
_GRACE = 0.5
"""Of a W's time: what comes less late than this is waited for."""
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
        starts, _ = op_times(schedule, found)
        self._expected = {op: (start - starts[rank][0]) * unit for op, start in zip(order, starts[rank], strict=True)}
        self._grace = _GRACE * unit * min((found.duration(op) for op in order if op.kind is Kind.W), default=0.0)
        self._memory = _with_memory(costs).resolve(schedule.placement)
        self._limit = peak_memory(order, self._memory) * (1 + _ROUNDING)
        self._position = {op: position for position, op in enumerate(order)}
        self._weights = [op for op in order if op.kind in _ADDS]
        self.begin(0)

    def begin(self, now: int) -> None:
        """A step begins at `now` (ns)."""
        self._begin = now
        self._held = 0.0
        self._left: dict[int, deque[Op]] = {}  # per stage, the W and BW to come in their order
        for op in self._weights:
            self._left.setdefault(op.stage, deque()).append(op)
        self._ready: set[Op] = set()

    def ran(self, op: Op) -> None:
        """`op` is done."""
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
        patience = 0.0 if planned_first else max(-self._late(op, now), 0) / 1e9
        return None if arrived(patience) else weight

    def _late(self, op: Op, now: int) -> float:
        """By how much (ns) `op`, if it started now, would be later than what still counts as on time."""
        return now - self._begin - self._expected[op] - self._grace

    def _fits(self, op: Op) -> bool:
        return op.kind is not Kind.F or self._held + self._memory.activation_memory[op.stage] <= self._limit


def _with_memory(costs: Costs) -> Costs:
    given = costs.activation_memory
    if any(given) if isinstance(given, tuple) else given:
        return costs
    return replace(costs, activation_memory=1.0, weight_memory=1.0)
