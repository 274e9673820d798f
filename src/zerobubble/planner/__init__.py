"""The planner: the best schedule it can find for given costs, microbatches and memory, and how far from the best it is.

`plan` asks four parts: `zerobubble.bounds` for what cannot be beaten, `heuristic` (the paper's, section 3.1) for seeds,
`search` and `improve` for the best of many, and `exact` (appendix G) for a proof where the problem is small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from zerobubble.bounds import Bound
from zerobubble.errors import CostsError, OptionError
from zerobubble.generators import GENERATORS
from zerobubble.generators.common import check_sizes
from zerobubble.planner.advice import per_rank
from zerobubble.planner.placements import name_of, placements_for
from zerobubble.planner.portfolio import MET, Attempt, Clock, Portfolio
from zerobubble.planner.problem import Problem
from zerobubble.planner.search import EFFORTS
from zerobubble.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerobubble.costs import Costs
    from zerobubble.schedule import Placement, Schedule
    from zerobubble.timeline import Timeline

EffortName: TypeAlias = Literal["quick", "default", "exact"]

_EXACT_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """A schedule for given costs, and how good it is.

    Attributes:
        schedule: the plan.
        timeline: the plan simulated with the costs: cost, bubble rate, peak memory.
        lower_bound: no schedule of the placements tried, within the memory limit, costs less.
        gap: (cost - lower_bound) / cost; 0 when the plan is proven to be the best.
        bound: the argument behind `lower_bound`.
        costs: the costs per stage of the plan's placement.
        notes: where the plan comes from and what was tried, one line each.
    """

    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    gap: float
    bound: Bound
    costs: Costs
    notes: tuple[str, ...] = field(default=())

    @property
    def optimal(self) -> bool:
        """Whether no schedule of the placements tried costs less."""
        return self.gap == 0.0


def plan(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    placement: str | Placement = "auto",
    chunks: int | None = None,
    effort: str = "default",
    time_limit: float | None = None,
    progress: Callable[..., None] | None = None,
) -> Plan:
    """The cheapest schedule found for `costs`, and a bound that no schedule can beat.

    More memory never gives a worse plan than a smaller limit that is a quarter, a half, ... of p microbatches: those
    below the limit are planned as well wherever their bound says that they could be better (exactly so for `quick`;
    the other efforts plan them quickly from a thousand ops on, and from twenty thousand only p and 2p microbatches are
    such limits). More effort never gives a worse plan. `quick` and `default` do not look at the clock unless there is a
    time limit: same input, same plan.

    Args:
        costs: times and memory; lists have one entry per stage, and stages are cut evenly where the placement has more.
            For `auto`, single numbers are those of one rank, so that placements can be compared.
        num_ranks: p.
        num_microbatches: m.
        memory_limit: activation memory of every rank, in the unit of the costs' `activation_memory`; None for no limit.
        placement: `linear`, `loop`, `v`, `wave`, a `Placement`, or `auto`: linear, v, loop of 3 chunks, wave of 4 and
            (unless `quick`) loop of 5.
        chunks: chunks per rank for `loop` (2 by default) and `wave` (4 by default); with `auto`, only these.
        effort: `quick` (a second or so, some more for thousands of ops), `default` (several times that), or `exact`:
            the integer program after that, for small problems.
        time_limit: seconds after which the search ends with what it has; for `exact`, those of search and solver
            together, of which the search has half at most. By default, the solver has 60.
        progress: called with a short text whenever there is news.

    Raises:
        OptionError: an argument is out of range, or no schedule can run within the memory limit.
        CostsError: the costs fit no placement.
        MissingExtraError: `exact` without the extra `solver`.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    _check(effort, memory_limit)
    say = progress or (lambda *_: None)
    given = per_rank(costs, num_ranks) if placement == "auto" else costs
    placements = placements_for(placement, num_ranks, chunks, effort)
    problems, clock = _problems(given, placements, num_microbatches, memory_limit), Clock(time_limit)
    portfolio = Portfolio(problems, clock.share(2) if effort == "exact" else clock, say)
    portfolio.search_all(effort)
    if effort != "quick":
        portfolio.search_on(effort)
    solver_seconds = clock.left() if time_limit else _EXACT_SECONDS
    return _finished(portfolio, given, solver_seconds if effort == "exact" else 0.0, say)


def _check(effort: str, memory_limit: float | None) -> None:
    if effort not in EFFORTS:
        raise OptionError(f"effort must be one of {', '.join(EFFORTS)}; got {effort!r}")
    if memory_limit is not None and not memory_limit >= 0:
        raise OptionError(f"the memory limit must be a number that is not negative; got {memory_limit!r}")


def _problems(
    costs: Costs, placements: list[Placement], num_microbatches: int, memory_limit: float | None
) -> list[Problem]:
    """One problem per placement that the costs and the limit allow."""
    limit = math.inf if memory_limit is None else float(memory_limit)
    problems = []
    refused: CostsError | None = None
    for placement in placements:
        try:
            problems.append(Problem(costs.resolve(placement), placement, num_microbatches, limit))
        except CostsError as error:
            refused = refused or error
    if not problems:
        raise refused or AssertionError("no placement was given")
    possible = [problem for problem in problems if problem.least_limit() <= problem.allowed]
    if not possible:
        least = min(problem.least_limit() for problem in problems)
        raise OptionError(
            f"no schedule can run within a memory limit of {memory_limit:g}: the least possible limit is {least:g}, "
            "where each microbatch runs alone; raise the limit, or use smaller microbatches"
        )
    return possible


def _finished(portfolio: Portfolio, costs: Costs, solver_seconds: float, say: Callable[..., None]) -> Plan:
    """The plan as a user gets it: as a schedule, checked and simulated, and after the exact solver if asked for."""
    attempts = portfolio.attempts
    best, bounds = attempts[0], [attempt.bound for attempt in attempts]
    schedule = best.problem.decode(best.found.orders, "plan")
    if solver_seconds > 0 and not best.met:
        schedule, bounds[0] = _exactly(best, schedule, solver_seconds, say)
    fitting = costs.split(1)
    timeline = simulate(schedule, fitting)
    if _undivided_may_win(best.problem):
        timeline = min([timeline, *_undivided(best.problem, fitting)], key=lambda one: one.cost)
    bound = min(bounds, key=lambda bound: bound.value)
    gap = (timeline.cost - bound.value) / timeline.cost if timeline.cost > 0 else 0.0
    gap = gap if gap > MET else 0.0
    notes = (*map(str, attempts), *portfolio.skipped)
    return Plan(timeline.schedule, timeline, min(bound.value, timeline.cost), gap, bound, fitting, notes)


def _exactly(attempt: Attempt, schedule: Schedule, seconds: float, say: Callable[..., None]) -> tuple[Schedule, Bound]:
    """What the exact solver makes of `schedule`, and the larger of its bound and the attempt's."""
    from zerobubble.planner import exact

    problem, bound = attempt.problem, attempt.bound
    limit = None if problem.limit == math.inf else problem.limit
    result = exact.solve(
        problem.costs, problem.placement, problem.num_microbatches, limit, schedule, seconds,
        on_progress=lambda news: say(f"cost {news.cost:g}, bound {news.lower_bound:g}"), known_bound=bound.value,
    )  # fmt: skip
    if result.lower_bound > bound.value and not _undivided_may_win(problem):
        bound = Bound(result.lower_bound, f"the exact solver, for placement {name_of(problem.placement)}")
    return result.schedule, bound


def _undivided_may_win(problem: Problem) -> bool:
    """Whether an undivided backward takes less time than its parts, or spares memory because B leaves more than it
    found. Search and exact solver know F, B and W only."""
    costs = problem.costs
    parts = map(sum, zip(costs.backward_input, costs.backward_weight))
    faster = any(full < split for full, split in zip(costs.backward_full, parts))
    return faster or any(w > b for w, b in zip(costs.weight_memory, costs.activation_memory))


def _undivided(problem: Problem, costs: Costs) -> Iterator[Timeline]:
    """The handcrafted schedules of the placement that fit, undivided backwards among them."""
    placement = problem.placement
    chunks = placement.num_stages // placement.num_ranks
    for generator in GENERATORS.values():
        if generator.takes_chunks or chunks == 1:
            options = {"chunks": chunks} if generator.takes_chunks else {}
            schedule = generator.make(placement.num_ranks, problem.num_microbatches, **options)
            if schedule.placement == placement:
                timeline = simulate(schedule, costs)
                if max(timeline.peak_memory) <= problem.allowed:
                    yield timeline


__all__ = ["Bound", "Plan", "name_of", "placements_for", "plan"]
