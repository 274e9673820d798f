"""`zerobubble show`: a schedule's timeline in the terminal or in a file, or the schedule in another notation."""

from collections.abc import Callable
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from zerobubble import notation, plot
from zerobubble.cli.compare import show_comparison
from zerobubble.cli.inputs import (
    SCHEDULE,
    AsJson,
    Chunks,
    CostsFile,
    MemoryLimit,
    Microbatches,
    Options,
    Ranks,
    simulated,
)
from zerobubble.cli.output import console, drawing_width, print_json
from zerobubble.errors import OptionError
from zerobubble.plot.trace import to_dict
from zerobubble.schedule import Schedule
from zerobubble.timeline import Timeline


class Notation(str, Enum):
    """A way to write a schedule."""

    text = "text"
    csv = "csv"
    torch = "torch"
    json = "json"


_WRITERS: dict[Notation, Callable[[Schedule], str]] = {
    Notation.text: notation.to_grid,
    Notation.csv: notation.to_csv,
    Notation.torch: lambda schedule: notation.to_csv(schedule, "torch"),
    Notation.json: lambda schedule: notation.to_json(schedule) + "\n",
}


def show(
    schedules: Annotated[list[str], typer.Argument(metavar="SCHEDULE...", help=SCHEDULE)],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    costs: CostsFile = None,
    memory_limit: MemoryLimit = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write a file: .svg, .png, .json (a trace for ui.perfetto.dev), .csv (the schedule)."
        ),
    ] = None,
    form: Annotated[
        Notation | None,
        typer.Option("--format", help="Give the schedule itself in this notation (torch: its CSV for torch)."),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Name the ops that came late: of a plan and a measured timeline, of two measured ones, or of one file "
            "that holds plan and measured step, as `emulate -o` writes it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw schedules and timelines over time, one above the other, compare two, or convert one with --format."""
    if as_json and (output or form):
        raise OptionError("--json prints the timeline; leave out --output and --format")
    options = Options(ranks, microbatches, chunks, costs, memory_limit)
    sources = [_timelines(source, options) for source in schedules]
    if compare:
        if form is not None:
            raise OptionError("--compare draws or prints; leave out --format")
        show_comparison(*_pair(sources), output, as_json)
        return
    timelines = list(chain.from_iterable(sources))
    if output is not None and form is None and output.suffix.lower() == ".csv":
        form = Notation.csv
    if as_json:
        print_json({"timelines": [to_dict(title, timeline) for title, timeline in timelines]})
    elif form is not None:
        _convert(timelines, form, output)
    elif output is not None:
        _draw(timelines, output)
    else:
        out = console()
        basic = out.color_system in ("standard", "windows")
        out.print(plot.text(timelines, drawing_width(), basic_colours=basic), soft_wrap=True)


def _timelines(source: str, options: Options) -> list[tuple[str, Timeline]]:
    """Those in a file of timelines, else the simulation of a schedule."""
    return plot.read(source) if plot.holds_timelines(source) else [simulated(source, options)]


def _pair(sources: list[list[tuple[str, Timeline]]]) -> tuple[tuple[str, Timeline], tuple[str, Timeline]]:
    """What is to be compared: the last timeline of each of two sources, or the first and last of a single one."""
    counts = [len(source) for source in sources]
    if len(sources) > 2 or sum(counts) < 2 or 0 in counts:
        raise OptionError(
            f"--compare needs two timelines: two sources, or one file that holds a plan and a measured step; "
            f"got {len(sources)} with {' and '.join(map(str, counts))}"
        )
    return (sources[0][0] if len(sources) == 1 else sources[0][-1]), sources[-1][-1]


def _convert(timelines: list[tuple[str, Timeline]], form: Notation, output: Path | None) -> None:
    if len(timelines) > 1:
        raise OptionError(f"one schedule at a time can be written as {form.value}; got {len(timelines)}")
    written = _WRITERS[form](timelines[0][1].schedule)
    if output is None:
        console().file.write(written)
        return
    try:
        output.write_text(written, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{output}: cannot be written: {error.strerror or error}") from None
    console().print(f"wrote {output}")


def _draw(timelines: list[tuple[str, Timeline]], output: Path) -> None:
    if output.suffix.lower() not in plot.SUFFIXES:
        raise OptionError(
            f"{output}: cannot tell what to write from the suffix {output.suffix!r}; possible are "
            f"{', '.join(plot.SUFFIXES)} and .csv, and any with --format"
        )
    plot.save(timelines, output)
    console().print(f"wrote {output}")
