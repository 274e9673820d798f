"""The simulator: each op starts exactly when its rank is free and what it needs has arrived."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import WHOLE_TIMES, schedules_with_costs

from zerobubble import Costs, Placement, one_f_one_b, simulate, zb_h1, zb_h2, zb_v
from zerobubble.dependencies import needs, result
from zerobubble.errors import CostsError, ScheduleError
from zerobubble.memory import held_memory
from zerobubble.op import BW, B, F, W
from zerobubble.schedule import make_schedule

if TYPE_CHECKING:
    from zerobubble import Op, Timeline

TIMES = ("forward", "backward_input", "backward_weight", "backward_full", "communication")
MEMORIES = ("activation_memory", "weight_memory")


def scaled(costs: Costs, keys: tuple[str, ...], factor: float) -> Costs:
    def times(value):
        return tuple(v * factor for v in value) if isinstance(value, tuple) else value and value * factor

    return replace(costs, **{key: times(getattr(costs, key)) for key in keys})


def by_op(timeline: Timeline, times: tuple[tuple[float, ...], ...]) -> dict[Op, float]:
    return {result(op): t for order, row in zip(timeline.schedule.orders, times) for op, t in zip(order, row)}


# ------------------------------------------------------------------------------------------------ times


@given(schedules_with_costs())
def test_each_op_starts_when_its_rank_is_free_and_its_needs_have_arrived(case):
    """This and the durations below fix every time, so they hold the simulator as a whole."""
    schedule, costs = case
    timeline, stage_costs = simulate(schedule, costs), costs.resolve(schedule.placement)
    ended = by_op(timeline, timeline.ends)
    for order, starts, ends in zip(schedule.orders, timeline.starts, timeline.ends, strict=True):
        for i, op in enumerate(order):
            ready = [ends[i - 1]] if i else [0]
            for need in needs(op, schedule.num_stages):
                hop = 0 if need.stage == op.stage else stage_costs.hop[min(need.stage, op.stage)]
                ready.append(ended[need] + hop)
            assert starts[i] == max(ready)


@given(schedules_with_costs())
def test_each_op_lasts_as_long_as_its_costs_say(case):
    schedule, costs = case
    timeline, stage_costs = simulate(schedule, costs), costs.resolve(schedule.placement)
    for order, starts, ends in zip(schedule.orders, timeline.starts, timeline.ends, strict=True):
        assert [end - start for start, end in zip(starts, ends)] == list(map(stage_costs.duration, order))


@given(schedules_with_costs(), st.sampled_from([0, 0.25, 3]))
def test_scaling_all_times_scales_the_timeline(case, factor):
    schedule, costs = case
    before, after = simulate(schedule, costs), simulate(schedule, scaled(costs, TIMES, factor))
    for name in ("cost", "makespan", "work"):
        assert getattr(after, name) == factor * getattr(before, name)
    assert [[factor * t for t in row] for row in before.starts] == [list(row) for row in after.starts]
    assert after.bubble_rate == pytest.approx(before.bubble_rate if factor else 0)
    assert after.peak_memory == before.peak_memory


@given(schedules_with_costs(), st.data())
def test_slower_ops_and_links_never_let_an_op_end_sooner(case, data):
    schedule, costs = case
    slower = {key: data.draw(WHOLE_TIMES, label=f"more {key}") for key in TIMES}

    def more(key):
        value = getattr(costs, key)
        if isinstance(value, tuple):
            return tuple(v + slower[key] for v in value)
        return value if value is None else value + slower[key]

    before, after = simulate(schedule, costs), simulate(schedule, replace(costs, **{key: more(key) for key in TIMES}))
    assert all(a >= b for rows in zip(before.ends, after.ends) for b, a in zip(*rows))
    assert after.makespan >= before.makespan


@given(schedules_with_costs())
def test_work_is_at_most_cost_and_cost_at_most_makespan(case):
    timeline = simulate(*case)
    assert timeline.work <= timeline.cost <= timeline.makespan
    assert 0 <= timeline.bubble_rate <= 1


def test_a_timeline_worked_out_by_hand():
    # T_F 1, T_B 2, T_W 3, a hop takes 10      time 0    11   12   14   24    26   29
    # rank 0 | 0F0 .................................................. 0B0 0W0
    # rank 1 | ........ 1F0 1B0 1W0
    timeline = simulate(zb_h1(2, 1), Costs(1, 2, 3, communication=10, unit="ms"))
    assert timeline.starts == ((0, 24, 26), (11, 12, 14))
    assert timeline.ends == ((1, 26, 29), (12, 14, 17))
    assert (timeline.cost, timeline.makespan, timeline.work, timeline.unit) == (29, 29, 6, "ms")


def test_cost_is_the_largest_span_of_a_rank_not_the_makespan():
    """ZB-H2 is a parallelogram: each rank's span is its work, though the last rank ends p-1 slots after the first."""
    timeline = simulate(zb_h2(4, 8))
    assert set(timeline.spans) == {24}
    assert (timeline.cost, timeline.makespan, timeline.bubble_rate) == (24, 27, 0)


def test_without_costs_every_op_takes_one_and_bw_takes_two():
    assert simulate(one_f_one_b(1, 2)).ends == ((1, 3, 4, 6),)


def test_hops_within_a_rank_take_nothing():
    schedule = make_schedule("alone", Placement((0, 0)), 1, [[F(0, 0), F(1, 0), BW(1, 0), BW(0, 0)]])
    assert simulate(schedule, Costs(communication=100)).bubble_rate == 0


# ------------------------------------------------------------------------------------------------ memory


def test_memory_held_op_by_op():
    """F adds M_B when it starts; B turns it into M_W when it ends; W frees M_W and BW frees M_B when they end."""
    costs = Costs(activation_memory=10, weight_memory=4).resolve(Placement.linear(1))
    order = [F(0, 0), F(0, 1), B(0, 0), F(0, 2), W(0, 0), BW(0, 1), B(0, 2), W(0, 2)]
    #        10       20       20       24       24       20        10       4
    assert list(held_memory(order, costs)) == [10, 20, 20, 24, 24, 20, 10, 4]


def test_memory_grows_during_b_where_weights_need_more_than_activations():
    costs = Costs(activation_memory=1, weight_memory=3).resolve(Placement.linear(1))
    assert list(held_memory([F(0, 0), B(0, 0), W(0, 0)], costs)) == [1, 3, 3]


@given(schedules_with_costs())
def test_peak_memory_is_the_most_that_a_rank_holds(case):
    """Counted anew at every moment from what is alive, rather than by adding and freeing."""
    schedule, costs = case
    stage_costs = costs.resolve(schedule.placement)
    for order, peak in zip(schedule.orders, simulate(schedule, costs).peak_memory, strict=True):
        moments = [0.0]
        for i in range(len(order)):
            for ended in (order[:i], order[: i + 1]):
                activations = {(o.stage, o.microbatch) for o in order[: i + 1] if o.kind == "F"}
                activations -= {(o.stage, o.microbatch) for o in ended if o.kind in ("B", "BW")}
                weights = {(o.stage, o.microbatch) for o in ended if o.kind == "B"}
                weights -= {(o.stage, o.microbatch) for o in ended if o.kind == "W"}
                held = sum(stage_costs.activation_memory[stage] for stage, _ in activations)
                moments.append(held + sum(stage_costs.weight_memory[stage] for stage, _ in weights))
        assert peak == max(moments)


@given(schedules_with_costs(), st.sampled_from([0, 0.5, 4]))
def test_scaling_memory_scales_the_peaks_and_no_time(case, factor):
    schedule, costs = case
    before, after = simulate(schedule, costs), simulate(schedule, scaled(costs, MEMORIES, factor))
    assert after.peak_memory == tuple(factor * peak for peak in before.peak_memory)
    assert (after.starts, after.ends) == (before.starts, before.ends)


# ------------------------------------------------------------------------------------------------ refusals and speed


def test_a_schedule_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="rank 0 lacks 0W0"):
        simulate(make_schedule("mine", Placement.linear(1), 1, [[F(0, 0), B(0, 0)]]))


def test_costs_for_another_number_of_stages_are_refused():
    with pytest.raises(CostsError, match="the lists have 3 entries, but the schedule has 4 stages"):
        simulate(zb_v(2, 2), Costs(forward=[1, 2, 3]))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 16), (64, 512)])
def test_simulation_is_linear_in_the_number_of_ops(num_ranks, num_microbatches, monkeypatch):
    """Counted in questions to the dependency rule: once to time an op, and to order it once and once per wait."""
    asked = 0

    def counting(op, num_stages):
        nonlocal asked
        asked += 1
        return needs(op, num_stages)

    for module in ("schedule", "simulate", "validate"):
        monkeypatch.setattr(import_module(f"zerobubble.{module}"), "needs", counting)
    schedule = zb_h1(num_ranks, num_microbatches)
    simulate(schedule)
    assert schedule.num_ops <= asked <= 4 * schedule.num_ops
