"""Draws the boundary between two steps on four ranks, as measured: an ordinary one, and one whose step is amended.

Emulated compute, real processes. Pale: step k. Strong: step k+1. Crossed out: forwards of step k+1 that ran on weights
that turned out wrong, and ran again. A black line is the optimizer's step; a red one, below, is `Validate`.

    python benchmarks/post_validation/picture.py -o docs/images/post-validation.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import zerobubble as zb
from zerobubble.plot.layout import COLOURS, MEANINGS, ink
from zerobubble.runtime import Pipeline, launch
from zerobubble.runtime.emulation import emulated_loss, emulation

RANKS, MICROBATCHES, MILLISECONDS = 4, 8, 40.0
FILLING = 2


class Step(NamedTuple):
    """What a rank did in one training step, on the machine's clock (ns)."""

    ops: list[tuple[int, int]]
    discarded: list[tuple[int, int]]
    stepped: int


def record(_report: Any, schedule: zb.Schedule, amend: bool) -> list[Step]:
    """The last two steps of this rank."""
    stages = emulation(zb.Costs(unit="ms"), schedule, MILLISECONDS)
    pipeline = Pipeline(stages.layers(), emulated_loss, schedule, wrap_transport=stages.delayed)
    optimizer = zb.PostValidatedOptimizer(torch.optim.AdamW(pipeline.parameters()), clip_norm=1.0)
    steps = []
    for number in range(FILLING + 2):
        pipeline.step(torch.ones(MICROBATCHES, 1))
        for parameter in pipeline.module.parameters():
            parameter.grad.fill_(0.9 if amend and number == FILLING else 0.1)
        optimizer.step()
        executor = pipeline._executors[dist.get_rank()]
        discarded = [pair for starts, ends in executor.discarded for pair in zip(starts, ends)]
        steps.append(Step(list(zip(executor.starts, executor.ends)), discarded, perf_counter_ns()))
    return steps[FILLING:]


def draw(axes: Any, title: str, schedule: zb.Schedule, by_rank: list[list[Step]]) -> None:
    """One panel: from the last quarter of step k to the first half of step k+1."""
    origin = min(before.ops[len(before.ops) * 3 // 5][0] for before, _ in by_rank)
    end = max(after.ops[len(after.ops) // 2][1] for _, after in by_rank)
    for rank, (before, after) in enumerate(by_rank):
        order = schedule.orders[rank]
        runs = [(before.ops, "pale"), (after.discarded, "crossed out"), (after.ops, "strong")]
        for times, style in runs:
            for op, (start, stop) in zip(order, times):
                if start >= origin and stop <= end:
                    _box(axes, rank, op, (start - origin) / 1e6, (stop - start) / 1e6, style)
        axes.plot([(before.stepped - origin) / 1e6] * 2, [rank + 0.03, rank + 0.97], color="black", linewidth=2.5)
        warm_up = next(i for i, op in enumerate(order) if op.kind is not zb.Kind.F)
        first = after.discarded or after.ops
        validated = (first[warm_up - 1][1] - origin) / 1e6
        axes.plot([validated] * 2, [rank + 0.75, rank + 1.05], color="#d00000", linewidth=2.5)
    axes.set_xlim(0, max(axes.get_xlim()[1], (end - origin) / 1e6))
    axes.set_ylim(len(by_rank) + 0.1, -0.05)
    axes.set_yticks([rank + 0.5 for rank in range(len(by_rank))], [f"rank {rank}" for rank in range(len(by_rank))])
    axes.set_title(title, loc="left", fontsize=11, weight="bold")
    axes.tick_params(labelbottom=True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _box(axes: Any, rank: int, op: zb.Op, start: float, width: float, style: str) -> None:
    red, green, blue = COLOURS[op.kind]
    whiter = {"pale": 0.62, "strong": 0.0, "crossed out": 0.8}[style]
    colour = (red + (1 - red) * whiter, green + (1 - green) * whiter, blue + (1 - blue) * whiter)
    edge, hatch = ("#c4c4c4", "xxx") if style == "crossed out" else ("white", None)
    box = Rectangle((start, rank + 0.09), width, 0.82, facecolor=colour, edgecolor=edge, linewidth=0.6, hatch=hatch)
    axes.add_patch(box)
    axes.text(start + width / 2, rank + 0.5, str(op.microbatch), ha="center", va="center", fontsize=8,
              color=ink(colour))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, nargs="+", help=".svg or .png")
    args = parser.parse_args()
    schedule = zb.zb_h2(RANKS, MICROBATCHES)
    figure = Figure(figsize=(13, 6.4), facecolor="white", layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (title, amend) in zip(panels, (("An ordinary step boundary", False), ("The step is amended", True))):
        draw(axes, title, schedule, launch(record, RANKS, schedule, amend, time_limit=120))
    panels[-1].set_xlabel("time (ms)")
    handles = [Patch(facecolor=COLOURS[kind], label=f"{kind}  {MEANINGS[kind]}") for kind in list(MEANINGS)[:3]]
    handles += [
        Patch(facecolor="#cccccc", label="step k (pale)"),
        Patch(facecolor="#eeeeee", edgecolor="#c4c4c4", hatch="xxx", label="runs again"),
        Patch(facecolor="black", label="optimizer.step()"),
        Patch(facecolor="#d00000", label="Validate"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    for path in args.output:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
