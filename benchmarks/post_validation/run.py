"""Claim: stepping ahead of the norm gives most of what it can give. Emulated compute, real processes and optimizers.

Stages sleep the times of the paper's table 9 under a schedule planned for twice the memory of 1F1B (ZB-2p), and a hop
takes its latency. Blocks of steps alternate in one run: with `SynchronousOptimizer`, which waits for all ranks; with
`PostValidatedOptimizer`; and with it when every step must be amended (the worst case, from which it would normally
fall back to waiting). The optimizer's own arithmetic is not emulated.

Simulated: steps that wait follow each other at the distance of the makespan, others at that of the cost.

    python benchmarks/post_validation/run.py --stretch 2
"""

from __future__ import annotations

import argparse
import json
from itertools import chain, pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zerobubble as zb
from zerobubble.paper import facts, profiled_costs, profiles
from zerobubble.runtime import Pipeline, launch
from zerobubble.runtime.emulation import Emulation, emulated_loss, emulation

PROFILES = ("1.5B/p8/m24", "6.2B/p8/m24")
KINDS = ("synchronous", "post-validated", "every step amended")
FILLING = 2
"""First steps of a block, which are not measured."""


def measure(
    _report: Any, schedule: zb.Schedule, stages: Emulation, steps: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds per step on this rank, from start to start, and how the others than the first took their steps."""
    pipeline = Pipeline(stages.layers(), emulated_loss, schedule, wrap_transport=stages.delayed)
    inner = torch.optim.AdamW(pipeline.parameters())
    optimizers = {
        KINDS[0]: zb.SynchronousOptimizer(inner, clip_norm=1.0),
        KINDS[1]: zb.PostValidatedOptimizer(inner, clip_norm=1.0),
        KINDS[2]: zb.PostValidatedOptimizer(inner, clip_norm=1.0, adaptive=False),
    }
    batch = torch.ones(schedule.num_microbatches, 1)
    pipeline.step(batch)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, optimizer in optimizers.items():
            dist.barrier()
            begins = []
            for _ in range(FILLING + steps + 1):
                begins.append(perf_counter())
                pipeline.step(batch)
                for parameter in pipeline.module.parameters():  # each rank's own norm is below 1, that of all above
                    parameter.grad.fill_(0.9 if kind == KINDS[2] else 0.01)
                optimizer.step()
            optimizer.validate()
            found[kind] += [b - a for a, b in pairwise(begins[FILLING:])]
    return found, {kind: vars(optimizers[kind].counts) for kind in KINDS[1:]}


def one_profile(profile: str, stretch: float, steps: int, rounds: int) -> dict[str, Any]:
    """The figures of one model, times in seconds as stretched."""
    costs, sizes = profiled_costs(profile), profiles()[profile]
    plan = zb.plan(costs, sizes["p"], sizes["m"], memory_limit=2 * sizes["p"], placement="linear", effort="quick")
    stages = emulation(plan.costs, plan.schedule, stretch)
    ranks = launch(measure, sizes["p"], plan.schedule, stages, steps, rounds, time_limit=1800)
    seconds = {kind: list(chain.from_iterable(found[kind] for found, _ in ranks)) for kind in KINDS}
    waits, ahead = (value * stages.seconds for value in (plan.timeline.makespan, plan.timeline.cost))
    measured = {kind: median(values) for kind, values in seconds.items()}
    paper_ahead, paper_waits = facts()["table_10"]["post_validation_vs_all_reduce"][profile]
    return {
        "seconds_measured": measured,
        "quartiles": {kind: quantiles(values) for kind, values in seconds.items()},
        "seconds_simulated": {KINDS[0]: waits, KINDS[1]: ahead},
        "ratio_measured": measured[KINDS[1]] / measured[KINDS[0]],
        "ratio_simulated": ahead / waits,
        "ratio_paper": paper_waits / paper_ahead,
        "share_of_gain": (measured[KINDS[0]] - measured[KINDS[1]]) / (waits - ahead),
        "amended_over_synchronous": measured[KINDS[2]] / measured[KINDS[0]],
        "counts": ranks[0][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", default=PROFILES, choices=PROFILES)
    parser.add_argument("--stretch", type=float, default=1.0, help="all times are multiplied by this")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per block")
    parser.add_argument("--rounds", type=int, default=3, help="alternating blocks of each kind")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    table = Table(title=f"Emulated, times stretched by {args.stretch:g}: step time ahead / step time waiting")
    table.add_column("profile")
    columns = ("waiting, s", "ahead, s", "ratio", "simulated", "paper's table 10", "share of the gain",
               "every step amended / waiting")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    rows = {}
    for profile in args.profiles:
        row = rows[profile] = one_profile(profile, args.stretch, args.steps, args.rounds)
        times = row["seconds_measured"]
        table.add_row(
            profile, f"{times[KINDS[0]]:.3f}", f"{times[KINDS[1]]:.3f}", f"{row['ratio_measured']:.3f}",
            f"{row['ratio_simulated']:.3f}", f"{row['ratio_paper']:.3f}", f"{row['share_of_gain']:.0%}",
            f"{row['amended_over_synchronous']:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps({"emulated": True, "stretch": args.stretch, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
