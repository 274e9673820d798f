"""The planner: the best schedule it can find for given costs, microbatches and memory, and how far from the best it is.

`plan` asks four parts: `zerobubble.bounds` for what cannot be beaten, `heuristic` (the paper's, section 3.1) for seeds,
`search` and `improve` for the best of many, and `exact` (appendix G) for a proof where the problem is small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Literal, TypeAlias

from zerobubble.bounds import Bound, lower_bound
from zerobubble.errors import CostsError, OptionError
from zerobubble.generators import GENERATORS
from zerobubble.generators.common import check_sizes
from zerobubble.planner.advice import per_rank
from zerobubble.planner.problem import Problem
from zerobubble.planner.search import EFFORTS, Found, search
from zerobubble.schedule import Placement
from zerobubble.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerobubble.costs import Costs
    from zerobubble.schedule import Schedule
    from zerobubble.timeline import Timeline

EffortName: TypeAlias = Literal["quick", "default", "exact"]

_MET = 1e-9
"""Cost and bound are equal when they differ by no more than this share: sums of many times are rounded."""

_AUTO = (("linear", 1), ("v", 2), ("loop", 3), ("wave", 4))
_AUTO_THOROUGH = (*_AUTO, ("loop", 5))
_THOROUGH = 2
"""Placements, the best after a quick search, on which more effort is spent."""
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
        time_limit: seconds after which the search ends with what it has; for `exact` also the solver's time
            (60 by default).
        progress: called with a short text whenever there is news.

    Raises:
        OptionError: an argument is out of range, or no schedule can run within the memory limit.
        CostsError: the costs fit no placement.
        MissingExtraError: `exact` without the extra `solver`.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    if effort not in EFFORTS:
        raise OptionError(f"effort must be one of {', '.join(EFFORTS)}; got {effort!r}")
    if memory_limit is not None and not memory_limit >= 0:
        raise OptionError(f"the memory limit must be a number that is not negative; got {memory_limit!r}")
    clock = _Clock(time_limit)
    say = progress or (lambda *_: None)
    given = per_rank(costs, num_ranks) if placement == "auto" else costs
    problems = _problems(given, placements_for(placement, num_ranks, chunks, effort), num_microbatches, memory_limit)
    bounded = [(lower_bound(one.costs, one.placement, num_microbatches, memory_limit), one) for one in problems]
    bounded.sort(key=lambda pair: (pair[0].value, pair[1].num_ops))
    tried: list[tuple[Found, Problem, Bound]] = []
    notes = []
    for number, (bound, problem) in enumerate(bounded):
        name, best = name_of(problem.placement), min((found.cost for found, _, _ in tried), default=math.inf)
        if best <= bound.value * (1 + _MET):
            notes.append(f"{name}: not searched, its bound is {bound.value:g}")
        elif tried and (clock.over() or (effort == "quick" and problem.num_ops > _TOO_LARGE_FOR_QUICK)):
            notes.append(f"{name}: not searched, for want of time")
        else:
            say(f"{name}: searching")
            share = clock.share(len(problems) - number + (effort != "quick"))
            tried.append((_search_within(problem, bound, "quick", share), problem, bound))
    tried.sort(key=lambda one: one[0].cost)
    if effort != "quick":
        for number, (known, problem, bound) in enumerate(tried[:_THOROUGH]):
            if tried[0][0].cost > bound.value * (1 + _MET) and not clock.over():
                say(f"{name_of(problem.placement)}: cost {known.cost:g}, searching on")
                share = clock.share(min(_THOROUGH, len(tried)) - number)
                tried[number] = _search_within(problem, bound, effort, share, known), problem, bound
        tried.sort(key=lambda one: one[0].cost)
    found, problem, _ = tried[0]
    notes = [f"{name_of(q.placement)}: cost {f.cost:g}, bound {b.value:g}, from {f.name}" for f, q, b in tried] + notes
    least = min((bound for _, _, bound in tried), key=lambda bound: bound.value)
    return _finished(given, problem, found, least, tuple(notes), effort, time_limit, say)


def placements_for(
    placement: str | Placement, num_ranks: int, chunks: int | None = None, effort: str = "default"
) -> list[Placement]:
    """The placements that `plan` tries.

    Raises:
        OptionError: an unknown name, or a number of chunks that the placement cannot have.
    """
    if isinstance(placement, Placement):
        if placement.num_ranks != num_ranks or chunks not in (None, placement.num_stages // num_ranks):
            raise OptionError(
                f"the placement has {placement.num_ranks} ranks; got num_ranks={num_ranks}, chunks={chunks}"
            )
        return [placement]
    if chunks is not None and chunks < 1:
        raise OptionError(f"chunks must be at least 1; got {chunks}")
    if placement == "auto":
        styles = _auto_with(chunks) if chunks else _AUTO if effort == "quick" else _AUTO_THOROUGH
    elif placement in ("linear", "v"):
        fixed = 1 if placement == "linear" else 2
        if chunks not in (None, fixed):
            raise OptionError(
                f"placement {placement!r} has {fixed} chunk{'s' * (fixed > 1)} per rank; got chunks={chunks}"
            )
        styles = ((placement, fixed),)
    elif placement in ("loop", "wave"):
        number = chunks or (2 if placement == "loop" else 4)
        if placement == "wave" and number % 2 and number > 1:
            raise OptionError(f"a wave goes down and up, so it needs an even number of chunks; got {chunks}")
        styles = ((placement, number),)
    else:
        raise OptionError(f"placement must be auto, linear, loop, v, wave or a Placement; got {placement!r}")
    makers = {"linear": lambda _: Placement.linear(num_ranks), "v": lambda _: Placement.v(num_ranks)}
    makers |= {"loop": lambda v: Placement.loop(num_ranks, v), "wave": lambda v: Placement.wave(num_ranks, v)}
    return list({p.ranks: p for p in (makers[style](number) for style, number in styles)}.values())


def _auto_with(chunks: int) -> tuple[tuple[str, int], ...]:
    if chunks == 1:
        return (("linear", 1),)
    return (("loop", chunks), ("wave", chunks)) if chunks % 2 == 0 else (("loop", chunks),)


def name_of(placement: Placement) -> str:
    """The style of a placement, with its chunks per rank where the style does not say."""
    style, chunks = placement.style, placement.num_stages // placement.num_ranks
    return f"{style} of {chunks}" if style in ("loop", "wave") else style


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


def _search_within(problem: Problem, bound: Bound, effort: str, clock: _Clock, known: Found | None = None) -> Found:
    """The best found for the problem's limit and for the smaller limits that every larger one tries as well.

    `known` is what a lower effort has found; it is kept where nothing is better.
    """
    best = _cheaper(search(problem, EFFORTS[effort], bound.value * (1 + _MET), clock.over), known)
    if known is not None and problem.num_ops > _SMALL:
        return best
    for limit in _smaller_limits(problem):
        smaller = problem.with_limit(limit)
        goal = lower_bound(smaller.costs, smaller.placement, smaller.num_microbatches, limit).value * (1 + _MET)
        if best.cost > goal and not clock.over():
            best = _cheaper(search(smaller, EFFORTS[effort], goal, clock.over), best)
    return best


def _cheaper(found: Found, known: Found | None) -> Found:
    return found if known is None or found.cost < known.cost else known


_SMALL = 1_000
"""Ops up to which smaller limits are searched with the same effort; beyond, quickly."""
_LARGE = 20_000
"""Ops above which only p and 2p microbatches are tried as smaller limits."""


_TOO_LARGE_FOR_QUICK = 50_000
"""Ops above which `quick` does not go on to a further placement."""


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


def _finished(
    costs: Costs,
    problem: Problem,
    found: Found,
    bound: Bound,
    notes: tuple[str, ...],
    effort: str,
    time_limit: float | None,
    say: Callable[..., None],
) -> Plan:
    """The plan as a user gets it: as a schedule, checked and simulated, and after the exact solver if asked for."""
    schedule = problem.decode(found.orders, "plan")
    limit = None if problem.limit == math.inf else problem.limit
    if effort == "exact" and found.cost > bound.value * (1 + _MET):
        schedule, bound = _exactly(problem, schedule, bound, time_limit, limit, say)
    fitting = costs.split(1)
    timeline = _cheaper_undivided(problem, fitting, simulate(schedule, fitting))
    gap = (timeline.cost - bound.value) / timeline.cost if timeline.cost > 0 else 0.0
    gap = gap if gap > _MET else 0.0
    return Plan(timeline.schedule, timeline, min(bound.value, timeline.cost), gap, bound, fitting, notes)


def _exactly(
    problem: Problem, schedule: Schedule, bound: Bound, time_limit: float | None, limit: float | None,
    say: Callable[..., None],
) -> tuple[Schedule, Bound]:  # fmt: skip
    from zerobubble.planner import exact

    result = exact.solve(
        problem.costs, problem.placement, problem.num_microbatches, limit, schedule, time_limit or _EXACT_SECONDS,
        on_progress=lambda news: say(f"cost {news.cost:g}, bound {news.lower_bound:g}"), known_bound=bound.value,
    )  # fmt: skip
    if result.lower_bound > bound.value:
        bound = Bound(result.lower_bound, f"the exact solver, for placement {name_of(problem.placement)}")
    return result.schedule, bound


def _cheaper_undivided(problem: Problem, costs: Costs, timeline: Timeline) -> Timeline:
    """A handcrafted schedule with undivided backwards that beats the plan.

    That can be where they take less time than their parts, or where what B leaves is more than what it found.
    """
    stage_costs, placement = problem.costs, problem.placement
    parts = map(sum, zip(stage_costs.backward_input, stage_costs.backward_weight))
    slower = all(full >= split for full, split in zip(stage_costs.backward_full, parts))
    lighter = all(w <= b for w, b in zip(stage_costs.weight_memory, stage_costs.activation_memory))
    if slower and lighter:
        return timeline
    chunks = placement.num_stages // placement.num_ranks
    for generator in GENERATORS.values():
        if generator.takes_chunks or chunks == 1:
            options = {"chunks": chunks} if generator.takes_chunks else {}
            schedule = generator.make(placement.num_ranks, problem.num_microbatches, **options)
            if schedule.placement == placement:
                other = simulate(schedule, costs)
                if other.cost < timeline.cost and max(other.peak_memory) <= problem.allowed:
                    timeline = other
    return timeline


class _Clock:
    """A time limit, shared by what is still to be done; None never ends."""

    def __init__(self, seconds: float | None) -> None:
        self.end = math.inf if seconds is None else monotonic() + seconds

    def over(self) -> bool:
        return self.end < math.inf and monotonic() >= self.end

    def share(self, parts: int) -> _Clock:
        """The clock of the next of `parts` equal parts."""
        part = _Clock(None)
        part.end = self.end if self.end == math.inf else monotonic() + max(self.end - monotonic(), 0.0) / parts
        return part


__all__ = ["Bound", "Plan", "name_of", "placements_for", "plan"]
