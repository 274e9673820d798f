"""Every format round-trips, and whatever cannot be read says where."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import schedules

from zerobubble import GENERATORS, Kind, Op, Schedule, one_f_one_b, simulate, zb_h1, zb_v
from zerobubble.errors import NotationError, ScheduleError
from zerobubble.notation import (
    format_op,
    from_csv,
    from_grid,
    from_json,
    load,
    parse_op,
    to_csv,
    to_dict,
    to_grid,
    to_json,
)
from zerobubble.op import BW, B, F, W
from zerobubble.schedule import make_schedule
from zerobubble.validate import find_faults, validate

OPS = st.builds(Op, st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6))

# ------------------------------------------------------------------------------------------------ round trips


@given(OPS, st.sampled_from(["ours", "torch"]))
def test_an_op_round_trips_in_both_dialects(op, dialect):
    assert parse_op(format_op(op, dialect), dialect) == op


def test_torch_writes_i_for_b_and_b_for_bw():
    assert [format_op(op, "torch") for op in (F(2, 0), B(0, 3), W(0, 3), BW(0, 3))] == ["2F0", "0I3", "0W3", "0B3"]
    assert [format_op(op) for op in (F(2, 0), B(0, 3), W(0, 3), BW(0, 3))] == ["2F0", "0B3", "0W3", "0BW3"]


@given(schedules())
def test_grid_round_trips(schedule):
    assert from_grid(to_grid(schedule)) == schedule


@given(schedules())
def test_grid_with_columns_by_time_round_trips(schedule):
    timeline = simulate(schedule)
    starts, ends = ([list(map(int, row)) for row in times] for times in (timeline.starts, timeline.ends))
    assert from_grid(to_grid(schedule, starts)) == from_grid(to_grid(schedule, starts, ends)) == schedule


@given(schedules(), st.sampled_from(["ours", "torch"]))
def test_csv_round_trips_in_both_dialects(schedule, dialect):
    assert from_csv(to_csv(schedule, dialect), dialect) == schedule


@given(schedules(), st.sampled_from(["ours", "torch"]))
def test_dialect_is_told_from_the_kinds(schedule, dialect):
    assert from_csv(to_csv(schedule, dialect)) == schedule


@given(schedules(), st.text(max_size=20))
def test_json_round_trips_with_its_name(schedule, name):
    named = make_schedule(name, schedule.placement, schedule.num_microbatches, schedule.orders)
    back = from_json(to_json(named))
    assert back == named
    assert back.name == name


@pytest.mark.parametrize("generator", [pytest.param(g, id=g.name) for g in GENERATORS.values()])
def test_placement_survives_every_format(generator):
    schedule = generator.make(3, 4)
    for back in (from_grid(to_grid(schedule)), from_csv(to_csv(schedule)), from_json(to_json(schedule))):
        assert back.placement == schedule.placement
        assert back.placement.style == generator.placement


# ------------------------------------------------------------------------------------------------ what they look like


def test_grid_without_columns_lists_the_ops():
    assert to_grid(zb_h1(2, 1)) == "rank 0 | 0F0 0B0 0W0\nrank 1 | 1F0 1B0 1W0\n"


def test_grid_with_columns_shows_idle_and_running_slots():
    grid = to_grid(one_f_one_b(2, 1), [[0, 4], [1, 2]], [[1, 6], [2, 4]])
    assert grid == "rank 0 | 0F0  .    .    .    0BW0 -\nrank 1 | .    1F0  1BW0 -\n"


def test_grid_is_read_without_labels_and_with_blank_lines():
    assert from_grid("\n0F0 . 0B0   0W0\n\n | 1F0 1B0 - 1W0") == zb_h1(2, 1)


def test_csv_has_a_row_per_rank_and_a_cell_per_op():
    assert to_csv(one_f_one_b(2, 1)) == "0F0,0BW0\n1F0,1BW0\n"
    assert to_csv(one_f_one_b(2, 1), "torch") == "0F0,0B0\n1F0,1B0\n"


def test_csv_of_torch_with_idle_cells_and_spaces_is_read():
    assert from_csv("0F0,,, 0I0,0W0\n,1F0 ,1I0,1W0,\n") == zb_h1(2, 1)


def test_a_faulty_csv_with_bw_is_taken_for_ours_so_that_its_fault_is_told():
    (fault,) = find_faults(from_csv("0F0,0B0,0F1,0BW1"))
    assert str(fault) == "rank 0 lacks 0W0; add it"


def test_csv_of_forwards_alone_is_read_in_either_dialect():
    forwards = one_f_one_b(2, 2).only({Kind.F})
    assert from_csv(to_csv(forwards)) == from_csv(to_csv(forwards, "torch")) == forwards


def test_json_has_four_keys():
    assert to_dict(zb_v(1, 1)) == {
        "name": "zb_v",
        "placement": [0, 0],
        "num_microbatches": 1,
        "orders": [["0F0", "1F0", "1B0", "1W0", "0B0", "0W0"]],
    }


@pytest.mark.parametrize(
    ("suffix", "write"), [(".json", to_json), (".csv", to_csv), (".txt", to_grid), (".CSV", to_csv), ("", to_grid)]
)
def test_a_file_is_read_by_its_suffix(tmp_path, suffix, write):
    path = tmp_path / f"mine{suffix}"
    path.write_text(write(zb_v(2, 3)), encoding="utf-8")
    assert load(path) == zb_v(2, 3)
    assert load(path).name == ("zb_v" if suffix == ".json" else "mine")


def test_a_file_with_the_byte_order_mark_of_a_spreadsheet_is_read(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(zb_h1(2, 3)), encoding="utf-8-sig")
    assert load(path) == zb_h1(2, 3)


# ------------------------------------------------------------------------------------------------ malformed input


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (
            from_grid,
            "rank 0 | 0F0\nrank 1 | 1F0 1X0",
            r"line 2, op 2: '1X0' is not an op; .* kind of F, B, W, BW, as in",
        ),
        (from_grid, "rank 0 | 0F", r"line 1, op 1: '0F' is not an op"),
        (from_grid, "0F-1", r"'0F-1' is not an op"),
        (from_grid, "0F\u0663", r"is not an op"),
        (from_grid, "0F" + "9" * 5000, r"line 1, op 1: '0F9999"),
        (from_grid, "9" * 5000 + "F0", r"line 1, op 1: '9999"),
        (from_grid, "", r"no ops found"),
        (from_grid, "rank 0 | . .", r"no ops found"),
        (from_grid, "0F0\n2F0", r"no op of stage 1 found, though there is a stage 2"),
        (from_grid, "999999999999F0", r"no op of stage 0 found"),
        (from_grid, "\n|\n1F0 0F0", r"rank 0 holds none"),
        (from_csv, "0F0,0BW0\n1F0,x", r"line 2, cell 2: 'x' is not an op"),
        (from_csv, "0F0,0I0,0BW0", r"line 1, cell 3: '0BW0' is not an op; .* kind of F, I, W, B, as in"),
        (from_csv, "0F0,SEND", r"line 1, cell 2"),
        (from_csv, "", r"no ops found"),
        (from_csv, "0F0," + "9" * 200_000, r"line 1: not CSV: field larger than field limit"),
        (from_json, "", r"line 1, column 1: not JSON"),
        (from_json, '{\n"placement": [0],', r"line 2, column 18: not JSON"),
        (from_json, "[" * 100_000, r"JSON that cannot be read"),
        (from_json, "9" * 5000, r"JSON that cannot be read|one JSON object"),
        (from_json, "null", r'must be one JSON object with "placement".*; got None'),
        (from_json, "[]", r"must be one JSON object .* got \[\]"),
        (from_json, "{}", r'missing key "placement"; needs "placement"'),
        (from_json, '{"placement": [0], "orders": []}', r'missing key "num_microbatches"'),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(read, text, message):
    with pytest.raises(NotationError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("placement", 3, r'"placement": must be a list; got 3'),
        ("placement", None, r'"placement": must be a list; got None'),
        ("placement", "01", r'"placement": must be a list; got \'01\''),
        ("placement", [0, None], r'"placement", stage 1: must be a whole number; got None'),
        ("placement", [0, 1.5], r'"placement", stage 1: must be a whole number; got 1.5'),
        ("placement", [0, True], r'"placement", stage 1: must be a whole number; got True'),
        ("placement", [0, "1"], r'"placement", stage 1: must be a whole number'),
        ("placement", [0, [1]], r'"placement", stage 1: must be a whole number'),
        ("placement", [], r'"placement": .*at least one stage'),
        ("placement", [0, 2], r'"placement": .* rank 1 holds none'),
        ("placement", [0, 10**18], r'"placement": .* rank 1 holds none'),
        ("placement", [-1], r'"placement": .* whole numbers from 0; got -1'),
        ("num_microbatches", None, r'"num_microbatches": must be a whole number; got None'),
        ("num_microbatches", 1.0, r'"num_microbatches": must be a whole number; got 1.0'),
        ("num_microbatches", float("inf"), r'"num_microbatches": must be a whole number; got inf'),
        ("num_microbatches", "3", r'"num_microbatches": must be a whole number; got \'3\''),
        ("num_microbatches", False, r'"num_microbatches": must be a whole number; got False'),
        ("orders", {}, r'"orders": must be a list; got {}'),
        ("orders", ["0F0"], r'"orders", rank 0: must be a list; got \'0F0\''),
        ("orders", [["0F0"], None], r'"orders", rank 1: must be a list; got None'),
        ("orders", [["0F0"], [None]], r'"orders", rank 1, op 0: None is not an op'),
        ("orders", [["0F0"], ["1F0", ["1B0"]]], r'"orders", rank 1, op 1: \[\'1B0\'\] is not an op'),
        ("orders", [["0F0", "0I0"]], r'"orders", rank 0, op 1: \'0I0\' is not an op'),
    ],
)
def test_json_of_the_wrong_type_is_refused_with_its_key(key, value, message):
    data = {**to_dict(zb_h1(2, 2)), key: value}
    with pytest.raises(NotationError, match=message):
        from_json(json.dumps(data))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("0F0"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def judge(read, text):
    """Whatever the text, it is either refused with a `NotationError`, or a schedule that the validator can judge."""
    with suppress(NotationError, ScheduleError):
        schedule = read(text)
        assert isinstance(schedule, Schedule)
        validate(schedule)


@given(st.text() | st.text(alphabet="0123456789FBWI,.|- \n\"'"), st.sampled_from([from_grid, from_csv, from_json]))
@example("0F0\x00,", from_csv)
@example('"0F0', from_csv)
@example("0F0\r0F1", from_csv)
@example("9F0\x0b8F0", from_grid)
def test_any_text_is_read_or_refused(text, read):
    judge(read, text)


@given(JUNK)
def test_any_json_is_read_or_refused(value):
    judge(from_json, json.dumps(value))


@given(st.fixed_dictionaries({"placement": JUNK, "num_microbatches": JUNK, "orders": JUNK}, optional={"name": JUNK}))
def test_any_json_with_the_right_keys_is_read_or_refused(value):
    judge(from_json, json.dumps(value))


@given(schedules(), st.data())
def test_valid_text_with_a_part_replaced_is_read_or_refused(schedule, data):
    write, read = data.draw(st.sampled_from([(to_grid, from_grid), (to_csv, from_csv), (to_json, from_json)]))
    text = write(schedule)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 5, len(text))))
    judge(
        read, text[:start] + data.draw(st.text(max_size=3) | st.text('0123456789FBW,-"[]{}', max_size=3)) + text[end:]
    )


# ------------------------------------------------------------------------------------------------ huge numbers


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (from_grid, "0F999999999"),
        (from_csv, "0F999999999"),
        (from_json, '{"placement": [0], "num_microbatches": 1000000000, "orders": [["0F999999999"]]}'),
    ],
)
def test_one_op_of_a_huge_microbatch_is_judged_at_once(read, text):
    began = time.perf_counter()
    faults = find_faults(read(text))
    assert time.perf_counter() - began < 1
    assert [str(fault) for fault in faults] == [
        "rank 0 lacks 0B999999999 and 0W999999999; add them",
        "rank 0 lacks every op of stage 0 for microbatches 0..999999998; add F, B and W (or F and BW)",
    ]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None], ids=["not text", "absent"])
def test_a_file_that_cannot_be_opened_as_text_is_named(tmp_path, content):
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NotationError, match=r"mine\.csv: cannot be read as a schedule"):
        load(path)


def test_a_malformed_file_is_named_with_the_place_in_it(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,oops\n")
    with pytest.raises(NotationError, match=r"mine\.csv: line 1, cell 2: 'oops' is not an op"):
        load(path)


def test_an_op_on_the_wrong_line_is_the_only_one_out_of_place():
    for write, read in ((to_grid, from_grid), (to_csv, from_csv)):
        text = write(zb_h1(2, 2)).strip().replace("0W1", "")
        (fault,) = find_faults(read(f"{text}{',' if ',' in text else ' '}0W1\n"))
        assert (
            str(fault)
            == "0W1 is on rank 1, but stage 0 lies on rank 0; move it there\n  rank 1 | ... 1B1 1W0 1W1 [0W1]"
        )
