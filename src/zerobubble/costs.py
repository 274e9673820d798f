"""What each op costs: times and activation memory per stage, as a user gives them and as one placement needs them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, TypeAlias

from zerobubble.errors import CostsError
from zerobubble.op import Kind

if TYPE_CHECKING:
    from zerobubble.op import Op
    from zerobubble.schedule import Placement

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
"""How long the units of time are."""

PerStage: TypeAlias = "float | tuple[float, ...]"
"""One number for every stage, or one per stage in data-flow order."""


@dataclass(frozen=True)
class StageCosts:
    """`Costs` worked out for one placement: one number per stage (`hop`: per stage boundary, 0 within a rank)."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward_full: tuple[float, ...]
    hop: tuple[float, ...]
    activation_memory: tuple[float, ...]
    weight_memory: tuple[float, ...]

    def duration(self, op: Op) -> float:
        """How long `op` runs."""
        return self.by_kind[op.kind][op.stage]

    @property
    def by_kind(self) -> dict[Kind, tuple[float, ...]]:
        """Durations per stage for each kind of op."""
        return {
            Kind.F: self.forward,
            Kind.B: self.backward_input,
            Kind.W: self.backward_weight,
            Kind.BW: self.backward_full,
        }


@dataclass(frozen=True)
class Costs:
    """Times and activation memory of a pipeline's stages.

    Each field but `communication` and `unit` is one number (the same on every stage) or one number per stage in
    data-flow order. Times share one unit, memories share another; neither needs a name for planning.

    Attributes:
        forward: T_F.
        backward_input: T_B, the backward for the stage's input only.
        backward_weight: T_W, the backward for the stage's weights only.
        backward_full: the ordinary backward; by default T_B + T_W.
        communication: T_comm, pure latency of a hop between two ranks: one number, or one per stage boundary, or one
            per pair of neighbouring ranks (the way round from the last rank to the first takes the largest).
        activation_memory: M_B, what a forward keeps until the backward for the input.
        weight_memory: M_W, what the backward for the input keeps until the backward for the weights.
        unit: the unit of the times, for display only, say "ms".

    Raises:
        CostsError: a value is negative, NaN, infinite or not a number, or two lists have different lengths.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    communication: PerStage = 0.0
    activation_memory: PerStage = 1.0
    weight_memory: PerStage = 0.5
    backward_full: PerStage | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        for key in _NUMERIC:
            value = getattr(self, key)
            if value is not None or key != "backward_full":
                object.__setattr__(self, key, _checked(key, value))
        if not isinstance(self.unit, str):
            raise CostsError(f'costs: "unit" must be a text such as "ms"; got {shortened(self.unit)}')
        self._check_lengths()

    def _check_lengths(self) -> None:
        lengths = {key: len(getattr(self, key)) for key in PER_STAGE_KEYS if isinstance(getattr(self, key), tuple)}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f'"{key}" has {length}' for key, length in lengths.items())
            raise CostsError(f"costs: every list must have one entry per stage, so all the same length; {listed}")

    @property
    def num_stages(self) -> int | None:
        """The length of the lists, or None where every value is a single number."""
        return next((len(getattr(self, key)) for key in PER_STAGE_KEYS if isinstance(getattr(self, key), tuple)), None)

    def split(self, parts: int) -> Costs:
        """The same model cut finer: every stage in `parts` equal stages, with 1/`parts` of its time and memory."""
        cut: dict[str, Any] = {key: _split(getattr(self, key), parts) for key in PER_STAGE_KEYS}
        return replace(self, **cut)

    def resolve(self, placement: Placement) -> StageCosts:
        """The costs per stage of `placement`. Stages are cut evenly where the placement has a multiple of them.

        Raises:
            CostsError: the lists fit neither the number of stages nor a divisor of it.
        """
        stages = placement.num_stages
        parts, rest = divmod(stages, self.num_stages or stages)
        if rest:
            raise CostsError(
                f"costs: the lists have {self.num_stages} entries, but the schedule has {stages} stages; "
                f"give {stages} entries, or a number that divides {stages} so that each stage can be cut evenly"
            )
        costs = self.split(parts) if parts > 1 else self
        full = {key: _spread(getattr(costs, key), stages) for key in PER_STAGE_KEYS if getattr(costs, key) is not None}
        full.setdefault(
            "backward_full", tuple(b + w for b, w in zip(full["backward_input"], full["backward_weight"], strict=True))
        )
        return StageCosts(**full, hop=self._hops(placement))

    def _hops(self, placement: Placement) -> tuple[float, ...]:
        hops, ranks, num_ranks = self.communication, placement.ranks, placement.num_ranks
        boundaries = list(pairwise(ranks))
        if isinstance(hops, tuple) and len(hops) not in (len(boundaries), num_ranks - 1):
            raise CostsError(
                f'costs: "communication" has {len(hops)} entries; give one number, or one per stage boundary '
                f"({len(boundaries)} here), or one per pair of neighbouring ranks ({num_ranks - 1} here)"
            )

        def latency(boundary: int, a: int, b: int) -> float:
            if a == b:
                return 0.0
            if not isinstance(hops, tuple):
                return hops
            if len(hops) == len(boundaries):
                return hops[boundary]
            return hops[min(a, b)] if abs(a - b) == 1 else max(hops)

        return tuple(latency(i, a, b) for i, (a, b) in enumerate(boundaries))

    @property
    def seconds(self) -> float:
        """How long one unit of time is; without a name for it, a millisecond.

        Raises:
            CostsError: the unit is no unit of time.
        """
        unit = self.unit or "ms"
        if unit not in SECONDS:
            raise CostsError(f"costs: {self.unit!r} is no unit of real time; give times in s, ms, us or ns")
        return SECONDS[unit]

    @classmethod
    def from_json(cls, text: str, source: str = "costs") -> Costs:
        """Read costs from JSON text with exactly the field names as keys.

        Raises:
            CostsError: not JSON, a key is unknown or missing, or a value is malformed; names `source` and the key.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise CostsError(f"{source}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested as deep
            raise CostsError(f"{source}: JSON that cannot be read: {error}") from None
        if not isinstance(data, dict):
            raise CostsError(f"{source}: costs must be one JSON object with keys; got {type(data).__name__}")
        known = [f.name for f in fields(cls)]
        unknown = [key for key in data if key not in known]
        missing = [key for key in ("forward", "backward_input", "backward_weight") if key not in data]
        if unknown or missing:
            what = f"unknown key {json.dumps(unknown[0])}" if unknown else f'missing key "{missing[0]}"'
            raise CostsError(f"{source}: {what}; the keys are {', '.join(known)}")
        try:
            return cls(**data)
        except CostsError as error:
            raise CostsError(f"{source}: {str(error).removeprefix('costs: ')}") from None

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """Read a costs file. Raises `CostsError` as `from_json`, or when the file cannot be read."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise CostsError(f"{path}: cannot be read as a costs file: {error}") from None
        return cls.from_json(text, source=str(path))

    def to_json(self) -> str:
        """The costs as a JSON object; `from_json` reads it back."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps({key: value for key, value in data.items() if value is not None}, indent=2)


PER_STAGE_KEYS = (
    "forward",
    "backward_input",
    "backward_weight",
    "backward_full",
    "activation_memory",
    "weight_memory",
)
"""The keys of a costs file that have one value per stage."""
_NUMERIC = (*PER_STAGE_KEYS, "communication")


def _checked(key: str, value: object) -> PerStage:
    if isinstance(value, (list, tuple)):
        if not value and key != "communication":
            raise CostsError(f'costs: "{key}" is an empty list; give one number per stage, or a single number')
        return tuple(_number(f'"{key}", entry {i}', entry) for i, entry in enumerate(value))
    return _number(f'"{key}"', value)


def _number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CostsError(f"costs: {where} must be a number, or a list of numbers; got {shortened(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise CostsError(f"costs: {where} must be finite and not negative; got {number!r}")
    return number


def _split(value: PerStage | None, parts: int) -> PerStage | None:
    if isinstance(value, tuple):
        return tuple(v / parts for v in value for _ in range(parts))
    return None if value is None else value / parts


def _spread(value: PerStage, stages: int) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,) * stages
