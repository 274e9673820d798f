"""Profiles: what was measured is what was there, and clocks that disagree do no harm."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models_for_tests import tiny_batch, tiny_pipeline

import zerobubble as zb
from zerobubble import cli
from zerobubble.errors import OptionError, PipelineError
from zerobubble.op import Kind
from zerobubble.runtime import MemoryTrace, measured_costs
from zerobubble.runtime.clock import HOST_CLOCK, Record, offsets
from zerobubble.runtime.profile import measured_profile, spread, timeline_of

TRUTH = zb.Costs((4, 6, 5), (5, 7, 6), (3, 4, 2), (1, 2), (3, 4, 5), (1, 2, 1), unit="ms")


def simulated(schedule=None):
    return zb.simulate(schedule or zb.zb_h1(3, 6), TRUTH)


def test_costs_that_were_simulated_are_found_again():
    found = measured_costs([simulated(), simulated()])
    for key in ("forward", "backward_input", "backward_weight", "communication"):
        assert getattr(found, key) == pytest.approx(getattr(TRUTH, key)), key
    assert found.unit == "ms"


@given(st.lists(st.floats(-0.4, 0.4), min_size=3, max_size=3))
def test_a_clock_that_is_ahead_does_not_change_the_latency_of_hops_seen_from_both_sides(ahead):
    truth = replace(TRUTH, forward=(6, 5, 4), backward_input=(5, 6, 7), backward_weight=(2, 3, 4))
    one = zb.simulate(zb.gpipe(3, 6).divided(), truth)  # the receiver is the faster one, both ways
    shifted = replace(
        one,
        starts=tuple(tuple(t + by for t in row) for row, by in zip(one.starts, ahead)),
        ends=tuple(tuple(t + by for t in row) for row, by in zip(one.ends, ahead)),
    )
    assert measured_costs([shifted]).communication == pytest.approx(TRUTH.communication)


def test_a_process_that_was_held_up_once_does_not_make_a_hop_slow():
    one = simulated(zb.one_f_one_b(3, 6).divided())
    late = 500.0  # rank 1 starts its second op late, and all ranks with what comes then

    def shifted(rows):
        return tuple(tuple(t + late * (i > 0 or rank > 1) for i, t in enumerate(row)) for rank, row in enumerate(rows))

    held_up = replace(one, starts=shifted(one.starts), ends=shifted(one.ends))
    found = measured_costs([one, held_up, one])
    assert found.communication == pytest.approx(TRUTH.communication)


def test_the_spread_is_the_distance_of_the_quartiles():
    assert spread([1, 2, 3, 4, 5]) == 2
    assert spread([7]) == 0
    schedule = zb.zb_h1(1, 4)
    one = zb.simulate(schedule)
    slow = zb.simulate(schedule, zb.Costs(forward=3))
    found = measured_profile([one, slow])
    assert (found.costs.forward, found.spread["forward"]) == ((2.0,), (2.0,))
    assert (found.steps, found.divided) == (2, True)


def test_undivided_backwards_are_said_to_be():
    found = measured_profile([simulated(zb.one_f_one_b(3, 6))])
    assert not found.divided
    assert found.costs.backward_full == pytest.approx((8, 11, 8))


def test_memory_of_a_trace_is_per_stage():
    schedule = zb.zb_h1(1, 3)
    live = tuple(accumulate({Kind.F: 10, Kind.B: -6, Kind.W: -4}[op.kind] for op in schedule.orders[0]))
    assert MemoryTrace(schedule, (live,)).per_stage() == ((10,), (4,))


def test_clocks_of_one_machine_are_taken_as_they_are_and_those_of_others_compared():
    ahead = [0, 5_000_000, -3_000_000]
    calls = []

    def gather(values):
        """Three machines that answer at once."""
        calls.append(values)
        own = values[0]
        if isinstance(own, str):
            return [own, own, "other"]
        return [own if own is None else [t + by for t in own] for by in ahead]

    assert offsets(lambda values: [values[0]] * 3, [0], "here") == [0, 0, 0]
    assert offsets(gather, [0], "here") == ahead
    rows = [([0, 10], [5, 20]), ([5_000_005, 5_000_010], [5_000_008, 5_000_011]), ([-2_999_995, -2_999_990],) * 2]
    schedule = zb.gpipe(3, 1)
    assert timeline_of(schedule, rows, ahead).starts == ((0, 1e-5), (5e-6, 1e-5), (5e-6, 1e-5))


def test_ops_that_ran_as_one_count_as_equal_parts_whatever_the_clock_marks():
    class Letters:
        """Marks that are no numbers until they are read, as events of a GPU are."""

        def read(self, marks):
            return [(ord(mark) - ord("a")) * 10 for mark in marks]

    record = Record(["a", "b", "b", "d"], ["b", "d", "d", "e"], [(1, 2)])
    assert record.read(Letters()) == ([0, 10, 20, 30], [10, 20, 30, 40])


def test_the_host_clock_goes_on():
    marks = [HOST_CLOCK.now() for _ in range(3)]
    assert HOST_CLOCK.read(marks) == sorted(marks)


def test_a_profile_needs_its_steps_and_one_to_warm_up():
    pipeline = tiny_pipeline(zb.zb_h1(2, 2))
    for _ in range(2):
        pipeline.step(*tiny_batch())
    with pytest.raises(PipelineError, match=r"2 steps needs 3 training steps .* 2 were taken"):
        pipeline.profile(steps=2)
    with pytest.raises(OptionError, match="steps=0"):
        pipeline.profile(steps=0)
    pipeline.step(*tiny_batch())
    found = pipeline.profile(steps=2)
    assert found.steps == 2
    assert min(found.costs.forward + found.costs.backward_input + found.costs.backward_weight) > 0
    assert not any(torch.tensor(found.costs.activation_memory).reshape(-1))
    pipeline.measure_memory(*tiny_batch())
    assert min(pipeline.profile(steps=2).costs.activation_memory) > 0


def test_the_command_writes_a_costs_file_that_can_be_planned_with(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 100)
    small = ("--blocks", "2", "--width", "16", "--context", "16", "--data", "text.txt", "--steps", "2")
    assert cli.main(("profile", *small, "-o", "costs.json", "--json")) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert zb.Costs.load("costs.json") == zb.Costs(**found["costs"])
    assert (found["steps"], len(found["spread"]["forward"]), found["costs"]["unit"]) == (2, 2, "ms")
    assert min(found["costs"]["activation_memory"]) > 1000
    assert cli.main(("plan", "--ranks", "2", "--microbatches", "4", "--costs", "costs.json", "--effort", "quick")) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "1"], "cannot be cut into 2 stages"),
        (["--placement", "auto"], "placement must be fixed"),
        (["--placement", "linear", "--chunks", "2"], "has 1 chunk"),
        (["--width", "30"], "--width must be a multiple of 4"),
        (["--data", "nowhere"], "there is no file or folder nowhere"),
        (["-o", "costs.csv"], "possible are .json"),
    ],
)
def test_the_command_refuses_wrong_options_before_it_starts(arguments, message, capsys):
    assert cli.main(("profile", *arguments)) == 2
    out, err = capsys.readouterr()
    assert message in " ".join(err.split())
    assert out == ""
