"""The constraint model of `zerobubble.planner.exact`, for OR-tools' CP-SAT: whole numbers, variables, constraints.

CP-SAT knows integers only. Times with a common unit (a few decimals) are counted in it, exactly. Other times are
rounded down, and memory in favour of the schedule: a relaxation, so its bound holds for the true times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from zerobubble.dependencies import needs
from zerobubble.op import Kind, Op
from zerobubble.schedule import make_schedule
from zerobubble.simulate import op_times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerobubble.costs import StageCosts
    from zerobubble.schedule import Placement, Schedule

_KINDS = (Kind.F, Kind.B, Kind.W)
_TIME_UNITS, _MEMORY_UNITS = 10**7, 10**9
"""All times together, and all memory, are counted in at most so many units; where the common unit is finer, rounded."""

RELATIVE_SLACK = 1e-9
"""Memory may exceed the limit by this share, as for `validate`; times this close count as equal."""


def memory_slack(memory_limit: float) -> float:
    """By how much a rank's memory may exceed the limit: rounding, as `validate` allows it."""
    return RELATIVE_SLACK * max(memory_limit, 1.0)


# ---------------------------------------------------------------------------------------------------- whole numbers


def _common_unit(values: Sequence[float], finest: Fraction) -> tuple[Fraction, bool]:
    """The largest unit of which all values are multiples, as decimals, and True; if too fine, `finest` and False."""
    exact = [Fraction(str(value)) for value in values if value > 0]
    if not exact:
        return Fraction(1), True
    denominator = math.lcm(*(value.denominator for value in exact))
    unit = Fraction(math.gcd(*(int(value * denominator) for value in exact)), denominator)
    return (unit, True) if unit >= finest else (finest, False)


def _units(value: float, unit: Fraction) -> int:
    return math.floor(Fraction(str(value)) / unit)


@dataclass(frozen=True)
class IntegerCosts:
    """The costs in whole numbers.

    Attributes:
        placement: stage -> rank.
        num_microbatches: m.
        unit: what a time of 1 stands for, in the unit of the costs.
        exact: whether all times are multiples of it. Otherwise they are rounded down. Rounding down the start times of
            a schedule, too, gives a solution, whose spans are longer than the true ones by less than one unit.
        durations: per kind and stage.
        hop: latency per stage boundary.
        activation: M_B per stage.
        weight: M_W per stage.
        limit: of the memory of a rank, or None.
    """

    placement: Placement
    num_microbatches: int
    unit: Fraction
    exact: bool
    durations: dict[Kind, tuple[int, ...]]
    hop: tuple[int, ...]
    activation: tuple[int, ...]
    weight: tuple[int, ...]
    limit: int | None

    @classmethod
    def of(
        cls, costs: StageCosts, placement: Placement, num_microbatches: int, memory_limit: float | None
    ) -> IntegerCosts:
        """Times and memory rounded down, the limit up, so that whatever can be scheduled still can."""
        times = [value for kind in _KINDS for value in costs.by_kind[kind]] + list(costs.hop)
        unit, exact = _common_unit(times, Fraction(num_microbatches * sum(times)) / _TIME_UNITS)
        held = [*costs.activation_memory, *costs.weight_memory]
        memory_unit, _ = _common_unit(held, Fraction(num_microbatches * sum(held)) / _MEMORY_UNITS)
        limit = None if memory_limit is None else Fraction(memory_limit) + Fraction(memory_slack(memory_limit))
        return cls(
            placement,
            num_microbatches,
            unit,
            exact,
            {kind: tuple(_units(value, unit) for value in costs.by_kind[kind]) for kind in _KINDS},
            tuple(_units(value, unit) for value in costs.hop),
            tuple(_units(value, memory_unit) for value in costs.activation_memory),
            tuple(_units(value, memory_unit) for value in costs.weight_memory),
            None if limit is None else math.floor(limit / memory_unit),
        )

    def at_most(self, cost: float) -> int:
        """A span that the solution for a schedule of that cost does not exceed."""
        return math.floor(cost * (1 + RELATIVE_SLACK) / self.unit) + (not self.exact)

    def at_least(self, bound: float) -> int:
        """A span that some optimal solution reaches, given that no schedule costs less than `bound`."""
        units = bound * (1 - RELATIVE_SLACK) / self.unit
        return max(0, math.ceil(units) if self.exact else math.floor(units))

    def proven(self, span: float) -> float:
        """The bound on true costs that follows when no solution has a smaller span."""
        whole = math.ceil(span - 1e-6) - (not self.exact)
        return max(0.0, float(whole * self.unit))

    def first_stage(self, rank: int) -> int:
        """The stage whose first F is the first op of `rank`."""
        return self.placement.stages_of(rank)[0]

    def latency(self, need: Op, op: Op) -> int:
        """Between the end of `need` and the arrival of its result where `op` runs."""
        return 0 if need.stage == op.stage else self.hop[min(need.stage, op.stage)]

    def ops(self) -> list[Op]:
        """All ops, each after those that it needs."""
        stages, microbatches = range(self.placement.num_stages), range(self.num_microbatches)
        down, up = [(Kind.F, s) for s in stages], [(kind, s) for s in stages[::-1] for kind in (Kind.B, Kind.W)]
        return [Op(stage, kind, j) for j in microbatches for kind, stage in down + up]


# ---------------------------------------------------------------------------------------------------- the model


class IntegerProgram:
    """The constraint model: a start per op, and the largest span."""

    def __init__(self, cp_model: Any, costs: IntegerCosts, cost: float, bound: float) -> None:
        self.costs = costs
        self.longest = costs.at_most(cost)
        self._ops = costs.ops()
        self.model = cp_model.CpModel()
        self._span = self.model.new_int_var(min(costs.at_least(bound), self.longest), self.longest, "span")
        self._horizon = 2 * self.longest  # each F and B is over when stage 0's last B is, at most a span from 0
        self._starts = {op: self.model.new_int_var(0, self._horizon, str(op)) for op in self._ops}
        self._depend()
        self._follow()
        for rank in range(costs.placement.num_ranks):
            self._run_one_at_a_time(rank)
            if costs.limit is not None:
                self._keep_within_memory(rank)
                self._make_room(rank)
        self._measure()
        self.model.minimize(self._span)

    def _end(self, op: Op) -> Any:
        return self._starts[op] + self.costs.durations[op.kind][op.stage]

    def _depend(self) -> None:
        """Nothing starts before what it needs has arrived."""
        for op in self._ops:
            for need in needs(op, self.costs.placement.num_stages):
                self.model.add(self._starts[op] >= self._end(need) + self.costs.latency(need, op))

    def _follow(self) -> None:
        """Ops of one stage and kind run in microbatch order."""
        for op in self._ops:
            if op.microbatch > 0:
                self.model.add(self._starts[op] >= self._end(op._replace(microbatch=op.microbatch - 1)))

    def _run_one_at_a_time(self, rank: int) -> None:
        stages = self.costs.placement.stages_of(rank)
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(
                self._starts[op], self.costs.durations[op.kind][op.stage], f"run {op}"
            )
            for op in self._ops
            if op.stage in stages
        )

    def _keep_within_memory(self, rank: int) -> None:
        """M_B from the start of F to the end of B, then M_W to the end of W: together never more than the limit."""
        intervals, demands = [], []
        for stage in self.costs.placement.stages_of(rank):
            for j in range(self.costs.num_microbatches):
                forward, backward, weight = (Op(stage, kind, j) for kind in _KINDS)
                for begin, end, demand in (
                    (self._starts[forward], self._end(backward), self.costs.activation[stage]),
                    (self._end(backward), self._end(weight), self.costs.weight[stage]),
                ):
                    size = self.model.new_int_var(0, self._horizon, "")
                    intervals.append(self.model.new_interval_var(begin, size, end, ""))
                    demands.append(demand)
        self.model.add_cumulative(intervals, demands, self.costs.limit)

    def _make_room(self, rank: int) -> None:
        """Implied: what must have ended before the F of microbatch j may start, if one stage alone filled the memory.

        With k = floor(limit / M_B), at least j + 1 - k B must have ended, and at least as many W as make room beside
        this F when all earlier B have ended.
        """
        limit, num_microbatches = self.costs.limit or 0, self.costs.num_microbatches
        for stage in self.costs.placement.stages_of(rank):
            activation, weight = self.costs.activation[stage], self.costs.weight[stage]
            rooms = {}
            if activation:
                rooms[Kind.B] = max(limit // activation, 1)
            if activation and weight:
                rooms[Kind.W] = max((limit - activation) // min(activation, weight) + 1, 1)
            for kind, room in rooms.items():
                for j in range(room, num_microbatches):
                    self.model.add(self._starts[Op(stage, Kind.F, j)] >= self._end(Op(stage, kind, j - room)))

    def _measure(self) -> None:
        """Time counts from the first op of all. A rank's span runs from its first F to its last W."""
        last = self.costs.num_microbatches - 1
        self.model.add(self._starts[Op(0, Kind.F, 0)] == 0)
        for stage, rank in enumerate(self.costs.placement.ranks):
            first = Op(self.costs.first_stage(rank), Kind.F, 0)
            self.model.add(self._span >= self._end(Op(stage, Kind.W, last)) - self._starts[first])

    def hint(self, schedule: Schedule, costs: StageCosts) -> None:
        """Start the search from `schedule`, its microbatches renamed in order and each BW taken apart."""
        starts, _ = op_times(schedule, costs)
        half = Fraction(1, 2) if self.costs.exact else 0  # rounded times: only rounding down gives a solution
        seen: dict[tuple[int, Kind], int] = {}
        for order, begins in zip(schedule.orders, starts, strict=True):
            for op, begin in zip(order, begins, strict=True):
                at = begin
                for kind in (Kind.B, Kind.W) if op.kind is Kind.BW else (op.kind,):
                    number = seen[op.stage, kind] = seen.get((op.stage, kind), -1) + 1
                    self.model.add_hint(
                        self._starts[Op(op.stage, kind, number)], math.floor(Fraction(at) / self.costs.unit + half)
                    )
                    at += costs.by_kind[kind][op.stage]

    def schedule(self, value: Callable[[Any], int]) -> Schedule:
        """The orders of the solution that `value` reads. Ops without duration stand as they need each other."""
        costs = self.costs
        orders: list[list[tuple[int, int, int, Op]]] = [[] for _ in range(costs.placement.num_ranks)]
        for i, op in enumerate(self._ops):
            start = value(self._starts[op])
            end = start + costs.durations[op.kind][op.stage]
            orders[costs.placement.ranks[op.stage]].append((start, end, i, op))
        return make_schedule(
            "exact", costs.placement, costs.num_microbatches, [[op for *_, op in sorted(order)] for order in orders]
        )
