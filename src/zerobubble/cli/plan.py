"""`zerobubble plan`: the best schedule for given costs and memory."""

import math
import os
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from zerobubble import notation
from zerobubble.cli.inputs import AsJson, Jitter, MemoryLimit, Samples
from zerobubble.cli.output import console, print_json
from zerobubble.cli.plan_report import print_answer, to_dict
from zerobubble.cli.plan_request import Request, answer_to
from zerobubble.cli.plan_sweep import sweep_memory as sweep
from zerobubble.costs import Costs
from zerobubble.errors import OptionError
from zerobubble.planner import placements_for
from zerobubble.planner.advice import per_rank
from zerobubble.schedule import Schedule


class PlacementStyle(str, Enum):
    """Where stages lie, or `auto` to try several."""

    auto = "auto"
    linear = "linear"
    loop = "loop"
    v = "v"
    wave = "wave"


class Effort(str, Enum):
    """How long to search."""

    quick = "quick"
    default = "default"
    exact = "exact"


class Dialect(str, Enum):
    """Whose notation the file has."""

    ours = "ours"
    torch = "torch"


def plan(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the pipeline.")],
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches per step.")],
    costs: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with forward, backward_input, backward_weight, ...: one number, or a list with one per "
            "rank or per stage. Stages are cut evenly where a placement has more of them. One number is for a stage; "
            "with placement auto, and without a file (where F, B and W take 1), for a whole rank."
        ),
    ] = None,
    memory_limit: MemoryLimit = None,
    placement: Annotated[PlacementStyle, typer.Option(help="Where the stages lie.")] = PlacementStyle.auto,
    chunks: Annotated[int | None, typer.Option(min=1, help="Stages per rank, for loop and wave.")] = None,
    effort: Annotated[
        Effort | None,
        typer.Option(help="How much to try; exact needs OR-tools. By default: default, or quick with --sweep-memory."),
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds to search at most.")] = None,
    layers: Annotated[
        Path | None,
        typer.Option(
            help="JSON file as for --costs, but with one entry per layer: the cut into stages is planned, too."
        ),
    ] = None,
    jitter: Jitter = None,
    samples: Samples = 200,
    form: Annotated[Dialect, typer.Option("--format", help="Notation of the CSV: ours, or torch's.")] = Dialect.ours,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the schedule: .csv or .json. With --sweep-memory: .svg or .png."),
    ] = None,
    sweep_memory: Annotated[
        bool, typer.Option("--sweep-memory", help="Plan for many memory limits: bubble against memory.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan the best schedule for given costs and memory, and say how far from the best possible it is."""
    start = time.perf_counter()
    _check(memory_limit, time_limit, jitter)
    _check_output(output, memory_limit, form, sweep_memory)
    chosen = effort or (Effort.quick if sweep_memory else Effort.default)
    request = Request(
        ranks=ranks,
        microbatches=microbatches,
        costs=_read_costs(costs, layers, ranks, placement.value, chunks),
        memory_limit=memory_limit,
        placement=placement.value,
        chunks=chunks,
        effort=chosen.value,
        time_limit=time_limit,
        layers=_load("--layers", layers) if layers else None,
    )
    if sweep_memory:
        sweep(request, output, as_json, start)
        return
    answer = answer_to(request, jitter, samples)
    if output is not None:
        _write(answer.timeline.schedule, output, form)
    seconds = time.perf_counter() - start
    if as_json:
        print_json(to_dict(answer, request, jitter, seconds))
    elif output is None and form is Dialect.torch:
        console().file.write(notation.to_csv(answer.timeline.schedule, "torch"))
    else:
        print_answer(answer, request, jitter, seconds)
        if output is not None:
            console().print(f"wrote {output}")


def _check(memory_limit: float | None, time_limit: float | None, jitter: float | None) -> None:
    for name, value in (("--memory-limit", memory_limit), ("--time-limit", time_limit)):
        if value is not None and not value > 0:  # NaN is not, either
            raise OptionError(f"{name} must be a positive number; got {value:g}")
    if jitter is not None and not 0 <= jitter < math.inf:
        raise OptionError(f"--jitter must be a share that is not negative, such as 0.1; got {jitter:g}")


def _check_output(output: Path | None, memory_limit: float | None, form: Dialect, sweep_memory: bool) -> None:
    suffix = None if output is None else output.suffix.lower()
    if sweep_memory and memory_limit is not None:
        raise OptionError("--sweep-memory chooses the limits; leave out --memory-limit")
    if suffix is not None and suffix not in ((".svg", ".png") if sweep_memory else (".csv", ".json")):
        possible = ".svg and .png" if sweep_memory else ".csv and .json"
        raise OptionError(f"{output}: cannot tell what to write from the suffix {suffix!r}; possible are {possible}")
    if form is Dialect.torch and suffix == ".json":
        raise OptionError("--format torch is a CSV; give a file that ends in .csv")


def _read_costs(costs: Path | None, layers: Path | None, ranks: int, placement: str, chunks: int | None) -> Costs:
    """Costs with one entry per rank or finer. With `auto`, a single number is for a whole rank, else for a stage."""
    if costs is not None and layers is not None:
        raise OptionError("give --costs, per stage, or --layers, per layer; not both")
    if costs is None:
        return per_rank(Costs(), ranks)
    stages = ranks if placement == "auto" else placements_for(placement, ranks, chunks)[0].num_stages
    return per_rank(_load("--costs", costs), ranks, stages // ranks)


def _load(option: str, path: Path) -> Costs:
    if path.is_dir():
        raise OptionError(f"{option}: {path} is a directory; give a JSON file")
    if not os.path.exists(path):
        raise OptionError(f"{option}: there is no file {path}")
    return Costs.load(path)


def _write(schedule: Schedule, output: Path, form: Dialect) -> None:
    written = notation.to_json(schedule) + "\n" if output.suffix.lower() == ".json" else ""
    try:
        output.write_text(written or notation.to_csv(schedule, form.value), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{output}: cannot be written: {error.strerror or error}") from None
