"""The figures taken from a timeline, simulated or measured."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from strategies import schedules_with_costs

from zerobubble import Costs, Placement, Timeline, one_f_one_b, simulate, zb_h1, zb_h2
from zerobubble.dependencies import needs, result
from zerobubble.op import BW, B, F, W
from zerobubble.schedule import make_schedule


def measured() -> Timeline:
    """A measured one: it starts at no round time, has gaps, and its ranks do not end together.

    time   100 101 102 103 104 105 106 107 108
    rank 0 | 0F0 .   .   .   .   0BW0 -   -
    rank 1 | .   .   1F0 1BW0 -
    """
    schedule = make_schedule("mine", Placement.linear(2), 1, [[F(0, 0), BW(0, 0)], [F(1, 0), BW(1, 0)]])
    return Timeline(schedule, ((100, 105), (102, 103)), ((101, 108), (103, 105)))


def test_figures_of_a_measured_timeline():
    timeline = measured()
    assert timeline.spans == (8, 3)
    assert timeline.busy == (4, 3)
    assert timeline.idle == (4, 0)
    assert (timeline.cost, timeline.makespan, timeline.work, timeline.bubble_rate) == (8, 8, 4, 0.5)


@given(schedules_with_costs())
def test_span_is_busy_and_idle_time_together(case):
    timeline = simulate(*case)
    assert [busy + idle for busy, idle in zip(timeline.busy, timeline.idle)] == list(timeline.spans)
    assert timeline.cost == max(timeline.spans)
    assert timeline.work == max(timeline.busy)


def test_a_timeline_without_time_has_no_bubble():
    timeline = simulate(zb_h1(2, 2), Costs(0, 0, 0))
    assert (timeline.cost, timeline.makespan, timeline.bubble_rate) == (0, 0, 0)


def test_a_timeline_without_ops_has_no_figures_but_zeros():
    empty = Timeline(make_schedule("empty", Placement.linear(2), 1, [[], []]), ((), ()), ((), ()))
    assert (empty.cost, empty.makespan, empty.work, empty.bubble_rate) == (0, 0, 0, 0)
    assert empty.critical_path() == []


def test_rounding_does_not_make_a_bubble_negative():
    timeline = simulate(zb_h2(4, 17), Costs(0.3, 0.3, 0.3))
    assert timeline.cost < timeline.work
    assert timeline.bubble_rate == 0


# ------------------------------------------------------------------------------------------------ the critical path


@given(schedules_with_costs())
def test_critical_path_is_a_chain_without_gaps_from_the_start_of_the_rank_to_its_end(case):
    timeline = simulate(*case)
    schedule = timeline.schedule
    rank = timeline.spans.index(timeline.cost)
    where = {result(op): (r, i) for r, order in enumerate(schedule.orders) for i, op in enumerate(order)}
    path = [where[result(op)] for op in timeline.critical_path()]
    starts = [timeline.starts[r][i] for r, i in path]

    assert path[-1] == (rank, len(schedule.orders[rank]) - 1)
    assert starts[0] <= timeline.starts[rank][0]
    assert all(start > timeline.starts[rank][0] for start in starts[1:])
    for (r, i), (next_r, next_i) in pairwise(path):
        op, following = schedule.orders[r][i], schedule.orders[next_r][next_i]
        if r == next_r:
            latency = 0
            assert i + 1 == next_i or result(op) in needs(following, schedule.num_stages)
        else:
            latency = timeline.hop[min(op.stage, following.stage)]
            assert result(op) in needs(following, schedule.num_stages)
        assert timeline.starts[next_r][next_i] == timeline.ends[r][i] + latency


def test_critical_path_of_1f1b_goes_down_the_ranks_and_back_up():
    # rank 0 | 0F0  .    .    .    .    0BW0 -
    # rank 1 | .    1F0  .    1BW0 -
    # rank 2 | .    .    2F0 ...
    path = simulate(one_f_one_b(3, 1)).critical_path()
    assert path == [F(0, 0), F(1, 0), F(2, 0), BW(2, 0), BW(1, 0), BW(0, 0)]


def test_critical_path_takes_the_slow_link_rather_than_the_op_that_ended_last():
    # rank 0 | 0F0 .   .   .   .   .   2F0 2B0 2W0 -   -   -   .   0B0 0W0    0B0 waits for 1B0, which ended before
    # rank 1 | .   .   .   1F0 .   .   .   .   .   .   1B0 1W0                2W0 but is two slots away
    orders = [[F(0, 0), F(2, 0), B(2, 0), W(2, 0), B(0, 0), W(0, 0)], [F(1, 0), B(1, 0), W(1, 0)]]
    schedule = make_schedule("mine", Placement((0, 1, 0)), 1, orders)
    timeline = simulate(schedule, Costs(backward_weight=[1, 1, 4], communication=2))
    assert timeline.ends[1][1] < timeline.ends[0][3] < timeline.starts[0][4]
    assert timeline.critical_path() == [F(0, 0), F(1, 0), F(2, 0), B(2, 0), B(1, 0), B(0, 0), W(0, 0)]


def test_critical_path_stops_where_the_rank_with_the_largest_span_begins():
    # rank 0 | 0F0 0B0 0W0
    # rank 1 | .   1F0 1B0 1W0 (long): its span alone is the cost, what ran before it is not in it
    timeline = simulate(zb_h1(2, 1), Costs(backward_weight=[1, 50]))
    assert timeline.critical_path() == [F(1, 0), B(1, 0), W(1, 0)]


def test_critical_path_of_a_measured_timeline_needs_no_latencies():
    assert measured().critical_path() == [F(0, 0), F(1, 0), BW(1, 0), BW(0, 0)]


def test_unit_and_peaks_are_passed_on():
    timeline = simulate(zb_h1(2, 3), Costs(unit="ms"))
    assert timeline.unit == "ms"
    assert timeline.peak_memory == pytest.approx((2, 1.5))
