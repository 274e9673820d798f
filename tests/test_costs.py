"""Costs: what a user may write, what is refused and how, and what one placement makes of them."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import costs, placements

from zerobubble import Costs, Kind, Op, Placement
from zerobubble.errors import CostsError

KEYS = ("forward", "backward_input", "backward_weight", "backward_full", "activation_memory", "weight_memory")
NOT_NUMBERS = [True, "1", {}, [[1]], [None], ["1"], [True]]
NOT_AMOUNTS = [-1, -0.5, float("nan"), float("inf"), float("-inf"), 10**400]

FLOATS = st.floats(0, 1e9)

# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("key", [*KEYS, "communication"])
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused_with_its_key_and_entry(key, value):
    where = f'"{key}", entry 0' if isinstance(value, list) else f'"{key}"'
    with pytest.raises(CostsError, match=f"^costs: {where} must be a number"):
        Costs(**{key: value})


@pytest.mark.parametrize("key", [*KEYS, "communication"])
@pytest.mark.parametrize("value", NOT_AMOUNTS, ids=lambda value: str(value)[:5])
def test_what_is_no_amount_is_refused_with_its_key_and_entry(key, value):
    with pytest.raises(CostsError, match=f'^costs: "{key}" must be finite and not negative; got (-|nan|inf)'):
        Costs(**{key: value})
    with pytest.raises(CostsError, match=f'^costs: "{key}", entry 2 must be finite and not negative; got (-|nan|inf)'):
        Costs(**{key: [1, 1, value]})


@pytest.mark.parametrize("key", [key for key in (*KEYS, "communication") if key != "backward_full"])
def test_only_the_whole_backward_may_be_left_open(key):
    assert Costs(backward_full=None).backward_full is None
    with pytest.raises(CostsError, match=f'"{key}" must be a number, or a list of numbers; got None'):
        Costs(**{key: None})


@pytest.mark.parametrize("key", KEYS)
def test_an_empty_list_is_refused_with_its_key(key):
    with pytest.raises(CostsError, match=f'"{key}" is an empty list; give one number per stage, or a single number'):
        Costs(**{key: []})


def test_lists_of_different_lengths_are_refused_with_each_length():
    with pytest.raises(CostsError, match=r'same length; "forward" has 2, "weight_memory" has 3'):
        Costs(forward=[1, 1], weight_memory=[1, 1, 1])


@pytest.mark.parametrize("unit", [None, 3, ["ms"]])
def test_a_unit_that_is_no_text_is_refused(unit):
    with pytest.raises(CostsError, match='"unit" must be a text such as "ms"; got'):
        Costs(unit=unit)


TIMES = {"forward": 1, "backward_input": 1, "backward_weight": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"costs\.json, line 1, column 1: not JSON"),
        ('{"forward": 1,\n}', r"costs\.json, line 2, column 1: not JSON"),
        ("[" * 100_000, r"costs\.json: JSON that cannot be read"),
        ("1" * 5000, r"costs\.json: (JSON that cannot be read|costs must be one JSON object)"),
        ("[1, 2]", r"costs\.json: costs must be one JSON object with keys; got list"),
        ("null", r"costs\.json: costs must be one JSON object with keys; got NoneType"),
        (
            json.dumps({**TIMES, "backwards": 1}),
            r'costs\.json: unknown key "backwards"; the keys are forward, backward_in',
        ),
        (json.dumps({"forward": 1, "backward_weight": 1}), r'costs\.json: missing key "backward_input"; the keys are'),
        (
            json.dumps({**TIMES, "forward": [1, -2]}),
            r'costs\.json: "forward", entry 1 must be finite and not negative; got -2',
        ),
        (
            json.dumps({**TIMES, "forward": float("nan")}),
            r'costs\.json: "forward" must be finite and not negative; got nan',
        ),
        (json.dumps({**TIMES, "communication": "fast"}), r'costs\.json: "communication" must be a number'),
        (json.dumps({**TIMES, "forward": [1, 1], "weight_memory": [1]}), r'costs\.json: every list .* "forward" has 2'),
    ],
    ids=lambda value: value[:20],
)
def test_a_malformed_file_is_refused_with_its_name_and_place(tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostsError, match=message):
        Costs.load(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None], ids=["not text", "absent"])
def test_a_file_that_cannot_be_opened_as_text_is_named(tmp_path, content):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CostsError, match=r"costs\.json: cannot be read as a costs file"):
        Costs.load(path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)


@given(st.text() | JUNK.map(json.dumps) | st.dictionaries(st.sampled_from([*KEYS, "unit"]), JUNK).map(json.dumps))
def test_any_text_is_read_or_refused(text):
    with suppress(CostsError):
        assert isinstance(Costs.from_json(text), Costs)


# ------------------------------------------------------------------------------------------------ what is read


@given(st.data())
def test_json_round_trips(data):
    given_costs = data.draw(costs(data.draw(placements()), FLOATS))
    assert Costs.from_json(given_costs.to_json()) == given_costs


def test_only_the_times_must_be_in_a_file():
    assert Costs.from_json(json.dumps(TIMES)) == Costs()


def test_the_number_of_stages_is_the_length_of_the_lists():
    assert Costs().num_stages is None
    assert Costs(communication=[1, 2]).num_stages is None
    assert Costs(weight_memory=[1, 2, 3]).num_stages == 3


# ------------------------------------------------------------------------------------------------ for one placement


@given(st.data())
def test_a_single_number_holds_on_every_stage(data):
    placement = data.draw(placements())
    value = data.draw(FLOATS)
    for key in KEYS:
        assert getattr(Costs(**{key: value}).resolve(placement), key) == (value,) * placement.num_stages


def test_the_whole_backward_takes_both_parts_unless_given():
    both = Costs(backward_input=[1, 2], backward_weight=4).resolve(Placement.linear(2))
    assert both.backward_full == (5, 6)
    assert Costs(backward_full=3).resolve(Placement.linear(2)).backward_full == (3, 3)


def test_duration_is_that_of_the_kind_on_the_stage():
    stage_costs = Costs([1, 2], [3, 4], [5, 6], backward_full=[7, 9]).resolve(Placement.linear(2))
    assert [stage_costs.duration(Op(1, kind, 0)) for kind in Kind] == [2, 4, 6, 9]


@given(st.data())
def test_stages_are_cut_evenly_where_the_placement_has_a_multiple_of_them(data):
    parts = data.draw(st.integers(1, 4))
    coarse = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=4))
    fine = Costs(forward=coarse).resolve(Placement.linear(len(coarse) * parts))
    assert fine.forward == tuple(value / parts for value in coarse for _ in range(parts))
    assert fine.activation_memory == (1 / parts,) * len(fine.forward)


@given(st.data(), st.integers(1, 4))
def test_cutting_keeps_the_sum_over_all_stages(data, parts):
    placement = data.draw(placements())
    whole = data.draw(costs(placement, FLOATS))
    finer = Placement.loop(placement.num_stages, parts) if parts > 1 else placement
    for key in KEYS:
        expected = sum(getattr(whole.resolve(placement), key))
        assert sum(getattr(whole.split(parts).resolve(finer), key)) == pytest.approx(expected)


@pytest.mark.parametrize(("entries", "stages"), [(3, 4), (4, 2), (3, 8)])
def test_lists_that_cannot_be_cut_to_the_stages_are_refused(entries, stages):
    with pytest.raises(
        CostsError, match=f"the lists have {entries} entries, but the schedule has {stages} stages; give"
    ):
        Costs(forward=[1] * entries).resolve(Placement.linear(stages))


# ------------------------------------------------------------------------------------------------ communication


def hops(placement: Placement, communication: float | list[float]) -> tuple[float, ...]:
    return Costs(communication=communication).resolve(placement).hop


def test_one_latency_holds_for_every_hop_between_ranks_and_none_within_one():
    #             stage 0    1    2    3
    # V, 2 ranks:  rank 0 -> 1 -> 1 -> 0
    assert hops(Placement.v(2), 3) == (3, 0, 3)


def test_a_latency_per_stage_boundary():
    assert hops(Placement.v(3), [1, 2, 9, 4, 5]) == (1, 2, 0, 4, 5)


def test_a_latency_per_pair_of_neighbouring_ranks_holds_in_both_directions():
    assert hops(Placement.v(3), [1, 2]) == (1, 2, 0, 2, 1)


def test_the_way_round_from_the_last_rank_to_the_first_takes_the_largest():
    # loop, 3 ranks: 0 -> 1 -> 2 => 0 -> 1 -> 2
    assert hops(Placement.loop(3, 2), [1, 2]) == (1, 2, 2, 1, 2)


@given(st.lists(FLOATS, max_size=6))
def test_with_one_stage_per_rank_in_order_boundaries_and_pairs_are_the_same(latencies):
    assert hops(Placement.linear(len(latencies) + 1), latencies) == tuple(latencies)


def test_with_one_stage_per_rank_in_another_order_it_is_per_boundary():
    # rank 2 -> 0 -> 1
    assert hops(Placement((2, 0, 1)), [5, 1]) == (5, 1)


@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_any_other_number_of_latencies_is_refused_with_both_that_would_do(count):
    message = (
        rf'"communication" has {count} entries; .* per stage boundary \(5 here\), .* neighbouring ranks \(2 here\)'
    )
    with pytest.raises(CostsError, match=message):
        hops(Placement.v(3), [1.0] * count)


def test_one_rank_needs_no_latencies():
    assert hops(Placement.linear(1), []) == ()
