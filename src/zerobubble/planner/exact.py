"""The paper's integer program (appendix G), solved with OR-tools' CP-SAT (extra `solver`).

Which op runs when, under three rules: what an op needs has arrived, a rank runs one op at a time, and a rank's
activation memory stays within the limit. The largest span of a rank is made as small as possible.

**In microbatch order, without loss of generality.** In the model the ops of one stage and kind run in microbatch order,
which takes away m! equal solutions per stage and kind. Any schedule can be renamed so: call the i-th op of each kind
that starts on a stage the one of microbatch i, and leave all times as they are. Microbatches cost the same, so times
and memory stay what they were. Dependencies hold too: when the i-th F starts on a stage, i different microbatches have
passed the stage before, so the i-th that passed it has; the same goes for B and W. So the bound holds for every
schedule of F, B and W ops. It does not speak of the undivided backward (BW) where that is cheaper than its parts.

**A rank may begin late.** As in the paper, the model may let a rank wait before its first op, which makes its span
shorter, where a simulation starts every op at once. So the bound also holds for orders that delay a rank's first op. It
can be below what a simulation reaches, and then the best schedule is not called optimal: once in the 100 random tiny
problems of `tests/test_optimal_plans.py`, by 1.3 %.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any

from zerobubble.errors import MissingExtraError, OptionError
from zerobubble.memory import peak_memory
from zerobubble.op import Kind
from zerobubble.planner.integer_program import RELATIVE_SLACK, IntegerCosts, IntegerProgram, memory_slack
from zerobubble.simulate import op_times

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerobubble.costs import StageCosts
    from zerobubble.schedule import Placement, Schedule

_ROUNDING = 1e-5
"""Where times had to be rounded, cost and bound meet when they differ by no more than this share of the cost."""


@dataclass(frozen=True)
class Progress:
    """News of a running search: the least cost so far, the proven bound so far, and seconds since its start."""

    cost: float
    lower_bound: float
    seconds: float


@dataclass(frozen=True)
class ExactResult:
    """What the search ended with.

    Attributes:
        schedule: the best schedule found, the warm start if none was better.
        cost: its largest span, simulated with the true times.
        lower_bound: no schedule of F, B and W ops within the limit costs less.
        optimal: whether cost and bound meet, but for rounding.
    """

    schedule: Schedule
    cost: float
    lower_bound: float
    optimal: bool


def solve(
    costs: StageCosts,
    placement: Placement,
    num_microbatches: int,
    memory_limit: float | None,
    warm_start: Schedule,
    time_limit: float,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    known_bound: float = 0.0,
    workers: int | None = None,
) -> ExactResult:
    """Search for the cheapest schedule and prove how good it is (the paper, appendix G).

    Args:
        costs: times and memory per stage.
        placement: stage -> rank.
        num_microbatches: m.
        memory_limit: most activation memory per rank, in the costs' unit; None for no limit.
        warm_start: a valid schedule of the same placement and microbatches within the limit. The result is never worse.
        time_limit: seconds; the best schedule and bound so far are returned when they are over.
        on_progress: called, from the solver's threads, with every better schedule and every better bound.
        known_bound: a cost that no schedule can beat, proven elsewhere; helps the proof.
        workers: threads of the solver; by default 4, or as many as there are processors where there are more.

    Raises:
        MissingExtraError: OR-tools is not installed.
        OptionError: the warm start has another placement or number of microbatches, or there is no time.
    """
    if (warm_start.placement, warm_start.num_microbatches) != (placement, num_microbatches):
        raise OptionError("the warm start must have the placement and the number of microbatches that are to be solved")
    if not time_limit > 0:
        raise OptionError(f"the time limit must be a positive number of seconds; got {time_limit:g}")
    cp_model = _cp_model()
    known_bound = max(known_bound, _busiest(costs, placement, num_microbatches))
    best = _Best(warm_start, _cost(warm_start, costs), costs, memory_limit)
    if best.reaches(known_bound):
        return best.result(known_bound)
    integers = IntegerCosts.of(costs, placement, num_microbatches, memory_limit)
    program = IntegerProgram(cp_model, integers, best.cost, known_bound)
    program.hint(warm_start, costs)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.num_workers = workers or max(4, os.cpu_count() or 1)
    status = solver.solve(program.model, _watch(cp_model, solver, program, best, on_progress))
    span = program.longest if status == cp_model.INFEASIBLE else solver.best_objective_bound
    return best.result(max(known_bound, integers.proven(span)), 0.0 if integers.exact else _ROUNDING)


def _cp_model() -> Any:
    """OR-tools' module, imported only when it is asked for."""
    try:
        return import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        raise MissingExtraError(
            "the exact solver needs OR-tools; install it with: pip install 'zerobubble[solver]'"
        ) from error


def _watch(
    cp_model: Any, solver: Any, program: IntegerProgram, best: _Best, on_progress: Callable[[Progress], None] | None
) -> Any:
    """The solver's callback: every solution is judged by the true times, and told."""
    begin = monotonic()

    def tell(span: float) -> None:
        if on_progress is not None:
            on_progress(Progress(best.cost, min(program.costs.proven(span), best.cost), monotonic() - begin))

    class Watch(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            best.offer(program.schedule(self.value))
            tell(self.best_objective_bound)

    solver.best_bound_callback = tell
    return Watch()


@dataclass
class _Best:
    """The best schedule so far, by the true times."""

    schedule: Schedule
    cost: float
    costs: StageCosts
    memory_limit: float | None

    def offer(self, schedule: Schedule) -> None:
        """Take `schedule` if it is cheaper and within the limit."""
        cost, limit = _cost(schedule, self.costs), self.memory_limit
        peak = max(peak_memory(order, self.costs) for order in schedule.orders)
        if cost < self.cost and (limit is None or peak <= limit + memory_slack(limit)):
            self.schedule, self.cost = schedule, cost

    def reaches(self, bound: float, rounding: float = 0.0) -> bool:
        """Whether the cost is at the bound, but for rounding."""
        return self.cost <= bound * (1 + max(RELATIVE_SLACK, rounding))

    def result(self, bound: float, rounding: float = 0.0) -> ExactResult:
        """The best schedule with the bound that is proven."""
        return ExactResult(self.schedule, self.cost, min(bound, self.cost), self.reaches(bound, rounding))


def _cost(schedule: Schedule, costs: StageCosts) -> float:
    starts, ends = op_times(schedule, costs)
    return max(ended[-1] - started[0] for started, ended in zip(starts, ends, strict=True) if ended)


def _busiest(costs: StageCosts, placement: Placement, num_microbatches: int) -> float:
    """The work of the busiest rank, which no schedule can beat."""
    each = [sum(costs.by_kind[kind][s] for kind in (Kind.F, Kind.B, Kind.W)) for s in range(placement.num_stages)]
    return max(
        num_microbatches * sum(each[stage] for stage in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    )
