"""`zerobubble demo`: train a small GPT on real text with several schedules, and compare."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zerobubble.cli.inputs import AsJson
from zerobubble.cli.output import console, print_json
from zerobubble.errors import OptionError
from zerobubble.generators import find_generator, generate
from zerobubble.schedule import Schedule

_SAMPLES_PER_MICROBATCH = 4
_LEAST_BLOCKS = 4


def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of 4 samples per step.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Training steps per schedule.")] = 80,
    schedules: Annotated[
        str, typer.Option(help="Names, separated by commas; the others are compared with the first.")
    ] = "one_f_one_b,zb_h1,zb_h2,zb_v",
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder; by default the source of Python's standard library.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the timelines (SVG) and report.json.")] = Path("out"),
    as_json: AsJson = False,
) -> None:
    """Train a small GPT on real text: 1F1B, then zero bubble; compare."""
    from zerobubble.demo.report import draw, make_report, table  # these need torch
    from zerobubble.demo.text import load_text
    from zerobubble.demo.training import DemoConfig, train_all
    from zerobubble.models import GPTConfig
    from zerobubble.runtime import launch

    plans = _plans(schedules, ranks, microbatches)
    if data is not None and not data.exists():
        raise OptionError(f"--data: there is no file or folder {data}")
    if out.exists() and not out.is_dir():
        raise OptionError(f"--out: {out} is not a folder")
    model = GPTConfig(blocks=_blocks(plans))
    config = DemoConfig(steps=steps, samples=_SAMPLES_PER_MICROBATCH * microbatches, data=data, model=model)
    text = load_text(data, model.context)
    with _progress(plans, steps) as news:
        runs = launch(train_all, ranks, plans, config, on_news=news)[0]
    report = make_report(runs, config, text.unigram_entropy(), text.source)
    files = draw(runs, out)
    (out / "report.json").write_text(json.dumps(report.to_dict(), indent=2), encoding="utf-8")
    if as_json:
        print_json(report.to_dict())
    else:
        console().print(table(report))
        console().print(f"Timelines and report: {', '.join(map(str, files))}, {out / 'report.json'}")


def _plans(names: str, ranks: int, microbatches: int) -> list[Schedule]:
    wanted = [find_generator(name.strip()).name for name in names.split(",") if name.strip()]
    if not wanted or len(set(wanted)) < len(wanted):
        raise OptionError(f"--schedules needs one or more different names, separated by commas; got {names!r}")
    return [generate(name, ranks, microbatches) for name in wanted]


def _blocks(plans: list[Schedule]) -> int:
    """Transformer blocks: as many for every stage of each schedule, and not too few."""
    step = math.lcm(*(plan.num_stages for plan in plans))
    return step * math.ceil(_LEAST_BLOCKS / step)


@contextmanager
def _progress(plans: list[Schedule], steps: int) -> Iterator[Callable[[tuple[str, int]], None]]:
    """Context: a progress bar per schedule on standard error; gives the function to call after each block of steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks = {plan.name: bars.add_task(find_generator(plan.name).title, total=steps) for plan in plans}
        yield lambda news: bars.advance(tasks[news[0]], news[1])
