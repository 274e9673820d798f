"""Rehearsals: emulated stages take the times and hold the memory that the costs say, in our runtime and in torch's."""

from __future__ import annotations

import json
from itertools import chain

import pytest
import torch

import zerobubble as zb
from zerobubble import cli, plot
from zerobubble.errors import CostsError, NotationError
from zerobubble.op import Kind
from zerobubble.plot.trace import read
from zerobubble.runtime import Pipeline
from zerobubble.runtime.emulation import emulated_loss, emulation
from zerobubble.runtime.rehearsal import rehearse

LIMIT = 120
UNEVEN = zb.Costs((8, 12), (10, 14), (6, 9), 15, (3, 2), (1, 1.5), unit="ms")


def durations(timelines):
    found: dict[tuple[Kind, int], list[float]] = {}
    for op, start, end in chain.from_iterable(row for timeline in timelines for row in timeline.rows()):
        found.setdefault((op.kind, op.stage), []).append(end - start)
    return found


@pytest.mark.parametrize("runtime", ["zerobubble", "torch"])
def test_ops_and_hops_take_their_times_and_activations_their_memory(runtime):
    done = rehearse(zb.zb_h1(2, 3), UNEVEN, 4, runtime=runtime, time_limit=LIMIT)
    truth = UNEVEN.resolve(done.schedule.placement)
    for (kind, stage), taken in durations(done.timelines).items():
        assert min(taken) == pytest.approx(truth.by_kind[kind][stage], rel=0.3), (kind, stage)
        assert min(taken) >= truth.by_kind[kind][stage] - 0.01
    ends = {op: end for order, row in zip(done.schedule.orders, done.timeline.ends) for op, end in zip(order, row)}
    first = done.timeline.starts[1][0]
    assert first - ends[zb.Op(0, Kind.F, 0)] >= 15 - 0.5  # no op of rank 1 before the hop is over
    expected = done.simulated.peak_memory
    if runtime == "torch":  # it keeps all of a microbatch until W
        expected = (6.0, 4.0)
    assert done.peak_memory == pytest.approx(expected, rel=0.02)
    assert done.step_seconds_measured >= done.step_seconds_simulated - 1e-3
    assert done.step_seconds_simulated == zb.simulate(done.schedule, UNEVEN).cost / 1e3
    assert 0 < done.bubble_rate_measured < 1


def test_latency_occupies_nobody():
    """GPipe sends three activations in a row: with a hop of 200 ms they arrive some 2 ms apart, not 200."""
    schedule = zb.gpipe(2, 3)
    stages = emulation(zb.Costs(2, 2, 2, 200, unit="ms"), schedule)
    pipeline = Pipeline(stages.layers(), emulated_loss, schedule, wrap_transport=stages.delayed)
    pipeline.step(torch.ones(3, 1))
    timeline = pipeline.timelines()[0]
    assert timeline.starts[1][0] - timeline.ends[0][0] >= 199.9
    assert timeline.starts[1][2] - timeline.starts[1][0] < 200


def test_undivided_backwards_take_their_own_time():
    costs = zb.Costs(1, 2, 4, backward_full=3, unit="s")
    undivided, divided = (emulation(costs, make(2, 2), stretch=0.1).times[0] for make in (zb.one_f_one_b, zb.zb_h1))
    assert undivided.backward_input + undivided.backward_weight == pytest.approx(0.3)
    assert (divided.backward_input, divided.backward_weight) == pytest.approx((0.2, 0.4))


def test_in_process_too_memory_is_held_from_f_to_w():
    schedule = zb.zb_h1(1, 2)
    stages = emulation(zb.Costs(0, 0, 0, activation_memory=2, weight_memory=3), schedule)
    pipeline = Pipeline(stages.layers(), emulated_loss, schedule, wrap_transport=stages.delayed)
    trace = pipeline.measure_memory(torch.ones(2, 1))
    held = {"F": 2, "B": 1, "W": -3}
    expected = [sum(held[op.kind.value] for op in schedule.orders[0][: i + 1]) for i in range(schedule.num_ops)]
    assert [live / stages.bytes for live in trace.live_bytes[0]] == pytest.approx(expected, abs=0.01)


def test_a_unit_that_is_no_time_is_refused():
    with pytest.raises(CostsError, match="'parsec' is no unit of real time"):
        emulation(zb.Costs(unit="parsec"), zb.zb_h1(2, 2))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.json").write_text(UNEVEN.to_json())
    return tmp_path


def test_the_command_prints_what_is_promised_and_writes_both_timelines(folder, capsys):
    sizes = ("--ranks", "2", "--microbatches", "2", "--steps", "1", "--stretch", "0.5")
    status = cli.main(("emulate", "--schedule", "zb_h1", "--costs", "costs.json", *sizes, "--json", "-o", "both.json"))
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["step_seconds_simulated"] == zb.simulate(zb.zb_h1(2, 2), UNEVEN).cost / 2e3
    assert found["step_seconds_measured"] > 0
    assert {"bubble_rate_measured", "bubble_rate_simulated", "seconds", "schedule"} <= found.keys()
    assert (found["runtime"], found["steps"], found["stretch"], len(found["peak_memory"])) == ("zerobubble", 1, 0.5, 2)
    (_, plan), (title, measured) = read("both.json")
    assert plan.cost == pytest.approx(found["step_seconds_simulated"] * 1e3)
    assert "emulated" in title
    assert measured.schedule == zb.zb_h1(2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3", "--microbatches", "2"], "the lists have 2 entries, but the schedule has 3 stages"),
        (["--ranks", "2"], "add --ranks and --microbatches"),
        (["--ranks", "2", "--microbatches", "0"], "--microbatches must be at least 1"),
        (["--ranks", "2", "--microbatches", "2", "--stretch", "0"], "--stretch must be a positive number"),
        (["--ranks", "2", "--microbatches", "2", "--steps", "0"], "steps"),
        (["--ranks", "2", "--microbatches", "2", "-o", "a.doc"], "possible are .svg"),
        (["--ranks", "2", "--microbatches", "2", "-o", "no/a.svg"], "there is no folder no"),
        (["--ranks", "2", "--microbatches", "2", "--memory-limit", "1"], "memory"),
        (["--ranks", "2", "--microbatches", "2", "--runtime", "jax"], "jax"),
    ],
)
def test_wrong_options_are_refused_before_a_process_starts(folder, capsys, arguments, message):
    assert cli.main(("emulate", "--schedule", "zb_h1", "--costs", "costs.json", *arguments)) in (1, 2)
    out, err = capsys.readouterr()
    assert message in " ".join(err.split())
    assert (out, "Traceback" in err) == ("", False)


# ---------------------------------------------------------------------------------------------------- timelines as JSON


def test_timelines_round_trip_through_a_trace(tmp_path):
    timelines = [
        ("a", zb.simulate(zb.zb_v(3, 4), zb.Costs(1.1, 1.3, 0.7, 0.2, unit="s"))),
        ("b", zb.simulate(zb.gpipe(1, 2))),
    ]
    plot.save(timelines, tmp_path / "a.json")
    assert read(tmp_path / "a.json") == timelines


def test_ops_that_overtook_each_other_are_drawn_as_they_ran_and_written_as_they_were_planned(tmp_path):
    order = zb.zb_h1(1, 2).orders[0]
    times = tuple(float(t) for t in (0, 1, 2, 3, 5, 4))
    timeline = zb.Timeline(zb.zb_h1(1, 2), (times,), (tuple(t + 1 for t in times),))
    plot.save([("", timeline)], tmp_path / "a.json")
    assert read(tmp_path / "a.json") == [("", timeline)]
    row = plot.text([("", timeline)], 200).plain.splitlines()[1]
    names = [f"{op.kind}{op.microbatch}" for op in (*order[:4], order[5], order[4])]
    assert [row.index(name) for name in names] == sorted(row.index(name) for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("timelines"), 'holds no "timelines"'),
        (lambda data: data["timelines"][0].pop("unit"), "timeline 0: needs schedule, unit"),
        (lambda data: data["timelines"][0]["ends"][1].pop(), r'timeline 0, "ends": needs one number per op'),
        (lambda data: data["timelines"][0]["schedule"].pop("orders"), r'"schedule": missing key "orders"'),
        (lambda data: data["timelines"][0].update(starts=3), "timeline 0: needs"),
    ],
)
def test_a_malformed_file_of_timelines_names_the_place(tmp_path, change, message):
    plot.save([("", zb.simulate(zb.zb_h1(2, 2)))], tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    change(data)
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(NotationError, match=message):
        read(tmp_path / "a.json")
