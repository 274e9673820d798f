"""A transformer layer of each of the paper's models (table 3) on a GPU: T_F, T_B, T_W, the cost of the split, memory.

Per model: the times of F, B and W by events on the device, F + B + W over F and the ordinary backward (alternating),
and what F and B leave in memory beside the paper's table 1 in units of s*b*h bytes: M_B = 34 + 5as/h with attention
written out, 34 without (fused attention keeps no s x s matrix), M_W = 32; no dropout here.

It has not been run on a GPU yet. `--device cpu --scale 16` tries the script itself.

    python benchmarks/gpu/run.py --json benchmarks/gpu/results-<gpu>-<date>.json
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

import zerobubble as zb
from zerobubble.models.gpt import Block, GPTConfig
from zerobubble.paper import facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MODELS = facts()["table_3_models"]
MICROBATCHES = 4


@dataclass(frozen=True)
class Result:
    """Times in ms per layer and microbatch; memory in units of s*b*h bytes per layer."""

    model: str
    forward: float
    backward_input: float
    backward_weight: float
    split_over_plain: float
    after_forward: float
    after_backward_input: float


def mean_square(output: Tensor, _targets: object) -> Tensor:
    return output.float().square().mean()


def measure(name: str, layers: int, scale: int, steps: int, device: torch.device, dtype: torch.dtype) -> Result:
    model = MODELS[name]
    width, length, size = model["hidden"] // scale, model["sequence"] // scale, model["microbatch_size"]
    heads = max(model["heads"] // scale, 1)
    config = GPTConfig(width=width - width % heads, heads=heads, context=length, dropout=0.0)
    torch.manual_seed(0)
    blocks = [Block(config).to(device, dtype) for _ in range(layers)]
    pipeline = zb.Pipeline(blocks, mean_square, zb.zb_h1(1, MICROBATCHES), device=device)
    batch = torch.randn(size * MICROBATCHES, length, config.width, device=device, dtype=dtype)
    memory = pipeline.measure_memory(batch)
    ratio = split_over_plain(pipeline, batch, steps)
    costs = pipeline.profile(min(steps, 20)).costs
    per_stage, unit = memory.per_stage(), size * length * config.width * layers
    first = [part[0] if isinstance(part, tuple) else part for part in (costs.forward, costs.backward_input)]
    weight = costs.backward_weight[0] if isinstance(costs.backward_weight, tuple) else costs.backward_weight
    times = (part / layers for part in (*first, weight))
    return Result(name, *times, ratio, per_stage[0][0] / unit, per_stage[1][0] / unit)


def split_over_plain(pipeline: zb.Pipeline, batch: Tensor, steps: int) -> float:
    """Median over alternating steps of F + B + W over F and autograd's own backward."""
    ours, plain = [], []
    for _ in range(steps + 2):
        ours.append(seconds(lambda: pipeline.step(batch), batch.device))
        plain.append(seconds(lambda: ordinary(pipeline, batch), batch.device))
        pipeline.zero_grad(set_to_none=False)
    return median(ours[2:]) / median(plain[2:])


def ordinary(pipeline: zb.Pipeline, batch: Tensor) -> None:
    """The same step in plain PyTorch."""
    for part in batch.chunk(MICROBATCHES):
        for block in pipeline.module.values():
            part = block(part)
        (mean_square(part, None) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that `run` takes until the device is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = perf_counter()
    run()
    wait()
    return perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layers", type=int, default=2, help="blocks that are measured together")
    parser.add_argument("--scale", type=int, default=1, help="divide width and length by this")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--json", type=Path, help="write the figures, the hardware and the date here")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "no GPU here; this benchmark waits for one (--device cpu --scale 16 tries the script)\n")
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    dtype = getattr(torch, args.dtype)
    results = [measure(name, args.layers, args.scale, args.steps, device, dtype) for name in args.models]
    report(results, f"{hardware}, {args.dtype}, torch {torch.__version__}, {date.today()}")
    if args.json:
        record: dict[str, object] = {
            "hardware": hardware,
            "date": str(date.today()),
            "torch": torch.__version__,
            "dtype": args.dtype,
        }
        record["results"] = [asdict(result) for result in results]
        args.json.write_text(json.dumps(record, indent=1), encoding="utf-8")


def report(results: list[Result], where: str) -> None:
    table = Table(title=f"One layer: {where}")
    memory = "M_B / sbh (paper 34 + 5as/h)", "M_W / sbh (paper 32)"
    for column in ("model", "T_F ms", "T_B ms", "T_W ms", "split / plain", *memory):
        table.add_column(column, justify="left" if column == "model" else "right")
    for r in results:
        times = (f"{t:.3f}" for t in (r.forward, r.backward_input, r.backward_weight))
        kept = (f"{units:.1f}" for units in (r.after_forward, r.after_backward_input))
        table.add_row(r.model, *times, f"{r.split_over_plain:.3f}", *kept)
    Console().print(table)


if __name__ == "__main__":
    main()
