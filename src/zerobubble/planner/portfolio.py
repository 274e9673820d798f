"""Several problems at once, one per placement: which are searched, with how much effort, in which order.

Bounds decide what is not worth a search. More memory gives no worse plan, since for a limit the smaller ones of a
ladder (quarters of p microbatches) are searched as well, wherever their bound is below the best cost of all placements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from zerobubble.bounds import Bound, lower_bound
from zerobubble.planner.placements import name_of
from zerobubble.planner.search import EFFORTS, Found, search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zerobubble.planner.problem import Problem

MET = 1e-9
"""Cost and bound are equal when they differ by no more than this share: sums of many times are rounded."""

_THOROUGH = 2
"""Placements, the best after a quick search, on which more effort is spent."""
_SMALL = 1_000
"""Ops up to which smaller limits are searched with the same effort; beyond, quickly."""
_LARGE = 20_000
"""Ops above which only p and 2p microbatches are tried as smaller limits."""
_TOO_LARGE_FOR_QUICK = 50_000
"""Ops above which `quick` leaves out placements with more than two chunks: their search takes long and finds little."""


class Clock:
    """A time limit, shared by what is still to be done; None never ends."""

    def __init__(self, seconds: float | None) -> None:
        self.end = math.inf if seconds is None else monotonic() + seconds

    def over(self) -> bool:
        """Whether time is up."""
        return self.end < math.inf and monotonic() >= self.end

    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return max(self.end - monotonic(), 0.0) if self.end < math.inf else math.inf

    def share(self, parts: int) -> Clock:
        """The clock of the next of `parts` equal parts."""
        part = Clock(None)
        part.end = monotonic() + self.left() / parts
        return part


@dataclass(frozen=True)
class Attempt:
    """The best found for a problem, and what cannot be beaten there."""

    found: Found
    problem: Problem
    bound: Bound

    @property
    def met(self) -> bool:
        """Whether nothing better is possible."""
        return self.found.cost <= self.bound.value * (1 + MET)

    def __str__(self) -> str:
        name, found = name_of(self.problem.placement), self.found
        return f"{name}: cost {found.cost:g}, bound {self.bound.value:g}, from {found.name}"


class Portfolio:
    """The attempts so far, best first, and notes on what was not tried."""

    def __init__(self, problems: Sequence[Problem], clock: Clock, say: Callable[..., None]) -> None:
        bounded = [(one, _bound(one)) for one in problems]
        self._open = sorted(bounded, key=lambda pair: (pair[1].value, pair[0].num_ops))
        self._clock, self._say = clock, say
        self.attempts: list[Attempt] = []
        self.skipped: list[str] = []

    @property
    def best(self) -> float:
        """The least cost so far."""
        return min((attempt.found.cost for attempt in self.attempts), default=math.inf)

    def search_all(self, effort: str) -> None:
        """Search every placement quickly that could be the best; `effort` is what comes after."""
        too_large = {id(problem): effort == "quick" and _is_too_large(problem) for problem, _ in self._open}
        self._open.sort(key=lambda pair: too_large[id(pair[0])])
        for number, (problem, bound) in enumerate(self._open):
            name = name_of(problem.placement)
            if self.best <= bound.value * (1 + MET):
                self.skipped.append(f"{name}: not searched, its bound is {bound.value:g}")
            elif self.attempts and (self._clock.over() or too_large[id(problem)]):
                self.skipped.append(f"{name}: not searched, for want of time")
            else:
                self._say(f"{name}: searching")
                share = self._clock.share(len(self._open) - number + 1)
                found = search(problem, EFFORTS["quick"], bound.value * (1 + MET), share.over)
                self.attempts.append(Attempt(found, problem, bound))
        self._sort()
        for number in range(len(self.attempts)):
            self._search_smaller(number, "quick")
        self._sort()

    def search_on(self, effort: str) -> None:
        """Spend `effort` on the best placements; what is known is kept where nothing is better."""
        count = min(_THOROUGH, len(self.attempts))
        for number in range(count):
            known = self.attempts[number]
            if self.best > known.bound.value * (1 + MET) and not self._clock.over():
                self._say(f"{known}; searching on")
                share = self._clock.share(count - number)
                self._offer(number, search(known.problem, EFFORTS[effort], known.bound.value * (1 + MET), share.over))
                if known.problem.num_ops <= _SMALL:
                    self._search_smaller(number, effort)
        self._sort()

    def _search_smaller(self, number: int, effort: str) -> None:
        """Search an attempt's problem within the smaller limits that every larger one tries as well."""
        problem = self.attempts[number].problem
        for limit in _smaller_limits(problem):
            smaller = problem.with_limit(limit)
            goal = _bound(smaller).value * (1 + MET)
            if self.best > goal and not self._clock.over():
                self._say(f"{self.attempts[number]}; searching within {limit:g} of memory")
                self._offer(number, search(smaller, EFFORTS[effort], goal, self._clock.over))

    def _offer(self, number: int, found: Found) -> None:
        """Take `found` as what an attempt has found if it is cheaper."""
        if found.cost < self.attempts[number].found.cost:
            self.attempts[number] = replace(self.attempts[number], found=found)

    def _sort(self) -> None:
        self.attempts.sort(key=lambda attempt: attempt.found.cost)


def _bound(problem: Problem) -> Bound:
    return lower_bound(problem.costs, problem.placement, problem.num_microbatches, problem.limit)


def _is_too_large(problem: Problem) -> bool:
    return problem.num_ops > _TOO_LARGE_FOR_QUICK and problem.placement.num_stages > 2 * problem.placement.num_ranks


def _smaller_limits(problem: Problem) -> Iterator[float]:
    """The ladder of limits below the problem's own, largest first: quarters of p microbatches."""
    memory = problem.costs.activation_memory
    whole = max(sum(memory[s] for s in stages) for stages in problem.stages) * problem.placement.num_ranks
    top = problem.peak_without_limit()
    step = whole / 4 if problem.num_ops < _LARGE else whole
    least = problem.least_limit()
    if step <= 0:
        return
    for number in range(math.ceil(min(problem.limit, top, 2 * whole) / step - 1e-9), 0, -1):
        limit = number * step
        if least <= limit < problem.limit * (1 - 1e-9):
            yield limit
