"""Claim: at every memory limit our plan costs no more than the best schedule of the peers that fits.

`instances.json` holds mixed problems, each with the cost and peak memory of schedules of the paper authors' Megatron-LM
fork ("sail") and of torch.distributed.pipelining 2.13 ("torch"), all simulated with the same times. Every plan is
simulated from scratch here, and written as a CSV so that anyone can do so again.

    python benchmarks/planner_vs_peers/run.py --instances benchmarks/planner_vs_peers/instances.json \
        --json planner.json --schedules plans/

It takes about ten minutes of one core; `--jobs` divides them among processes, `--effort default` takes several times
that.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from pathlib import Path
from statistics import mean
from time import process_time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from zerobubble import Costs, Placement
from zerobubble.errors import OptionError
from zerobubble.notation import to_csv
from zerobubble.planner import plan
from zerobubble.simulate import simulate
from zerobubble.validate import validate

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
LIMITS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Memory limits over p, in M_B of a whole rank."""
PLACEMENTS = {"linear": Placement.linear, "v": Placement.v}
EQUAL = 1e-9


def costs_of(instance: dict[str, Any], style: str) -> Costs:
    stages = instance[style]
    return Costs(
        forward=stages["F"],
        backward_input=stages["B"],
        backward_weight=stages["W"],
        communication=instance["communication"],
        activation_memory=stages["MB"],
        weight_memory=stages["MW"],
    )


def best_peer(instance: dict[str, Any], style: str, limit: float) -> dict[str, Any] | None:
    """The cheapest peer of the placement whose peak memory is within the limit; peers that failed have no peak."""
    fitting = [
        peer
        for peer in instance["peers"]
        if peer["placement"] == style and peer.get("peak") is not None and peer["peak"] <= limit * (1 + EQUAL)
    ]
    return min(fitting, key=lambda peer: peer["cost"], default=None)


def measure(instance: dict[str, Any], style: str, ratio: float, effort: str, folder: Path | None) -> dict[str, Any]:
    """One plan beside the best peer. `ours` is None where no schedule can run within the limit."""
    p, limit = instance["p"], ratio * instance["p"]
    costs, peer = costs_of(instance, style), best_peer(instance, style, limit)
    row = {"instance": instance["name"], "placement": style, "limit": ratio, "memory_limit": limit}
    row |= {"peer": peer and peer["name"], "peer_cost": peer and peer["cost"], "ours": None}
    begin = process_time()
    try:
        found = plan(costs, p, instance["m"], memory_limit=limit, placement=PLACEMENTS[style](p), effort=effort)
    except OptionError:
        return row
    seconds = process_time() - begin
    validate(found.schedule, limit, costs)
    cost = simulate(found.schedule, costs).cost
    if folder is not None:
        (folder / f"{instance['name']}-{style}-{ratio:g}p.csv").write_text(to_csv(found.schedule), encoding="utf-8")
    row |= {"ours": cost, "lower_bound": found.lower_bound, "gap": found.gap, "cpu_seconds": seconds}
    return row | {"ratio": peer and cost / peer["cost"], "peak_memory": max(found.timeline.peak_memory)}


def measure_all(jobs: list[tuple[Any, ...]], processes: int) -> Iterator[dict[str, Any]]:
    """`measure` for every job, in their order."""
    if processes == 1:
        yield from starmap(measure, jobs)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(measure, *zip(*jobs, strict=True))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per placement and limit: mean ratio to the best peer, how often we are worse, gap to the bound, planning time."""
    found = []
    for style in PLACEMENTS:
        for ratio in LIMITS:
            ours = [r for r in rows if (r["placement"], r["limit"]) == (style, ratio) and r["ours"] is not None]
            ratios = [r["ratio"] for r in ours if r["ratio"] is not None]
            found.append({
                "placement": style,
                "limit": ratio,
                "plans": len(ours),
                "compared": len(ratios),
                "mean_ratio": mean(ratios) if ratios else None,
                "largest_ratio": max(ratios, default=None),
                "worse": sum(ratio > 1 + EQUAL for ratio in ratios),
                "better": sum(ratio < 1 - EQUAL for ratio in ratios),
                "mean_gap": mean(r["gap"] for r in ours) if ours else None,
                "proven": sum(r["gap"] == 0 for r in ours),
                "mean_cpu_seconds": mean(r["cpu_seconds"] for r in ours) if ours else None,
            })  # fmt: skip
    return found


def show(lines: list[dict[str, Any]], console: Console) -> None:
    table = Table("placement", "limit", "compared", "ours/best peer", "largest", "worse", "gap", "proven", "CPU s")
    for line in lines:
        if line["plans"]:
            ratios = [f"{line[key]:.4f}" if line[key] is not None else "-" for key in ("mean_ratio", "largest_ratio")]
            table.add_row(
                line["placement"], f"{line['limit']:g}p", str(line["compared"]), *ratios, str(line["worse"]),
                f"{line['mean_gap']:.2%}", f"{line['proven']}/{line['plans']}", f"{line['mean_cpu_seconds']:.1f}",
            )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, default=HERE / "instances.json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--schedules", type=Path, help="a folder for the plans as CSV")
    parser.add_argument("--effort", choices=("quick", "default"), default="quick")
    parser.add_argument("--jobs", type=int, default=1, help="plans made at the same time")
    parser.add_argument("--only", nargs="*", help="names of instances, or parts of them")
    options = parser.parse_args()
    if options.schedules is not None:
        options.schedules.mkdir(parents=True, exist_ok=True)
    instances = json.loads(options.instances.read_text(encoding="utf-8"))
    wanted = [i for i in instances if not options.only or any(part in i["name"] for part in options.only)]
    jobs = [(instance, style, ratio) for instance in wanted for style in PLACEMENTS for ratio in LIMITS]
    console = Console()
    measured = measure_all([(*job, options.effort, options.schedules) for job in jobs], options.jobs)
    rows = list(track(measured, description="planning", total=len(jobs), console=Console(stderr=True)))
    lines = summary(rows)
    show(lines, console)
    worse = [row for row in rows if row.get("ratio") and row["ratio"] > 1 + EQUAL]
    for row in worse:
        console.print(
            f"worse: {row['instance']} {row['placement']} {row['limit']:g}p: {row['ratio']:.4f} ({row['peer']})"
        )
    console.print(f"{len(rows)} plans; worse than the best peer in {len(worse)}")
    if options.json is not None:
        result = {"effort": options.effort, "worse": len(worse), "summary": lines, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
