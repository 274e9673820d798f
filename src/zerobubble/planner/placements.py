"""Placements by name, and which of them `plan` tries."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from zerobubble.errors import OptionError
from zerobubble.schedule import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

Styles: TypeAlias = tuple[tuple[str, int], ...]
"""Names with numbers of chunks."""

_AUTO: Styles = (("linear", 1), ("v", 2), ("loop", 3), ("wave", 4))
_AUTO_THOROUGH: Styles = (*_AUTO, ("loop", 5))

_MAKERS: dict[str, Callable[[int, int], Placement]] = {
    "linear": lambda num_ranks, _: Placement.linear(num_ranks),
    "loop": Placement.loop,
    "v": lambda num_ranks, _: Placement.v(num_ranks),
    "wave": Placement.wave,
}
_CHUNKS = {"linear": 1, "loop": 2, "v": 2, "wave": 4}
"""Chunks per rank unless told otherwise; linear and v have no others."""


def placements_for(
    placement: str | Placement, num_ranks: int, chunks: int | None = None, effort: str = "default"
) -> list[Placement]:
    """The placements that `plan` tries.

    Raises:
        OptionError: an unknown name, or a number of chunks that the placement cannot have.
    """
    if isinstance(placement, Placement):
        if placement.num_ranks != num_ranks or chunks not in (None, placement.num_stages // num_ranks):
            raise OptionError(
                f"the placement has {placement.num_ranks} ranks; got num_ranks={num_ranks}, chunks={chunks}"
            )
        return [placement]
    if placement != "auto":
        return [make_placement(placement, num_ranks, chunks)]
    styles = _AUTO if effort == "quick" else _AUTO_THOROUGH
    if chunks is not None:
        styles = tuple((style, chunks) for style in _styles_with(chunks))
    return list({p.ranks: p for p in (make_placement(style, num_ranks, number) for style, number in styles)}.values())


def _styles_with(chunks: int) -> tuple[str, ...]:
    """The styles with so many chunks per rank that `auto` tries."""
    if chunks == 1:
        return ("linear",)
    return ("loop",) if chunks % 2 else ("loop", "wave")


def make_placement(style: str, num_ranks: int, chunks: int | None = None) -> Placement:
    """The placement of that name, by default with 2 chunks for a loop and 4 for a wave.

    Raises:
        OptionError: no placement has the name, or a number of chunks that it cannot have.
    """
    if style not in _MAKERS:
        raise OptionError(f"placement must be auto, linear, loop, v, wave or a Placement; got {style!r}")
    number = _CHUNKS[style] if chunks is None else chunks
    if number < 1:
        raise OptionError(f"chunks must be at least 1; got {chunks}")
    if style in ("linear", "v") and number != _CHUNKS[style]:
        plural = "s" * (_CHUNKS[style] > 1)
        raise OptionError(f"placement {style!r} has {_CHUNKS[style]} chunk{plural} per rank; got chunks={chunks}")
    if style == "wave" and number % 2 and number > 1:
        raise OptionError(f"a wave goes down and up, so it needs an even number of chunks; got {chunks}")
    return _MAKERS[style](num_ranks, number)


def name_of(placement: Placement) -> str:
    """The style of a placement, with its chunks per rank where the style does not say."""
    style, chunks = placement.style, placement.num_stages // placement.num_ranks
    return f"{style} of {chunks}" if style in ("loop", "wave") else style
