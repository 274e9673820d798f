"""Our runtime and torch's on the same schedules: emulated stages, real processes, step time over the simulated ideal.

Every stage sleeps T milliseconds in F, B and W each (stages of two chunks half of it, so that all schedules do the
same work); messages cost what the transport makes them cost, the simulation counts them as nothing. Both runtimes run
the same orders (torch loads them as CSV), in turns.

    python benchmarks/runtime_vs_torch/run.py --ranks 2 4 8
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

import zerobubble as zb
from zerobubble.runtime.rehearsal import Rehearsal, rehearse

NAMES = ("one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v")
RUNTIMES = ("zerobubble", "torch")


@dataclass
class Row:
    """One schedule on one number of ranks. Seconds per step, one entry per round."""

    schedule: str
    ranks: int
    ideal: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {runtime: [] for runtime in RUNTIMES})

    def over_ideal(self, runtime: str) -> float:
        """Step time over the simulated ideal of the same schedule."""
        return median(self.seconds[runtime]) / self.ideal

    def add(self, done: Rehearsal) -> None:
        """Add what a round measured."""
        self.ideal = done.step_seconds_simulated
        self.seconds[done.runtime].append(done.step_seconds_measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--milliseconds", type=float, default=20.0, help="T_F = T_B = T_W of one rank")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    rows = [Row(name, ranks) for ranks in args.ranks for name in args.schedules]
    runs = [(row, runtime) for _ in range(args.rounds) for row in rows for runtime in RUNTIMES]
    for row, runtime in track(runs, "rehearsing", console=Console(stderr=True)):
        schedule = zb.generate(row.schedule, row.ranks, 2 * row.ranks)
        time = args.milliseconds * row.ranks / schedule.num_stages
        row.add(rehearse(schedule, zb.Costs(time, time, time, unit="ms"), args.steps, runtime=runtime, time_limit=300))
    report(rows, args.milliseconds)
    if args.json:
        args.json.write_text(json.dumps([figures(row) for row in rows], indent=1), encoding="utf-8")


def report(rows: list[Row], milliseconds: float) -> None:
    table = Table(title=f"Emulated, T = {milliseconds:g} ms, m = 2p: step time over the simulated ideal")
    for column in ("schedule", "ranks", "ideal, s", "ours", "torch", "ours / torch"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in rows:
        ours, torch = (row.over_ideal(runtime) for runtime in RUNTIMES)
        figures = f"{row.ideal:.3f}", f"{ours:.3f}", f"{torch:.3f}", f"{ours / torch:.3f}"
        table.add_row(row.schedule, str(row.ranks), *figures)
    console = Console()
    console.print(table)
    for ranks in sorted({row.ranks for row in rows}):
        best = {
            runtime: min((median(row.seconds[runtime]), row.schedule) for row in rows if row.ranks == ranks)
            for runtime in RUNTIMES
        }
        (ours, our_name), (torch, torch_name) = best["zerobubble"], best["torch"]
        console.print(f"p={ranks}: our best ({our_name}) takes {ours / torch:.3f} of torch's best ({torch_name})")


def figures(row: Row) -> dict[str, object]:
    over = {runtime: row.over_ideal(runtime) for runtime in RUNTIMES}
    return {
        "schedule": row.schedule,
        "ranks": row.ranks,
        "ideal": row.ideal,
        "seconds": row.seconds,
        "over_ideal": over,
    }


if __name__ == "__main__":
    main()
