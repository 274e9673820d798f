"""What is said of a plan in one sentence."""

from __future__ import annotations

import pytest

import zerobubble as zb
from zerobubble.planner.advice import advice, handcrafted, per_rank


def linear_rows(limit=None):
    """The handcrafted schedules of the plan's own placement."""
    return [row for row in rows_for(unit(), limit=limit) if row.timeline.schedule.num_stages == 4]


def rows_for(costs, num_ranks=4, num_microbatches=8, limit=None):
    return handcrafted(lambda _: costs, num_ranks, num_microbatches, limit)


def unit() -> zb.Costs:
    return per_rank(zb.Costs(), 4)


def test_single_numbers_become_one_per_rank_and_lists_stay():
    costs = per_rank(zb.Costs(forward=2, backward_full=3), 4)
    assert costs.forward == (2,) * 4
    assert costs.backward_full == (3,) * 4
    assert costs.communication == 0
    assert per_rank(costs, 2) is costs
    assert zb.simulate(zb.zb_v(4, 8), costs).work == 8 * 4
    assert per_rank(zb.Costs(forward=2), 4, chunks=3).forward == (6,) * 4


def test_generators_that_the_costs_do_not_fit_are_left_out():
    costs = zb.Costs(forward=(1,) * 8)
    assert {row.timeline.schedule.num_stages for row in rows_for(costs)} == {8}


def test_rows_say_what_keeps_the_limit():
    fits = {row.name: row.fits for row in rows_for(unit(), limit=4)}
    assert fits["one_f_one_b"]
    assert not fits["zb_h2"]


def test_zero_bubble_does_not_pay_where_the_plain_schedule_is_as_good():
    costs = per_rank(zb.Costs(), 1)
    said = advice(zb.simulate(zb.zb_h1(1, 8), costs), 24, rows_for(costs, 1))
    assert said == (
        "Zero bubble does not pay here: 1F1B costs no more than the plan and needs no split of the backward."
    )


def test_zero_bubble_does_not_pay_where_it_gains_little():
    costs = per_rank(zb.Costs(backward_weight=0.01), 4)
    said = advice(zb.simulate(zb.zb_h1(4, 8), costs), 16.0, [row for row in rows_for(costs) if row.name != "zb_v"])
    assert said.startswith("Zero bubble does not pay here: ")


def test_a_better_placement_is_named():
    said = advice(zb.simulate(zb.zb_h1(4, 8), unit()), 27, rows_for(unit(), limit=4), 4)
    assert said == "Another placement is better here: ZB-V (placement v) costs 11.1% less."


def test_more_memory_is_named_when_it_at_least_halves_the_bubble():
    timeline = zb.simulate(zb.zb_h1(4, 8), unit())
    asked = []

    def with_limit(limit):
        asked.append(limit)
        return zb.simulate(zb.zb_h2(4, 8), unit()) if limit >= 7 else timeline

    said = advice(timeline, 24, linear_rows(limit=4), 4, with_limit)
    assert said == "More memory would pay: with 8 instead of 4 per rank the bubble falls from 11.1% to 0.0%."
    assert asked == [5, 6, 8]


def test_a_limit_that_cannot_be_planned_is_passed_over():
    timeline = zb.simulate(zb.zb_h1(4, 8), unit())
    rows = [row for row in linear_rows(limit=4) if row.fits]
    said = advice(timeline, 24, rows, 4, lambda limit: None)
    assert said == (
        "The plan takes 18.2% less time than 1F1B; at most 11.1% more can be gained with the placements tried."
    )


def test_without_new_plans_a_handcrafted_schedule_over_the_limit_says_what_memory_would_do():
    said = advice(zb.simulate(zb.zb_h1(4, 8), unit()), 24, linear_rows(limit=4), 4)
    assert said == (
        "More memory would pay: ZB-H2 takes 7 instead of 4 per rank and has a bubble of 0.0% instead of 11.1%."
    )


@pytest.mark.parametrize("limit", [None, 8])
def test_an_optimal_plan_is_called_so(limit):
    timeline = zb.simulate(zb.zb_h2(4, 8), unit())
    said = advice(timeline, 24, linear_rows(limit), limit)
    assert said.endswith("it is proven that no schedule of the placements tried takes less.")


def test_without_any_handcrafted_schedule_within_the_limit_the_bound_is_said():
    timeline = zb.simulate(zb.zb_h2(4, 8), unit())
    said = advice(timeline, 24, [], tried="this cut")
    assert said == "It is proven that no schedule of this cut takes less."
