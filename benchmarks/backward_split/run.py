"""Claim: splitting the backward costs next to nothing. (F + B + W) over (F + ordinary backward), one thread.

Ours and torch's split (`stage_backward_input`, `stage_backward_weight`) run GPT blocks, alternating with the
ordinary backward in one process; the figures are medians of the ratios, of elapsed and of processor time.

Each size is measured in two processes. In one, the C library's malloc is told to keep what is freed, for all three
alike: so does the caching allocator of a GPU, and so memory that W frees is not fetched from the system page by page in
the next B. In the other, malloc is as it comes (rows "as it comes").

    python benchmarks/backward_split/run.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from zerobubble.models.gpt import Block, GPTConfig
from zerobubble.runtime import SplitBackward, WeightStore
from zerobubble.runtime.split import backward

if TYPE_CHECKING:
    from collections.abc import Callable

    Seconds = tuple[float, float]
    """Elapsed, and of the processor."""

SIZES = [(64, 1), (64, 8), (64, 32), (128, 8), (256, 1), (256, 4), (256, 8), (512, 1), (512, 4), (1024, 1), (1024, 2)]
"""(hidden, blocks)."""

MALLOC = {
    "keeps all": {
        "MALLOC_TOP_PAD_": str(2**29),
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
    },
    "as it comes": {},
}
"""Environment for glibc (mallopt(3)): with the first it returns nothing to the system. Other C libraries ignore it."""


class Work:
    """GPT blocks, an input and an output gradient; three ways to run forward and backward."""

    def __init__(self, hidden: int, blocks: int, samples: int, length: int) -> None:
        config = GPTConfig(width=hidden, context=length, dropout=0.0)
        self.model = torch.nn.Sequential(*[Block(config) for _ in range(blocks)])
        self.x = torch.randn(samples, length, hidden, requires_grad=True)
        self.gradient = torch.randn_like(self.x)
        self.weights = list(self.model.parameters())

    def ordinary(self) -> None:
        torch.autograd.backward([self.model(self.x)], [self.gradient])

    def ours(self) -> None:
        store = WeightStore()
        with SplitBackward(store):
            y = self.model(self.x)
        backward([y], [self.gradient], store)
        del y
        store.run()

    def torchs(self) -> None:
        y = self.model(self.x)
        _, groups = stage_backward_input([y], [self.gradient], [self.x], iter(self.weights))
        stage_backward_weight(iter(self.weights), groups)


def seconds(run: Callable[[], None]) -> Seconds:
    elapsed, processor = perf_counter(), process_time()
    run()
    return perf_counter() - elapsed, process_time() - processor


def measure(work: Work, budget: float) -> dict[str, float]:
    """Of the ordinary way the milliseconds, of ours and torch's the ratios to it in the same round (medians)."""
    ways = {"ordinary": work.ordinary, "ours": work.ours, "torch": work.torchs}
    rounds: list[dict[str, Seconds]] = []
    end = perf_counter() + budget
    while perf_counter() < end or len(rounds) < 7:
        ways = dict([*list(ways.items())[1:], *list(ways.items())[:1]])  # each way follows each other one in turn
        rounds.append({name: seconds(run) for name, run in ways.items()})
    del rounds[:2]  # the first gradients are made, not added
    figures = {"ordinary_ms": 1e3 * median(r["ordinary"][0] for r in rounds), "rounds": len(rounds)}
    for name in ("ours", "torch"):
        for clock, unit in enumerate(("", "_cpu")):
            figures[name + unit] = median(r[name][clock] / r["ordinary"][clock] for r in rounds)
    return figures


def measure_apart(size: tuple[int, int], environment: dict[str, str], options: list[str]) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--one", *map(str, size), *options]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0, help="per size and malloc")
    parser.add_argument("--hidden", type=int, help="only this size")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.one:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        hidden, blocks = args.one
        print(json.dumps(measure(Work(hidden, blocks, args.samples, args.length), args.seconds)))
        return

    options = [f"--samples={args.samples}", f"--length={args.length}", f"--seconds={args.seconds}"]
    table = Table(title=f"(F + B + W) over (F + backward); {args.samples} x {args.length} tokens, one thread")
    for column in ("hidden", "blocks", "malloc", "ordinary ms", "ours", "CPU", "torch's", "CPU"):
        table.add_column(column, justify="right")
    rows = []
    sizes = [size for size in SIZES if args.hidden in (None, size[0])]
    cases = [(size, malloc) for size in sizes for malloc in MALLOC]
    for (hidden, blocks), malloc in track(cases, "Sizes", console=Console(stderr=True)):
        figures = measure_apart((hidden, blocks), MALLOC[malloc], options)
        rows.append({"hidden": hidden, "blocks": blocks, "malloc": malloc, **figures})
        ratios = (f"{figures[name]:.3f}" for name in ("ours", "ours_cpu", "torch", "torch_cpu"))
        table.add_row(str(hidden), str(blocks), malloc, f"{figures['ordinary_ms']:.1f}", *ratios)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
