"""Cutting a model into stages: against brute force, and together with the schedule."""

from __future__ import annotations

from itertools import combinations
from random import Random
from types import SimpleNamespace

import pytest

import zerobubble as zb
from zerobubble import planner
from zerobubble.errors import CostsError, OptionError
from zerobubble.planner.partition import best_partitions, plan_layers, stage_costs_for
from zerobubble.schedule import Placement

HEAVY_ENDS = zb.Costs(
    forward=(0.5, *[1] * 10, 3),
    backward_input=(0, *[1] * 10, 3),
    backward_weight=(0.5, *[1] * 10, 3),
    activation_memory=(0.2, *[1] * 10, 2),
    weight_memory=0.5,
)


def busiest(layers: zb.Costs, partition, placement: Placement) -> float:
    costs = stage_costs_for(layers, partition).resolve(placement)
    loads = [0.0] * placement.num_ranks
    for stage, rank in enumerate(placement.ranks):
        loads[rank] += costs.forward[stage] + costs.backward_input[stage] + costs.backward_weight[stage]
    return max(loads)


def all_partitions(layers: int, stages: int):
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))


def test_stage_costs_are_the_sums_of_their_layers():
    costs = stage_costs_for(HEAVY_ENDS, (2, 3, 6, 1))
    assert costs.forward == (1.5, 3, 6, 3)
    assert costs.activation_memory == (1.2, 3, 6, 2)
    assert costs.weight_memory == (1, 1.5, 3, 0.5)
    assert costs.backward_full is None


def test_one_hop_per_layer_boundary_leaves_those_at_the_cuts():
    layers = zb.Costs(forward=(1, 1, 1, 1), communication=(0.1, 0.2, 0.3), backward_full=3)
    assert stage_costs_for(layers, (2, 2)).communication == (0.2,)
    assert stage_costs_for(layers, (1, 2, 1)).communication == (0.1, 0.3)
    assert stage_costs_for(layers, (1, 3)).backward_full == (3, 9)


@pytest.mark.parametrize("partition", [(1, 2), (0, 4), (2, 3), ()])
def test_a_partition_that_does_not_fit_is_refused(partition):
    with pytest.raises(OptionError, match="4 layers cannot be cut"):
        stage_costs_for(zb.Costs(forward=(1, 1, 1, 1)), partition)


def test_layers_without_any_list_are_refused():
    with pytest.raises(CostsError, match="one entry per layer"):
        stage_costs_for(zb.Costs(), (1, 1))


@pytest.mark.parametrize("seed", range(25))
def test_no_partition_has_less_work_on_the_busiest_rank(seed):
    random = Random(seed)
    num_ranks = random.randint(1, 3)
    count = random.randint(2 * num_ranks, 10)
    layers = zb.Costs(*(tuple(round(random.uniform(0, 3), 1) for _ in range(count)) for _ in range(3)))
    for placement in (Placement.linear(num_ranks), Placement.v(num_ranks)):
        least = min(busiest(layers, cut, placement) for cut in all_partitions(count, placement.num_stages))
        assert busiest(layers, best_partitions(layers, placement)[0], placement) == pytest.approx(least)


@pytest.mark.parametrize("placement", [Placement.linear(4), Placement.v(4), Placement.loop(2, 3), Placement.wave(3, 4)])
def test_near_optimal_partitions_are_distinct_sorted_and_whole(placement):
    found = best_partitions(HEAVY_ENDS, placement, 5)
    assert len(set(found)) == len(found)
    assert all(sum(cut) == 12 and len(cut) == placement.num_stages and min(cut) > 0 for cut in found)
    loads = [busiest(HEAVY_ENDS, cut, placement) for cut in found]
    assert loads == sorted(loads)


def test_equal_layers_are_cut_evenly():
    layers = zb.Costs(forward=(1,) * 16)
    for placement in (Placement.linear(4), Placement.v(4), Placement.loop(2, 2)):
        assert set(best_partitions(layers, placement)[0]) == {16 // placement.num_stages}


def test_heavy_ends_get_fewer_layers():
    first, *middle, last = best_partitions(HEAVY_ENDS, Placement.linear(4))[0]
    assert last == min(first, *middle, last) < max(middle)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(OptionError, match="3 layers cannot fill 4 stages"):
        best_partitions(zb.Costs(forward=(1, 1, 1)), Placement.v(2))


@pytest.fixture
def handcrafted_plans(monkeypatch):
    """A planner that knows ZB-H1 and ZB-V only, and what it was asked."""
    asked = []

    def plan(costs, num_ranks, num_microbatches, *, placement, effort, memory_limit=None, **options):
        asked.append((placement, effort))
        if placement == "wave":
            raise OptionError("too little memory")
        schedule = (zb.zb_h1 if placement == "linear" else zb.zb_v)(num_ranks, num_microbatches)
        timeline = zb.simulate(schedule, costs)
        return SimpleNamespace(schedule=schedule, timeline=timeline)

    monkeypatch.setattr(planner, "plan", plan, raising=False)
    return asked


def test_the_cut_with_the_cheapest_plan_wins(handcrafted_plans):
    partition, found = plan_layers(HEAVY_ENDS, 3, 6, placement="linear", candidates=4)
    costs = [
        zb.simulate(zb.zb_h1(3, 6), stage_costs_for(HEAVY_ENDS, cut)).cost
        for cut in best_partitions(HEAVY_ENDS, Placement.linear(3), 4)
    ]
    assert found.timeline.cost == min(costs)
    assert found.timeline.cost == zb.simulate(zb.zb_h1(3, 6), stage_costs_for(HEAVY_ENDS, partition)).cost
    assert handcrafted_plans == [("linear", "quick")] * 4 + [("linear", "default")]


def test_auto_tries_every_placement_that_the_layers_fill_and_skips_what_cannot_be_planned(handcrafted_plans):
    partition, found = plan_layers(HEAVY_ENDS, 3, 6, effort="quick", candidates=2)
    assert {style for style, _ in handcrafted_plans} == {"linear", "v", "wave"}
    assert len(partition) == found.schedule.num_stages
    with pytest.raises(OptionError, match="too little memory"):
        plan_layers(HEAVY_ENDS, 3, 6, placement="wave", chunks=4)
    handcrafted_plans.clear()
    plan_layers(HEAVY_ENDS, 12, 3, effort="quick")
    assert {style for style, _ in handcrafted_plans} == {"linear"}


def test_an_unknown_placement_is_refused():
    with pytest.raises(OptionError, match="got 'zigzag'"):
        plan_layers(HEAVY_ENDS, 3, 6, placement="zigzag")
