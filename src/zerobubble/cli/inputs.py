"""What several commands take: a schedule by file or by generator, its sizes, costs and a memory limit."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zerobubble import notation
from zerobubble.costs import Costs
from zerobubble.errors import OptionError
from zerobubble.generators import GENERATORS, find_generator, generate
from zerobubble.schedule import Schedule
from zerobubble.simulate import simulate
from zerobubble.timeline import Timeline
from zerobubble.validate import validate

SCHEDULE = "A schedule file (.csv, .json, or a text grid), or the name of a generator (see `zerobubble schedules`)."

Ranks = Annotated[int | None, typer.Option("--ranks", help="Ranks of the pipeline; for a generator.")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", help="Microbatches; for a generator.")]
Chunks = Annotated[int | None, typer.Option("--chunks", help="Stages per rank; for a generator that lets you choose.")]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        help="JSON file with forward, backward_input, backward_weight, ...: one number, or one per stage; lists with "
        "one entry per rank are cut evenly into chunks. Without it F, B and W take 1 on every rank.",
    ),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        "--memory-limit", help="Most activation memory per rank, in the unit of activation_memory in the costs."
    ),
]
Jitter = Annotated[
    float | None,
    typer.Option(
        help="Also run it with times drawn at random: their standard deviation as a share of the mean, say 0.1."
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="How often times are drawn with --jitter.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True)
class Options:
    """The options that `simulate` and `show` share, as given."""

    ranks: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    costs: Path | None = None
    memory_limit: float | None = None


def simulated(source: str, options: Options) -> tuple[str, Timeline]:
    """Title and timeline of the schedule that `source` names.

    Raises:
        OptionError: an option or argument that cannot be used, or a file that is not there.
        ZeroBubbleError: the schedule or the costs are malformed, do not fit each other, or need too much memory.
    """
    limit = options.memory_limit
    if limit is not None and not limit > 0:  # NaN is not, either
        raise OptionError(f"--memory-limit must be a positive number; got {limit:g}")
    title, schedule = read_schedule(source, options)
    costs = read_costs(options.costs, schedule)
    validate(schedule, limit, costs)
    return title, simulate(schedule, costs)


def read_schedule(source: str, options: Options) -> tuple[str, Schedule]:
    """Title and schedule of a generator's name or a file's path. The name wins; write `./name` for the file."""
    if os.sep not in source and "." not in source and _is_generator(source):
        generator = find_generator(source)
        return generator.title, _generated(generator.name, options)
    if os.path.isdir(source):
        raise OptionError(f"{source} is a directory; give a schedule file or the name of a generator")
    if not os.path.exists(source):
        raise OptionError(f"no file and no generator is called {source!r}; the generators are {', '.join(GENERATORS)}")
    for name in ("ranks", "microbatches", "chunks"):
        if getattr(options, name) is not None:
            raise OptionError(f"--{name} is for generators; the schedule in {source} has its own")
    schedule = notation.load(Path(source))
    return schedule.name, schedule


def _is_generator(name: str) -> bool:
    try:
        return bool(find_generator(name))
    except OptionError:
        return False


def _generated(name: str, options: Options) -> Schedule:
    if options.ranks is None or options.microbatches is None:
        raise OptionError(
            f"the generator {name} needs sizes: add --ranks and --microbatches, say --ranks 4 --microbatches 8"
        )
    for size in ("ranks", "microbatches", "chunks"):
        value = getattr(options, size)
        if value is not None and value < 1:
            raise OptionError(f"--{size} must be at least 1; got {value}")
    return generate(name, options.ranks, options.microbatches, options.chunks)


def check_file(path: Path | None, suffixes: Iterable[str]) -> None:
    """Raise `OptionError` before long work where a file to be written has no place or another suffix."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        possible = ", ".join(suffixes)
        raise OptionError(f"{path}: cannot tell what to write from the suffix {path.suffix!r}; possible are {possible}")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{path}: cannot be written: there is no folder {path.parent}")


def read_costs(path: Path | None, schedule: Schedule) -> Costs:
    """The costs in `path`. Without one, F, B and W of a rank's whole share take 1, in however many chunks."""
    if path is None:
        return Costs().split(max(schedule.num_stages // schedule.num_ranks, 1))
    if path.is_dir():
        raise OptionError(f"--costs: {path} is a directory; give a JSON file")
    if not os.path.exists(path):
        raise OptionError(f"--costs: there is no file {path}")
    return Costs.load(path)
