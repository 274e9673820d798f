"""Claim: a pipeline that plans itself beats the handcrafted schedules of its placement. Emulated, real processes.

The last stage is heavy and one hop slow. A pipeline with schedule="auto" measures its costs, plans within the memory of
1F1B, and goes on with the plan; then it and the handcrafted schedules of the same placement that need no more memory
run in alternating blocks of steps. Also shown: how far the costs that it measured are from those that were emulated.

With `--placement v`, where ZB-V is simulated within 1% of the plan, it did not on a busy machine: see docs/measure.md.

    python benchmarks/auto_schedule/run.py --ranks 4 --microbatches 8 --milliseconds 20
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
from zerobubble.runtime import Auto, Pipeline, launch
from zerobubble.runtime.emulation import Emulation, emulated_loss, emulation

HEAVY, SLOW_HOP, HOP = 1.4, 0.6, 0.1
M_B, M_W = 3.0, 2.0
KEYS = ("forward", "backward_input", "backward_weight", "communication", "activation_memory", "weight_memory")


def truth_for(placement: zb.Placement, milliseconds: float) -> zb.Costs:
    """Per stage: the last is heavy, and so is the hop in the middle."""
    stages = placement.num_stages
    times = [milliseconds * placement.num_ranks / stages] * stages
    times[-1] *= HEAVY
    hops = [milliseconds * HOP] * (stages - 1)
    if hops:
        hops[len(hops) // 2] = milliseconds * SLOW_HOP
    memory = (size * placement.num_ranks / stages for size in (M_B, M_W))
    times_of_kinds = (tuple(times), tuple(time * 1.1 for time in times), tuple(time * 0.9 for time in times))
    return zb.Costs(*times_of_kinds, tuple(hops), *memory, unit="ms")


def emulated_pipeline(schedule: Any, stages: Emulation) -> Pipeline:
    return Pipeline(stages.layers(), emulated_loss, schedule, wrap_transport=stages.delayed)


def measure(
    _report: Any, auto: Auto, stages: Emulation, others: list[zb.Schedule], steps: int, rounds: int
) -> tuple[zb.Schedule, zb.Costs, str, dict[str, list[float]]]:
    """The plan, the costs it was made for, why, and seconds per step of each schedule on this rank."""
    planned = emulated_pipeline(auto, stages)
    batch = torch.ones(auto.num_microbatches, 1)
    for _ in range(auto.steps + 1):
        planned.step(batch)
    pipelines = {"auto": planned, **{other.name: emulated_pipeline(other, stages) for other in others}}
    found: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(rounds):
        for name, pipeline in pipelines.items():
            dist.barrier()
            begins = []
            for _ in range(steps + 2):
                begins.append(perf_counter())
                pipeline.step(batch)
            found[name] += [after - before for before, after in pairwise(begins[1:])]
    assert planned.plan is not None
    return planned.schedule, planned.plan.costs, planned.plan.notes[0], found


def fitting(placement: zb.Placement, count: int, costs: zb.Costs, limit: float) -> list[zb.Schedule]:
    """The handcrafted schedules of `placement` that need no more memory than `limit`."""
    made = [zb.generate(name, placement.num_ranks, count) for name in zb.GENERATORS]
    same = [schedule for schedule in made if schedule.placement == placement]
    return [schedule for schedule in same if max(zb.simulate(schedule, costs).peak_memory) <= limit * 1.001]


def errors(measured: zb.Costs, truth: zb.Costs, placement: zb.Placement, unit_bytes: float) -> dict[str, float]:
    """Largest relative error of each kind of cost."""
    scale = {key: unit_bytes if key.endswith("memory") else 1.0 for key in KEYS}
    real, own = truth.resolve(placement), measured.resolve(placement)
    pairs = {key: (getattr(real, key), getattr(own, key)) for key in KEYS if key != "communication"}
    pairs["communication"] = real.hop, own.hop
    return {
        key: max((abs(b / scale[key] / a - 1) for a, b in zip(*rows, strict=True) if a), default=0.0)
        for key, rows in pairs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--placement", default="linear", choices=["linear", "v"])
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    parser.add_argument("--rounds", type=int, default=4, help="alternating blocks per schedule")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    auto = Auto(args.microbatches, placement=args.placement)
    safe = auto.safe_schedule(args.ranks)
    truth = truth_for(safe.placement, args.milliseconds)
    stages = emulation(truth, safe)
    limit = max(zb.simulate(safe, truth).peak_memory)
    others = fitting(safe.placement, args.microbatches, truth, limit)
    by_rank = launch(measure, args.ranks, auto, stages, others, args.steps, args.rounds)
    schedule, costs, reason, _ = by_rank[0]
    simulated = {other.name: zb.simulate(other, truth) for other in others} | {"auto": zb.simulate(schedule, truth)}
    measured = {name: median(chain.from_iterable(rank[3][name] for rank in by_rank)) for name in simulated}
    wrong = errors(costs, truth, safe.placement, stages.bytes)

    sizes = (
        f"{args.ranks} ranks, {args.microbatches} microbatches, {args.milliseconds:g} ms, {args.placement} placement"
    )
    table = Table(title=f"Emulated, heavy last stage and slow hop: {sizes}")
    for column in ("schedule", "step ms, measured", "simulated", "/ auto's, measured", "peak memory, simulated"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    rows = {}
    for name, value in sorted(measured.items(), key=lambda item: item[1]):
        timeline = simulated[name]
        rows[name] = {
            "step_seconds_measured": value,
            "step_seconds_simulated": timeline.cost / 1e3,
            "over_auto": value / measured["auto"],
            "peak_memory": max(timeline.peak_memory),
        }
        table.add_row(
            name, f"{value * 1e3:.1f}", f"{timeline.cost:.1f}", f"{rows[name]['over_auto']:.3f}",
            f"{rows[name]['peak_memory']:g}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    console.print(reason)
    console.print("Measured costs against those emulated, largest error: ", end="")
    console.print(", ".join(f"{key} {value:.1%}" for key, value in wrong.items()))
    if args.json:
        args.json.write_text(json.dumps({"emulated": sizes, "rows": rows, "errors": wrong, "reason": reason}, indent=2))


if __name__ == "__main__":
    main()
