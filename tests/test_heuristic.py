"""The list scheduler: every rule's orders can run within the limit; no collapse where memory is short."""

from __future__ import annotations

import math
from time import process_time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import costs, placements

from zerobubble import Costs, Placement, generate, simulate
from zerobubble.planner.heuristic import Rule, list_schedule, one_at_a_time, refill
from zerobubble.planner.improve import improve
from zerobubble.planner.problem import Problem, cost, fits
from zerobubble.validate import find_faults

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

rules = st.builds(
    Rule,
    forward_pace=st.floats(0.5, 4),
    backward_pace=st.floats(0.5, 4),
    turn=st.sampled_from([-1e6, -2.0, 0.0, 1.0]),
    extra=st.sampled_from([-1.0, 0.0, 1.0, math.inf]),
    fill=st.floats(0.01, 1),
    level=st.booleans(),
    allowance=st.sampled_from([-1.0, 0.0, 0.01]),
    patience=st.sampled_from([0.0, 0.1, 1.0]),
    first_patience=st.sampled_from([0.0, 1.0]),
    flat=st.booleans(),
)


@st.composite
def problems(draw: st.DrawFn, max_microbatches: int = 6) -> Problem:
    """Any placement and costs, with a limit anywhere from the least possible one up."""
    placement = draw(placements(max_ranks=4, max_chunks=3))
    stage_costs = draw(costs(placement)).resolve(placement)
    problem = Problem(stage_costs, placement, draw(st.integers(1, max_microbatches)))
    least = problem.least_limit()
    return problem.with_limit(draw(st.sampled_from([least, least * 1.3, least * 2, least * 4, math.inf])))


def can_run(problem: Problem, orders: list[list[int]]) -> bool:
    """Complete and without deadlock, by the validator; within the limit, by the planner's own count."""
    return not find_faults(problem.decode(orders, "test")) and fits(problem, orders)


@SETTINGS
@given(problems(), rules)
def test_what_a_rule_gives_can_run(problem, rule):
    orders = list_schedule(problem, rule)
    if orders is not None:
        assert can_run(problem, orders)


@SETTINGS
@given(problems())
def test_one_at_a_time_always_fits(problem):
    assert can_run(problem, one_at_a_time(problem))


@SETTINGS
@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.sampled_from(["linear", "loop", "wave"]), st.integers(1, 4))
def test_never_stuck_from_one_microbatch_up(data, ranks, microbatches, style, chunks):
    """With M_W <= M_B on equal stages there is a way on at every limit that one microbatch fits into."""
    chunks = {"linear": 1, "loop": chunks, "wave": 2 * chunks}[style]
    placement = Placement.wave(ranks, chunks) if style == "wave" else Placement.loop(ranks, chunks)
    limit = data.draw(st.floats(chunks, 3 * chunks))
    problem = Problem(Costs(weight_memory=0.43).resolve(placement), placement, microbatches, limit)
    orders = list_schedule(problem, Rule(first_patience=1.0))
    assert orders is not None
    assert can_run(problem, orders)


@SETTINGS
@given(problems(), st.integers(0, 100))
def test_cost_is_the_simulators(problem, seed):
    orders = list_schedule(problem, Rule(fill=0.5, turn=-float(seed % 3)))
    if orders is not None:
        given_costs = Costs(
            problem.costs.forward, problem.costs.backward_input, problem.costs.backward_weight, problem.costs.hop
        )
        assert cost(problem, orders) == simulate(problem.decode(orders, "test"), given_costs).cost


@SETTINGS
@given(problems(max_microbatches=4), st.integers(0, 5))
def test_improvement_is_never_worse_and_keeps_the_rules(problem, seed):
    orders = one_at_a_time(problem)
    before = [list(order) for order in orders]
    better, reached = improve(problem, orders, moves=60, goal=0.0, seed=seed)
    assert orders == before
    assert reached <= cost(problem, orders)
    assert reached == cost(problem, better)
    assert can_run(problem, better)


def test_the_papers_heuristic_at_once_and_twice_the_memory():
    """Equal times, no communication: ZB-H1's cost within p microbatches, no bubble within 2p."""
    placement = Placement.linear(4)
    for limit, expected in ((4, 8 * 3 + 3), (8, 8 * 3)):
        problem = Problem(Costs(weight_memory=0.43).resolve(placement), placement, 8, limit)
        assert cost(problem, list_schedule(problem, Rule(first_patience=1.0))) == expected


@pytest.mark.parametrize(("limit", "reference"), [(8, 0.1323), (7, 0.415), (4, 0.744)])
def test_does_not_collapse_below_p(limit, reference):
    """6.2B, p=8, m=24: the bubble rates of the paper authors' heuristic stand in peers.md."""
    placement = Placement.linear(8)
    times = Costs(29.718, 29.444, 19.927, communication=0.527, weight_memory=0.4324)
    problem = Problem(times.resolve(placement), placement, 24, limit)
    rate = 1 - problem.work[0] / cost(problem, list_schedule(problem, Rule(first_patience=1.0)))
    assert rate < reference if limit < 8 else rate < reference + 0.01


def test_refill_keeps_forwards_and_backwards_in_place():
    schedule = generate("zb_v", 4, 8)
    problem = Problem(Costs(2, 2, 1).split(2).resolve(schedule.placement), schedule.placement, 8, 4.0)
    before = problem.encode(schedule)
    after = refill(problem, before, Rule())
    assert can_run(problem, after)
    assert [[c for c in order if c // 8 % 3 < 2] for order in after] == [
        [c for c in order if c // 8 % 3 < 2] for order in before
    ]


def test_linear_in_the_number_of_ops():
    placement = Placement.linear(8)

    def seconds(microbatches: int) -> float:
        problem = Problem(Costs().resolve(placement), placement, microbatches, 16)
        begin = process_time()
        list_schedule(problem, Rule())
        return process_time() - begin

    seconds(100)
    assert min(seconds(2000) for _ in range(2)) < 30 * min(seconds(200) for _ in range(3))
