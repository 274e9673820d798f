"""The exact solver against brute force on tiny instances, and the sizes that it must prove in a minute."""

from __future__ import annotations

import sys
from itertools import permutations, product
from random import Random

import pytest

import zerobubble as zb
from zerobubble.errors import MissingExtraError, OptionError
from zerobubble.memory import peak_memory
from zerobubble.op import BW, B, F, Kind, W
from zerobubble.paper import profiled_costs
from zerobubble.planner.exact import solve
from zerobubble.schedule import Placement, make_schedule
from zerobubble.simulate import op_times
from zerobubble.validate import find_faults

pytest.importorskip("ortools")

LINEAR, V = Placement.linear, Placement.v


def one_by_one(placement: Placement, num_microbatches: int):
    """One microbatch after the other: the least memory, no overlap."""
    orders = [
        [
            op
            for j in range(num_microbatches)
            for op in (
                *(F(s, j) for s in placement.stages_of(rank)),
                *(op for s in placement.stages_of(rank)[::-1] for op in (B(s, j), W(s, j))),
            )
        ]
        for rank in range(placement.num_ranks)
    ]
    return make_schedule("one by one", placement, num_microbatches, orders)


def run(costs, placement, num_microbatches, limit=None, warm_start=None, time_limit=60.0, **options):
    warm_start = warm_start or one_by_one(placement, num_microbatches)
    stage_costs = costs.resolve(placement)
    found = solve(stage_costs, placement, num_microbatches, limit, warm_start, time_limit, **options)
    zb.validate(found.schedule, limit, costs)
    assert found.cost == pytest.approx(zb.simulate(found.schedule, costs).cost, rel=1e-12)
    assert found.lower_bound <= found.cost <= zb.simulate(warm_start, costs).cost
    return found


def rank_orders(stages, num_microbatches):
    """Every order of a rank's ops in which each stage and microbatch has F, B, W in turn; any order of microbatches."""
    jobs = [(stage, j) for stage in stages for j in range(num_microbatches)]
    kinds = (Kind.F, Kind.B, Kind.W)
    for sequence in set(permutations([job for job in jobs for _ in kinds])):
        counts: dict[tuple[int, int], int] = {}
        order = []
        for stage, j in sequence:
            order.append(zb.Op(stage, kinds[counts.get((stage, j), 0)], j))
            counts[stage, j] = counts.get((stage, j), 0) + 1
        yield tuple(order)


def in_microbatch_order(order):
    seen: dict[tuple[int, Kind], int] = {}
    for stage, kind, j in order:
        if seen.setdefault((stage, kind), 0) != j:
            return False
        seen[stage, kind] += 1
    return True


def brute_force(costs, placement, num_microbatches, limit, in_order=False):
    """The least cost of all schedules within the limit; None when there is none."""
    stage_costs = costs.resolve(placement)
    allowed = []
    for rank in range(placement.num_ranks):
        orders = rank_orders(placement.stages_of(rank), num_microbatches)
        allowed.append(
            [
                order
                for order in orders
                if (not in_order or in_microbatch_order(order))
                and (limit is None or peak_memory(order, stage_costs) <= limit + 1e-9)
            ]
        )
    best = None
    for chosen in product(*allowed):
        schedule = make_schedule("", placement, num_microbatches, chosen)
        if len(schedule.progress.sequence) < schedule.num_ops:
            continue
        starts, ends = op_times(schedule, stage_costs)
        cost = max(e[-1] - s[0] for s, e in zip(starts, ends, strict=True))
        best = cost if best is None else min(best, cost)
    return best


def random_costs(random: Random, stages: int, decimals: int | None = 1) -> zb.Costs:
    def times(least: float):
        drawn = [random.uniform(least, 3) for _ in range(stages)]
        return tuple(drawn if decimals is None else (round(value, decimals) for value in drawn))

    return zb.Costs(
        forward=times(0),
        backward_input=times(0.1),
        backward_weight=times(0),
        communication=round(random.uniform(0, 1), 1),
        activation_memory=tuple(round(random.uniform(0.5, 1.5), 1) for _ in range(stages)),
        weight_memory=tuple(round(random.uniform(0, 1.5), 1) for _ in range(stages)),
    )


SIZES = [(LINEAR(2), 2), (LINEAR(3), 1), (V(2), 1), (Placement.loop(2, 2), 1), (Placement((0, 1, 0)), 1)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("placement", "num_microbatches"), SIZES)
def test_proves_the_optimum_that_brute_force_finds(placement, num_microbatches, seed):
    random = Random(seed)
    costs = random_costs(random, placement.num_stages, decimals=1 if seed % 2 else None)
    serial = one_by_one(placement, num_microbatches)
    least = max(zb.simulate(serial, costs).peak_memory)
    limit = random.choice([None, least, least * 1.3])
    found = run(costs, placement, num_microbatches, limit)
    assert found.cost == pytest.approx(brute_force(costs, placement, num_microbatches, limit), rel=1e-6)
    assert found.lower_bound == pytest.approx(found.cost, rel=1e-5)
    assert found.optimal


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_orders_out_of_microbatch_order_are_no_cheaper(limit):
    costs = zb.Costs(forward=(1, 2), backward_input=(2, 1), backward_weight=(1, 1.5), weight_memory=0.7)
    best = brute_force(costs, LINEAR(2), 2, limit)
    assert best == brute_force(costs, LINEAR(2), 2, limit, in_order=True)
    assert run(costs, LINEAR(2), 2, limit).cost == best


@pytest.mark.parametrize(
    ("costs", "limit", "optimum"),
    [
        (zb.Costs(weight_memory=0.43), 4, 27),
        (zb.Costs(weight_memory=0.43), 3, 31),
        (zb.Costs(weight_memory=0.43), 2, 41),
        (profiled_costs("1.5B/p8/m24"), 4, 456.585),
    ],
)
def test_proves_four_ranks_and_eight_microbatches(costs, limit, optimum):
    """3 and 2 M_B: the optima of a solver that is not ours; at p M_B, ZB-H1 is optimal (shared rules)."""
    found = run(costs, LINEAR(4), 8, limit)
    assert found.optimal
    assert found.cost == pytest.approx(optimum)
    assert found.lower_bound == pytest.approx(optimum)


def test_a_known_bound_that_the_warm_start_reaches_ends_the_search_at_once():
    warm_start = zb.zb_h1(4, 8)
    found = run(zb.Costs(), LINEAR(4), 8, 4, warm_start, known_bound=27.0)
    assert found.schedule is warm_start
    assert found.optimal


def test_never_worse_than_the_warm_start_when_there_is_no_time():
    warm_start = zb.zb_h2(6, 12)
    found = run(profiled_costs("6.2B/p8/m24"), LINEAR(6), 12, 12, warm_start, time_limit=0.01)
    assert found.cost <= zb.simulate(warm_start, profiled_costs("6.2B/p8/m24")).cost


def test_warm_start_with_undivided_backward_that_is_cheaper_than_its_parts_is_kept():
    costs = zb.Costs(backward_full=1.0)
    warm_start = make_schedule("bw", LINEAR(1), 2, [[F(0, 0), BW(0, 0), F(0, 1), BW(0, 1)]])
    found = run(costs, LINEAR(1), 2, warm_start=warm_start)
    assert found.schedule is warm_start
    assert found.cost == 4


def test_undivided_backward_in_the_warm_start_is_taken_apart():
    found = run(zb.Costs(), LINEAR(3), 4, 3, zb.one_f_one_b(3, 4))
    assert found.optimal
    assert found.cost < zb.simulate(zb.one_f_one_b(3, 4)).cost


def test_zero_times_and_zero_memory():
    costs = zb.Costs(forward=0, backward_input=0, backward_weight=0, activation_memory=0, weight_memory=0)
    found = run(costs, V(2), 2, 0)
    assert (found.cost, found.optimal) == (0, True)


def test_ops_that_take_no_time_keep_their_order():
    costs = zb.Costs(forward=(0, 1, 0), backward_input=(1, 0, 0), backward_weight=0, communication=(0, 0.5))
    found = run(costs, LINEAR(3), 3, 2)
    assert not find_faults(found.schedule, 2, costs)


def test_progress_tells_falling_costs_and_bounds_below_them():
    news = []
    run(zb.Costs(weight_memory=0.43), LINEAR(4), 8, 2, on_progress=news.append)
    assert news
    costs = [one.cost for one in news]
    assert costs == sorted(costs, reverse=True)
    assert all(0 <= one.lower_bound <= one.cost for one in news)


def test_scaled_times_give_the_scaled_optimum():
    costs = random_costs(Random(7), 3)
    scaled = zb.Costs(
        *([7.3 * t for t in getattr(costs, key)] for key in ("forward", "backward_input", "backward_weight")),
        communication=7.3 * costs.communication,
        activation_memory=costs.activation_memory,
        weight_memory=costs.weight_memory,
    )
    assert run(scaled, LINEAR(3), 3).cost == pytest.approx(7.3 * run(costs, LINEAR(3), 3).cost, rel=1e-6)


def test_without_or_tools_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'zerobubble\[solver\]'"):
        run(zb.Costs(), LINEAR(2), 2)


def test_a_warm_start_of_other_sizes_is_refused():
    with pytest.raises(OptionError, match="warm start"):
        run(zb.Costs(), LINEAR(2), 3, warm_start=zb.zb_h1(2, 2))


def test_a_time_limit_that_is_none_is_refused():
    with pytest.raises(OptionError, match="time limit"):
        run(zb.Costs(), LINEAR(2), 2, time_limit=0)
