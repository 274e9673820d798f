"""What averaging gradients over replicas adds to a step when it overlaps the last W, and when it follows them.

Emulated: two pipelines of two ranks, in real processes over gloo; layers sleep T_F, T_B and T_W and have real weights.
Three ways, alternating step by step: no reduction at all (`no_sync`); buckets of one layer's weights, sent off as they
get done; one bucket per stage, so sent off after its last W. Draws a step of the second.

    python benchmarks/data_parallel/run.py --picture docs/images/replicas.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerobubble as zb
from zerobubble.plot.layout import MEANINGS, Panel, ink, shade
from zerobubble.runtime import Pipeline, launch
from zerobubble.runtime.emulation import Times, emulated, emulated_loss

if TYPE_CHECKING:
    from zerobubble.runtime.reducer import Reduction

REPLICAS, RANKS, LAYERS = 2, 2, 4
NAMES = ("one_f_one_b", "zb_h1", "zb_v")
WAYS = ("no reduction", "per layer, overlapping", "per stage, at the end")


class Layer(nn.Module):
    """An emulated layer with a weight of `mib` MiB."""

    def __init__(self, times: Times, mib: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(int(mib * 2**20 / 4)))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return emulated(x, self.weight, self.times)


def measure(_report: Any, name: str, microbatches: int, seconds: float, mib: float, steps: int) -> Any:
    """Seconds of the fastest step of each way, and timeline and reductions of the last overlapping step."""
    schedule = zb.generate(name, RANKS, microbatches)
    share = seconds / LAYERS * schedule.num_ranks / RANKS
    layers = [lambda: Layer(Times(share, share, share), mib)] * (LAYERS * RANKS)
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS))

    def pipeline(cap: float) -> Pipeline:
        return Pipeline(layers, emulated_loss, schedule, mesh=mesh, bucket_cap_mb=cap, timeout=120)

    overlapping, at_the_end = pipeline(mib), pipeline(float("inf"))
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(steps + 1):
        for way in WAYS:
            used = at_the_end if way == WAYS[2] else overlapping
            used.zero_grad()
            dist.barrier()
            begin = perf_counter()
            if way == WAYS[0]:
                with used.no_sync():
                    used.step(torch.ones(microbatches, 1))
            else:
                used.step(torch.ones(microbatches, 1))
            dist.barrier()
            if step > 0:  # the first one agrees on shapes
                took[way].append(perf_counter() - begin)
    fastest = {way: min(times) for way, times in took.items()}
    return fastest, overlapping.timelines()[0], overlapping.reductions()[0]


def draw(timeline: zb.Timeline, reductions: list[Reduction], title: str, path: Path) -> None:
    """Per rank a row of its ops, and under it its reductions."""
    panel = Panel(title, timeline)
    figure = Figure(figsize=(11, 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank in range(RANKS):
        for box in panel.boxes(rank):
            colour = shade(box.op.kind, box.chunk, panel.num_chunks)
            axes.barh(
                2 * rank, box.end - box.start, left=box.start, height=0.9, color=colour, edgecolor="white", lw=0.6
            )
            axes.text(
                (box.start + box.end) / 2, 2 * rank, box.op.microbatch, ha="center", va="center",
                fontsize=7, color=ink(colour),
            )  # fmt: skip
        own = [reduction for reduction in reductions if reduction.rank == rank]
        for number, r in enumerate(own):
            axes.barh(2 * rank + 0.62 + 0.2 * number, r.end - r.start, left=r.start, height=0.16, color="#7a3b8f")
    axes.invert_yaxis()
    axes.set_yticks([y for rank in range(RANKS) for y in (2 * rank, 2 * rank + 0.92)],
                    [text for rank in range(RANKS) for text in (f"rank {rank}", "reductions")])  # fmt: skip
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=shade(kind, 0, panel.num_chunks), label=MEANINGS[kind]) for kind in panel.kinds]
    handles.append(Patch(color="#7a3b8f", label="a bucket of gradients on its way through the replicas"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--milliseconds", type=float, default=40.0, help="T_F = T_B = T_W of a rank's layers")
    parser.add_argument("--mib", type=float, default=8.0, help="weights of a layer; a rank has four layers")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--picture", type=Path, help="draw a step of ZB-H1 into this file")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    arguments = parser.parse_args()
    table = Table(title="emulated: seconds of the fastest step, and what reducing gradients adds to it")
    for heading in ("schedule", *WAYS, "adds, overlapping", "adds, at the end"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    found = {}
    for name in NAMES:
        sizes = (arguments.microbatches, arguments.milliseconds / 1e3, arguments.mib, arguments.steps)
        results = launch(measure, REPLICAS * RANKS, name, *sizes, time_limit=600)
        took, timeline, reductions = results[0]
        none, overlapping, at_the_end = (took[way] for way in WAYS)
        added = [f"{(way - none) * 1e3:.0f} ms" for way in (overlapping, at_the_end)]
        table.add_row(zb.GENERATORS[name].title, *(f"{took[way]:.3f}" for way in WAYS), *added)
        found[name] = took
        if arguments.picture and name == "zb_h1":
            title = f"ZB-H1, emulated, one of two replicas: {RANKS} ranks, {LAYERS} layers each, a bucket per layer"
            draw(timeline, reductions, title, arguments.picture)
    Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
