"""What the runtime itself costs per op, and where it goes: CPU time of empty stages (identity on a small tensor).

Four figures per schedule, each containing the one before: the executor's loop over stages and a transport that do
nothing; with real stages (autograd, split, randomness) and no transport; in processes over gloo.

    python benchmarks/executor_overhead/run.py
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from time import process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zerobubble as zb
from zerobubble.runtime import Pipeline, launch
from zerobubble.runtime.executor import Executor
from zerobubble.runtime.parcel import Parcel, pack
from zerobubble.runtime.stage import Batch

NAMES = ("one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v")


class NoStage:
    """A stage that does nothing."""

    def forward(self, *_: Any) -> Parcel:
        return EMPTY

    def backward_input(self, *_: Any) -> Parcel:
        return EMPTY

    def backward_weight(self, *_: Any) -> None:
        pass


class NoTransport:
    """A transport on which everything is there at once."""

    turn = nullcontext()

    def post(self, _message: Any) -> None:
        pass

    def receive(self, _message: Any) -> Parcel:
        return EMPTY

    def send(self, _message: Any, _parcel: Any) -> None:
        pass

    def finished(self, _op: Any, _step: int) -> None:
        pass

    def failed(self, _error: BaseException, _where: str) -> None:
        pass


EMPTY = pack(torch.zeros(1))[0]


def loop_only(schedule: zb.Schedule, steps: int) -> float:
    """Seconds of CPU per op of rank 0's loop."""
    stages: Any = {stage: NoStage() for stage in range(schedule.num_stages)}
    transport: Any = NoTransport()
    executor = Executor(zb.lower(schedule)[0], stages, schedule.num_stages, transport)
    batch = Batch(0, [], [], [], [])
    executor.run(batch)
    begin = process_time()
    for _ in range(steps):
        executor.run(batch)
    return (process_time() - begin) / steps / len(schedule.orders[0])


def in_processes(_report: Any, schedule: zb.Schedule, steps: int) -> float:
    """Seconds of CPU per op of this rank, waits not counted."""
    pipeline = identity_pipeline(schedule)
    batch = torch.ones(schedule.num_microbatches, 4)
    for _ in range(3):
        pipeline.step(batch)
    begin = process_time()
    for _ in range(steps):
        pipeline.step(batch)
    used = process_time() - begin
    return used / steps / (schedule.num_ops / schedule.num_ranks)


def alone(_report: Any, schedule: zb.Schedule, steps: int) -> float:
    """The same for a pipeline of one rank with as many stages: no transport."""
    one = zb.generate("zb_v" if schedule.num_stages > 2 else "zb_h1", 1, schedule.num_microbatches)
    return in_processes(_report, one, steps)


def identity_pipeline(schedule: zb.Schedule) -> Pipeline:
    layers = [torch.nn.Linear(4, 4), *[torch.nn.Identity()] * (schedule.num_stages - 1)]
    return Pipeline(layers, lambda y, _: y.sum(), schedule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)

    table = Table(title=f"CPU microseconds per op, {args.ranks} ranks, {args.microbatches} microbatches")
    for column in ("schedule", "executor's loop", "with stages, one rank", "in processes, with transport"):
        table.add_column(column, justify="right")
    rows = {}
    for name in NAMES:
        schedule = zb.generate(name, args.ranks, args.microbatches)
        figures = (
            loop_only(schedule, args.steps),
            launch(alone, 1, schedule, args.steps)[0],
            max(launch(in_processes, args.ranks, schedule, args.steps)),
        )
        rows[name] = dict(zip(("loop", "stages", "processes"), (f * 1e6 for f in figures), strict=True))
        table.add_row(name, *(f"{f * 1e6:.0f}" for f in figures))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
