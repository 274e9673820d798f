"""The paper's printed figures and formulas (arXiv 2401.10241v1), from `zerobubble.paper`, against our simulator.

Formulas hold in regimes; each test states the widest one found, and where it is sharp, that it is.
"""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zerobubble import Costs, generate, one_f_one_b, simulate, zb_h1, zb_h2

FACTS = json.loads((files("zerobubble.paper") / "facts.json").read_text(encoding="utf-8"))
PROFILES = FACTS["table_9_profiled_times_ms"]
PRINTED = {
    (profile, column): value
    for profile, row in FACTS["table_5_bubble_rate"]["rows"].items()
    for column, value in zip(FACTS["table_5_bubble_rate"]["columns"], row, strict=True)
    if column in ("1F1B", "ZB-H1", "ZB-H2")
}

TIMES = st.integers(1, 30)
RANKS = st.integers(1, 6)


def value(formula: str, **names: float) -> float:
    return eval(formula, {"__builtins__": {}}, names)


def table_2(column: str, **times: float) -> float:
    bubble, _ = FACTS["table_2_bubble_and_memory"][column]
    return value(bubble, **times)


def closed_form(key: str, **values: float) -> float:
    return value(FACTS["closed_forms_with_communication"][key], **values)


def bubble(name: str, p: int, m: int, costs: Costs) -> float:
    timeline = simulate(generate(name, p, m), costs)
    return timeline.cost - timeline.work


# ------------------------------------------------------------------------------------------------ table 5


def test_36_values_are_compared():
    assert len(PRINTED) == 36


@pytest.mark.parametrize(("profile", "column"), PRINTED, ids=lambda value: value)
def test_bubble_rate_is_the_printed_one_to_four_digits(profile, column):
    measured = PROFILES[profile]
    costs = Costs(measured["T_F"], measured["T_B"], measured["T_W"], communication=measured["T_comm"])
    timeline = simulate(generate(column, measured["p"], measured["m"]), costs)
    assert round(timeline.bubble_rate, 4) == PRINTED[profile, column]


# ------------------------------------------------------------------------------------------------ table 2: bubbles


@given(RANKS, st.integers(1, 12), TIMES, TIMES, TIMES)
def test_bubble_of_1f1b_and_gpipe_for_any_times_and_any_number_of_microbatches(p, m, T_F, T_B, T_W):
    expected = table_2("1F1B", p=p, T_F=T_F, T_B=T_B, T_W=T_W)
    assert bubble("1F1B", p, m, Costs(T_F, T_B, T_W)) == expected
    assert bubble("GPipe", p, m, Costs(T_F, T_B, T_W)) == expected


@given(RANKS, st.integers(1, 4), st.integers(1, 3), TIMES, TIMES, TIMES)
def test_bubble_of_interleaved_is_that_of_1f1b_over_the_chunks_where_p_divides_m(p, chunks, groups, T_F, T_B, T_W):
    costs = Costs(T_F, T_B, T_W).split(chunks)
    timeline = simulate(generate("1F1B-I", p, p * groups, chunks), costs)
    expected = table_2("1F1B", p=p, T_F=T_F, T_B=T_B, T_W=T_W) / chunks
    assert timeline.cost - timeline.work == pytest.approx(expected)


@given(RANKS, st.integers(0, 10), TIMES, TIMES, TIMES)
def test_bubble_of_zb_h1_where_w_is_no_longer_than_f_and_m_at_least_p(p, more, T_F, T_B, T_W):
    assume(T_W <= T_F)
    expected = table_2("ZB-H1", p=p, T_F=T_F, T_B=T_B, T_W=T_W)
    assert bubble("ZB-H1", p, p + more, Costs(T_F, T_B, T_W)) == expected


@given(RANKS, st.integers(0, 10), TIMES, TIMES, TIMES)
def test_bubble_of_zb_h2_where_w_is_no_longer_than_f_nor_the_mean_of_f_and_b_and_m_at_least_2p_minus_1(
    p, more, T_F, T_B, T_W
):
    assume(T_W <= T_F)
    assume(2 * T_W <= T_F + T_B)
    expected = table_2("ZB-H2", p=p, T_F=T_F, T_B=T_B, T_W=T_W)
    assert bubble("ZB-H2", p, 2 * p - 1 + more, Costs(T_F, T_B, T_W)) == expected


@pytest.mark.parametrize(
    ("column", "m", "times"),
    [
        ("ZB-H1", 19, (4, 4, 9)),  # W longer than F
        ("ZB-H1", 5, (3, 3, 3)),  # too few microbatches
        ("ZB-H2", 12, (1, 12, 6)),  # W longer than F
        ("ZB-H2", 12, (4, 2, 4)),  # two W longer than F and B: the formula is negative
        ("ZB-H2", 10, (3, 3, 3)),  # too few microbatches
    ],
)
def test_outside_these_regimes_the_formulas_of_table_2_do_not_hold(column, m, times):
    assert bubble(column, 6, m, Costs(*times)) != table_2(column, p=6, **dict(zip(("T_F", "T_B", "T_W"), times)))


# ------------------------------------------------------------------------------------------------ with communication


@pytest.mark.parametrize(("make", "key"), [(zb_h1, "ZB-H1 cost"), (zb_h2, "ZB-H2 cost")], ids=["ZB-H1", "ZB-H2"])
@given(RANKS, st.integers(0, 10), TIMES, TIMES, TIMES, st.integers(0, 15))
def test_cost_with_communication_where_both_hops_fit_into_w_and_w_into_f_and_b(
    make, key, p, more, T_F, T_B, T_W, T_comm
):
    """2 T_comm <= T_W <= T_F, T_B and m >= 2p - 1: so in all twelve settings of table 9."""
    T_W, T_F, T_B = sorted((T_F, T_B, T_W))
    assume(2 * T_comm <= T_W)
    m = 2 * p - 1 + more
    expected = closed_form(key, p=p, m=m, T_F=T_F, T_B=T_B, T_W=T_W, T_comm=T_comm)
    assert simulate(make(p, m), Costs(T_F, T_B, T_W, communication=T_comm)).cost == expected


def test_all_settings_of_table_9_lie_in_that_regime():
    for t in PROFILES.values():
        assert 2 * t["T_comm"] <= t["T_W"] <= min(t["T_F"], t["T_B"])
        assert t["m"] >= 2 * t["p"] - 1


def test_where_two_hops_do_not_fit_into_w_each_microbatch_costs_more():
    def beyond_the_closed_form(m):
        cost = simulate(zb_h1(4, m), Costs(10, 10, 1, communication=2)).cost
        return cost - closed_form("ZB-H1 cost", p=4, m=m, T_F=10, T_B=10, T_W=1, T_comm=2)

    assert 0 < beyond_the_closed_form(20) < beyond_the_closed_form(40) < beyond_the_closed_form(80)


# ------------------------------------------------------------------------------------------------ table 2: memory


@pytest.mark.parametrize(
    ("name", "least"), [("ZB-H1", lambda p: p), ("ZB-H2", lambda p: 2 * p - 1)], ids=["ZB-H1", "ZB-H2"]
)
@given(RANKS, st.integers(0, 8), st.integers(0, 20), st.integers(0, 20))
def test_memory_of_each_worker_where_w_holds_no_more_than_b(name, least, p, more, a, b):
    M_W, M_B = sorted((a, b))
    timeline = simulate(generate(name, p, least(p) + more), Costs(activation_memory=M_B, weight_memory=M_W))
    formula = FACTS["table_2_bubble_and_memory"][f"{name} worker i"]
    assert list(timeline.peak_memory) == [value(formula, p=p, i=i, M_B=M_B, M_W=M_W) for i in range(1, p + 1)]


@given(RANKS, st.integers(1, 12), st.integers(0, 20))
def test_memory_of_1f1b_is_that_of_its_first_worker(p, m, M_B):
    timeline = simulate(one_f_one_b(p, m), Costs(activation_memory=M_B))
    assert list(timeline.peak_memory) == [min(m, p - rank) * M_B for rank in range(p)]
