"""Local improvement of a schedule: one op at a time moves to another place on its rank, judged by the simulated cost.

Moves start from why the cost is what it is: ops on the chain that the slowest rank waits for go earlier, what stands in
front of them goes later, and ops behind an idle gap of the slowest rank go into it. A move that makes things a little
worse may be taken (late acceptance: it is held against the cost of some moves ago), the best orders seen are kept.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from zerobubble.planner.problem import end_times, peak, spans

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerobubble.planner.problem import Orders, Problem

_MEMORY = 60
_MEMORY_SHARE = 30
"""Moves after which a cost is forgotten: so many, or this part of all moves where that is more."""

_PATIENCE = 1000
"""Moves without a gain after which, and after a quarter of all, the search ends."""


def improve(
    problem: Problem, orders: Orders, *, moves: int, goal: float, seed: int = 0, stop: Callable[[], bool] = bool
) -> tuple[Orders, float]:
    """The best orders found from `orders` within `moves` simulated moves, and their cost; never worse than `orders`.

    Args:
        problem: what is planned; `orders` keep its memory limit, and so do all moves.
        orders: orders that can run.
        moves: how many moves are simulated.
        goal: a cost at which there is nothing left to gain.
        seed: the same seed gives the same moves.
        stop: asked now and then; ends the search early when it says true.
    """
    walk = _Walk(problem, [list(order) for order in orders], Random(seed))
    best, best_cost = [list(order) for order in orders], walk.cost
    past = [walk.objective] * max(_MEMORY, moves // _MEMORY_SHARE)
    tries = gained = 0
    for move in range(moves):
        if best_cost <= goal or move - gained > max(_PATIENCE, moves // 4) or (move % 32 == 31 and stop()):
            break
        slot = move % len(past)
        change = None
        while change is None and tries < 20 * moves:
            tries += 1
            change = walk.propose()
        if change is None:
            break
        walk.try_out(change, max(past[slot], walk.objective))
        past[slot] = walk.objective
        if walk.cost < best_cost:
            best, best_cost, gained = [list(order) for order in walk.orders], walk.cost, move
    return best, best_cost


class _Walk:
    """Where the search stands: orders, their times, and the chain of ops that makes the cost."""

    def __init__(self, problem: Problem, orders: Orders, random: Random) -> None:
        self.problem, self.orders, self.random = problem, orders, random
        ends = end_times(problem, orders)
        if ends is None:
            raise AssertionError("the orders to improve cannot run")
        self._settle(ends)

    def _settle(self, ends: list[float]) -> None:
        """Take over the times of the present orders."""
        self.ends = ends
        self.spans = spans(self.problem, self.orders, ends)
        self.cost, self.objective = self._rate(self.spans)
        self.chain: list[tuple[int, int]] | None = None

    def _rate(self, all_spans: list[float]) -> tuple[float, float]:
        """Cost, and the objective: cost with a small share of all ranks' spans, so that plateaus have a slope."""
        most = max(all_spans)
        return most, most + 0.02 * sum(all_spans) / len(all_spans)

    def try_out(self, change: tuple[int, int, int], accept: float) -> None:
        """Move the op at `i` of `rank` to `j`; undo it when memory forbids or the objective exceeds `accept`."""
        rank, i, j = change
        order = self.orders[rank]
        order.insert(j, order.pop(i))
        ends = None
        if peak(self.problem, order) <= self.problem.allowed:
            ends = end_times(self.problem, self.orders)
        if ends is not None and self._rate(spans(self.problem, self.orders, ends))[1] <= accept:
            self._settle(ends)
        else:
            order.insert(i, order.pop(j))

    def propose(self) -> tuple[int, int, int] | None:
        """A random move (rank, from, to), or None when the dice fell on one that changes nothing."""
        pick = self.random.random()
        if pick < 0.45:
            rank, i = self._critical()
            return self._earlier(rank, i)
        if pick < 0.7:
            rank, i = self._critical()
            return self._later(rank, i - 1) if i else None
        rank = self.spans.index(max(self.spans)) if pick < 0.9 else self.random.randrange(len(self.orders))
        i = self.random.randrange(len(self.orders[rank]))
        return self._earlier(rank, i) if self.random.random() < 0.6 else self._later(rank, i)

    def _earlier(self, rank: int, i: int) -> tuple[int, int, int] | None:
        """Bring the op at `i` forward by a random number of places, no further than what it needs."""
        order, m = self.orders[rank], self.problem.num_microbatches
        code, steps = order[i], self._steps()
        row = code // m
        needed = code - m if row % 3 else -1
        j = i
        while j and steps:
            before = order[j - 1]
            if before == needed or before // m == row:
                break
            j -= 1
            steps -= 1
        return (rank, i, j) if j < i else None

    def _later(self, rank: int, i: int) -> tuple[int, int, int] | None:
        """Put the op at `i` back by a random number of places, no further than what needs it."""
        order, m = self.orders[rank], self.problem.num_microbatches
        code, steps = order[i], self._steps()
        row = code // m
        needs_it = code + m if row % 3 < 2 else -1
        j, last = i, len(order) - 1
        while j < last and steps:
            behind = order[j + 1]
            if behind == needs_it or behind // m == row:
                break
            j += 1
            steps -= 1
        return (rank, i, j) if j > i else None

    def _steps(self) -> int:
        """1 most often, sometimes many."""
        steps = 1
        while steps < 64 and self.random.random() < 0.55:
            steps += 1 + steps // 3
        return steps

    def _critical(self) -> tuple[int, int]:
        """A random op on the chain that the rank with the largest span waits for."""
        if self.chain is None:
            self.chain = self._find_chain()
        return self.random.choice(self.chain)

    def _find_chain(self) -> list[tuple[int, int]]:
        problem, ends = self.problem, self.ends
        duration, awaited, latency = problem.duration, problem.awaited, problem.latency
        place = {code: (rank, i) for rank, order in enumerate(self.orders) for i, code in enumerate(order)}
        rank = self.spans.index(max(self.spans))
        begin = ends[self.orders[rank][0]] - duration[self.orders[rank][0]]
        i = len(self.orders[rank]) - 1
        chain = []
        while True:
            chain.append((rank, i))
            code = self.orders[rank][i]
            if ends[code] - duration[code] <= begin:
                return chain
            need = awaited[code]
            free = ends[self.orders[rank][i - 1]] if i else -1.0
            if need >= 0 and ends[need] + latency[code] >= free:
                rank, i = place[need]
            elif i:
                i -= 1
            else:
                return chain
