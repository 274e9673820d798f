"""A planning problem as flat arrays, for the planner's hot loops: costs of one placement, microbatches, memory limit.

An op is one number here: `code = (3 * stage + kind) * num_microbatches + microbatch`, with kind 0 = F, 1 = B, 2 = W.
An order of ops per rank is a list of such codes. Orders come and go by the thousand; `Schedule` is made once, at last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from zerobubble.op import Kind, Op
from zerobubble.schedule import make_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerobubble.costs import StageCosts
    from zerobubble.schedule import Placement, Schedule

Orders: TypeAlias = "list[list[int]]"
"""Per rank, the codes of its ops, first to last."""

_KINDS = (Kind.F, Kind.B, Kind.W)


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be planned: costs per stage, where the stages lie, how many microbatches, how much memory.

    Attributes:
        costs: costs per stage of `placement`.
        placement: stage -> rank.
        num_microbatches: m.
        limit: activation memory of every rank, in the unit of the costs; infinite for no limit.
    """

    costs: StageCosts
    placement: Placement
    num_microbatches: int
    limit: float = math.inf

    @cached_property
    def stages(self) -> list[tuple[int, ...]]:
        """Per rank, its stages in data-flow order."""
        return [self.placement.stages_of(rank) for rank in range(self.placement.num_ranks)]

    @cached_property
    def num_ops(self) -> int:
        """How many ops a step has."""
        return 3 * self.placement.num_stages * self.num_microbatches

    @cached_property
    def allowed(self) -> float:
        """The limit with the slack for rounding that the validator grants as well."""
        return self.limit + 0.5e-9 * max(self.limit, 1.0) if self.limit < math.inf else math.inf

    @cached_property
    def work(self) -> list[float]:
        """Per rank, the sum of its op times."""
        costs, m = self.costs, self.num_microbatches
        times = zip(costs.forward, costs.backward_input, costs.backward_weight)
        per_stage = [m * sum(each) for each in times]
        return [sum(per_stage[stage] for stage in stages) for stages in self.stages]

    @cached_property
    def duration(self) -> list[float]:
        """Per op, how long it runs."""
        costs, m = self.costs, self.num_microbatches
        by_stage = zip(costs.forward, costs.backward_input, costs.backward_weight)
        return [time for times in by_stage for time in times for _ in range(m)]

    @cached_property
    def awaited(self) -> list[int]:
        """Per op, the op of another stage whose result it needs, or -1. Those of its own stage stand before it."""
        m, last, codes = self.num_microbatches, self.placement.num_stages - 1, []
        for stage in range(last + 1):
            codes += [(3 * (stage - 1)) * m + mb if stage else -1 for mb in range(m)]
            codes += [(3 * (stage + 1) + 1) * m + mb if stage < last else -1 for mb in range(m)]
            codes += [-1] * m
        return codes

    @cached_property
    def latency(self) -> list[float]:
        """Per op, how long the result that it awaits is under way."""
        m, last, hop = self.num_microbatches, self.placement.num_stages - 1, self.costs.hop
        lags: list[float] = []
        for stage in range(last + 1):
            lags += [hop[stage - 1] if stage else 0.0] * m
            lags += [hop[stage] if stage < last else 0.0] * m
            lags += [0.0] * m
        return lags

    def with_limit(self, limit: float) -> Problem:
        """The same problem with another memory limit."""
        return Problem(self.costs, self.placement, self.num_microbatches, limit)

    @cached_property
    def flattened(self) -> Problem:
        """The same problem with the median time of each kind of op on every stage."""
        costs = self.costs
        flat = {
            key: (median(getattr(costs, key)),) * self.placement.num_stages
            for key in ("forward", "backward_input", "backward_weight", "backward_full")
        }
        return Problem(replace(costs, **flat), self.placement, self.num_microbatches, self.limit)

    def shortened(self, num_microbatches: int) -> Problem:
        """The same problem with fewer microbatches."""
        return Problem(self.costs, self.placement, num_microbatches, self.limit)

    def least_limit(self) -> float:
        """The least memory limit under which any schedule can run: one microbatch at a time, every W at once."""
        return max(map(self._least_on, self.stages))

    def peak_without_limit(self) -> float:
        """A limit that no schedule can exceed: all microbatches held at once."""
        memory = [max(pair) for pair in zip(self.costs.activation_memory, self.costs.weight_memory)]
        return self.num_microbatches * max(sum(memory[s] for s in stages) for stages in self.stages)

    def _least_on(self, stages: Sequence[int]) -> float:
        most = held = 0.0
        for stage in stages:
            most = max(most, held + self.costs.weight_memory[stage])
            held += self.costs.activation_memory[stage]
        return max(most, held)

    def encode(self, schedule: Schedule) -> Orders:
        """The orders of `schedule` as codes; a BW becomes a B with its W behind it."""
        m, orders = self.num_microbatches, []
        for ops in schedule.orders:
            order: list[int] = []
            for stage, kind, mb in ops:
                base = 3 * stage * m + mb
                if kind is Kind.F:
                    order.append(base)
                elif kind is Kind.W:
                    order.append(base + 2 * m)
                else:
                    order.append(base + m)
                    if kind is Kind.BW:
                        order.append(base + 2 * m)
            orders.append(order)
        return orders

    def decode(self, orders: Orders, name: str) -> Schedule:
        """The schedule that `orders` stand for."""
        m = self.num_microbatches
        ops = [Op(stage, kind, mb) for stage in range(self.placement.num_stages) for kind in _KINDS for mb in range(m)]
        return make_schedule(name, self.placement, m, [[ops[code] for code in order] for order in orders])


def end_times(problem: Problem, orders: Orders) -> list[float] | None:
    """When each op ends, by code, if every op starts as soon as it can; None when `orders` deadlock.

    That an op stands behind those of its own stage that it needs is the caller's business.
    """
    duration, awaited, latency = problem.duration, problem.awaited, problem.latency
    ends = [-1.0] * problem.num_ops
    waiting = [-1] * problem.num_ops
    position, free = [0] * len(orders), [0.0] * len(orders)
    runnable = list(range(len(orders) - 1, -1, -1))
    left = sum(map(len, orders))
    while runnable:
        rank = runnable.pop()
        order, now = orders[rank], free[rank]
        first = i = position[rank]
        for i in range(first, len(order)):
            code = order[i]
            need = awaited[code]
            if need >= 0:
                arrival = ends[need]
                if arrival < 0.0:
                    waiting[need] = rank
                    break
                arrival += latency[code]
                if arrival > now:
                    now = arrival
            now += duration[code]
            ends[code] = now
            if waiting[code] >= 0:
                runnable.append(waiting[code])
        else:
            i = len(order)
        left -= i - first
        position[rank], free[rank] = i, now
    return None if left else ends


def spans(problem: Problem, orders: Orders, ends: Sequence[float]) -> list[float]:
    """Per rank, the end of its last op minus the start of its first."""
    duration = problem.duration
    return [ends[order[-1]] - (ends[order[0]] - duration[order[0]]) for order in orders]


def cost(problem: Problem, orders: Orders) -> float:
    """The largest span of a rank; infinite when the orders deadlock."""
    ends = end_times(problem, orders)
    return math.inf if ends is None else max(spans(problem, orders, ends))


def peak(problem: Problem, order: Sequence[int]) -> float:
    """The most memory that a rank holds when it runs `order`."""
    m, activation, weight = problem.num_microbatches, problem.costs.activation_memory, problem.costs.weight_memory
    held = most = 0.0
    for code in order:
        stage, kind = divmod(code // m, 3)
        held += activation[stage] if kind == 0 else weight[stage] - activation[stage] if kind == 1 else -weight[stage]
        if held > most:
            most = held
    return most


def fits(problem: Problem, orders: Orders) -> bool:
    """Whether no rank holds more than the limit allows."""
    return problem.limit == math.inf or all(peak(problem, order) <= problem.allowed for order in orders)
