"""What every drawing shares: times counted from the first op, chunks, the phases of each rank, captions and colours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from zerobubble.errors import OptionError
from zerobubble.op import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerobubble.op import Op
    from zerobubble.timeline import Interval, Timeline

NO_MATPLOTLIB = "drawing SVG and PNG needs matplotlib; install it with: pip install 'zerobubble[plot]'"

MEANINGS: dict[Kind, str] = {
    Kind.F: "forward",
    Kind.B: "backward (input)",
    Kind.W: "backward (weights)",
    Kind.BW: "backward (both)",
}
"""The words of the legends, in their order."""

COLOURS: dict[Kind, tuple[float, float, float]] = {
    Kind.F: (0.20, 0.42, 0.69),
    Kind.B: (0.93, 0.60, 0.13),
    Kind.W: (0.13, 0.61, 0.52),
    Kind.BW: (0.79, 0.36, 0.25),
}
"""Red, green and blue from 0 to 1 for the first chunk: apart in hue and in lightness, also for colour-blind people."""

_LIGHTEST = 0.58


class Box(NamedTuple):
    """One op of a drawing; times count from the timeline's first op."""

    rank: int
    op: Op
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Panel:
    """One timeline of a drawing with its title."""

    title: str
    timeline: Timeline

    @cached_property
    def origin(self) -> float:
        """When the first op starts."""
        return min((starts[0] for starts in self.timeline.starts if starts), default=0.0)

    @cached_property
    def _rows(self) -> list[list[Interval]]:
        return self.timeline.rows()

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Chunk of each stage: its index among the stages of its rank."""
        placement = self.timeline.schedule.placement
        return tuple(placement.stages_of(rank).index(stage) for stage, rank in enumerate(placement.ranks))

    @cached_property
    def num_chunks(self) -> int:
        """The most chunks that a rank has."""
        return max(self.chunks) + 1

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of op that occur, in the order of the legends."""
        present = {op.kind for op in self.timeline.schedule.ops()}
        return tuple(kind for kind in MEANINGS if kind in present)

    @cached_property
    def windows(self) -> tuple[tuple[float, float], ...]:
        """Per rank, the time that belongs to this step: from its first op to the first of the next step.

        Steps follow each other at the distance of the cost, so every window is as long as that (0 for a rank without
        ops), and what a rank does not work in its window is its bubble.
        """
        cost = self.timeline.cost
        firsts = [starts[0] - self.origin if starts else None for starts in self.timeline.starts]
        return tuple((0.0, 0.0) if first is None else (first, first + cost) for first in firsts)

    @cached_property
    def phases(self) -> tuple[tuple[float, float], ...]:
        """Per rank, the end of warm-up (its first backward starts) and the start of cool-down (its last F has ended).

        Both are one where no backward starts before the last F has ended: there is no steady phase.
        """
        return tuple(self._phases(rank) for rank in range(len(self.timeline.starts)))

    def _phases(self, rank: int) -> tuple[float, float]:
        timeline = self.timeline
        rows = list(zip(timeline.schedule.orders[rank], timeline.starts[rank], timeline.ends[rank], strict=True))
        last_forward = max((end for op, _, end in rows if op.kind is Kind.F), default=self.origin)
        first_backward = min((start for op, start, _ in rows if op.kind is not Kind.F), default=last_forward)
        return first_backward - self.origin, max(first_backward, last_forward) - self.origin

    @cached_property
    def end(self) -> float:
        """Where the drawing ends: the end of the last window."""
        return max((end for _, end in self.windows), default=0.0)

    def boxes(self, rank: int) -> Iterator[Box]:
        """The ops of `rank`, in the order in which they ran."""
        for op, start, end in self._rows[rank]:
            yield Box(rank, op, self.chunks[op.stage], start - self.origin, end - self.origin)

    @property
    def caption(self) -> str:
        """Bubble rate, cost, and where it is known the peak memory, in words."""
        timeline = self.timeline
        parts = [f"bubble rate {timeline.bubble_rate:.1%}", f"cost {with_unit(timeline.cost, timeline.unit)}"]
        if timeline.peak_memory:
            parts.append(f"peak memory {max(timeline.peak_memory):g}")
        return ", ".join(parts)


def panels(timelines: Sequence[tuple[str, Timeline]]) -> list[Panel]:
    """The timelines of a drawing, made ready.

    Raises:
        OptionError: there is none.
    """
    if not timelines:
        raise OptionError("nothing to draw: give at least one (title, timeline)")
    return [Panel(title, timeline) for title, timeline in timelines]


def shared_unit(drawn: Sequence[Panel]) -> str:
    """The unit of a time axis under all panels.

    Raises:
        OptionError: the timelines have different units.
    """
    units = [panel.timeline.unit for panel in drawn]
    if len(set(units)) > 1:
        listed = ", ".join(f"{panel.title!r} has {unit!r}" for panel, unit in zip(drawn, units, strict=True))
        raise OptionError(f"timelines on one time axis must have the same unit; {listed}")
    return units[0]


def with_unit(value: float, unit: str) -> str:
    """A number with its unit, if it has one."""
    return f"{value:g} {unit}".rstrip()


def shade(kind: Kind, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """The colour of a kind, lighter for every further chunk."""
    white = _LIGHTEST * chunk / max(num_chunks - 1, 1)
    red, green, blue = (part + (1 - part) * white for part in COLOURS[kind])
    return red, green, blue


def ink(colour: tuple[float, float, float]) -> str:
    """`white` or `black`, whichever reads better on `colour`."""
    red, green, blue = (part**2.2 for part in colour)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def tick_step(end: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, ... that cuts a time axis of length `end` into at most `most` parts."""
    if end <= 0:
        return 1.0
    rough = end / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= rough * (1 - 1e-9))
