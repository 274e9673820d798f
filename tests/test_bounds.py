"""Lower bounds: no schedule falls below them, and where the paper's argument is tight they are exact."""

from __future__ import annotations

import json
from itertools import count, permutations, product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import costs, placements, random_schedule

from zerobubble import Costs, Kind, Placement, generate, simulate
from zerobubble.bounds import _most_work_held, lower_bound, lower_bounds
from zerobubble.errors import OptionError
from zerobubble.op import B, F, Op
from zerobubble.paper import profiled_costs, profiles
from zerobubble.planner.heuristic import Rule, refill
from zerobubble.planner.problem import Problem, cost
from zerobubble.schedule import Schedule
from zerobubble.validate import find_faults

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTANCES = Path(__file__).parents[1] / "benchmarks" / "planner_vs_peers" / "instances.json"
SETTINGS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def bound(costs: Costs, placement: Placement, m: int, limit: float | None = None) -> float:
    return lower_bound(costs.resolve(placement), placement, m, limit).value


def below(value: float, cost: float) -> bool:
    return value <= cost * (1 + 1e-9) + 1e-9


@SETTINGS
@given(st.data())
def test_no_schedule_falls_below(data):
    """Any placement, any costs, undivided backwards among them; the limit is what the schedule holds."""
    placement = data.draw(placements(max_ranks=4, max_chunks=2))
    given_costs = data.draw(costs(placement))
    schedule = random_schedule(placement, data.draw(st.integers(1, 5)), Random(data.draw(st.integers(0, 2**32))))
    timeline = simulate(schedule, given_costs)
    limit = max(timeline.peak_memory)
    for each in lower_bounds(given_costs.resolve(placement), placement, schedule.num_microbatches, limit):
        assert below(each.value, timeline.cost), each.reason


@SETTINGS
@given(st.data(), st.sampled_from(["one_f_one_b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "interleaved"]))
def test_no_handcrafted_schedule_falls_below(data, name):
    schedule = generate(name, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8)))
    given_costs = data.draw(costs(schedule.placement))
    timeline = simulate(schedule, given_costs)
    limit = max(timeline.peak_memory)
    assert below(bound(given_costs, schedule.placement, schedule.num_microbatches, limit), timeline.cost)


def optimum(given_costs: Costs, m: int, limit: float) -> float:
    """The least cost on two ranks by brute force: every order, each kind of op in microbatch order."""
    orders = [sorted({ops for ops in map(tuple, _mixes(rank, m)) if _in_order(rank, ops)}) for rank in range(2)]
    schedules = (Schedule(Placement.linear(2), m, pair) for pair in product(*orders))
    return min(simulate(one, given_costs).cost for one in schedules if not find_faults(one, limit, given_costs))


def _mixes(rank: int, m: int) -> Iterator[list[Op]]:
    for kinds in set(permutations([Kind.F, Kind.B, Kind.W] * m)):
        counters = {kind: count() for kind in Kind}
        yield [Op(rank, kind, next(counters[kind])) for kind in kinds]


def _in_order(rank: int, ops: tuple[Op, ...]) -> bool:
    places = {op: i for i, op in enumerate(ops)}
    last = [op for op in ops if op.kind is Kind.W]
    return all(places[F(rank, w.microbatch)] < places[B(rank, w.microbatch)] < places[w] for w in last)


@pytest.mark.parametrize("limit", [1, 1.5, 2])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 2, 1), (2, 5, 3)])
def test_brute_force_does_not_fall_below(times, limit):
    placement = Placement.linear(2)
    given_costs = Costs(*times, communication=0.5, weight_memory=0.5)
    assert below(bound(given_costs, placement, 2, limit), optimum(given_costs, 2, limit))


def test_no_peer_falls_below():
    for instance in json.loads(INSTANCES.read_text()):
        for peer in instance["peers"]:
            if peer.get("peak") is None or peer["placement"] not in ("linear", "v"):
                continue
            stages = instance[peer["placement"]]
            keys = ("F", "B", "W")
            memory = {"activation_memory": stages["MB"], "weight_memory": stages["MW"]}
            given_costs = Costs(*(stages[key] for key in keys), communication=instance["communication"], **memory)
            make = Placement.linear if peer["placement"] == "linear" else Placement.v
            value = bound(given_costs, make(instance["p"]), instance["m"], peer["peak"])
            assert value <= peer["cost"] * (1 + 1e-9), (instance["name"], peer)


@pytest.mark.parametrize("profile", profiles())
def test_zb_h1_is_optimal_at_its_memory(profile):
    """RULES: before the first and after the last op, memory p*M_B leaves exactly ZB-H1's bubble."""
    p, m = profiles()[profile]["p"], profiles()[profile]["m"]
    reached = simulate(generate("zb_h1", p, m), profiled_costs(profile)).cost
    found = lower_bounds(profiled_costs(profile).resolve(Placement.linear(p)), Placement.linear(p), m, p)
    assert found[0].value == pytest.approx(reached, rel=1e-9)
    assert next(b for b in found if "memory at the ends" in b.reason).value == pytest.approx(reached, rel=1e-9)


@pytest.mark.parametrize(("model", "printed"), [("1.5B/p8/m24", 7.03), ("6.2B/p8/m24", 4.03), ("14.6B/p16/m48", 4.98)])
def test_zb_v_with_w_moved_is_optimal_at_its_memory(model, printed):
    """The bubble rates that the paper authors' ZB-V reaches with p*M_B: no V schedule does better."""
    p, m = profiles()[model]["p"], profiles()[model]["m"]
    placement = Placement.v(p)
    given_costs = profiled_costs(model).split(2).resolve(placement)
    found = lower_bound(given_costs, placement, m, p)
    problem = Problem(given_costs, placement, m, p)
    orders = refill(problem, problem.encode(generate("zb_v", p, m)), Rule())
    assert cost(problem, orders) == pytest.approx(found.value, rel=1e-9)
    assert round(100 * (1 - max(problem.work) / found.value), 2) == printed


def test_explains_the_papers_odd_cell():
    """1.5B, m=24: 0.0433 with twice the memory, since the last rank's stream of B comes late."""
    found = lower_bound(profiled_costs("1.5B/p8/m24").resolve(Placement.linear(8)), Placement.linear(8), 24, 16)
    times = profiles()["1.5B/p8/m24"]
    work = 24 * (times["T_F"] + times["T_B"] + times["T_W"])
    assert round(1 - work / found.value, 4) == 0.0433
    assert "stream" in found.reason


@SETTINGS
@given(st.data())
def test_more_memory_never_raises_the_bound(data):
    placement = data.draw(placements())
    given_costs, m = data.draw(costs(placement)), data.draw(st.integers(1, 6))
    a, b = sorted((data.draw(st.integers(0, 60)), data.draw(st.integers(0, 60))))
    assert bound(given_costs, placement, m, b) <= bound(given_costs, placement, m, a) * (1 + 1e-12)
    assert bound(given_costs, placement, m) <= bound(given_costs, placement, m, b) * (1 + 1e-12)


def test_largest_first_each_with_a_reason():
    placement = Placement.linear(4)
    bounds = lower_bounds(Costs(weight_memory=0.43).resolve(placement), placement, 8, 3)
    assert [b.value for b in bounds] == sorted((b.value for b in bounds), reverse=True)
    assert all(b.reason for b in bounds)
    assert bounds[-1].value > 0


@pytest.mark.parametrize(("m", "limit"), [(0, None), (4, -1), (4, float("nan"))])
def test_what_is_out_of_range_is_refused(m, limit):
    placement = Placement.linear(2)
    with pytest.raises(OptionError):
        lower_bound(Costs().resolve(placement), placement, m, limit)


def test_memory_used_up_to_the_last_bit_leaves_no_negative_room():
    """3.9 / 14 * 14 is a little more than 3.9, and what holds no memory was then divided by it."""
    assert 3.9 / 14 * 14 > 3.9
    assert _most_work_held([(14.0, 28.0, 1), (0.0, 0.0, 4)], 3.9) == 3.9 / 14 * 28
