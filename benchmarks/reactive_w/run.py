"""Reactive W against the static order: emulated stages whose times vary by chance, one rank of which straggles.

Every time is drawn anew for each microbatch, the same for both runs; schedules take turns with and without reaction in
one run. Reaction is against what a calm pipeline was measured to take. The figure is the median step time with
reaction over that without.

    python benchmarks/reactive_w/run.py --ranks 8 --microbatches 16
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.runtime import Pipeline, launch
from zerobubble.runtime.emulation import Times, emulated, emulated_loss

CALM_STEPS = 3
LEAST = 0.05
"""Of its mean that an op takes at least."""


class Unsteady(nn.Module):
    """An emulated layer that takes, for each microbatch, `slower` times what is drawn around T."""

    def __init__(self, seconds: float, jitter: float, slower: float, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._draw = lambda random: seconds * slower * max(LEAST, random.gauss(1.0, jitter))
        self._random = Random(seed)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep T_F; B and W sleep theirs."""
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        return emulated(x, self.weight, Times(*(self._draw(self._random) for _ in range(3))))


@dataclass(frozen=True)
class Case:
    """What is rehearsed. `costs` are nominal, per stage."""

    schedule: zb.Schedule
    costs: zb.Costs
    jitter: float
    straggler: int | None

    def pipeline(self, jitter: float, straggler: int | None, reactive: zb.Costs | None = None) -> Pipeline:
        """A pipeline of unsteady stages; those of the same arguments draw the same times."""
        seconds = self.costs.resolve(self.schedule.placement).forward[0] * self.costs.seconds
        slower = (1.3 if rank == straggler else 1.0 for rank in self.schedule.placement.ranks)
        layers = [Unsteady(seconds, jitter, factor, seed) for seed, factor in enumerate(slower)]
        return Pipeline(layers, emulated_loss, self.schedule, reactive=reactive)

    def calm_costs(self, batch: Tensor) -> zb.Costs:
        """What a calm pipeline is measured to take, with the nominal memory."""
        pipeline = self.pipeline(0.0, None)
        for _ in range(CALM_STEPS + 1):
            pipeline.step(batch)
        memory = self.costs.activation_memory, self.costs.weight_memory
        found = pipeline.profile(CALM_STEPS).costs
        return replace(found, activation_memory=memory[0], weight_memory=memory[1])


def measure(_report: Any, case: Case, steps: int, rounds: int) -> dict[bool, list[float]]:
    """Seconds per step on this rank, from start to start, with and without reaction."""
    batch = torch.ones(case.schedule.num_microbatches, 1)
    costs = case.calm_costs(batch)
    pipelines = {
        reacts: case.pipeline(case.jitter, case.straggler, costs if reacts else None) for reacts in (False, True)
    }
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for reacts, pipeline in pipelines.items():
            dist.barrier()
            begins = []
            for _ in range(steps + 1):
                begins.append(perf_counter())
                pipeline.step(batch)
            found[reacts] += [b - a for a, b in pairwise(begins[1:])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="mean T_F = T_B = T_W of one rank")
    parser.add_argument("--steps", type=int, default=4, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    part = zb.Costs(*[args.milliseconds] * 3, activation_memory=1.0, weight_memory=0.43, unit="ms")
    planned = zb.plan(part, args.ranks, args.microbatches, memory_limit=2 * args.ranks, effort="quick").schedule
    schedules = {
        "ZB-2p": planned,
        **{name: zb.generate(name, args.ranks, args.microbatches) for name in ("zb_h1", "zb_v")},
    }
    table = Table(
        title=f"Emulated, T = {args.milliseconds:g} ms: step time with reactive W over that of the static order"
    )
    for column in ("schedule", "jitter", "straggler (1.3x)", "static, s", "reactive, s", "ratio"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    rows = []
    for name, schedule in schedules.items():
        for jitter, straggler in ((0.0, None), (0.3, None), (0.3, args.ranks // 2)):
            costs = part.split(schedule.num_stages // schedule.num_ranks)
            case = Case(schedule, costs, jitter, straggler)
            by_rank = launch(measure, args.ranks, case, args.steps, args.rounds)
            static, reactive = (median(chain.from_iterable(rank[r] for rank in by_rank)) for r in (False, True))
            where = "none" if straggler is None else f"rank {straggler}"
            table.add_row(name, f"{jitter:.0%}", where, f"{static:.3f}", f"{reactive:.3f}", f"{reactive / static:.3f}")
            rows.append(
                {"schedule": name, "jitter": jitter, "straggler": straggler, "static": static, "reactive": reactive}
            )
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
