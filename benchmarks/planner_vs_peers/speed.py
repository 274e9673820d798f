"""How long the planner takes: CPU seconds of the whole command, on large pipelines, at effort `quick`.

python benchmarks/planner_vs_peers/speed.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zerobubble.paper import profiled_costs

SIZES = [(8, 24), (32, 256), (64, 512)]
"""(ranks, microbatches)."""


def main() -> None:
    costs = Path(tempfile.mkdtemp()) / "costs.json"
    costs.write_text(profiled_costs("28.3B/p32/m256").to_json(), encoding="utf-8")
    table = Table(
        "placement", "ranks", "microbatches", "CPU seconds", "bubble rate", title="zerobubble plan, quick, p M_B"
    )
    for placement, (ranks, microbatches) in product(("linear", "auto"), SIZES):
        command = [sys.executable, "-m", "zerobubble", "plan", "--placement", placement, "--effort", "quick", "--json"]
        sizes = ["--ranks", ranks, "--microbatches", microbatches, "--memory-limit", ranks]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*command, *map(str, sizes), "--costs", str(costs)], check=True, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        rate = json.loads(done.stdout)["bubble_rate"]
        table.add_row(placement, str(ranks), str(microbatches), f"{seconds:.1f}", f"{rate:.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
