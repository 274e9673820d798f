"""`zerobubble plan`: what it prints and writes. The search itself is replaced by the best handcrafted schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import zerobubble as zb
from zerobubble import cli, notation, planner
from zerobubble.errors import OptionError
from zerobubble.jitter import simulate_jitter
from zerobubble.validate import find_faults

SIZES = ("--ranks", "4", "--microbatches", "8")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(capsys, *arguments: str):
    """A command with the true planner."""
    assert cli.main(arguments) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def handcrafted_plans(monkeypatch):
    """A planner that knows the handcrafted schedules only, and what it was asked."""
    asked = []

    def plan(costs, num_ranks, num_microbatches, *, memory_limit=None, placement="auto", chunks=None, **options):
        asked.append({"memory_limit": memory_limit, "placement": placement, "chunks": chunks, **options})
        style = placement if isinstance(placement, str) else placement.style
        timelines = []
        for generator in zb.GENERATORS.values():
            schedule = generator.make(num_ranks, num_microbatches)
            if style in ("auto", generator.placement) and not find_faults(schedule, memory_limit, costs):
                timelines.append(zb.simulate(schedule, costs))
        if not timelines:
            raise OptionError(f"the memory limit {memory_limit:g} is too low; the least possible is 1")
        best = min(timelines, key=lambda timeline: timeline.cost)
        schedule = replace(best.schedule, name="planned")
        return SimpleNamespace(schedule=schedule, timeline=zb.simulate(schedule, costs), lower_bound=best.work, gap=0)

    monkeypatch.setattr(planner, "plan", plan, raising=False)
    return asked


@pytest.fixture
def run(run, handcrafted_plans):
    """As everywhere, with handcrafted schedules for plans."""
    return run


@pytest.fixture
def fail(fail, handcrafted_plans):
    """As everywhere, with handcrafted schedules for plans."""
    return fail


@pytest.fixture
def costs_file(folder):
    costs = {"forward": [1, 1.5, 1, 1], "backward_input": 1.2, "backward_weight": 0.9, "unit": "ms"}
    (folder / "costs.json").write_text(json.dumps(costs))
    return "costs.json"


@pytest.fixture
def layers_file(folder):
    times = [0.5, *[1] * 14, 3]
    (folder / "layers.json").write_text(
        json.dumps(dict.fromkeys(("forward", "backward_input", "backward_weight"), times))
    )
    return "layers.json"


def test_json_gives_every_figure(run, costs_file, folder):
    data = json.loads(run("plan", *SIZES, "--costs", costs_file, "--memory-limit", "4", "--json"))
    (folder / "schedule.json").write_text(json.dumps(data["schedule"]))
    timeline = zb.simulate(notation.load(folder / "schedule.json"), zb.Costs.load(folder / costs_file))
    assert data["cost"] == timeline.cost
    assert data["makespan"] == timeline.makespan
    assert data["bubble_rate"] == timeline.bubble_rate
    assert data["peak_memory"] == list(timeline.peak_memory)
    assert data["lower_bound"] == timeline.work
    assert data["gap"] == pytest.approx(1 - timeline.work / timeline.cost)
    assert data["unit"] == "ms"
    assert 0 < data["seconds"] < 60
    assert {row["name"] for row in data["handcrafted"]} == set(zb.GENERATORS)
    assert "partition" not in data
    assert data["advice"].endswith(".")


def test_options_reach_the_planner(run, handcrafted_plans):
    run(
        "plan", *SIZES, "--memory-limit", "16", "--placement", "loop", "--chunks", "2", "--effort", "quick",
        "--time-limit", "7",
    )  # fmt: skip
    assert {key: handcrafted_plans[0][key] for key in handcrafted_plans[0] if key != "progress"} == {
        "memory_limit": 16, "placement": "loop", "chunks": 2, "effort": "quick", "time_limit": 7,
    }  # fmt: skip


def test_single_numbers_are_per_rank_in_every_placement(run, folder):
    (folder / "costs.json").write_text('{"forward": 2, "backward_input": 2, "backward_weight": 2}')
    data = json.loads(run("plan", *SIZES, "--costs", "costs.json", "--json"))
    work = {row["name"]: row["cost"] * (1 - row["bubble_rate"]) for row in data["handcrafted"]}
    assert work == pytest.approx(dict.fromkeys(zb.GENERATORS, 48))


def test_table_compares_with_the_handcrafted_and_marks_those_over_the_limit(run):
    lines = run("plan", *SIZES, "--memory-limit", "4").splitlines()
    assert lines[0].startswith("4 ranks, 8 microbatches, memory limit 4; planned in ")
    rows = {line.split("│")[1].strip(): line for line in lines if line.startswith("│")}
    assert {"plan", *(generator.title for generator in zb.GENERATORS.values())} == set(rows)
    assert next(iter(rows)) == "plan"
    for title, row in rows.items():
        assert ("over the limit" in row) == (title in ("GPipe", "1F1B-I", "ZB-H2"))
    assert rows["plan"].replace("│", " ").split()[:2] == ["plan", "v"]
    assert rows["ZB-H1"].replace("│", " ").split()[-2:] == ["27", "0.00%"]
    assert lines[-1].endswith(".")


@pytest.mark.parametrize(("name", "form"), [("s.csv", "ours"), ("s.csv", "torch"), ("s.json", "ours")])
def test_output_is_the_schedule(run, folder, name, form):
    out = run("plan", *SIZES, "--memory-limit", "4", "--placement", "v", "--format", form, "-o", name)
    assert out.endswith(f"wrote {name}\n")
    assert notation.load(folder / name) == zb.zb_v(4, 8)
    if form == "torch":
        assert "0I0" in (folder / name).read_text()


def test_format_torch_without_a_file_prints_the_csv(run):
    out = run("plan", *SIZES, "--memory-limit", "4", "--placement", "linear", "--format", "torch")
    assert out == notation.to_csv(zb.zb_h1(4, 8), "torch")


def test_layers_give_the_partition_too(run, layers_file):
    data = json.loads(run("plan", *SIZES, "--layers", layers_file, "--placement", "linear", "--json"))
    assert sum(data["partition"]) == 16
    assert len(data["partition"]) == 4
    assert data["partition"][-1] < max(data["partition"])
    assert "zb_v" in {row["name"] for row in data["handcrafted"]}
    printed = run("plan", *SIZES, "--layers", layers_file, "--placement", "linear")
    assert f"layers per stage: {' '.join(map(str, data['partition']))}" in printed


def test_jitter_prefers_what_holds_up(run):
    data = json.loads(run("plan", *SIZES, "--memory-limit", "8", "--placement", "linear", "--jitter", "0.3", "--json"))
    assert data["jitter"]["samples"] == 200
    assert data["jitter"]["jitter"] == 0.3
    means = [simulate_jitter(zb.generate(name, 4, 8), jitter=0.3).mean for name in ("zb_h1", "zb_h2", "one_f_one_b")]
    assert data["jitter"]["mean"] <= min(means)
    assert "with jitter 0.3: mean cost " in run("plan", *SIZES, "--jitter", "0.3")


class TestSweep:
    def test_json(self, run):
        data = json.loads(run("plan", *SIZES, "--sweep-memory", "--json"))
        assert [curve["name"] for curve in data["curves"]] == ["linear", "v"]
        for curve in data["curves"]:
            costs = [point["cost"] for point in curve["points"]]
            limits = [point["memory_limit"] for point in curve["points"]]
            assert costs == sorted(costs, reverse=True)
            assert limits == sorted(limits)
            assert all(max(point["peak_memory"]) <= point["memory_limit"] for point in curve["points"])
        assert {row["name"] for row in data["handcrafted"]} == set(zb.GENERATORS)

    def test_is_quick_unless_told_otherwise(self, run, handcrafted_plans):
        run("plan", *SIZES, "--sweep-memory", "--placement", "v")
        assert {asked["effort"] for asked in handcrafted_plans} == {"quick"}
        assert {asked["placement"] for asked in handcrafted_plans} == {"v"}

    def test_tables(self, run):
        out = run("plan", *SIZES, "--sweep-memory")
        assert "memory limit" in out
        assert any(line.replace("│", " ").split()[:2] == ["4", "11.11%"] for line in out.splitlines())
        assert any(line.replace("│", " ").split() == ["1F1B", "4", "27.27%"] for line in out.splitlines())

    @pytest.mark.parametrize("name", ["sweep.svg", "sweep.png"])
    def test_picture(self, run, folder, name):
        pytest.importorskip("matplotlib")
        assert f"wrote {name}" in run("plan", *SIZES, "--sweep-memory", "-o", name)
        assert (folder / name).stat().st_size > 5000

    def test_layers_are_cut_for_the_placement(self, run, fail, layers_file):
        data = json.loads(run("plan", *SIZES, "--layers", layers_file, "--placement", "v", "--sweep-memory", "--json"))
        assert [curve["name"] for curve in data["curves"]] == ["v"]
        status, message = fail("plan", *SIZES, "--layers", layers_file, "--sweep-memory")
        assert status == 2
        assert "--placement" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", "4"), "microbatches"),
        (("--ranks", "0", "--microbatches", "2"), "--ranks"),
        ((*SIZES, "--memory-limit", "0"), "--memory-limit must be a positive number"),
        ((*SIZES, "--memory-limit", "nan"), "--memory-limit must be a positive number"),
        ((*SIZES, "--time-limit", "-1"), "--time-limit must be a positive number"),
        ((*SIZES, "--memory-limit", "0.5"), "the least possible is"),
        ((*SIZES, "--placement", "zigzag"), "zigzag"),
        ((*SIZES, "--effort", "heroic"), "heroic"),
        ((*SIZES, "--costs", "none.json"), "--costs: there is no file none.json"),
        ((*SIZES, "--layers", "."), "--layers: . is a directory"),
        ((*SIZES, "--costs", "a.json", "--layers", "b.json"), "not both"),
        ((*SIZES, "-o", "plan.pdf"), "possible are .csv and .json"),
        ((*SIZES, "--sweep-memory", "-o", "plan.csv"), "possible are .svg and .png"),
        ((*SIZES, "--sweep-memory", "--memory-limit", "4"), "leave out --memory-limit"),
        ((*SIZES, "--format", "torch", "-o", "plan.json"), "--format torch is a CSV"),
        ((*SIZES, "--jitter", "-1"), "--jitter must be a share"),
        ((*SIZES, "--jitter", "0.1", "--samples", "0"), "--samples"),
        ((*SIZES, "-o", "none/plan.csv"), "cannot be written"),
    ],
)
def test_wrong_usage_is_said_in_one_paragraph(fail, arguments, said):
    status, message = fail("plan", *arguments)
    assert status == 2
    assert said in message
    assert len(message.strip().splitlines()) == 1


def test_malformed_costs_fail(fail, folder):
    (folder / "costs.json").write_text('{"forward": -1, "backward_input": 1, "backward_weight": 1}')
    status, message = fail("plan", *SIZES, "--costs", "costs.json")
    assert status == 1
    assert '"forward" must be finite and not negative' in message


class TestWithTheTruePlanner:
    def test_the_file_it_writes_costs_what_it_says(self, capsys, costs_file):
        data = command(
            capsys, "plan", *SIZES, "--costs", costs_file, "--memory-limit", "3", "--effort", "quick", "-o", "s.csv",
            "--json",
        )  # fmt: skip
        assert max(data["peak_memory"]) <= 3
        assert data["cost"] <= min(row["cost"] for row in data["handcrafted"] if row["fits"])
        simulated = command(capsys, "simulate", "s.csv", "--costs", costs_file, "--memory-limit", "3", "--json")
        assert simulated["cost"] == pytest.approx(data["cost"])

    def test_exact_proves_small_plans(self, capsys):
        pytest.importorskip("ortools")
        data = command(
            capsys, "plan", *SIZES, "--memory-limit", "3", "--placement", "linear", "--effort", "exact", "--json"
        )
        assert data["gap"] == 0
        assert data["lower_bound"] == pytest.approx(data["cost"])

    def test_layers(self, capsys, folder, layers_file):
        data = command(
            capsys,
            "plan",
            "--ranks",
            "2",
            "--microbatches",
            "4",
            "--layers",
            layers_file,
            "--effort",
            "quick",
            "--json",
        )
        assert sum(data["partition"]) == 16
        (folder / "stages.json").write_text(json.dumps(data["costs"]))
        (folder / "s.json").write_text(json.dumps(data["schedule"]))
        simulated = command(capsys, "simulate", "s.json", "--costs", "stages.json", "--json")
        assert simulated["cost"] == pytest.approx(data["cost"])

    def test_jitter(self, capsys):
        data = command(
            capsys, "plan", *SIZES, "--placement", "linear", "--effort", "quick", "--jitter", "0.2", "--samples", "50",
            "--json",
        )  # fmt: skip
        schedule = notation.from_json(json.dumps(data["schedule"]))
        assert data["jitter"]["mean"] == pytest.approx(simulate_jitter(schedule, jitter=0.2, samples=50).mean)
