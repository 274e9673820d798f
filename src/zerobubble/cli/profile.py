"""`zerobubble profile`: what the stages of the demo's GPT take on this machine, as a costs file."""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from zerobubble.cli.emulate import step_bar
from zerobubble.cli.inputs import AsJson, check_file
from zerobubble.cli.output import console, print_json
from zerobubble.cli.plan import PlacementStyle
from zerobubble.errors import OptionError

if TYPE_CHECKING:
    from zerobubble.runtime import Profile

_MIB = 2**20


def profile(
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches per step.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Samples per microbatch.")] = 4,
    steps: Annotated[int, typer.Option(min=1, max=200, help="Measured steps; two more warm up.")] = 10,
    placement: Annotated[PlacementStyle, typer.Option(help="Where the stages lie (not auto).")] = PlacementStyle.linear,
    chunks: Annotated[int | None, typer.Option(min=1, help="Stages per rank, for loop and wave.")] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks of the GPT; at least one per stage.")] = 4,
    width: Annotated[int, typer.Option(min=4, help="Width of the GPT; a multiple of 4.")] = 256,
    context: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 128,
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder; by default the source of Python's standard library.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the costs: .json.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure F, B, W, hops and memory per stage of the demo's GPT, trained on real processes, as a costs file."""
    from zerobubble.demo.profiling import WARM_UP_STEPS, profile_all  # these need torch
    from zerobubble.demo.training import DemoConfig
    from zerobubble.models import GPTConfig, gpt_partition
    from zerobubble.runtime import Auto, launch

    begin = time.perf_counter()
    check_file(output, (".json",))
    if data is not None and not data.exists():
        raise OptionError(f"--data: there is no file or folder {data}")
    if width % 4:
        raise OptionError(f"--width must be a multiple of 4, the number of attention heads; got {width}")
    schedule = Auto(microbatches, placement=placement.value, chunks=chunks).safe_schedule(ranks)
    model = GPTConfig(blocks=blocks, width=width, context=context)
    gpt_partition(model, schedule.num_stages)
    config = DemoConfig(steps=steps, samples=samples * microbatches, data=data, model=model)
    with step_bar("profiling", steps + WARM_UP_STEPS) as on_step:
        found: Profile = launch(profile_all, ranks, schedule, config, on_news=on_step)[0]
    if output is not None:
        _write(found, output)
    if as_json:
        print_json(_to_dict(found, time.perf_counter() - begin))
        return
    _print(found, schedule.name)
    if ranks > (os.cpu_count() or 1):
        console().print(f"Note: {ranks} processes share {os.cpu_count()} processors, so times include waiting for one.")
    if output is not None:
        console().print(f"wrote {output}")


def _write(found: "Profile", output: Path) -> None:
    try:
        output.write_text(found.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{output}: cannot be written: {error.strerror or error}") from None


def _to_dict(found: "Profile", seconds: float) -> dict[str, Any]:
    spread = {key: list(values) for key, values in found.spread.items()}
    return {"costs": json.loads(found.to_json()), "spread": spread, "steps": found.steps, "seconds": seconds}


def _print(found: "Profile", name: str) -> None:
    costs: Any = found.costs
    table = Table(title=f"{found.steps} steps of {name}, medians ± half the distance of the quartiles, in {costs.unit}")
    for column in ("stage", "F", "B", "W", "hop to the next", "M_B MiB", "M_W MiB"):
        table.add_column(column, justify="right")
    hops = [*zip(costs.communication, found.spread["communication"], strict=True), None]
    for stage, hop in enumerate(hops):
        times = (
            _measured(getattr(costs, key)[stage], found.spread[key][stage])
            for key in ("forward", "backward_input", "backward_weight")
        )
        memory = (f"{sizes[stage] / _MIB:.2f}" for sizes in (costs.activation_memory, costs.weight_memory))
        table.add_row(str(stage), *times, _measured(*hop) if hop else "", *memory)
    console().print(table)


def _measured(value: float, spread: float) -> str:
    return f"{value:.2f} ± {spread / 2:.2f}"
