"""`zerobubble simulate`: what a schedule costs."""

import time
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.table import Table

from zerobubble import notation
from zerobubble.cli.inputs import (
    SCHEDULE,
    AsJson,
    Chunks,
    CostsFile,
    Jitter,
    MemoryLimit,
    Microbatches,
    Options,
    Ranks,
    Samples,
    read_costs,
    simulated,
)
from zerobubble.cli.output import console, print_json
from zerobubble.jitter import JitterResult, simulate_jitter
from zerobubble.plot.layout import with_unit
from zerobubble.timeline import Timeline


def simulate(
    schedule: Annotated[str, typer.Argument(help=SCHEDULE)],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    costs: CostsFile = None,
    memory_limit: MemoryLimit = None,
    jitter: Jitter = None,
    samples: Samples = 200,
    as_json: AsJson = False,
) -> None:
    """What a schedule costs: time, bubbles and memory, per rank and in all."""
    start = time.perf_counter()
    options = Options(ranks, microbatches, chunks, costs, memory_limit)
    _, timeline = simulated(schedule, options)
    drawn = None
    if jitter is not None:
        drawn = simulate_jitter(timeline.schedule, read_costs(costs, timeline.schedule), jitter, samples)
    seconds = time.perf_counter() - start
    if as_json:
        print_json(_to_dict(timeline, seconds) | ({} if drawn is None else {"jitter": jitter_dict(drawn, jitter)}))
    else:
        _print(timeline, drawn, jitter)


def _to_dict(timeline: Timeline, seconds: float) -> dict[str, Any]:
    return {
        "schedule": notation.to_dict(timeline.schedule),
        "unit": timeline.unit,
        "cost": timeline.cost,
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        "work": timeline.work,
        "lower_bound": None,
        "spans": list(timeline.spans),
        "idle": list(timeline.idle),
        "peak_memory": list(timeline.peak_memory),
        "critical_path": [str(op) for op in timeline.critical_path()],
        "seconds": seconds,
    }


def jitter_dict(drawn: JitterResult, jitter: float | None) -> dict[str, Any]:
    """What `--json` says of costs under jitter."""
    return {"jitter": jitter, "samples": len(drawn.costs), "mean": drawn.mean, "p95": drawn.p95}


def _print(timeline: Timeline, drawn: JitterResult | None, jitter: float | None) -> None:
    out, schedule = console(), timeline.schedule
    out.print(
        f"{schedule.name}: {many(schedule.num_ranks, 'rank')}, {many(schedule.num_stages, 'stage')} "
        f"({schedule.placement.style} placement), {many(schedule.num_microbatches, 'microbatch')}, "
        f"{many(schedule.num_ops, 'op')}"
    )
    summary = Table.grid(padding=(0, 2))
    for name, value in [
        ("cost", with_unit(timeline.cost, timeline.unit)),
        ("makespan", with_unit(timeline.makespan, timeline.unit)),
        ("work", with_unit(timeline.work, timeline.unit)),
        ("bubble rate", f"{timeline.bubble_rate:.4f}"),
        *(_jittered(drawn, jitter, timeline.unit) if drawn else ()),
    ]:
        summary.add_row(name, value)
    out.print(summary)
    out.print(_per_rank(timeline))
    out.print(f"critical path: {_critical_path(timeline)}")


def _jittered(drawn: JitterResult, jitter: float | None, unit: str) -> list[tuple[str, str]]:
    times = f"with jitter {jitter:g}, {many(len(drawn.costs), 'sample')}"
    return [
        ("mean cost", f"{with_unit(drawn.mean, unit)} {times}"),
        ("95% cost", with_unit(drawn.p95, unit)),
    ]


def _per_rank(timeline: Timeline) -> Table:
    table = Table()
    for name in ("rank", "span", "idle", "peak memory"):
        table.add_column(name, justify="right")
    for rank, row in enumerate(zip(timeline.spans, timeline.idle, timeline.peak_memory, strict=True)):
        table.add_row(str(rank), *(f"{value:g}" for value in row))
    return table


def _critical_path(timeline: Timeline) -> str:
    """In one line: from where to where, how many ops of each kind and their time, and how often it changes rank."""
    path, ranks = timeline.critical_path(), timeline.schedule.placement.ranks
    durations = {
        op: end - start
        for order, starts, ends in zip(timeline.schedule.orders, timeline.starts, timeline.ends, strict=True)
        for op, start, end in zip(order, starts, ends, strict=True)
    }
    by_kind: dict[str, list[float]] = {}
    for op in path:
        by_kind.setdefault(op.kind.value, []).append(durations[op])
    parts = [f"{len(times)} {kind} ({with_unit(sum(times), timeline.unit)})" for kind, times in by_kind.items()]
    hops = sum(ranks[a.stage] != ranks[b.stage] for a, b in pairwise(path))
    return f"{path[0]} to {path[-1]}: {', '.join(parts)}, {many(hops, 'hop')} between ranks"


def many(count: int, what: str) -> str:
    """`1 rank`, `2 ranks`, `2 microbatches`."""
    return f"{count} {what}{('es' if what.endswith('ch') else 's') * (count != 1)}"
