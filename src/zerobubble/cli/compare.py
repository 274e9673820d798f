"""`zerobubble show --compare`: plan above measured, and the difference op by op."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from zerobubble import plot
from zerobubble.cli.output import console, drawing_width, print_json
from zerobubble.compare import Delay, compare, in_unit
from zerobubble.plot.trace import to_dict
from zerobubble.timeline import Timeline

_SHOWN = 10
"""Ops in the table."""
_IN_PICTURE = 5

_Titled = tuple[str, Timeline]


def show_comparison(plan: _Titled, measured: _Titled, output: Path | None, as_json: bool) -> None:
    """Print or draw two timelines, one above the other, and the ops that added most to being late.

    Raises:
        OptionError: they cannot be compared, or the file cannot be written.
    """
    delays = compare(plan[1], measured[1])
    plan = plan[0], in_unit(plan[1], measured[1].unit)
    if as_json:
        timelines = [to_dict(*plan), to_dict(*measured)]
        print_json({"timelines": timelines, "delays": [_to_dict(delay) for delay in delays]})
        return
    unit = measured[1].unit
    out = console()
    if output is None:
        basic = out.color_system in ("standard", "windows")
        out.print(plot.text([plan, measured], drawing_width(), basic_colours=basic), soft_wrap=True)
    else:
        worst = [delay for delay in delays[:_IN_PICTURE] if delay.own > 0]
        notes = [f"{delay.op} on rank {delay.rank}: {_sentence(delay, unit)}" for delay in worst]
        plot.save([plan, measured], output, notes, {delay.op for delay in worst})
        out.print(f"wrote {output}")
    out.print(_table(delays, unit))
    longer, waited = (sum(getattr(delay, key) for delay in delays) for key in ("longer", "waited"))
    out.print(
        f"Cost {_number(measured[1].cost, unit)}, planned {_number(plan[1].cost, unit)}. All {len(delays)} ops "
        f"together ran {_number(longer, unit)} longer and waited {_number(waited, unit)} longer than planned."
    )


def _to_dict(delay: Delay) -> dict[str, Any]:
    names = {"op": str(delay.op), "behind": None if delay.behind is None else str(delay.behind)}
    return {**asdict(delay), **names, "late": delay.late, "own": delay.own, "cause": delay.cause}


def _sentence(delay: Delay, unit: str) -> str:
    return (
        f"ended {_number(delay.late, unit)} late; of this it added {_number(delay.own, unit)}: "
        f"{delay.cause} (op {delay.longer:+.3g}, wait {delay.waited:+.3g})"
    )


def _number(value: float, unit: str) -> str:
    return f"{value:.4g} {unit}".rstrip()


def _table(delays: list[Delay], unit: str) -> Table:
    table = Table(
        title=f"The {min(_SHOWN, len(delays))} ops that added most to being late, in {unit or 'units of time'}"
    )
    for name in ("op", "rank", "ended late", "inherited", "from", "waited longer", "ran longer", "mostly"):
        table.add_column(name, justify="left" if name in ("op", "from", "mostly") else "right")
    for delay in delays[:_SHOWN]:
        numbers = (f"{value:+.3g}" for value in (delay.late, delay.inherited))
        own = (f"{value:+.3g}" for value in (delay.waited, delay.longer))
        behind = "" if delay.behind is None else str(delay.behind)
        table.add_row(str(delay.op), str(delay.rank), *numbers, behind, *own, delay.cause)
    return table
