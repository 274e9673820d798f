"""The command line: what it prints, its exit status, and that no mistake of a user's ends in a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer

import zerobubble as zb
from zerobubble import cli, notation
from zerobubble.paper import tables

SIZES = ("--ranks", "4", "--microbatches", "8")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def process(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zerobubble", *arguments], capture_output=True, text=True, check=False, **options
    )


class TestSchedules:
    def test_lists_every_generator(self, run):
        lines = run("schedules").splitlines()
        for generator in zb.GENERATORS.values():
            line = next(line for line in lines if f" {generator.name} " in line)
            for value in (generator.title, generator.placement, generator.bubble, generator.memory, generator.good_for):
                assert f" {value} " in line

    def test_json(self, run):
        rows = json.loads(run("schedules", "--json"))["schedules"]
        assert [row["name"] for row in rows] == list(zb.GENERATORS)
        assert set(rows[0]) == {"name", "title", "placement", "bubble", "memory", "good_for"}


class TestSimulate:
    @pytest.mark.parametrize("name", zb.GENERATORS)
    def test_json(self, run, name):
        data = json.loads(run("simulate", name, *SIZES, "--json"))
        schedule = zb.generate(name, 4, 8)
        timeline = zb.simulate(schedule, zb.Costs().split(schedule.num_stages // 4))
        assert data["schedule"] == notation.to_dict(schedule)
        assert data["cost"] == timeline.cost
        assert data["makespan"] == timeline.makespan
        assert data["bubble_rate"] == timeline.bubble_rate
        assert data["peak_memory"] == list(timeline.peak_memory)
        assert data["lower_bound"] is None
        assert 0 < data["seconds"] < 60

    def test_prints_figures_per_rank_and_critical_path(self, run):
        out = run("simulate", "zb_h1", *SIZES)
        words = [line.replace("│", " ").split() for line in out.splitlines()]
        assert ["cost", "27"] in words
        assert ["bubble", "rate", "0.1111"] in words
        assert [w for w in words if w[:1] in (["0"], ["3"])] == [["0", "27", "3", "4"], ["3", "24", "0", "2.5"]]
        assert out.splitlines()[-1].startswith("critical path: 0F0 to 0W7: ")

    def test_costs_file_with_an_entry_per_rank_serves_more_chunks(self, run, folder):
        times = {"forward": [1, 2, 3, 4], "backward_input": 2, "backward_weight": 1, "unit": "ms"}
        (folder / "costs.json").write_text(json.dumps(times))
        data = json.loads(run("simulate", "zb_v", *SIZES, "--costs", "costs.json", "--json"))
        assert data["unit"] == "ms"
        assert data["cost"] == zb.simulate(zb.zb_v(4, 8), zb.Costs.load(folder / "costs.json")).cost

    def test_titles_are_names_too(self, run):
        assert json.loads(run("simulate", "1F1B", *SIZES, "--json"))["schedule"]["name"] == "one_f_one_b"

    def test_chunks(self, run):
        data = json.loads(run("simulate", "interleaved", *SIZES, "--chunks", "3", "--json"))
        assert len(data["schedule"]["placement"]) == 12

    def test_file_beside_a_generators_name_is_read_by_path(self, run, folder):
        (folder / "zb_h1").write_text("0F0 0BW0\n")
        assert json.loads(run("simulate", "./zb_h1", "--json"))["cost"] == 3

    def test_memory_limit_that_is_kept(self, run):
        assert json.loads(run("simulate", "zb_h1", *SIZES, "--memory-limit", "4", "--json"))["peak_memory"][0] == 4

    def test_memory_limit_that_is_not(self, fail):
        status, message = fail("simulate", "zb_h1", *SIZES, "--memory-limit", "3")
        assert status == 1
        assert "0F3 needs 4 of activation memory on rank 0, over the limit of 3" in message
        assert "rank 0 | 0F0 0F1 0F2 [0F3]" in message

    def test_brackets_in_a_file_name_are_no_markup(self, run, folder):
        (folder / "a[red]b.txt").write_text("0F0 0BW0\n")
        assert run("simulate", "a[red]b.txt").startswith("a[red]b: 1 rank, 1 stage")


class TestShow:
    def test_draws_in_the_terminal(self, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", "90")
        lines = run("show", "1f1b", "zb_h1", *SIZES).splitlines()
        assert lines[0] == "1F1B  bubble rate 27.3%, cost 33, peak memory 4"
        assert lines[5] == "ZB-H1  bubble rate 11.1%, cost 27, peak memory 4"
        assert lines[6] == "rank 0 F0F1F2F3......B0W0F4B1W1F5B2W2F6B3W3F7B4W4B5W5B6W6B7W7"
        assert "\x1b" not in "".join(lines)

    @pytest.mark.parametrize(("form", "read"), [
        ("text", notation.from_grid),
        ("csv", notation.from_csv),
        ("torch", notation.from_csv),
        ("json", notation.from_json),
    ])  # fmt: skip
    @pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
    def test_converts(self, run, folder, form, read, name):
        printed = run("show", name, *SIZES, "--format", form)
        assert read(printed) == zb.generate(name, 4, 8)
        assert run("show", name, *SIZES, "--format", form, "-o", "written") == "wrote written\n"
        assert (folder / "written").read_text() == printed

    def test_torch_has_its_own_letters(self, run):
        assert run("show", "zb_h1", "--ranks", "1", "--microbatches", "1", "--format", "torch") == "0F0,0I0,0W0\n"

    @pytest.mark.parametrize("suffix", [".csv", ".json", ".svg", ".png"])
    def test_writes_by_suffix(self, run, folder, suffix):
        if suffix in (".svg", ".png"):
            pytest.importorskip("matplotlib")
        path = folder / f"out{suffix}"
        assert run("show", "zb_h1", *SIZES, "-o", str(path)) == f"wrote {path}\n"
        starts = {".csv": b"0F0,0F1", ".json": b'{"displayTimeUnit"', ".svg": b"<?xml", ".png": b"\x89PNG"}
        assert path.read_bytes().startswith(starts[suffix])

    def test_csv_is_simulated_as_the_generator_is(self, run):
        run("show", "zb_h1", *SIZES, "-o", "a.csv")
        made, read = (json.loads(run("simulate", *what, "--json")) for what in (("zb_h1", *SIZES), ("a.csv",)))
        assert read["cost"] == made["cost"]
        assert read["schedule"]["orders"] == made["schedule"]["orders"]

    def test_json(self, run):
        data = json.loads(run("show", "1f1b", "zb_h1", *SIZES, "--json"))
        assert [one["title"] for one in data["timelines"]] == ["1F1B", "ZB-H1"]
        assert data["timelines"][1]["starts"][0][:4] == [0, 1, 2, 3]

    @pytest.mark.parametrize(("arguments", "message"), [
        (("zb_h1", *SIZES, "-o", "a.pdf"), "cannot tell what to write from the suffix '.pdf'; possible are .svg"),
        (("zb_h1", *SIZES, "-o", "none/a.csv"), "none/a.csv: cannot be written: No such file or directory"),
        (("zb_h1", *SIZES, "-o", "none/a.json"), "none/a.json: cannot be written: No such file or directory"),
        (("zb_h1", "1f1b", *SIZES, "--format", "csv"), "one schedule at a time can be written as csv; got 2"),
        (("zb_h1", *SIZES, "--format", "yaml"), "'yaml' is not one of 'text', 'csv', 'torch', 'json'"),
        (("zb_h1", *SIZES, "--json", "-o", "a.svg"), "--json prints the timeline; leave out --output and --format"),
        ((), "Missing argument 'SCHEDULE...'"),
    ])  # fmt: skip
    def test_wrong_usage(self, fail, folder, arguments, message):
        status, said = fail("show", *arguments)
        assert (status, message in said) == (2, True), said
        assert list(folder.iterdir()) == []


class TestPaper:
    def test_table_5_as_json(self, run):
        data = json.loads(run("paper", "--table", "5", "--json"))
        assert len(data["rows"]) == 12
        assert data["rows"]["1.5B/p8/m24"]["ZB-H1"]["printed"] == 0.1585
        exact = [cells[c] for cells in data["rows"].values() for c in ("1F1B", "ZB-H1", "ZB-H2")]
        assert len([cell for cell in exact if cell["ours"] == cell["printed"]]) == 36
        assert data["rows"]["1.5B/p8/m24"]["ZB-2p"]["ours"] == 0.0433

    def test_all_tables(self, run):
        out = run("paper")
        assert [line for line in out.splitlines() if line.startswith("Table")] == [
            "Table 2: bubble and peak activation memory of the handcrafted schedules",
            "Table 5: bubble rates",
            "Table 8: bubble rates with ZB-V",
        ]
        assert "the times behind this table are not printed in the paper" in out
        rows = [line.replace("│", " ").split() for line in out.splitlines()]
        at = next(i for i, row in enumerate(rows) if row[:1] == ["1.5B/p8/m24"])
        assert rows[at][1:] == ["printed", "0.2431", "0.1055", "0.1585", "0.1083", "0.1585", "0.0433"]
        assert rows[at + 1][:2] == ["ours", "0.2431"]

    def test_several_tables_as_json(self, run, monkeypatch):
        monkeypatch.setattr(sys.modules["zerobubble.cli.paper"], "TABLES", {2: tables.table_2})
        assert json.loads(run("paper", "--json")) == {"tables": [tables.table_2().to_dict()]}

    def test_no_such_table(self, fail):
        status, message = fail("paper", "--table", "3")
        assert (status, "'3' is not one of '2', '5', '8'" in message) == (2, True), message


class TestMistakes:
    """Each a line on standard error; status 2 where the command line is wrong, 1 where a file's content is."""

    @pytest.mark.parametrize(("arguments", "message"), [
        (("simulate", "zb_h9"), "no file and no generator is called 'zb_h9'; the generators are gpipe, "),
        (("simulate", "missing.csv"), "no file and no generator is called 'missing.csv'"),
        (("simulate", "a" * 400), "no file and no generator is called 'aaa"),
        (("simulate", ""), "no file and no generator is called ''"),
        (("simulate", "."), ". is a directory"),
        (("simulate",), "Missing argument"),
        (("simulate", "zb_h1"), "the generator zb_h1 needs sizes: add --ranks and --microbatches"),
        (("simulate", "zb_h1", "--ranks", "4"), "the generator zb_h1 needs sizes"),
        (("simulate", "zb_h1", "--ranks", "0", "--microbatches", "8"), "--ranks must be at least 1; got 0"),
        (("simulate", "zb_h1", "--ranks", "4", "--microbatches", "-3"), "--microbatches must be at least 1; got -3"),
        (("simulate", "interleaved", *SIZES, "--chunks", "0"), "--chunks must be at least 1; got 0"),
        (("simulate", "zb_h1", *SIZES, "--chunks", "2"), "zb_h1 has a fixed number of chunks per rank"),
        (("simulate", "zb_h1", "--ranks", "four", "--microbatches", "8"), "Invalid value for '--ranks'"),
        (("simulate", "zb_h1", *SIZES, "--memory-limit", "nan"), "--memory-limit must be a positive number; got nan"),
        (("simulate", "zb_h1", *SIZES, "--memory-limit", "-1"), "--memory-limit must be a positive number; got -1"),
        (("simulate", "zb_h1", *SIZES, "--costs", "missing.json"), "--costs: there is no file missing.json"),
        (("simulate", "zb_h1", *SIZES, "--costs", "."), "--costs: . is a directory"),
        (("simulate", "zb_h1", *SIZES, "--colour"), "see zerobubble simulate --help"),
        (("fly",), "see zerobubble --help"),
    ])  # fmt: skip
    def test_wrong_usage(self, fail, arguments, message):
        status, said = fail(*arguments)
        assert (status, message in said) == (2, True), said
        assert said.count("\n") == 1

    @pytest.mark.parametrize(("name", "content", "message"), [
        ("a.csv", b"0F0,0B0,zzz\n", "a.csv: line 1, cell 3: 'zzz' is not an op"),
        ("a.csv", b"", "a.csv: no ops found"),
        ("a.csv", b"\xff\xfe\x00", "a.csv: cannot be read as a schedule"),
        ("a.csv", b"0F0,0BW0,0BW0\n", "0BW0 is there twice"),
        ("a.json", b"{", "a.json: line 1, column 2: not JSON"),
        ("a.json", b"[1]", "a.json: must be one JSON object"),
        ("a.json", b'{"placement": [0], "orders": [["0F0"]]}', 'a.json: missing key "num_microbatches"'),
        ("a.txt", b"rank 0 | 0BW0 0F0\n", "0BW0 stands before 0F0"),
    ])  # fmt: skip
    @pytest.mark.parametrize("command", ["simulate", "show"])
    def test_bad_schedule_file(self, fail, folder, command, name, content, message):
        (folder / name).write_bytes(content)
        status, said = fail(command, name)
        assert (status, message in said) == (1, True), said

    @pytest.mark.parametrize(("content", "message"), [
        ('{"forward": 1', "costs.json, line 1, column 14: not JSON"),
        ('{"forward": [1, 2, 3], "backward_input": 1, "backward_weight": 1}', "the lists have 3 entries, but"),
        ('{"forward": 1, "backward_input": 1, "backward_weight": 1, "foo": 2}', 'costs.json: unknown key "foo"'),
        ('{"forward": [1, -2, 1, 1], "backward_input": 1, "backward_weight": 1}', 'costs.json: "forward", entry 1'),
        ('{"forward": 1, "backward_input": NaN, "backward_weight": 1}', 'costs.json: "backward_input" must be finite'),
        ("[1]", "costs.json: costs must be one JSON object"),
    ])  # fmt: skip
    def test_bad_costs_file(self, fail, folder, content, message):
        (folder / "costs.json").write_text(content)
        status, said = fail("simulate", "zb_h1", *SIZES, "--costs", "costs.json")
        assert (status, message in said) == (1, True), said
        assert said.count("\n") == 1

    def test_sizes_beside_a_file(self, fail, folder):
        (folder / "a.txt").write_text("0F0 0BW0\n")
        status, said = fail("simulate", "a.txt", "--ranks", "2")
        assert (status, said) == (2, "--ranks is for generators; the schedule in a.txt has its own\n")

    def test_a_missing_extra_is_a_failure(self, fail, monkeypatch):
        monkeypatch.setattr("zerobubble.plot.save", _missing)
        assert fail("show", "zb_h1", *SIZES, "-o", "a.svg") == (1, "needs matplotlib\n")


def _missing(*_):
    raise zb.errors.MissingExtraError("needs matplotlib")


class TestProcess:
    def test_version(self):
        done = process("--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"zerobubble {zb.__version__}\n", "")

    def test_alone_it_helps(self):
        done = process()
        assert done.returncode == 0
        assert all(command in done.stdout for command in ("simulate", "show", "schedules", "paper"))

    @pytest.mark.parametrize(("arguments", "status"), [(["simulate", "a.csv"], 1), (["simulate", "b.csv"], 2)])
    def test_status_and_no_traceback(self, folder, arguments, status):
        (folder / "a.csv").write_text("x")
        done = process(*arguments)
        assert (done.returncode, done.stdout) == (status, "")
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr

    def test_nothing_is_wrapped_when_piped(self):
        lines = process("schedules").stdout.splitlines()
        assert len([line for line in lines if line.startswith("│")]) == len(zb.GENERATORS)
        assert max(map(len, lines)) > 120

    def test_terminal_without_utf8(self):
        done = process("schedules", env=os.environ | {"PYTHONIOENCODING": "ascii"})
        assert (done.returncode, done.stderr) == (0, "")
        assert "zb_h1" in done.stdout

    def test_letters_that_the_terminal_lacks(self, folder):
        (folder / "é.txt").write_text("0F0 0BW0\n")
        done = process("show", "é.txt", env=os.environ | {"PYTHONIOENCODING": "ascii"})
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("?  bubble rate 0.0%")

    def test_reader_that_leaves(self):
        """`zerobubble show ... | head -1` printed a BrokenPipeError."""
        command = [sys.executable, "-m", "zerobubble", "show", "zb_h1", "--ranks", "64", "--microbatches", "200"]
        with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            child.stdout.read(1)
            child.stdout.close()
            assert child.stderr.read() == b""

    @pytest.mark.parametrize("raised", [KeyboardInterrupt, typer.Abort])
    def test_interrupt_before_a_command_begins(self, monkeypatch, raised):
        def interrupted(*_, **__):
            raise raised

        monkeypatch.setattr(cli, "app", interrupted)
        assert cli.main([]) == 130

    @pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
    def test_interrupt_is_quiet(self):
        """Interrupted while it waits for a schedule from a pipe that nobody writes to."""
        os.mkfifo("pipe")
        command = [sys.executable, "-m", "zerobubble", "simulate", "pipe"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            writer = os.open("pipe", os.O_WRONLY)  # returns when the child has opened its end: it is in main by then
            time.sleep(0.2)
            child.send_signal(signal.SIGINT)
            assert child.communicate(timeout=30) == (b"", b"")
            os.close(writer)
        assert child.returncode == 130

    def test_planning_commands_leave_torch_alone(self):
        code = "import sys; from zerobubble import cli; cli.main(['schedules']); sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
