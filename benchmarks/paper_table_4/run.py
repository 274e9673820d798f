"""Claim: with the paper's times, executed schedules are as much faster than 1F1B as the simulation says (table 4).

Stages sleep the times of table 9 (emulated compute, real processes). Per setting every schedule runs once; the figure
is 1F1B's median step time over the schedule's, beside that of the simulation and the ratio of the throughputs that the
paper measured on GPUs (table 4; for ZB-V table 6, on other settings, is not comparable and left out).

    python benchmarks/paper_table_4/run.py --ranks 8
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

import zerobubble as zb
from zerobubble.paper import facts, profiled_costs, profiles
from zerobubble.runtime.rehearsal import rehearse

NAMES = ("1F1B", "ZB-1p", "ZB-2p", "ZB-V")


def schedule_of(name: str, costs: zb.Costs, ranks: int, microbatches: int) -> zb.Schedule:
    """The schedule that goes by this name in the paper, planned where it is an automatic one."""
    if name == "1F1B":
        return zb.one_f_one_b(ranks, microbatches)
    placement, share = ("v", 1) if name == "ZB-V" else ("linear", int(name[3]))
    given = costs.split(2) if placement == "v" else costs
    limit = float(share * ranks)
    return zb.plan(given, ranks, microbatches, placement=placement, memory_limit=limit, effort="quick").schedule


def printed(name: str, model: str, microbatches: int) -> float | None:
    """The paper's ratio of throughputs."""
    table = facts()["table_4_throughput"]["samples_per_gpu_per_second"]
    if name not in table:
        return None
    column = sorted(row["m"] for row in profiles().values() if row["model"] == model).index(microbatches)
    ratio: float = table[name][model][column] / table["1F1B"][model][column]
    return ratio


def measure(profile: str, stretch: float, steps: int) -> list[dict[str, Any]]:
    """One row per schedule."""
    times, costs = profiles()[profile], profiled_costs(profile)
    rows: list[dict[str, Any]] = []
    for name in NAMES:
        schedule = schedule_of(name, costs, times["p"], times["m"])
        given = costs.split(schedule.num_stages // schedule.num_ranks)
        result = rehearse(schedule, given, steps, stretch=stretch)
        seconds = {"measured": result.step_seconds_measured, "simulated": result.step_seconds_simulated}
        first = rows[0]["seconds"] if rows else seconds
        ratios = {key: first[key] / seconds[key] for key in seconds}
        paper = printed(name, times["model"], times["m"])
        rows.append({"profile": profile, "schedule": name, "seconds": seconds, "over_1f1b": ratios, "paper": paper})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="the settings of table 9 with so many: 8, 16 or 32")
    parser.add_argument("--profile", help="only this setting, like 1.5B/p8/m24")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per schedule")
    parser.add_argument("--stretch", type=float, default=1.0, help="all times multiplied, where cores are few")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    chosen = [p for p, row in profiles().items() if row["p"] == args.ranks and args.profile in (None, p)]
    title = f"Emulated, times of table 9 x {args.stretch:g}: throughput over 1F1B's"
    table = Table("setting", "schedule", title=title)
    for column in ("step s, measured", "simulated", "over 1F1B, measured", "simulated", "meas. / sim.", "the paper"):
        table.add_column(column, justify="right")
    rows = []
    for profile in track(chosen, "Settings", console=Console(stderr=True)):
        rows += measure(profile, args.stretch, args.steps)
    for row in rows:
        seconds, ratio, paper = row["seconds"], row["over_1f1b"], row["paper"]
        table.add_row(
            row["profile"], row["schedule"], f"{seconds['measured']:.3f}", f"{seconds['simulated']:.3f}",
            f"{ratio['measured']:.3f}", f"{ratio['simulated']:.3f}", f"{ratio['measured'] / ratio['simulated']:.3f}",
            "" if paper is None else f"{paper:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
