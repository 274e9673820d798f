"""Tables 2, 5 and 8 of the paper: the printed value, and ours beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from zerobubble.costs import Costs
from zerobubble.generators import generate
from zerobubble.paper import evaluate, facts, peers, profiled_costs, profiles
from zerobubble.planner import plan
from zerobubble.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zerobubble.timeline import Timeline

    Track: TypeAlias = Callable[[Sequence[str]], Iterable[str]]
    """Goes through the rows and may show how far it is."""

_EXAMPLE = "1.5B/p8/m64"

_GENERATORS = {"1F1B": "one_f_one_b", "1F1B-I": "interleaved", "ZB-H1": "zb_h1", "ZB-H2": "zb_h2", "ZB-V": "zb_v"}
"""Column of the paper -> our generator."""

_PLANS = {"ZB-1p": 1, "ZB-2p": 2}
"""Column of the paper -> memory limit of our plan, in p*M_B. Columns in neither table have no value of ours."""

_SIMULATED = "ours: simulated with the times of table 9; cost = largest span of a rank, communication = pure latency"
_INTERLEAVED = (
    "1F1B-I: the paper does not print its number of chunks per rank; ours has (layers + 2) / p, one layer per chunk "
    "with embedding and output counted as one each, which comes nearest"
)
_PLANNED = (
    "ZB-1p, ZB-2p: planned with effort `quick`, one chunk per rank, within p*M_B and 2p*M_B of memory; the paper's "
    "M_W / M_B of table 1; bound: no schedule within that memory has a smaller bubble rate"
)
_PEER = "peer: the paper authors' own schedulers, simulated with the same times"


@dataclass(frozen=True)
class Cell:
    """One cell of a table: `printed` in the paper (a number or a formula), `ours`, and what stands beside them.

    Attributes:
        printed: the paper's number or formula.
        ours: our number, or None where we have none.
        peer: what the paper authors' code reaches, or None where that is not known.
        value: the value of the printed formula for the example, or None where a number is printed.
        bound: the bubble rate that no schedule within the memory can beat, or None where ours is not planned.
    """

    printed: float | str
    ours: float | None
    peer: float | None = None
    value: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Attributes:
        number: its number in the paper.
        title: what it shows.
        columns: its columns, in the paper's order.
        rows: cells by row and column.
        notes: what a reader must know about our values.
        times: per row, the setting of table 9 whose times we used.
    """

    number: int
    title: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, Cell]]
    notes: tuple[str, ...]
    times: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The table as a JSON object: `rows` maps row -> column -> `printed`, `ours` and `peer`.

        Formulas have `value` in the place of `peer`, planned cells also `bound`.
        """
        return {
            "table": self.number,
            "title": self.title,
            "columns": list(self.columns),
            "rows": {
                row: {column: _cell_to_dict(cell) for column, cell in cells.items()} for row, cells in self.rows.items()
            },
            "times": self.times,
            "notes": list(self.notes),
        }


def table_2(track: Track = iter) -> Table:
    """Bubble and peak memory of the handcrafted schedules: formula, its value for an example, and what we simulate."""
    times = profiles()[_EXAMPLE]
    costs = profiled_costs(_EXAMPLE)
    silent = Costs(
        costs.forward, costs.backward_input, costs.backward_weight, weight_memory=costs.weight_memory, unit=costs.unit
    )
    values = {key: float(times[key]) for key in ("p", "T_F", "T_B", "T_W")} | {"M_B": 1.0}
    formulas = facts()["table_2_bubble_and_memory"]
    rows = {}
    for schedule in track(["1F1B", "ZB-H1", "ZB-H2"]):
        timeline = _simulated(schedule, times["p"], times["m"], silent)
        ours = (timeline.cost - timeline.work, max(timeline.peak_memory))
        rows[schedule] = {
            column: Cell(formula, _rounded(mine), value=_rounded(evaluate(formula, values)))
            for column, formula, mine in zip(("bubble", "memory"), formulas[schedule], ours, strict=True)
        }
    notes = (
        f"value, ours: for the times of {_EXAMPLE} in ms, without communication, which the formulas leave out; M_B = 1",
        "ours: bubble = cost - work and the largest peak memory of a rank, from the simulated schedule",
    )
    title = "bubble and peak activation memory of the handcrafted schedules"
    return Table(2, title, ("bubble", "memory"), rows, notes, dict.fromkeys(rows, _EXAMPLE))


def table_5(track: Track = iter) -> Table:
    """Bubble rates of all schedules with one chunk per rank, and of 1F1B-I."""
    key = "table_5_bubble_rate"
    times = {row: row for row in facts()[key]["rows"]}
    return _bubble_rates(5, "bubble rates", key, times, (_SIMULATED, _INTERLEAVED, _PLANNED, _PEER), track)


def table_8(track: Track = iter) -> Table:
    """Bubble rates with ZB-V, on other settings than those of table 5."""
    key = "table_8_bubble_rate_with_zb_v"
    times = {row: _nearest_profile(row) for row in facts()[key]["rows"]}
    notes = (
        f"{facts()[key]['note']}: ours takes the times of the same model with the nearest m of table 9 (p is another "
        "for 6.2B and 14.6B), so the values are near to the printed ones, not equal",
        _SIMULATED,
        _INTERLEAVED,
        "ZB-V: two chunks per rank, each with half of a stage's times",
        _PEER,
    )
    return _bubble_rates(8, "bubble rates with ZB-V", key, times, notes, track)


TABLES: dict[int, Callable[..., Table]] = {2: table_2, 5: table_5, 8: table_8}
"""The tables that we have values for, by number."""


def _bubble_rates(
    number: int, title: str, key: str, times: dict[str, str], notes: tuple[str, ...], track: Track
) -> Table:
    columns = tuple(facts()[key]["columns"])
    known = peers()[key]
    rows = {}
    for row in track(list(times)):
        costs, peer = profiled_costs(times[row]), known.get(row, {})
        printed = zip(columns, facts()[key]["rows"][row], strict=True)
        rows[row] = {column: _cell(column, row, costs, value, peer.get(column)) for column, value in printed}
    return Table(number, title, columns, rows, notes, times)


@cache
def _cell(column: str, row: str, costs: Costs, printed: float, peer: float | None) -> Cell:
    """One bubble rate beside the printed one: simulated, or planned with the bound that no plan can beat."""
    model, ranks, microbatches = _parts(row)
    if column in _PLANS:
        limit = float(_PLANS[column] * ranks)
        found = plan(costs, ranks, microbatches, memory_limit=limit, placement="linear", effort="quick")
        least = max(1 - found.timeline.work / found.lower_bound, 0.0)
        return Cell(printed, _rounded(found.timeline.bubble_rate), peer, bound=_rounded(least))
    if column not in _GENERATORS:
        return Cell(printed, None, peer)
    layers: int = facts()["table_3_models"][model]["layers"]
    chunks = (layers + 2) // ranks if column == "1F1B-I" else None
    return Cell(printed, _rounded(_simulated(column, ranks, microbatches, costs, chunks).bubble_rate), peer)


def _simulated(column: str, num_ranks: int, num_microbatches: int, costs: Costs, chunks: int | None = None) -> Timeline:
    schedule = generate(_GENERATORS[column], num_ranks, num_microbatches, chunks)
    return simulate(schedule, costs.split(schedule.num_stages // num_ranks))


def _parts(row: str) -> tuple[str, int, int]:
    """Model, p and m of a setting such as `1.5B/p8/m24`."""
    model, ranks, microbatches = row.split("/")
    return model, int(ranks[1:]), int(microbatches[1:])


def _nearest_profile(row: str) -> str:
    """The setting of table 9 with the row's model and the nearest number of microbatches, the smaller one of two."""
    model, _, microbatches = _parts(row)
    same = [name for name, times in profiles().items() if times["model"] == model]
    return min(same, key=lambda name: abs(profiles()[name]["m"] - microbatches))


def _rounded(value: float) -> float:
    return round(value, 4)


def _cell_to_dict(cell: Cell) -> dict[str, Any]:
    beside = {"peer": cell.peer} if cell.value is None else {"value": cell.value}
    bound = {} if cell.bound is None else {"bound": cell.bound}
    return {"printed": cell.printed, "ours": cell.ours, **beside, **bound}
