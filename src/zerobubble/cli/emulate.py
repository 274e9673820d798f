"""`zerobubble emulate`: rehearse a schedule on real processes, with stages that sleep their times."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from zerobubble import notation, plot
from zerobubble.cli.inputs import (
    SCHEDULE,
    AsJson,
    Chunks,
    CostsFile,
    MemoryLimit,
    Microbatches,
    Options,
    Ranks,
    check_file,
    read_costs,
    read_schedule,
)
from zerobubble.cli.output import console, drawing_width, print_json
from zerobubble.errors import OptionError
from zerobubble.validate import validate

if TYPE_CHECKING:
    from zerobubble.runtime.rehearsal import Rehearsal

_MOST_RANKS = 64


class Runtime(str, Enum):
    """Whose executor runs the schedule."""

    zerobubble = "zerobubble"
    torch = "torch"


def emulate(
    schedule: Annotated[str, typer.Option(help=SCHEDULE)],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    costs: CostsFile = None,
    memory_limit: MemoryLimit = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps; some more warm up.")] = 10,
    runtime: Annotated[
        Runtime, typer.Option(help="Ours, or the schedule runtime of torch.distributed.pipelining.")
    ] = Runtime.zerobubble,
    stretch: Annotated[
        float, typer.Option(help="Multiply all times, so that what the runtime adds counts less.")
    ] = 1.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Draw the plan above the measured step: .svg, .png, or .json (a trace)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse a schedule: one real process per rank, with stages that sleep their times (ms without a unit)."""
    from zerobubble.runtime.rehearsal import WARM_UP_STEPS, rehearse  # needs torch

    begin = time.perf_counter()
    if not 0 < stretch < float("inf"):
        raise OptionError(f"--stretch must be a positive number; got {stretch:g}")
    check_file(output, plot.SUFFIXES)
    title, plan = read_schedule(schedule, Options(ranks, microbatches, chunks))
    times = read_costs(costs, plan)
    validate(plan, memory_limit, times)
    if plan.num_ranks > _MOST_RANKS:
        raise OptionError(f"{plan.num_ranks} ranks are too many processes for one machine; at most {_MOST_RANKS}")
    with step_bar("emulating", steps + WARM_UP_STEPS + 1) as on_step:
        done = rehearse(plan, times, steps, stretch=stretch, runtime=runtime.value, on_step=on_step)
    pair = [(f"{title}, plan", done.simulated), (f"{title}, measured (emulated compute)", done.timeline)]
    if output is not None:
        plot.save(pair, output)
    if as_json:
        print_json(_to_dict(done, stretch, time.perf_counter() - begin))
        return
    _print(done, title, stretch)
    if output is None:
        console().print(plot.text(pair, drawing_width()), soft_wrap=True)
    else:
        console().print(f"wrote {output}")


@contextmanager
def step_bar(what: str, total: int) -> Iterator[Callable[[Any], None]]:
    """Context: a progress bar on a terminal's standard error; gives the function to call after each step."""
    error = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeRemainingColumn(), console=error, transient=True, disable=not error.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda _: bar.advance(task)


def _to_dict(done: "Rehearsal", stretch: float, seconds: float) -> dict[str, Any]:
    return {
        "schedule": notation.to_dict(done.schedule),
        "runtime": done.runtime,
        "steps": done.steps,
        "stretch": stretch,
        "step_seconds_measured": done.step_seconds_measured,
        "step_seconds_spread": done.spread,
        "step_seconds_simulated": done.step_seconds_simulated,
        "bubble_rate_measured": done.bubble_rate_measured,
        "bubble_rate_simulated": done.simulated.bubble_rate,
        "peak_memory": list(done.peak_memory),
        "peak_memory_simulated": list(done.simulated.peak_memory),
        "bytes_per_unit_of_memory": done.bytes,
        "seconds": seconds,
    }


def _print(done: "Rehearsal", title: str, stretch: float) -> None:
    out, schedule = console(), done.schedule
    stretched = "" if stretch == 1 else f", all times multiplied by {stretch:g}"
    out.print(
        f"{title}, emulated: {schedule.num_ranks} processes, {schedule.num_microbatches} microbatches, "
        f"{done.steps} steps in the runtime of {done.runtime}{stretched}"
    )
    table = Table()
    for name in ("", "measured", "simulated", "measured / simulated"):
        table.add_column(name, justify="right" if name else "left")
    measured, simulated = done.step_seconds_measured * 1e3, done.step_seconds_simulated * 1e3
    step = f"{measured:.2f} ms ± {done.spread * 5e2:.2f}"
    table.add_row("step time", step, f"{simulated:.2f} ms", f"{measured / simulated:.3f}" if simulated else "")
    table.add_row("bubble rate", f"{done.bubble_rate_measured:.1%}", f"{done.simulated.bubble_rate:.1%}")
    for rank, (peak, planned) in enumerate(zip(done.peak_memory, done.simulated.peak_memory, strict=True)):
        table.add_row(f"peak memory of rank {rank}", f"{peak:.3g}", f"{planned:.3g}")
    out.print(table)
    out.print(
        f"Step time: median ± half of what lies between the quartiles. 1 unit of memory: {done.bytes:,.0f} bytes."
    )
