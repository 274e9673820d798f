"""Claim: the executed zero-bubble schedules keep what they promise on paper. Emulated compute, real processes.

Every layer sleeps the same time in F, B and W; schedules run in alternating blocks of steps; the figure is the median
step time over 1F1B's, beside the simulated ratio.

    python benchmarks/zero_bubble_vs_1f1b/run.py --ranks 4 --microbatches 8 --milliseconds 20
"""

from __future__ import annotations

import argparse
import json
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zerobubble as zb
from zerobubble.runtime import Pipeline, launch
from zerobubble.runtime.emulation import EmulatedLayer, Times, emulated_loss

NAMES = ("one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v")


def times_of(schedule: zb.Schedule, seconds: float) -> Times:
    """A rank's whole share takes `seconds` per op, in however many chunks."""
    part = seconds * schedule.num_ranks / schedule.num_stages
    return Times(part, part, part)


def measure(
    _report: Any, schedules: list[zb.Schedule], seconds: float, steps: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per step of each schedule on this rank, from start to start."""
    pipelines = {}
    for schedule in schedules:
        layers = [EmulatedLayer(times_of(schedule, seconds)) for _ in range(schedule.num_stages)]
        pipelines[schedule.name] = Pipeline(layers, emulated_loss, schedule)
    found: dict[str, list[float]] = {schedule.name: [] for schedule in schedules}
    for _ in range(rounds):
        for name, pipeline in pipelines.items():
            dist.barrier()
            begins = []
            for _ in range(steps + 1):
                begins.append(perf_counter())
                pipeline.step(torch.ones(pipeline.schedule.num_microbatches, 4))
            found[name] += [b - a for a, b in pairwise(begins[1:])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--rounds", type=int, default=4, help="alternating blocks per schedule")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    schedules = [zb.generate(name, args.ranks, args.microbatches) for name in NAMES]
    seconds = args.milliseconds / 1000
    by_rank = launch(measure, args.ranks, schedules, seconds, args.steps, args.rounds)
    measured = {name: median(chain.from_iterable(rank[name] for rank in by_rank)) for name in by_rank[0]}
    ideal = {
        s.name: zb.simulate(s, zb.Costs(seconds, seconds, seconds).split(s.num_stages // s.num_ranks)).cost
        for s in schedules
    }
    sizes = f"{args.ranks} ranks, {args.microbatches} microbatches, {args.milliseconds:g} ms per op"
    table = Table(title=f"Emulated: {sizes}")
    table.add_column("schedule")
    for column in ("step ms, measured", "simulated", "measured / simulated", "/ 1F1B's, measured", "simulated"):
        table.add_column(column, justify="right")
    rows = {}
    for name, value in measured.items():
        rows[name] = {
            "step_seconds_measured": value,
            "step_seconds_simulated": ideal[name],
            "over_simulated": value / ideal[name],
            "over_1f1b": value / measured[NAMES[0]],
            "over_1f1b_ideal": ideal[name] / ideal[NAMES[0]],
        }
        row = rows[name]
        table.add_row(
            name, f"{value * 1e3:.1f}", f"{ideal[name] * 1e3:.1f}", f"{row['over_simulated']:.3f}",
            f"{row['over_1f1b']:.3f}", f"{row['over_1f1b_ideal']:.3f}",
        )  # fmt: skip
    Console(width=110).print(table)
    if args.json:
        args.json.write_text(json.dumps({"emulated": sizes, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
