"""Jitter: the costs of many runs with random times."""

from __future__ import annotations

import json
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from strategies import schedules_with_costs

import zerobubble as zb
from zerobubble import cli
from zerobubble.errors import OptionError, ScheduleError
from zerobubble.jitter import simulate_jitter
from zerobubble.op import B, F, W
from zerobubble.schedule import Placement, make_schedule


@given(schedules_with_costs())
def test_without_jitter_it_is_the_simulation(schedule_and_costs):
    schedule, costs = schedule_and_costs
    found = simulate_jitter(schedule, costs, jitter=0, samples=2)
    assert found.costs == pytest.approx([zb.simulate(schedule, costs).cost] * 2)
    assert found.mean == found.p95 == pytest.approx(found.costs[0])


@given(schedules_with_costs())
def test_mean_and_p95_are_those_of_the_samples(schedule_and_costs):
    found = simulate_jitter(*schedule_and_costs, jitter=0.3, samples=40)
    assert found.mean == pytest.approx(fmean(found.costs))
    assert sum(cost <= found.p95 for cost in found.costs) >= 38
    assert sum(cost < found.p95 for cost in found.costs) < 38


def test_single_op_times_have_the_mean_and_deviation_asked_for():
    schedule = make_schedule("one", Placement.linear(1), 1, [[F(0, 0), B(0, 0), W(0, 0)]])
    costs = zb.Costs(forward=5, backward_input=0, backward_weight=0)
    drawn = simulate_jitter(schedule, costs, jitter=0.2, samples=20_000).costs
    assert fmean(drawn) == pytest.approx(5, rel=0.01)
    assert pstdev(drawn) == pytest.approx(1, rel=0.03)


def test_waiting_for_each_other_makes_jitter_cost_more_than_its_mean():
    schedule = zb.zb_h1(4, 8)
    assert simulate_jitter(schedule, jitter=0.2).mean > zb.simulate(schedule).cost


def test_the_seed_decides():
    schedule = zb.zb_v(3, 6)
    assert simulate_jitter(schedule, samples=5) == simulate_jitter(schedule, samples=5)
    assert simulate_jitter(schedule, samples=5, seed=1) != simulate_jitter(schedule, samples=5)


def test_more_samples_go_on_where_fewer_stopped():
    schedule = zb.zb_h2(3, 6)
    assert simulate_jitter(schedule, samples=9).costs[:4] == simulate_jitter(schedule, samples=4).costs


def test_schedules_of_the_same_ops_meet_the_same_luck():
    """The work of a single rank does not depend on the order, so neither does its cost."""
    ops = [F(0, 0), F(0, 1), B(0, 0), W(0, 0), B(0, 1), W(0, 1)]
    other = [F(0, 0), B(0, 0), F(0, 1), B(0, 1), W(0, 0), W(0, 1)]
    a, b = (make_schedule("", Placement.linear(1), 2, [order]) for order in (ops, other))
    assert simulate_jitter(a, samples=5).costs == pytest.approx(simulate_jitter(b, samples=5).costs)


@pytest.mark.parametrize("jitter", [-0.1, float("nan"), float("inf")])
def test_a_jitter_that_is_no_share_is_refused(jitter):
    with pytest.raises(OptionError, match="jitter must be a share"):
        simulate_jitter(zb.gpipe(2, 2), jitter=jitter)


def test_no_samples_are_refused():
    with pytest.raises(OptionError, match="at least one sample"):
        simulate_jitter(zb.gpipe(2, 2), samples=0)


def test_an_invalid_schedule_is_refused():
    with pytest.raises(ScheduleError):
        simulate_jitter(make_schedule("", Placement.linear(1), 1, [[F(0, 0)]]))


class TestCommand:
    def test_json_has_mean_and_95_percent_cost(self, capsys):
        sizes = ("--ranks", "3", "--microbatches", "4")
        assert cli.main(["simulate", "zb_h1", *sizes, "--jitter", "0.2", "--samples", "50", "--json"]) == 0
        found = simulate_jitter(zb.zb_h1(3, 4), jitter=0.2, samples=50)
        data = json.loads(capsys.readouterr().out)
        assert data["jitter"] == {"jitter": 0.2, "samples": 50, "mean": found.mean, "p95": found.p95}
        assert cli.main(["simulate", "zb_h1", *sizes, "--json"]) == 0
        assert "jitter" not in json.loads(capsys.readouterr().out)

    def test_table_has_both(self, capsys):
        assert cli.main(["simulate", "zb_v", "--ranks", "2", "--microbatches", "2", "--jitter", "0.1"]) == 0
        out = capsys.readouterr().out
        assert "mean cost" in out
        assert "with jitter 0.1, 200 samples" in out
        assert "95% cost" in out

    @pytest.mark.parametrize(("option", "value"), [("--jitter", "-0.5"), ("--samples", "0")])
    def test_wrong_usage(self, capsys, option, value):
        arguments = ["simulate", "zb_h1", "--ranks", "2", "--microbatches", "2", "--jitter", "0.1", option, value]
        assert cli.main(arguments) == 2
        assert "error: " in capsys.readouterr().err
