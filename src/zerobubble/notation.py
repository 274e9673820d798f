"""Schedules as text: a grid to read, CSV (our dialect and that of `torch.distributed.pipelining`), JSON. All round-trip.

An op is written `<stage><kind><microbatch>`: `2F0`, `0B3`, `0W3`, `0BW3`. PyTorch writes `I` for our B and `B` for our
BW; that translation lives in this module only.
"""

from __future__ import annotations

import csv
import io
import json
import re
from typing import TYPE_CHECKING, Literal

from zerobubble.errors import NotationError, OptionError
from zerobubble.op import Kind, Op
from zerobubble.schedule import Placement, Schedule, make_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

Dialect = Literal["ours", "torch"]

_OP = re.compile(r"(\d+)(F|BW|B|W|I)(\d+)")
_KINDS: dict[Dialect, dict[str, Kind]] = {
    "ours": {kind.value: kind for kind in Kind},
    "torch": {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW},
}
_LETTERS = {dialect: {kind: letter for letter, kind in kinds.items()} for dialect, kinds in _KINDS.items()}
_IDLE = "."


def parse_op(text: str, dialect: Dialect = "ours", where: str = "op") -> Op:
    """Read one op. Raises `NotationError` with `where` when the text is not one."""
    match = _OP.fullmatch(text)
    kind = _KINDS[dialect].get(match[2]) if match else None
    if match is None or kind is None:
        letters = ", ".join(_KINDS[dialect])
        raise NotationError(
            f"{where}: {text!r} is not an op; write <stage><kind><microbatch> with a kind of {letters}, as in 2F0"
        )
    return Op(int(match[1]), kind, int(match[3]))


def format_op(op: Op, dialect: Dialect = "ours") -> str:
    """Write one op."""
    return f"{op.stage}{_LETTERS[dialect][op.kind]}{op.microbatch}"


# ---------------------------------------------------------------------------------------------------- text grid


def to_grid(schedule: Schedule, slots: Sequence[Sequence[int]] | None = None) -> str:
    """One line per rank, one column per time slot, `.` where a rank is idle.

    `slots[rank][i]` is the column of the rank's i-th op; without it the ops stand one after the other.
    """
    slots = slots or [range(len(order)) for order in schedule.orders]
    width = max((len(str(op)) for op in schedule.ops()), default=1)
    lines = []
    for rank, (order, columns) in enumerate(zip(schedule.orders, slots, strict=True)):
        cells = [_IDLE] * (columns[-1] + 1 if columns else 0)
        for op, column in zip(order, columns, strict=True):
            cells[column] = str(op)
        lines.append(f"rank {rank} | {' '.join(cell.ljust(width) for cell in cells)}".rstrip())
    return "\n".join(lines) + "\n"


def from_grid(text: str, name: str = "custom") -> Schedule:
    """Read a text grid back. Columns and idle marks only help the reader: the order is what counts.

    Raises:
        NotationError: names the line and the word that is not an op.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            _, bar, cells = line.rpartition("|")
            words = [word for word in (cells if bar else line).split() if word != _IDLE]
            rows.append([parse_op(word, where=f"line {number}, op {i}") for i, word in enumerate(words, 1)])
    return _schedule(rows, name)


# ---------------------------------------------------------------------------------------------------- CSV


def to_csv(schedule: Schedule, dialect: Dialect = "ours") -> str:
    """One row per rank, one op per cell. `dialect="torch"` gives what `torch.distributed.pipelining` loads."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([format_op(op, dialect) for op in order] for order in schedule.orders)
    return out.getvalue()


def from_csv(text: str, dialect: Dialect | None = None, name: str = "custom") -> Schedule:
    """Read a CSV: one row per rank, one op per cell, empty cells ignored.

    Without `dialect` it is told from the kinds used: an `I`, or backward ops without any `W`, is torch's.

    Raises:
        NotationError: names the line and the cell that is not an op.
    """
    lines = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    dialect = dialect or _guess_dialect(cell for row in lines for cell in row)
    rows = [
        [parse_op(cell, dialect, f"line {number}, cell {i}") for i, cell in enumerate(row, 1) if cell]
        for number, row in enumerate(lines, 1)
        if any(row)
    ]
    return _schedule(rows, name)


def _guess_dialect(cells: Iterable[str]) -> Dialect:
    kinds = {match[2] for match in map(_OP.fullmatch, cells) if match}
    return "torch" if "I" in kinds or ("B" in kinds and not kinds & {"W", "BW"}) else "ours"


# ---------------------------------------------------------------------------------------------------- JSON


def to_json(schedule: Schedule) -> str:
    """A JSON object with `name`, `placement` (stage -> rank), `num_microbatches` and `orders` (ops per rank)."""
    return json.dumps(to_dict(schedule))


def to_dict(schedule: Schedule) -> dict[str, object]:
    """The object that `to_json` writes."""
    return {
        "name": schedule.name,
        "placement": list(schedule.placement.ranks),
        "num_microbatches": schedule.num_microbatches,
        "orders": [[str(op) for op in order] for order in schedule.orders],
    }


def from_json(text: str) -> Schedule:
    """Read a JSON object as `to_json` writes it.

    Raises:
        NotationError: not JSON, a key is missing or of the wrong type, or an entry is not an op; names the place.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise NotationError(f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    try:
        ranks, microbatches, orders = data["placement"], data["num_microbatches"], data["orders"]
        rows = [
            [parse_op(str(op), where=f'"orders", rank {r}, op {i}') for i, op in enumerate(order)]
            for r, order in enumerate(orders)
        ]
        placement = Placement(tuple(int(rank) for rank in ranks))
        return make_schedule(str(data.get("name", "custom")), placement, int(microbatches), rows)
    except KeyError as error:
        raise NotationError(f'missing key {error}; needs "placement", "num_microbatches" and "orders"') from None
    except (TypeError, AttributeError, OptionError) as error:
        raise NotationError(
            f'must be one object with "placement" (list of ranks), "num_microbatches" (number) and "orders" '
            f"(lists of ops): {error}"
        ) from None
    except ValueError as error:
        if isinstance(error, NotationError):
            raise
        raise NotationError(f'"placement" and "num_microbatches" must be whole numbers: {error}') from None


# ---------------------------------------------------------------------------------------------------- files


def load(path: Path) -> Schedule:
    """Read a schedule file: `.json`, `.csv` (either dialect), anything else as a text grid.

    Raises:
        NotationError: the file cannot be read or is malformed; names the file and the place in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotationError(f"{path}: cannot be read as a schedule: {error}") from None
    try:
        if path.suffix == ".json":
            return from_json(text)
        return from_csv(text, name=path.stem) if path.suffix == ".csv" else from_grid(text, name=path.stem)
    except NotationError as error:
        raise NotationError(f"{path}: {error}") from None


def _schedule(rows: list[list[Op]], name: str) -> Schedule:
    """Placement and number of microbatches are read off the ops; the validator judges the rest."""
    ops = [op for row in rows for op in row]
    if not ops:
        raise NotationError("no ops found; write one line per rank with ops such as 0F0")
    rank_of = {op.stage: rank for rank, row in enumerate(rows) for op in reversed(row)}
    absent = [stage for stage in range(max(rank_of) + 1) if stage not in rank_of]
    if absent:
        raise NotationError(f"no op of stage {absent[0]} found, though there is a stage {max(rank_of)}")
    try:
        placement = Placement(tuple(rank_of[stage] for stage in sorted(rank_of)))
    except OptionError as error:
        raise NotationError(str(error)) from None
    return make_schedule(name, placement, max(op.microbatch for op in ops) + 1, rows)
