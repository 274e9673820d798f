"""`plan`: valid, within the limit, never below the bound, monotone in memory, the same for any unit of time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import costs, placements

from zerobubble import GENERATORS, Costs, Placement, generate, simulate, validate
from zerobubble.errors import CostsError, OptionError
from zerobubble.paper import facts, profiled_costs, profiles
from zerobubble.planner import exact, placements_for, plan
from zerobubble.planner.problem import Problem

SETTINGS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
UNIT = Costs(weight_memory=0.43)
INSTANCES = json.loads((Path(__file__).parents[1] / "benchmarks" / "planner_vs_peers" / "instances.json").read_text())


@st.composite
def requests(draw: st.DrawFn) -> tuple[Costs, Placement, int, float | None]:
    placement = draw(placements(max_ranks=3, max_chunks=2))
    given_costs = draw(costs(placement, st.integers(1, 20)))
    m = draw(st.integers(1, 4))
    least = Problem(given_costs.resolve(placement), placement, m).least_limit()
    return given_costs, placement, m, draw(st.none() | st.sampled_from([least, 1.5 * least, 3 * least]))


def quick(given_costs: Costs, placement: Placement, m: int, limit: float | None):
    return plan(given_costs, placement.num_ranks, m, memory_limit=limit, placement=placement, effort="quick")


@SETTINGS
@given(requests())
def test_valid_within_the_limit_and_not_below_the_bound(request_):
    given_costs, _, m, limit = request_
    found = quick(*request_)
    validate(found.schedule, limit, given_costs)
    assert found.schedule.num_microbatches == m
    assert found.timeline.cost == simulate(found.schedule, given_costs).cost
    assert found.lower_bound <= found.timeline.cost
    assert found.gap == pytest.approx(1 - found.lower_bound / found.timeline.cost, abs=1e-8)


@SETTINGS
@given(requests(), st.sampled_from([2.0**-7, 0.5, 4.0]))
def test_the_unit_of_time_does_not_matter(request_, factor):
    given_costs, placement, m, limit = request_

    def scaled(value):
        return tuple(v * factor for v in value) if isinstance(value, tuple) else value and value * factor

    keys = ("forward", "backward_input", "backward_weight", "backward_full", "communication")
    other = replace(given_costs, **{key: scaled(getattr(given_costs, key)) for key in keys})
    first, second = quick(*request_), quick(other, placement, m, limit)
    assert second.schedule == first.schedule
    assert second.timeline.cost == factor * first.timeline.cost


@SETTINGS
@given(requests())
def test_same_input_same_plan(request_):
    assert quick(*request_).schedule == quick(*request_).schedule


@SETTINGS
@given(requests())
def test_never_worse_than_a_handcrafted_schedule_that_fits(request_):
    given_costs, placement, m, limit = request_
    found = quick(*request_)
    for name in GENERATORS:
        schedule = generate(name, placement.num_ranks, m)
        if schedule.placement == placement:
            other = simulate(schedule, given_costs)
            if limit is None or max(other.peak_memory) <= limit:
                assert found.timeline.cost <= other.cost


def test_undivided_backwards_win_where_b_leaves_more_than_it_found():
    """M_W > M_B: within two microbatches of memory only GPipe's BW let both forwards run first."""
    given_costs = Costs(1, 1, 1, communication=1, weight_memory=2)
    found = plan(given_costs, 2, 2, memory_limit=2, placement="linear", effort="quick")
    assert found.timeline.cost <= simulate(generate("gpipe", 2, 2), given_costs).cost == 11


@pytest.mark.parametrize(("style", "p", "m"), [("linear", 4, 8), ("v", 3, 4)])
def test_more_memory_is_never_worse(style, p, m):
    given_costs = Costs(3, 4, 2, communication=0.3, weight_memory=0.4).split(1 if style == "linear" else 2)
    limits = [p * quarter / 4 for quarter in range(2, 9)]
    found = [
        plan(given_costs, p, m, memory_limit=limit, placement=style, effort="quick").timeline.cost
        for limit in limits
        if limit >= 1
    ]
    assert found == sorted(found, reverse=True)
    assert plan(given_costs, p, m, placement=style, effort="quick").timeline.cost <= found[-1]


def test_more_effort_is_never_worse():
    instance = next(i for i in INSTANCES if i["p"] == 4 and i["m"] == 8)
    keys = ("F", "B", "W", "MB", "MW")
    f, b, w, mb, mw = (instance["linear"][key] for key in keys)
    given_costs = Costs(f, b, w, instance["communication"], mb, mw)
    first, second = (
        plan(given_costs, 4, 8, memory_limit=3, placement="linear", effort=e) for e in ("quick", "default")
    )
    assert second.timeline.cost <= first.timeline.cost


@pytest.mark.parametrize(("limit", "most"), [(2, 41), (3, 31), (4, 27), (8, 24)])
def test_below_p_without_a_solver(limit, most):
    """Optima proved by the exact solver: 41 and 31 (peers.md); the reference collapses there."""
    found = plan(UNIT, 4, 8, memory_limit=limit, placement="linear", effort="quick")
    assert found.timeline.cost <= most
    assert found.optimal == (limit >= 4)


@pytest.mark.parametrize("row", [row for row, times in profiles().items() if times["p"] == 8])
@pytest.mark.parametrize(("column", "times_p"), [("ZB-1p", 1), ("ZB-2p", 2)])
def test_table_5_cells(row, column, times_p):
    columns = facts()["table_5_bubble_rate"]["columns"]
    printed = facts()["table_5_bubble_rate"]["rows"][row][columns.index(column)]
    p, m = profiles()[row]["p"], profiles()[row]["m"]
    found = plan(profiled_costs(row), p, m, memory_limit=times_p * p, placement="linear", effort="quick")
    assert round(found.timeline.bubble_rate, 4) <= printed
    assert found.gap <= (0.004 if times_p == 2 else 0)


def test_auto_compares_placements_of_the_same_model():
    """Single numbers are those of one rank: a V has half of them per stage, and the same work."""
    given_costs = Costs(3, 4, 2, communication=0.1, weight_memory=0.5)
    found = plan(given_costs, 3, 8, memory_limit=4, effort="quick")
    assert found.schedule.num_stages > 3
    assert found.timeline.work == pytest.approx(8 * (3 + 4 + 2))
    assert simulate(found.schedule, found.costs).cost == found.timeline.cost
    linear = plan(given_costs, 3, 8, memory_limit=4, placement="linear", effort="quick")
    assert found.timeline.cost < linear.timeline.cost
    assert max(found.timeline.peak_memory) <= 4 + 1e-9


def test_auto_at_quick_finds_for_many_ops_what_a_v_alone_finds():
    """Placements of more chunks have lower bounds, but are too large to be searched quickly."""
    times, ranks, microbatches = profiled_costs("14.6B/p16/m128"), 32, 300
    limits = {"memory_limit": float(ranks), "effort": "quick"}
    v = plan(times.split(2), ranks, microbatches, placement=Placement.v(ranks), **limits)
    auto = plan(times, ranks, microbatches, **limits)
    assert auto.timeline.cost <= v.timeline.cost
    assert any("for want of time" in note for note in auto.notes)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["6.2B/p8/m24", "14.6B/p16/m48"])
@pytest.mark.parametrize(("times_p", "most"), [(1.25, 0.03), (1.5, 0.003)])
def test_auto_needs_not_twice_the_memory(model, times_p, most):
    p, m = profiles()[model]["p"], profiles()[model]["m"]
    found = plan(profiled_costs(model), p, m, memory_limit=times_p * p, effort="quick")
    assert found.timeline.bubble_rate <= most
    assert max(found.timeline.peak_memory) <= times_p * p + 1e-9


def test_undivided_backward_is_taken_where_it_is_cheaper():
    given_costs = Costs(1, 1, 1, backward_full=1.2, weight_memory=0.5)
    found = plan(given_costs, 2, 6, memory_limit=2, placement="linear", effort="quick")
    assert found.timeline.cost <= simulate(generate("1f1b", 2, 6), given_costs).cost
    assert found.lower_bound <= found.timeline.cost


class TestRefusals:
    @pytest.mark.parametrize("placement", ["auto", "linear", "v"])
    def test_impossible_limit_names_the_least_possible(self, placement):
        least = 2 if placement == "v" else 1
        with pytest.raises(OptionError, match=f"least possible limit is {least}"):
            plan(UNIT, 4, 8, memory_limit=0.9, placement=placement)
        assert plan(UNIT, 2, 3, memory_limit=least, placement=placement, effort="quick").timeline.cost > 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"placement": "spiral"}, "auto, linear, loop, v, wave"),
            ({"effort": "hard"}, "quick, default, exact"),
            ({"placement": "linear", "chunks": 2}, "1 chunk per rank"),
            ({"placement": "wave", "chunks": 3}, "even number of chunks"),
            ({"placement": "loop", "chunks": 0}, "at least 1"),
            ({"memory_limit": float("nan")}, "not negative"),
            ({"placement": Placement.linear(3)}, "has 3 ranks"),
        ],
    )
    def test_arguments(self, options, message):
        with pytest.raises(OptionError, match=message):
            plan(UNIT, 4, 8, **options)

    def test_costs_that_fit_no_placement(self):
        with pytest.raises(CostsError, match="7 entries"):
            plan(Costs(forward=(1,) * 7), 4, 8)


@pytest.mark.parametrize(
    ("style", "chunks", "expected"),
    [
        ("auto", None, ["linear", "v", "loop", "wave", "loop"]),
        ("auto", 1, ["linear"]),
        ("auto", 3, ["loop"]),
        ("auto", 4, ["loop", "wave"]),
        ("loop", None, ["loop"]),
        ("wave", 2, ["v"]),
    ],
)
def test_placements(style, chunks, expected):
    assert [placement.style for placement in placements_for(style, 4, chunks)] == expected


def test_progress_and_time_limit():
    news = []
    begin = process_time()
    found = plan(UNIT, 8, 64, memory_limit=6, time_limit=0.5, progress=lambda *text: news.append(text))
    assert process_time() - begin < 5
    assert news
    validate(found.schedule, 6, found.costs)


class TestExact:
    """The solver by way of `plan`: the search's plan is its warm start."""

    @pytest.fixture(autouse=True)
    def solver(self):
        return pytest.importorskip("ortools")

    def test_proves_what_bounds_alone_do_not(self):
        options = {"memory_limit": 2, "placement": "linear"}
        start, found = (plan(UNIT, 3, 6, effort=effort, **options) for effort in ("default", "exact"))
        assert not start.optimal
        assert found.optimal
        assert "exact solver" in found.bound.reason
        assert found.lower_bound == pytest.approx(found.timeline.cost)
        assert start.lower_bound <= found.lower_bound <= found.timeline.cost <= start.timeline.cost
        validate(found.schedule, 2, UNIT)

    def test_the_time_limit_holds_for_search_and_solver_together(self, monkeypatch):
        given, solve = [], exact.solve

        def spy(*arguments, **options):
            given.append(arguments[5])
            return solve(*arguments, **options)

        monkeypatch.setattr(exact, "solve", spy)
        costs = Costs(3, 4, 2, communication=0.3, weight_memory=0.4)
        found = plan(costs, 5, 10, memory_limit=3, placement="linear", effort="exact", time_limit=3)
        assert 0 < given[0] < 3
        assert found.lower_bound <= found.timeline.cost
        validate(found.schedule, 3, costs)

    def test_says_nothing_of_undivided_backwards_that_are_cheaper(self):
        costs = Costs(1, 1, 1, backward_full=1.2, weight_memory=0.5)
        found = plan(costs, 3, 4, memory_limit=3, placement="linear", effort="exact", time_limit=2)
        assert "exact solver" not in found.bound.reason
        assert found.lower_bound <= simulate(generate("1f1b", 3, 4), costs).cost

    def test_the_bound_is_that_of_all_placements(self):
        """The solver's proof is for one placement; others that were tried may have a lower bound."""
        costs = Costs(2, 3, 1, communication=1, weight_memory=0.5)
        found = plan(costs, 3, 4, memory_limit=2, effort="exact", time_limit=4)
        _, *others = (float(note.split("bound ")[1].split(",")[0]) for note in found.notes if "cost" in note)
        assert others
        assert found.lower_bound <= min(others) * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("row", profiles())
def test_table_5_large_cells(row):
    test_table_5_cells(row, "ZB-2p", 2)
