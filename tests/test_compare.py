"""A plan beside what was measured: every delay is named, and the parts of a delay add up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from strategies import schedules_with_costs

import zerobubble as zb
from zerobubble import cli, plot
from zerobubble.compare import compare
from zerobubble.errors import OptionError
from zerobubble.op import BW, B, F, W
from zerobubble.schedule import make_schedule
from zerobubble.timeline import Timeline

ONE = make_schedule("one", zb.Placement.linear(2), 1, [[F(0, 0), BW(0, 0)], [F(1, 0), BW(1, 0)]])
PLAN = Timeline(ONE, ((0, 8), (3, 5)), ((2, 10), (5, 7)), unit="ms", hop=(1.0,))
"""time   0   2   4   6   8
   rank 0 | F0  .       BW0
   rank 1 |   . F0  BW0 .      hops take 1"""
MEASURED = Timeline(ONE, ((100, 109), (104, 106)), ((102, 112), (106, 108)), unit="ms")
"""The first hop took 2 instead of 1, and the last BW 3 instead of 2."""


def test_each_delay_is_named_where_it_arises():
    worst, second, *rest = compare(PLAN, MEASURED)
    assert {worst.op, second.op} == {F(1, 0), BW(0, 0)}
    hop, long = sorted((worst, second), key=lambda delay: delay.rank, reverse=True)
    assert (hop.rank, hop.behind, hop.inherited, hop.waited, hop.longer) == (1, F(0, 0), 0, 1, 0)
    assert (hop.late, hop.own, hop.cause) == (1, 1, "waited for 0F0")
    assert (long.rank, long.behind, long.inherited, long.waited, long.longer) == (0, BW(1, 0), 1, 0, 1)
    assert (long.late, long.own, long.cause) == (2, 1, "ran longer")
    assert [delay.own for delay in rest] == [0, 0]


def test_an_op_that_overtook_another_stands_behind_what_really_ran_before_it():
    schedule = make_schedule("w", zb.Placement.linear(1), 2, [[F(0, 0), B(0, 0), F(0, 1), W(0, 0), B(0, 1), W(0, 1)]])
    plan = zb.simulate(schedule)
    real = Timeline(schedule, ((0, 1, 3, 2, 4, 5),), ((1, 2, 4, 3, 5, 6),))  # W of microbatch 0 before F of 1
    found = {delay.op: delay for delay in compare(plan, real)}
    assert (found[F(0, 1)].behind, found[F(0, 1)].inherited, found[F(0, 1)].waited) == (W(0, 0), 1, 0)
    assert (found[W(0, 0)].behind, found[W(0, 0)].late) == (B(0, 0), -1)
    assert real.spans == (6,)


def test_units_are_converted_to_that_of_the_measured():
    assert compare(PLAN.scaled(1e-3, "s"), MEASURED)[0].own == pytest.approx(1)
    with pytest.raises(OptionError, match=r"times in '' and 'ms' cannot be compared; give the costs a \"unit\""):
        compare(replace(PLAN, unit=""), MEASURED)


@given(schedules_with_costs())
def test_the_parts_of_a_delay_add_up_to_how_late_the_op_ended(case):
    schedule, costs = case
    plan = zb.simulate(schedule, costs)
    real = zb.simulate(schedule, zb.Costs(3, 1, 2, 1, unit=costs.unit))
    origins = [min(starts[0] for starts in one.starts if starts) for one in (plan, real)]
    delays = {delay.op: delay for delay in compare(plan, real)}
    assert len(delays) == schedule.num_ops
    for rank, order in enumerate(schedule.orders):
        for op, planned, ended in zip(order, plan.ends[rank], real.ends[rank]):
            late = (ended - origins[1]) - (planned - origins[0])
            assert (delays[op].late, delays[op].rank) == (pytest.approx(late), rank)
    assert {delay.own for delay in compare(plan, plan)} == {0}


def test_what_cannot_be_compared_says_why():
    shorter, elsewhere = zb.simulate(zb.zb_h1(2, 1)), zb.simulate(zb.zb_v(2, 1))
    with pytest.raises(OptionError, match="on rank 0 only one of them runs 0B1"):
        compare(shorter, zb.simulate(zb.zb_h1(2, 2)))
    with pytest.raises(OptionError, match="stages lie on different ranks"):
        compare(shorter, elsewhere)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plot.save([("plan", PLAN), ("measured", MEASURED)], "both.json")
    plot.save([("measured", MEASURED)], "measured.json")
    (tmp_path / "plan.csv").write_text("0F0,0BW0\n1F0,1BW0\n")
    (tmp_path / "costs.json").write_text(zb.Costs(2, 1, 1, 1, unit="ms").to_json())
    return tmp_path


@pytest.mark.parametrize(
    "sources", [["both.json"], ["both.json", "measured.json"], ["plan.csv", "measured.json", "--costs", "costs.json"]]
)
def test_the_command_names_the_late_ops_in_the_terminal_and_in_a_picture(sources, folder, capsys):
    if sources[1:] == ["measured.json"]:  # the last of each: measured against itself
        assert cli.main(("show", "--compare", *sources, "--json")) == 0
        assert {delay["own"] for delay in json.loads(capsys.readouterr().out)["delays"]} == {0}
        return
    assert cli.main(("show", "--compare", *sources)) == 0
    out = capsys.readouterr().out
    assert "waited for 0F0" in out
    assert "Cost 12 ms, planned 10 ms. All 4 ops together ran 1 ms longer and waited 1 ms longer than planned" in out
    assert cli.main(("show", "--compare", *sources, "-o", "both.svg")) == 0
    assert (folder / "both.svg").stat().st_size > 1000
    capsys.readouterr()
    assert cli.main(("show", "--compare", *sources, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(found["timelines"]), len(found["delays"])] == [2, 4]
    assert {delay["op"] for delay in found["delays"][:2]} == {"1F0", "0BW0"}


def test_measured_timelines_are_drawn_like_simulated_ones(folder, capsys):
    assert cli.main(("show", "both.json", "plan.csv", "--costs", "costs.json", "-o", "three.json")) == 0
    assert [title for title, _ in plot.read("three.json")] == ["plan", "measured", "plan"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measured.json"], "needs two timelines"),
        (["both.json", "both.json", "both.json"], "needs two timelines"),
        (["both.json", "--format", "csv"], "leave out --format"),
        (["plan.csv", "measured.json"], 'give the costs a "unit"'),
        (["both.json", "-o", "a.doc"], "possible are .svg"),
    ],
)
def test_the_command_refuses_what_it_cannot_compare(arguments, message, folder, capsys):
    assert cli.main(("show", "--compare", *arguments)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
