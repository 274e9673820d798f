"""How `zerobubble plan` says what it found: a table or one JSON object."""

import json
from typing import Any

from rich.table import Table

from zerobubble import notation
from zerobubble.cli.output import console
from zerobubble.cli.plan_request import Answer, Request, gap
from zerobubble.cli.simulate import jitter_dict, many
from zerobubble.plot.layout import with_unit
from zerobubble.timeline import Timeline


def to_dict(answer: Answer, request: Request, jitter: float | None, seconds: float) -> dict[str, Any]:
    """The object that `--json` prints."""
    timeline = answer.timeline
    data: dict[str, Any] = {
        "schedule": notation.to_dict(timeline.schedule),
        "placement": timeline.schedule.placement.style,
        "unit": timeline.unit,
        **_figures(timeline),
        "makespan": timeline.makespan,
        "work": timeline.work,
        "lower_bound": answer.lower_bound,
        "gap": answer.gap,
        "costs": json.loads(answer.costs.to_json()),
        "memory_limit": request.memory_limit,
        "effort": request.effort,
        "handcrafted": [
            {"name": row.name, "title": row.title, "fits": row.fits, "lower_bound": row.lower_bound}
            | _figures(row.timeline)
            for row in answer.rows
        ],
        "advice": answer.advice,
        "seconds": seconds,
    }
    if answer.partition is not None:
        data["partition"] = list(answer.partition)
    if answer.jitter is not None:
        data["jitter"] = jitter_dict(answer.jitter, jitter)
    return data


def _figures(timeline: Timeline) -> dict[str, Any]:
    return {
        "cost": timeline.cost,
        "bubble_rate": timeline.bubble_rate,
        "peak_memory": list(timeline.peak_memory),
    }


def print_answer(answer: Answer, request: Request, jitter: float | None, seconds: float) -> None:
    """The plan beside the handcrafted schedules, and one sentence of advice."""
    out, unit = console(), answer.timeline.unit
    limit = "no memory limit" if request.memory_limit is None else f"memory limit {request.memory_limit:g}"
    sizes = f"{many(request.ranks, 'rank')}, {many(request.microbatches, 'microbatch')}"
    out.print(f"{sizes}, {limit}; planned in {seconds:.1f} s")
    out.print(_table(answer))
    if answer.partition is not None:
        out.print(f"layers per stage: {' '.join(map(str, answer.partition))}")
    if answer.jitter is not None:
        drawn = answer.jitter
        out.print(f"with jitter {jitter:g}: mean cost {with_unit(drawn.mean, unit)}, 95% {with_unit(drawn.p95, unit)}")
    out.print(answer.advice)


def _table(answer: Answer) -> Table:
    """The plan first, then the handcrafted schedules, cheapest first; those over the limit are marked and last."""
    table = Table()
    for name in ("schedule", "placement", "cost", "bubble", "peak memory", "lower bound", "gap"):
        table.add_column(name, justify="left" if name in ("schedule", "placement") else "right")
    table.add_row("plan", *_cells(answer.timeline, answer.lower_bound), style="bold")
    for row in sorted(answer.rows, key=lambda row: (not row.fits, row.timeline.cost)):
        table.add_row(row.title, *_cells(row.timeline, row.lower_bound), style=None if row.fits else "dim")
    return table


def _cells(timeline: Timeline, bound: float | None) -> list[str]:
    return [
        timeline.schedule.placement.style,
        with_unit(timeline.cost, timeline.unit),
        f"{timeline.bubble_rate:.2%}",
        f"{max(timeline.peak_memory):g}" + (" (over the limit)" if bound is None else ""),
        "" if bound is None else with_unit(bound, timeline.unit),
        "" if bound is None else f"{gap(timeline, bound):.2%}",
    ]
