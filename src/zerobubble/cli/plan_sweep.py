"""`zerobubble plan --sweep-memory`: bubble against memory limit, all families in one table and picture."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from zerobubble import planner
from zerobubble.cli.output import console, print_json
from zerobubble.cli.plan_request import Request, progress
from zerobubble.errors import OptionError
from zerobubble.planner.partition import best_partitions, stage_costs_for
from zerobubble.planner.placements import make_placement
from zerobubble.planner.sweep import STYLES, Sweep, sweep


def sweep_memory(request: Request, output: Path | None, as_json: bool, start: float) -> None:
    """Plan at many limits; print, and draw to `output` if given.

    Raises:
        OptionError: no limit is high enough, layers are given, or the file cannot be written.
        MissingExtraError: `output` without matplotlib.
    """
    if output is not None:
        import zerobubble.plot.sweep  # noqa: F401 - before the work: it may be missing

    request, styles = _fixed(request)
    done = 0
    with progress("planning") as tell:

        def count() -> None:
            nonlocal done
            done += 1
            tell(f"plan {done}")

        found = sweep(
            request.costs, request.ranks, request.microbatches,
            lambda limit, style, chunks: _plan(request, limit, style, chunks), styles, count,
        )  # fmt: skip
    if output is not None:
        _draw(found, request, output)
    if as_json:
        print_json(_to_dict(found, time.perf_counter() - start))
        return
    out = console()
    out.print(_limits(found))
    out.print(_handcrafted(found))
    if output is not None:
        out.print(f"wrote {output}")


def _fixed(request: Request) -> tuple[Request, list[tuple[str, int | None]]]:
    """The request with costs per stage, and the placements to sweep. Layers are cut once, as evenly as possible."""
    if request.placement == "auto" and request.layers is not None:
        raise OptionError("--sweep-memory with --layers needs one --placement, say v: the cut is made for it")
    if request.placement == "auto":
        return request, list(STYLES)
    if request.layers is not None:
        placement = make_placement(request.placement, request.ranks, request.chunks)
        cut = best_partitions(request.layers, placement)[0]
        request = replace(request, costs=stage_costs_for(request.layers, cut), layers=None)
    return request, [(request.placement, request.chunks)]


def _plan(request: Request, limit: float, style: str, chunks: int | None) -> planner.Plan:
    return planner.plan(
        request.costs, request.ranks, request.microbatches, memory_limit=limit, placement=style, chunks=chunks,
        effort=request.effort, time_limit=request.time_limit,
    )  # fmt: skip


def _draw(found: Sweep, request: Request, output: Path) -> None:
    from zerobubble.plot import sweep as plot

    lines = [
        plot.Line(curve.name, tuple((point.memory_limit, point.plan.timeline.bubble_rate) for point in curve.points))
        for curve in found.curves
    ]
    points = [
        plot.Labelled(row.title, max(row.timeline.peak_memory), row.timeline.bubble_rate)
        for row in found.handcrafted
        if max(row.timeline.peak_memory) <= found.limits[-1]
    ]
    plot.write(lines, points, output, f"{request.ranks} ranks, {request.microbatches} microbatches")


def _to_dict(found: Sweep, seconds: float) -> dict[str, Any]:
    return {
        "curves": [
            {
                "name": curve.name,
                "points": [
                    {
                        "memory_limit": point.memory_limit,
                        "cost": point.plan.timeline.cost,
                        "bubble_rate": point.plan.timeline.bubble_rate,
                        "peak_memory": list(point.plan.timeline.peak_memory),
                        "lower_bound": point.plan.lower_bound,
                    }
                    for point in curve.points
                ],
            }
            for curve in found.curves
        ],
        "handcrafted": [
            {
                "name": row.name,
                "title": row.title,
                "cost": row.timeline.cost,
                "bubble_rate": row.timeline.bubble_rate,
                "peak_memory": list(row.timeline.peak_memory),
            }
            for row in found.handcrafted
        ],
        "seconds": seconds,
    }


def _limits(found: Sweep) -> Table:
    table = Table("memory limit", *(curve.name for curve in found.curves), title="bubble of the plans")
    by_curve = [{point.memory_limit: point.plan.timeline.bubble_rate for point in c.points} for c in found.curves]
    for limit in found.limits:
        table.add_row(f"{limit:g}", *(f"{bubbles[limit]:.2%}" if limit in bubbles else "" for bubbles in by_curve))
    return table


def _handcrafted(found: Sweep) -> Table:
    table = Table("handcrafted", "peak memory", "bubble")
    for row in sorted(found.handcrafted, key=lambda row: max(row.timeline.peak_memory)):
        table.add_row(row.title, f"{max(row.timeline.peak_memory):g}", f"{row.timeline.bubble_rate:.2%}")
    return table
