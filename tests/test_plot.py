"""Drawings: what stands in them, that nothing overlaps, and that the same timeline gives the same drawing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import pytest
from rich.console import Console

from zerobubble import GENERATORS, Costs, Kind, Timeline, generate, lower, plot, simulate
from zerobubble.errors import OptionError
from zerobubble.lower import Send
from zerobubble.plot.layout import COLOURS, Panel, shade, tick_step
from zerobubble.plot.text import text
from zerobubble.plot.trace import trace

UNEVEN = Costs(18.5, 18.1, 9.3, communication=0.7, unit="ms")


def timeline(name: str, num_ranks: int = 4, num_microbatches: int = 8, costs: Costs | None = None) -> Timeline:
    schedule = generate(name, num_ranks, num_microbatches)
    return simulate(schedule, (costs or Costs()).split(schedule.num_stages // num_ranks))


def later(one: Timeline, by: float) -> Timeline:
    """The same timeline as a clock would measure it that does not start at 0."""
    moved = [tuple(tuple(time + by for time in row) for row in rows) for rows in (one.starts, one.ends)]
    return replace(one, starts=moved[0], ends=moved[1])


class TestLayout:
    def test_every_rank_has_as_much_time_as_the_cost(self):
        panel = Panel("", timeline("zb_h2", costs=UNEVEN))
        assert [end - start for start, end in panel.windows] == pytest.approx([panel.timeline.cost] * 4)
        assert [start for start, _ in panel.windows] == [row[0] for row in panel.timeline.starts]

    def test_phases_of_1f1b(self):
        assert Panel("", timeline("one_f_one_b")).phases == ((10, 22), (8, 23), (6, 24), (4, 25))

    def test_gpipe_has_no_steady_phase(self):
        assert all(warm == cool for warm, cool in Panel("", timeline("gpipe")).phases)

    def test_chunk_is_the_index_among_the_stages_of_the_rank(self):
        assert Panel("", timeline("zb_v", 3)).chunks == (0, 0, 0, 1, 1, 1)

    def test_caption_names_rate_cost_and_memory(self):
        one = timeline("one_f_one_b", costs=Costs(unit="ms"))
        assert Panel("", one).caption == "bubble rate 27.3%, cost 33 ms, peak memory 4"
        assert Panel("", replace(one, peak_memory=())).caption == "bubble rate 27.3%, cost 33 ms"

    @pytest.mark.parametrize(
        ("end", "most", "step"), [(33, 10, 5), (100, 10, 10), (0.7, 8, 0.1), (1e6, 3, 5e5), (0, 5, 1)]
    )
    def test_tick_step(self, end, most, step):
        assert tick_step(end, most) == pytest.approx(step)

    def test_colours_stay_apart_without_red_green_vision(self):
        """Machado et al. 2009: what a deuteranope sees of a linear RGB colour."""
        matrix = ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969))

        def seen(kind: Kind) -> list[float]:
            linear = [part**2.2 for part in COLOURS[kind]]
            return [max(sum(m * part for m, part in zip(row, linear)), 0) ** (1 / 2.2) for row in matrix]

        together = [pair for pair in combinations(Kind, 2) if set(pair) != {Kind.W, Kind.BW}]
        for one, other in together:
            assert sum((a - b) ** 2 for a, b in zip(seen(one), seen(other))) ** 0.5 > 0.2, (one, other)

    def test_chunks_get_lighter(self):
        lightness = [sum(shade(Kind.F, chunk, 4)) for chunk in range(4)]
        assert lightness == sorted(set(lightness))


class TestText:
    def test_picture(self):
        drawn = text([("ZB-H1", timeline("zb_h1", 2, 3))], width=45)
        assert drawn.plain.splitlines() == [
            "ZB-H1  bubble rate 10.0%, cost 10, peak memory 2",
            "rank 0 F0 F1 ...B0 W0 F2 B1 W1 B2 W2 ",
            "rank 1    F0 B0 F1 B1 W0 F2 B2 W1 W2 ...",
            "       |              |              |",
            "       0              5              10",
            " F  forward    B  backward (input)",
            " W  backward (weights)   . bubble",
        ]  # the legend does not fit on one line of 45

    def test_an_op_fills_the_columns_whose_middle_it_covers(self):
        costs = Costs(1.4, 1.7, 0.3)  # in 20 columns of 0.17 F ends at 8.2, B at 18.2
        row = text([("", timeline("zb_h1", 1, 1, costs))], width=7 + 3 + 20).plain.splitlines()[1]
        assert row == "rank 0 F0      B0        W0"

    def test_ops_without_room_keep_their_letter(self):
        one = timeline("one_f_one_b", 2, 4)  # its last window ends at 16; one column per unit of time
        assert text([("", one)], width=30).plain.splitlines()[1] == "rank 0 FF..BWFBWFBW.BW"

    def test_second_chunk_has_small_letters(self):
        rows = text([("", timeline("zb_v", 2, 2))], width=100).plain.splitlines()
        assert "f0" in rows[1]
        assert "F0" in rows[1]
        assert rows[-1].endswith("small letter: odd chunk")

    @pytest.mark.parametrize("name", GENERATORS)
    @pytest.mark.parametrize("width", [40, 80, 133])
    @pytest.mark.parametrize("costs", [Costs(), UNEVEN], ids=["equal", "uneven"])
    def test_keeps_within_the_width(self, name, width, costs):
        lines = text([("", timeline(name, costs=costs))], width).plain.splitlines()[1:]
        assert max(map(len, lines)) <= width
        assert max(map(len, lines)) > 0.5 * width

    @pytest.mark.parametrize("name", GENERATORS)
    def test_every_op_is_there_in_order_when_there_is_room(self, name):
        one = timeline(name, 3, 5)
        lines = text([("", one)], 800).plain.splitlines()
        for rank, order in enumerate(one.schedule.orders):
            words = lines[1 + rank].removeprefix(f"rank {rank} ").replace(".", " ").split()
            assert [word.upper() for word in words] == [f"{op.kind}{op.microbatch}" for op in order]

    @pytest.mark.parametrize("basic", [False, True])
    def test_kinds_and_chunks_differ_in_colour(self, basic):
        drawn = text([("", timeline("zb_v", 2, 2))], 200, basic_colours=basic)
        styles = {drawn.plain[span.start : span.end].strip().rstrip("01"): str(span.style) for span in drawn.spans}
        colours = [styles[letter] for letter in "FBWfbw"]
        assert len(set(colours)) == 6

    def test_letters_survive_where_there_is_no_colour(self, capsys):
        Console(no_color=True, width=100).print(text([("", timeline("zb_h1", 2, 2))], 100), soft_wrap=True)
        assert "F0" in capsys.readouterr().out

    def test_several_share_the_axis(self):
        pair = [("a", timeline("one_f_one_b", 2, 4)), ("b", timeline("zb_h2", 2, 4))]
        lines = text(pair, 100).plain.splitlines()
        assert (lines[0].split()[0], lines[3].split()[0]) == ("a", "b")
        columns = 5  # per unit of time: 1F1B's last window ends at 16
        assert lines[1].index("B") == 7 + 4 * columns
        assert lines[4].index("B") == 7 + 3 * columns


class TestFigure:
    @pytest.fixture(autouse=True)
    def _needs_matplotlib(self):
        pytest.importorskip("matplotlib")

    def draw(self, *timelines):
        from zerobubble.plot.figure import draw

        return draw(list(timelines))

    @pytest.mark.parametrize("name", GENERATORS)
    def test_one_box_per_op_at_its_time(self, name):
        one = timeline(name, costs=UNEVEN)
        boxes = [c for c in self.draw(("", one)).axes[0].collections if len(c.get_paths()) == one.schedule.num_ops]
        found = sorted(tuple(path.get_extents().intervalx) for path in boxes[0].get_paths())
        pairs = zip(sum(one.starts, ()), sum(one.ends, ()))
        assert found == [pytest.approx(pair) for pair in sorted(pairs)]

    @pytest.mark.parametrize("name", GENERATORS)
    def test_no_two_texts_overlap_and_all_stay_on_the_sheet(self, name):
        figure = self.draw(("A long title, " * 12, timeline(name)), (name, timeline(name, 6, 3)))
        figure.canvas.draw()
        boxes = [(t.get_text(), t.get_window_extent()) for t in _texts(figure)]
        assert len(boxes) > 20
        for (_, one), (_, other) in combinations(boxes, 2):
            assert not one.overlaps(other), (one, other)
        width, height = figure.canvas.get_width_height()
        assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for _, b in boxes)

    def test_numbers_stay_inside_their_boxes(self):
        one = timeline("zb_v", 4, 12, UNEVEN)
        axes = self.draw(("", one)).axes[0]
        axes.figure.canvas.draw()
        spans = {}
        for rank, order in enumerate(one.schedule.orders):
            for op, start, end in zip(order, one.starts[rank], one.ends[rank]):
                middle = round((start + end) / 2, 6), rank + 0.5
                spans[middle] = (str(op.microbatch), axes.transData.transform([(start, 0), (end, 0)])[:, 0])
        numbers = [t for t in axes.texts if t.get_text().isdigit()]
        assert len(numbers) > one.schedule.num_ops / 2
        for number in numbers:
            x, y = number.get_position()
            word, (left, right) = spans[round(x, 6), y]
            extent = number.get_window_extent()
            assert number.get_text() == word
            assert left <= extent.x0
            assert extent.x1 <= right

    def test_dollars_in_a_title_are_not_mathematics(self):
        title = "$x_1$ and $"
        texts = {t.get_text(): t for t in self.draw((title, timeline("zb_h1"))).axes[0].texts}
        assert not texts[title].get_parse_math()

    def test_legend_names_what_is_there(self):
        labels = [t.get_text() for t in self.draw(("", timeline("interleaved"))).legends[0].get_texts()]
        assert labels == ["F  forward", "BW  backward (both)", "bubble", "chunks 0 and 1"]

    def test_axis_names_the_unit(self):
        assert self.draw(("", timeline("zb_h1", costs=UNEVEN))).axes[-1].get_xlabel() == "time (ms)"
        assert self.draw(("", timeline("zb_h1"))).axes[-1].get_xlabel() == "time"

    def test_same_timeline_same_svg(self, tmp_path):
        one = [("ZB-H1", timeline("zb_h1"))]
        for name in ("a.svg", "b.svg"):
            plot.save(one, tmp_path / name)
        svg = (tmp_path / "a.svg").read_text()
        assert svg == (tmp_path / "b.svg").read_text()
        assert "<dc:date>" not in svg

    def test_png(self, tmp_path):
        plot.save([("ZB-H1", timeline("zb_h1"))], str(tmp_path / "a.PNG"))
        assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")

    def test_many_ops_stay_small(self, tmp_path):
        """An SVG path for each of 98304 boxes took 20 MB, which no browser likes."""
        plot.save([("", timeline("zb_h1", 64, 512, UNEVEN))], tmp_path / "a.svg")
        assert (tmp_path / "a.svg").stat().st_size < 2e6

    def test_no_time_at_all(self):
        self.draw(("", timeline("zb_h1", costs=Costs(0, 0, 0)))).canvas.draw()


class TestTrace:
    def events(self, *timelines, phase="X"):
        made = trace(list(timelines))
        assert json.loads(json.dumps(made)) == made
        return [event for event in made["traceEvents"] if event["ph"] == phase]

    def test_every_op_is_a_complete_event_in_microseconds(self):
        one = timeline("zb_v", costs=replace(UNEVEN, unit="ms"))
        events = {event["name"]: event for event in self.events(("", one))}
        assert len(events) == one.schedule.num_ops
        for rank, order in enumerate(one.schedule.orders):
            for op, start, end in zip(order, one.starts[rank], one.ends[rank]):
                event = events[str(op)]
                assert (event["pid"], event["tid"], event["cat"]) == (0, rank, op.kind.value)
                assert event["ts"] == pytest.approx(1000 * start, abs=1e-3)
                assert event["dur"] == pytest.approx(1000 * (end - start), abs=2e-3)
                assert event["args"]["microbatch"] == op.microbatch
                assert event["args"]["stage"] == op.stage

    @pytest.mark.parametrize(
        ("unit", "scale"), [("s", 1e6), ("ms", 1e3), ("us", 1), ("ns", 1e-3), ("", 1), ("ticks", 1)]
    )
    def test_units(self, unit, scale):
        events = self.events(("", timeline("gpipe", 1, 1, Costs(8, 8, 8, unit=unit))))
        assert [(event["ts"], event["dur"]) for event in events] == [(0, 8 * scale), (8 * scale, 16 * scale)]

    @pytest.mark.parametrize("name", GENERATORS)
    def test_ops_of_a_thread_do_not_overlap(self, name):
        """Viewers nest events that overlap by a rounding error."""
        thirds = Costs(1 / 3, 2 / 3, 1 / 7, communication=0.01, unit="us")
        last: dict[int, float] = {}
        for event in sorted(self.events(("", timeline(name, costs=thirds))), key=lambda e: e["ts"]):
            assert event["ts"] >= last.get(event["tid"], 0.0) - 1e-9
            last[event["tid"]] = event["ts"] + event["dur"]

    @pytest.mark.parametrize("name", GENERATORS)
    def test_an_arrow_for_every_message(self, name):
        one = timeline(name)
        messages = [i.message for program in lower(one.schedule) for i in program.instructions if isinstance(i, Send)]
        starts, ends = (self.events(("", one), phase=phase) for phase in "sf")
        assert [event["id"] for event in starts] == [event["id"] for event in ends]
        assert len({event["id"] for event in starts}) == len(messages)
        assert sorted((m.source, m.target) for m in messages) == sorted(
            (start["tid"], end["tid"]) for start, end in zip(starts, ends)
        )

    def test_arrows_begin_and_end_inside_their_ops(self):
        ops = self.events(("", timeline("zb_h1", costs=UNEVEN)))
        arrows = [self.events(("", timeline("zb_h1", costs=UNEVEN)), phase=phase) for phase in "sf"]
        for start, end in zip(*arrows):
            producer, consumer = (
                next(op for op in ops if op["tid"] == e["tid"] and op["ts"] < e["ts"] < op["ts"] + op["dur"])
                for e in (start, end)
            )
            assert abs(producer["args"]["stage"] - consumer["args"]["stage"]) == 1
            assert producer["args"]["microbatch"] == consumer["args"]["microbatch"]
            assert producer["ts"] + producer["dur"] <= consumer["ts"]

    def test_processes_and_threads_have_names(self):
        events = self.events(("one", timeline("gpipe", 2)), ("two", timeline("zb_h1", 3)), phase="M")
        names = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
        assert names == [(0, 0, "rank 0"), (0, 1, "rank 1"), (1, 0, "rank 0"), (1, 1, "rank 1"), (1, 2, "rank 2")]
        titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert [title.split(" (")[0] for title in titles] == ["one", "two"]


class TestSave:
    def test_measured_timelines_start_at_zero_too(self, tmp_path):
        one = timeline("zb_h1")
        for suffix in (".json", ".svg"):
            plot.save([("", one)], tmp_path / f"a{suffix}")
            plot.save([("", later(one, by=4096.0))], tmp_path / f"b{suffix}")
            assert (tmp_path / f"a{suffix}").read_text() == (tmp_path / f"b{suffix}").read_text()
        assert text([("", one)]).plain == text([("", later(one, by=4096.0))]).plain

    def test_trace(self, tmp_path):
        plot.save([("", timeline("zb_h1"))], tmp_path / "a.json")
        assert json.loads((tmp_path / "a.json").read_text()) == trace([("", timeline("zb_h1"))])

    @pytest.mark.parametrize("name", ["a.pdf", "a", ".svg"])
    def test_unknown_suffix_lists_what_is_possible(self, name, tmp_path):
        with pytest.raises(OptionError, match=r"\.svg .*\.png .*\.json"):
            plot.save([("", timeline("zb_h1"))], tmp_path / name)

    @pytest.mark.parametrize("name", ["a.svg", "a.json"])
    def test_missing_folder(self, name, tmp_path):
        with pytest.raises(OptionError, match="cannot be written: No such file or directory"):
            plot.save([("", timeline("zb_h1"))], tmp_path / "none" / name)

    @pytest.mark.parametrize("draw", [text, trace, lambda t: plot.save(t, "a.svg")])
    def test_nothing_to_draw(self, draw):
        with pytest.raises(OptionError, match="nothing to draw"):
            draw([])

    @pytest.mark.parametrize("draw", [text, lambda t: plot.save(t, "a.svg")], ids=["text", "figure"])
    def test_one_axis_one_unit(self, draw):
        mixed = [("a", timeline("zb_h1")), ("b", timeline("zb_h1", costs=UNEVEN))]
        with pytest.raises(OptionError, match="'a' has '', 'b' has 'ms'"):
            draw(mixed)

    def test_without_matplotlib_the_error_says_what_to_install(self, tmp_path):
        code = (
            "import sys; sys.modules['matplotlib'] = None\n"
            "import zerobubble as zb\n"
            "from zerobubble import plot\n"
            "one = [('', zb.simulate(zb.zb_h1(2, 2)))]\n"
            "plot.save(one, sys.argv[1] + '/a.json'); plot.text(one)\n"
            "try: plot.save(one, sys.argv[1] + '/a.svg')\n"
            "except zb.errors.MissingExtraError as error: print(error)"
        )
        run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert "pip install 'zerobubble[plot]'" in run.stdout


def _texts(figure):
    for axes in figure.axes:
        yield from axes.texts
        yield axes.xaxis.label
        for axis in (axes.xaxis, axes.yaxis):
            yield from (tick.label1 for tick in axis.get_major_ticks() if tick.label1.get_visible())
    for legend in figure.legends:
        yield from legend.get_texts()
