"""`zerobubble paper`: the paper's tables beside ours."""

import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Grid
from rich.text import Text

from zerobubble.cli.inputs import AsJson
from zerobubble.cli.output import console, print_json
from zerobubble.paper.tables import TABLES, Cell, Table


class Number(str, Enum):
    """A table that we have values for."""

    two = "2"
    five = "5"
    eight = "8"


def paper(
    table: Annotated[Number | None, typer.Option("--table", help="Only this table of the paper.")] = None,
    as_json: AsJson = False,
) -> None:
    """The paper's tables 2, 5 and 8: the printed value, ours, and what its authors' code reaches."""
    wanted = list(TABLES) if table is None else [int(table.value)]
    made = _make(wanted)
    if as_json:
        print_json({"tables": [one.to_dict() for one in made]} if table is None else made[0].to_dict())
        return
    out = console()
    for one in made:
        out.print(f"Table {one.number}: {one.title}", style="bold")
        out.print(_grid(one))
        for note in one.notes:
            out.print(f"  {note}")
        out.print()


def _make(wanted: Sequence[int]) -> list[Table]:
    """The tables, with a progress bar on a terminal's standard error."""
    silent = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=silent) as progress:

        def track(number: int, rows: Sequence[str]) -> Iterable[str]:
            return progress.track(rows, description=f"table {number}")

        return [TABLES[number](lambda rows, number=number: track(number, rows)) for number in wanted]


def _grid(table: Table) -> Grid:
    grid = Grid("", "", *table.columns)
    for row, cells in table.rows.items():
        lines = [
            ("printed", [_text(cell.printed) for cell in cells.values()]),
            ("value", [_text(cell.value) for cell in cells.values()]),
            ("ours", [_ours(cell) for cell in cells.values()]),
            ("peer", [_text(cell.peer) for cell in cells.values()]),
        ]
        for name, line in lines:
            if any(line):
                grid.add_row(row if name == "printed" else "", name, *line)
        grid.add_section()
    return grid


def _ours(cell: Cell) -> Text:
    """Our value, green where it equals the paper's."""
    expected = cell.printed if cell.value is None else cell.value
    return _text(cell.ours, "green" if cell.ours == expected else "")


def _text(value: str | float | None, style: str = "") -> Text:
    if value is None or isinstance(value, str):
        return Text(value or "", style)
    return Text(f"{value:.4f}" if value < 1 else f"{value:g}", style)
