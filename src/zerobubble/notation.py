"""Schedules as text: a grid, CSV (our dialect and that of `torch.distributed.pipelining`), JSON. All round-trip.

An op is written `<stage><kind><microbatch>`: `2F0`, `0B3`, `0W3`, `0BW3`. PyTorch writes `I` for our B and `B` for our
BW; that translation lives in this module only.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Literal

from zerobubble.errors import NotationError, OptionError
from zerobubble.op import Kind, Op
from zerobubble.schedule import Placement, Schedule, make_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Dialect = Literal["ours", "torch"]

_OP = re.compile(r"([0-9]{1,18})(F|BW|B|W|I)([0-9]{1,18})")
_KINDS: dict[Dialect, dict[str, Kind]] = {
    "ours": {kind.value: kind for kind in Kind},
    "torch": {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW},
}
_LETTERS = {dialect: {kind: letter for letter, kind in kinds.items()} for dialect, kinds in _KINDS.items()}
_IDLE = "."
_BUSY = "-"


def parse_op(text: str, dialect: Dialect = "ours", where: str = "op") -> Op:
    """Read one op. Raises `NotationError` with `where` when the text is not one."""
    match = _OP.fullmatch(text) if isinstance(text, str) else None
    kind = _KINDS[dialect].get(match[2]) if match else None
    if match is None or kind is None:
        letters = ", ".join(_KINDS[dialect])
        raise NotationError(
            f"{where}: {shortened(text)} is not an op; "
            f"write <stage><kind><microbatch> with a kind of {letters}, as in 2F0"
        )
    return Op(int(match[1]), kind, int(match[3]))


def format_op(op: Op, dialect: Dialect = "ours") -> str:
    """Write one op."""
    return f"{op.stage}{_LETTERS[dialect][op.kind]}{op.microbatch}"


# ---------------------------------------------------------------------------------------------------- text grid


def to_grid(
    schedule: Schedule, slots: Sequence[Sequence[int]] | None = None, ends: Sequence[Sequence[int]] | None = None
) -> str:
    """One line per rank, one column per time slot, `.` where a rank is idle.

    `slots[rank][i]` is the column of the rank's i-th op; without it the ops stand one after the other.
    With `ends`, an op that runs on up to column `ends[rank][i]` has `-` in the columns behind its first.
    """
    slots = slots or [range(len(order)) for order in schedule.orders]
    width = max((len(str(op)) for op in schedule.ops()), default=1)
    lines = []
    for rank, (order, columns) in enumerate(zip(schedule.orders, slots, strict=True)):
        until = ends[rank] if ends else [column + 1 for column in columns]
        cells = [_IDLE] * max(until, default=0)
        for op, column, end in zip(order, columns, until, strict=True):
            cells[column:end] = [str(op)] + [_BUSY] * (end - column - 1)
        lines.append(f"rank {rank} | {' '.join(cell.ljust(width) for cell in cells)}".rstrip())
    return "\n".join(lines) + "\n"


def from_grid(text: str, name: str = "custom") -> Schedule:
    """Read a text grid back. Columns, `.` and `-` only help the reader: the order is what counts.

    Raises:
        NotationError: names the line and the word that is not an op.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            _, bar, cells = line.rpartition("|")
            words = [word for word in (cells if bar else line).split() if word not in (_IDLE, _BUSY)]
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
    reader = csv.reader(io.StringIO(text))
    try:
        lines = [[cell.strip() for cell in row] for row in reader]
    except csv.Error as error:
        raise NotationError(f"line {reader.line_num}: not CSV: {error}") from None
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
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested as deep
        raise NotationError(f"JSON that cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise NotationError(f"must be one JSON object with {_KEYS}; got {shortened(data)}")
    missing = next((key for key in ("placement", "num_microbatches", "orders") if key not in data), None)
    if missing:
        raise NotationError(f'missing key "{missing}"; needs {_KEYS}')
    ranks = [_whole(rank, f'"placement", stage {i}') for i, rank in enumerate(_list(data["placement"], '"placement"'))]
    num_microbatches = _whole(data["num_microbatches"], '"num_microbatches"')
    rows = [
        [parse_op(op, where=f'"orders", rank {r}, op {i}') for i, op in enumerate(_list(row, f'"orders", rank {r}'))]
        for r, row in enumerate(_list(data["orders"], '"orders"'))
    ]
    try:
        placement = Placement(tuple(ranks))
    except OptionError as error:
        raise NotationError(f'"placement": {error}') from None
    return make_schedule(str(data.get("name", "custom")), placement, num_microbatches, rows)


_KEYS = '"placement" (list of ranks), "num_microbatches" (number) and "orders" (a list of ops per rank)'


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise NotationError(f"{where}: must be a list; got {shortened(value)}")
    return value


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotationError(f"{where}: must be a whole number; got {shortened(value)}")
    return value


# ---------------------------------------------------------------------------------------------------- files


def load(path: str | Path) -> Schedule:
    """Read a schedule file: `.json`, `.csv` (either dialect), anything else as a text grid.

    Raises:
        NotationError: the file cannot be read or is malformed; names the file and the place in it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise NotationError(f"{path}: cannot be read as a schedule: {error}") from None
    try:
        if path.suffix.lower() == ".json":
            return from_json(text)
        return (from_csv if path.suffix.lower() == ".csv" else from_grid)(text, name=path.stem)
    except NotationError as error:
        raise NotationError(f"{path}: {error}") from None


def _schedule(rows: list[list[Op]], name: str) -> Schedule:
    """Placement and number of microbatches are read off the ops; the validator judges the rest.

    A stage lies on the rank that has most of its ops, so that an op on a wrong line is the only one out of place.
    """
    ops = [op for row in rows for op in row]
    if not ops:
        raise NotationError("no ops found; write one line per rank with ops such as 0F0")
    held: dict[int, Counter[int]] = {}
    for rank, row in enumerate(rows):
        for op in row:
            held.setdefault(op.stage, Counter())[rank] += 1
    absent = next((stage for stage in range(max(held)) if stage not in held), None)
    if absent is not None:
        raise NotationError(f"no op of stage {absent} found, though there is a stage {max(held)}")
    try:
        placement = Placement(tuple(held[stage].most_common(1)[0][0] for stage in range(len(held))))
    except OptionError as error:
        raise NotationError(str(error)) from None
    return make_schedule(name, placement, max(op.microbatch for op in ops) + 1, rows)
