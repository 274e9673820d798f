"""How close plans come to the optimum where it can be proved: 100 random tiny instances."""

from __future__ import annotations

from random import Random

import pytest

from zerobubble import Costs, Placement
from zerobubble.planner import plan
from zerobubble.planner.exact import solve
from zerobubble.planner.problem import Problem

pytest.importorskip("ortools")


def random_problem(random: Random) -> Problem:
    """At most 3 ranks and 4 microbatches, linear or V, other costs on every stage, little memory most often."""
    placement = random.choice((Placement.linear, Placement.v))(random.randint(1, 3))
    stages = range(placement.num_stages)
    costs = Costs(
        forward=tuple(random.randint(1, 9) for _ in stages),
        backward_input=tuple(random.randint(1, 9) for _ in stages),
        backward_weight=tuple(random.randint(0, 9) for _ in stages),
        communication=random.choice((0, 0, 1, 2)),
        activation_memory=tuple(random.choice((1, 1, 1.5)) for _ in stages),
        weight_memory=tuple(random.choice((0.4, 0.5, 1)) for _ in stages),
    )
    problem = Problem(costs.resolve(placement), placement, random.randint(1, 4))
    return problem.with_limit(problem.least_limit() * random.choice((1, 1.25, 1.5, 2, 3)))


def above_the_optimum(problem: Problem) -> float:
    """Cost of the plan over what the solver makes of it, less 1; no bound exceeds that.

    The solver ends with its proof, long before its time is over. It may prove a little less than can be reached: its
    model lets a rank begin late.
    """
    costs, placement, m, limit = problem.costs, problem.placement, problem.num_microbatches, problem.limit
    given = Costs(
        costs.forward, costs.backward_input, costs.backward_weight, costs.hop, costs.activation_memory,
        costs.weight_memory,
    )  # fmt: skip
    found = plan(given, placement.num_ranks, m, memory_limit=limit, placement=placement)
    best = solve(costs, placement, m, limit, found.schedule, 60)
    assert found.lower_bound <= best.cost * (1 + 1e-9)
    assert best.lower_bound >= 0.98 * best.cost
    return found.timeline.cost / best.cost - 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_plans_of_tiny_problems_are_optimal(seed):
    """Ten problems per seed, effort `default`."""
    random = Random(seed)
    assert [above_the_optimum(random_problem(random)) for _ in range(10)] == pytest.approx([0.0] * 10, abs=1e-9)
