"""The handcrafted schedules. `GENERATORS` is the one table that drives the command line, the docs and the tests."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING

from zerobubble.errors import OptionError
from zerobubble.generators.gpipe import gpipe
from zerobubble.generators.interleaved import interleaved
from zerobubble.generators.one_f_one_b import one_f_one_b
from zerobubble.generators.v_half import v_half
from zerobubble.generators.v_min import v_min
from zerobubble.generators.zb_h1 import zb_h1
from zerobubble.generators.zb_h2 import zb_h2
from zerobubble.generators.zb_v import zb_v

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerobubble.schedule import Schedule


@dataclass(frozen=True)
class Generator:
    """A row of the table of schedules.

    Attributes:
        name: what a user types.
        title: the name in the literature.
        make: the function; takes num_ranks and num_microbatches, and `chunks` where `takes_chunks`.
        placement: style of its placement.
        bubble: its bubble in words or as a formula of the paper, for equal stages.
        memory: peak activation memory of the rank that holds most.
        good_for: when to choose it.
    """

    name: str
    title: str
    make: Callable[..., Schedule]
    placement: str
    bubble: str
    memory: str
    good_for: str

    @property
    def takes_chunks(self) -> bool:
        """Whether the number of chunks per rank can be chosen."""
        return "chunks" in signature(self.make).parameters


_TABLE = (
    Generator(
        "gpipe", "GPipe", gpipe, "linear", "(p-1)(T_F+T_B+T_W)", "m M_B",
        "reference; few microbatches",
    ),
    Generator(
        "one_f_one_b", "1F1B", one_f_one_b, "linear", "(p-1)(T_F+T_B+T_W)", "p M_B",
        "baseline; no split of the backward",
    ),
    Generator(
        "interleaved", "1F1B-I", interleaved, "loop", "about (p-1)(T_F+T_B+T_W)/v", "about p M_B (1 + (p-1)/(pv))",
        "fast links, memory to spare, no split of the backward",
    ),
    Generator(
        "zb_h1", "ZB-H1", zb_h1, "linear", "(p-1)(T_F+T_B-T_W)", "p M_B",
        "a drop-in for 1F1B: same memory, a third of the bubble",
    ),
    Generator(
        "zb_h2", "ZB-H2", zb_h2, "linear", "(p-1)(T_F+T_B-2T_W)", "(2p-1) M_B",
        "no bubble where twice the memory is there",
    ),
    Generator(
        "zb_v", "ZB-V", zb_v, "v", "0 for T_F = T_B = T_W", "p M_B",
        "no bubble at 1F1B's memory, twice the communication",
    ),
    Generator(
        "v_half", "V-Half", v_half, "v", "about half of 1F1B's", "about p/2 M_B",
        "half the memory: larger microbatches or longer sequences",
    ),
    Generator(
        "v_min", "V-Min", v_min, "v", "about 2/3 of 1F1B's for T_F = T_B = T_W", "about p/3 M_B",
        "the least memory",
    ),
)  # fmt: skip

GENERATORS: dict[str, Generator] = {generator.name: generator for generator in _TABLE}
"""Every generator by name."""


def generate(name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of the generator called `name` (also `1f1b`, `ZB-H1`: case, dashes and titles are forgiven).

    Raises:
        OptionError: no such generator, a size below 1, or `chunks` given to one that has a fixed number.
    """
    generator = find_generator(name)
    if chunks is None:
        return generator.make(num_ranks, num_microbatches)
    if not generator.takes_chunks:
        raise OptionError(f"{generator.name} has a fixed number of chunks per rank; leave chunks out (got {chunks})")
    return generator.make(num_ranks, num_microbatches, chunks=chunks)


def find_generator(name: str) -> Generator:
    """The row of the table for `name` or title. Raises `OptionError` listing the names when there is none."""
    wanted = name.lower().replace("-", "_")
    for generator in _TABLE:
        if wanted in (generator.name, generator.title.lower().replace("-", "_")):
            return generator
    raise OptionError(f"no schedule is called {name!r}; the names are {', '.join(GENERATORS)}")


__all__ = [
    "GENERATORS", "Generator", "find_generator", "generate",
    "gpipe", "interleaved", "one_f_one_b", "v_half", "v_min", "zb_h1", "zb_h2", "zb_v",
]  # fmt: skip
