"""Bubble against memory: the limits, the curves, and the picture."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import zerobubble as zb
from zerobubble.errors import OptionError
from zerobubble.planner.advice import per_rank
from zerobubble.planner.sweep import SHARES, sweep, sweep_limits


def fake(cost: float):
    return SimpleNamespace(timeline=SimpleNamespace(cost=cost))


def test_limits_are_shares_of_what_1f1b_takes():
    costs = per_rank(zb.Costs(activation_memory=3), 4)
    assert sweep_limits(costs, 4) == tuple(12 * share for share in SHARES)
    assert sweep_limits(costs.split(2), 4) == sweep_limits(costs, 4)
    assert sweep_limits(zb.Costs(activation_memory=(1, 2) * 6), 4) == tuple(4 * 6 * share for share in SHARES)


def test_more_memory_never_gives_a_worse_point():
    costs = per_rank(zb.Costs(), 2)
    planned = iter([5.0, 7.0, 4.0, *[6.0] * 20])
    found = sweep(costs, 2, 4, lambda limit, style, chunks: fake(next(planned)), [("linear", None)])
    assert [point.plan.timeline.cost for point in found.curves[0].points] == [5.0, 5.0, *[4.0] * 9]


def test_limits_too_low_are_left_out_and_every_plan_is_counted():
    def plan(limit, style, chunks):
        if style == "wave" or limit < 1:
            raise OptionError("too low")
        return fake(1.0)

    counted = []
    found = sweep(per_rank(zb.Costs(), 2), 2, 4, plan, on_point=lambda: counted.append(1))
    assert [curve.name for curve in found.curves] == ["linear", "v"]
    assert found.curves[0].points[0].memory_limit == 1
    assert len(counted) == 3 * len(SHARES)
    assert {row.name for row in found.handcrafted} == set(zb.GENERATORS)


def test_no_placement_at_all_is_an_error():
    def plan(limit, style, chunks):
        raise OptionError("too low")

    with pytest.raises(OptionError, match="no placement can be planned"):
        sweep(per_rank(zb.Costs(), 2), 2, 4, plan)


class TestPicture:
    @pytest.fixture(autouse=True)
    def plot(self):
        pytest.importorskip("matplotlib")
        from zerobubble.plot import sweep as plot

        return plot

    def test_a_curve_per_family_and_a_name_per_point(self, plot):
        lines = [plot.Line("linear", ((2.0, 0.3), (4.0, 0.1))), plot.Line("v", ((2.0, 0.2), (4.0, 0.0)))]
        points = [plot.Labelled("1F1B", 4.0, 0.27), plot.Labelled("GPipe", 8.0, 0.27)]
        axes = plot.draw(lines, points, "p = 4").axes[0]
        assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[0.3, 0.1], [0.2, 0.0]]
        assert [text.get_text() for text in axes.texts] == ["1F1B", "GPipe"]
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["linear", "v"]

    def test_names_of_points_in_one_place_do_not_cover_each_other(self, plot):
        points = [plot.Labelled(name, 4.0, 0.1) for name in ("a", "b", "c")]
        heights = [text.xy[1] for text in plot.draw([], points).axes[0].texts]
        assert len(set(heights)) == 3

    def test_same_input_same_bytes(self, plot, tmp_path):
        lines = [plot.Line("linear", ((2.0, 0.3), (4.0, 0.1)))]
        for name in ("a.svg", "b.svg"):
            plot.write(lines, [], tmp_path / name)
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()

    def test_what_cannot_be_written_is_said(self, plot, tmp_path):
        with pytest.raises(OptionError, match=r"\.svg or \.png"):
            plot.write([], [], tmp_path / "a.pdf")
        with pytest.raises(OptionError, match="cannot be written"):
            plot.write([], [], tmp_path / "none" / "a.svg")
