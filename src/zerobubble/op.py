"""Ops: one stage's work of one kind for one microbatch."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What an op does. The values are the letters of the notation."""

    F = "F"
    """Forward of one stage for one microbatch."""
    B = "B"
    """Backward for the stage's input only: unblocks the previous stage."""
    W = "W"
    """Backward for the stage's weights only: unblocks nobody, may wait."""
    BW = "BW"
    """Both in one, the ordinary backward."""

    def __str__(self) -> str:
        return self.value


class Op(NamedTuple):
    """One stage's work of one kind for one microbatch. `str(op)` is its notation: `2F0`, `0BW3`."""

    stage: int
    kind: Kind
    microbatch: int

    def parts(self) -> tuple[Op, ...]:
        """B and W of a BW; any other op itself."""
        if self.kind is not Kind.BW:
            return (self,)
        return self._replace(kind=Kind.B), self._replace(kind=Kind.W)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


def F(stage: int, microbatch: int) -> Op:  # noqa: N802 - the field's own letter
    """The forward op of `stage` for `microbatch`."""
    return Op(stage, Kind.F, microbatch)


def B(stage: int, microbatch: int) -> Op:  # noqa: N802
    """The input-gradient op of `stage` for `microbatch`."""
    return Op(stage, Kind.B, microbatch)


def W(stage: int, microbatch: int) -> Op:  # noqa: N802
    """The weight-gradient op of `stage` for `microbatch`."""
    return Op(stage, Kind.W, microbatch)


def BW(stage: int, microbatch: int) -> Op:  # noqa: N802
    """The ordinary backward op of `stage` for `microbatch`."""
    return Op(stage, Kind.BW, microbatch)
