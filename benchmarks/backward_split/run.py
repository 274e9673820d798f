"""Claim: splitting the backward costs next to nothing. (F + B + W) over (F + ordinary backward), one thread.

Ours and torch's split (`stage_backward_input`, `stage_backward_weight`) run GPT blocks, alternating with the
ordinary backward in one process; the figure is the median of the ratios.

    python benchmarks/backward_split/run.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
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

SIZES = [(64, 1), (64, 8), (64, 32), (128, 8), (256, 1), (256, 4), (256, 8), (512, 1), (512, 4), (1024, 1), (1024, 2)]
"""(hidden, blocks)."""


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


def seconds(run: Callable[[], None]) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def measure(work: Work, budget: float) -> tuple[float, float, float]:
    """Milliseconds of the ordinary way; ours and torch's over it (median of alternating runs)."""
    for run in (work.ordinary, work.ours, work.torchs):
        run()
    plain, ours, torchs = [], [], []
    end = perf_counter() + budget
    while perf_counter() < end or len(plain) < 5:
        plain.append(seconds(work.ordinary))
        ours.append(seconds(work.ours) / plain[-1])
        torchs.append(seconds(work.torchs) / plain[-1])
    return median(plain) * 1e3, median(ours), median(torchs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=8.0, help="per size")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    table = Table(title=f"(F + B + W) over (F + backward); {args.samples} x {args.length} tokens, one thread")
    for column in ("hidden", "blocks", "ordinary ms", "ours", "torch's"):
        table.add_column(column, justify="right")
    rows = []
    for hidden, blocks in track(SIZES, "Sizes", console=Console(stderr=True)):
        plain, ours, torchs = measure(Work(hidden, blocks, args.samples, args.length), args.seconds)
        rows.append({"hidden": hidden, "blocks": blocks, "ordinary_ms": plain, "ours": ours, "torch": torchs})
        table.add_row(str(hidden), str(blocks), f"{plain:.1f}", f"{ours:.3f}", f"{torchs:.3f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
