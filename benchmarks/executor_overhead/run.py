"""What the runtime itself costs per op, and where it goes: CPU time of empty stages (identity on a small tensor).

Three figures per schedule, each containing the one before: the executor's loop over stages and a transport that do
nothing; with real stages (autograd, split, randomness) and no transport; in processes over gloo. The last also for the
schedule runtime of torch.distributed.pipelining, on the same orders and the same stages.

    python benchmarks/executor_overhead/run.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import zerobubble as zb
from zerobubble.notation import to_csv
from zerobubble.runtime import Pipeline, launch
from zerobubble.runtime.executor import Executor
from zerobubble.runtime.parcel import Parcel, pack
from zerobubble.runtime.stage import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

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
    return cpu_per_op(lambda: pipeline.step(batch), schedule, steps)


def in_torch(_report: Any, schedule: zb.Schedule, steps: int) -> float:
    """The same for torch's schedule runtime."""
    rank, count = dist.get_rank(), schedule.num_microbatches
    modules = dict(enumerate(identity_layers(schedule)))
    holders = [
        PipelineStage(modules[stage], stage, schedule.num_stages, torch.device("cpu"))
        for stage in schedule.placement.stages_of(rank)
    ]
    runtime = _PipelineScheduleRuntime(holders, count, loss_fn=lambda y, _: y.square().sum())  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(to_csv(schedule, "torch"), encoding="utf-8")
        runtime._load_csv(str(path), format="compute_only")
    own = schedule.placement.stages_of(rank)
    inputs = (torch.ones(count, 4),) if 0 in own else ()
    target = torch.zeros(count, 1) if schedule.num_stages - 1 in own else None
    return cpu_per_op(lambda: runtime.step(*inputs, target=target), schedule, steps)


def cpu_per_op(step: Callable[[], Any], schedule: zb.Schedule, steps: int) -> float:
    """Seconds of CPU per op of this rank, after a warm-up."""
    for _ in range(3):
        step()
    begin = process_time()
    for _ in range(steps):
        step()
    return (process_time() - begin) / steps / (schedule.num_ops / schedule.num_ranks)


def alone(_report: Any, schedule: zb.Schedule, steps: int) -> float:
    """The same for a pipeline of one rank with as many stages: no transport."""
    one = zb.generate("zb_v" if schedule.num_stages > 2 else "zb_h1", 1, schedule.num_microbatches)
    return in_processes(_report, one, steps)


def identity_pipeline(schedule: zb.Schedule) -> Pipeline:
    return Pipeline(identity_layers(schedule), lambda y, _: y.square().sum(), schedule)


def identity_layers(schedule: zb.Schedule) -> list[nn.Module]:
    """Stages that do next to nothing."""
    return [nn.Linear(4, 4), *[nn.Identity() for _ in range(schedule.num_stages - 1)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)

    table = Table(title=f"CPU microseconds per op, {args.ranks} ranks, {args.microbatches} microbatches")
    columns = ("executor's loop", "with stages, one rank", "in processes, over gloo", "torch's runtime in processes")
    for column in ("schedule", *columns):
        table.add_column(column, justify="right")
    rows = {}
    for name in NAMES:
        schedule = zb.generate(name, args.ranks, args.microbatches)
        figures = (
            loop_only(schedule, args.steps),
            launch(alone, 1, schedule, args.steps)[0],
            max(launch(in_processes, args.ranks, schedule, args.steps)),
            max(launch(in_torch, args.ranks, schedule, args.steps)),
        )
        rows[name] = dict(zip(("loop", "stages", "processes", "torch"), (f * 1e6 for f in figures), strict=True))
        table.add_row(name, *(f"{f * 1e6:.0f}" for f in figures))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
