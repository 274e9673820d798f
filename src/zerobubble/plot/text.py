"""Timelines for the terminal: a line of coloured cells per rank, readable without colour too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from zerobubble.op import Kind
from zerobubble.plot.layout import MEANINGS, ink, panels, shade, shared_unit, tick_step, with_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerobubble.plot.layout import Box, Panel
    from zerobubble.timeline import Timeline

    Style = Callable[[Kind, int, int], str]
    """Kind, chunk and number of chunks -> how rich is to print it."""

_IDLE = "."
_LEAST_COLUMNS = 20
_BASIC = {Kind.F: "blue", Kind.B: "yellow", Kind.W: "green", Kind.BW: "magenta"}


def text(timelines: Sequence[tuple[str, Timeline]], width: int = 120, *, basic_colours: bool = False) -> Text:
    """The timelines one above the other over one time axis, in lines of at most `width` characters (titles apart).

    An op fills the columns whose middle it covers, starting with the letter of its kind (small on odd chunks) and its
    microbatch where there is room. A dot is a column of the bubble: time until the rank's next step may begin.
    `basic_colours` is for terminals with 16 colours, where the others would fall together.

    Raises:
        OptionError: no timeline, or timelines with different units.
    """
    drawn = panels(timelines)
    unit = shared_unit(drawn)
    margin = len(_label(max(len(panel.timeline.starts) for panel in drawn) - 1))
    end = max(panel.end for panel in drawn) or 1.0
    per_column = end / _columns(drawn, end, max(width - margin - len(with_unit(end, unit)), _LEAST_COLUMNS))
    style = _basic_style if basic_colours else _style
    lines: list[Text] = []
    for panel in drawn:
        lines.append(Text.assemble((panel.title, "bold"), f"  {panel.caption}"))
        for rank in range(len(panel.timeline.starts)):
            lines.append(Text(_label(rank).ljust(margin)).append(_row(panel, rank, per_column, style)))
    lines += [*_axis(end, per_column, margin, unit), *_legend(drawn, width, style)]
    return Text("\n").join(lines)


def _label(rank: int) -> str:
    return f"rank {rank} "


def _columns(drawn: Sequence[Panel], end: float, room: int) -> int:
    """As many columns as there is room for; where all times are multiples of one step, a whole number per step."""
    boxes = [box for panel in drawn for rank in range(len(panel.timeline.starts)) for box in panel.boxes(rank)]
    step = min((box.end - box.start for box in boxes if box.end > box.start), default=end)
    steps = [time / step for box in boxes for time in (box.start, box.end)] + [end / step]
    if steps[-1] > room or any(abs(s - round(s)) > 1e-6 for s in steps):
        return room
    return room // round(steps[-1]) * round(steps[-1])


def _row(panel: Panel, rank: int, per_column: float, style: Style) -> Text:
    first, last = (_column(time, per_column) for time in panel.windows[rank])
    row = Text(" " * first)
    for box in panel.boxes(rank):
        start, end = _column(box.start, per_column), _column(box.end, per_column)
        row.append(_IDLE * (start - len(row)), "dim")
        row.append(_cell(box, end - start), style(box.op.kind, box.chunk, panel.num_chunks))
    return row.append(_IDLE * (last - len(row)), "dim")


def _column(time: float, per_column: float) -> int:
    """The first column whose middle is not before `time`."""
    return int(time / per_column + 0.5 - 1e-6)


def _cell(box: Box, width: int) -> str:
    letter, number = box.op.kind.value, str(box.op.microbatch)
    if box.chunk % 2:
        letter = letter.lower()
    fits = (word for word in (letter + number, letter, letter[0]) if len(word) <= width)
    return next(fits, "").ljust(width)


def _style(kind: Kind, chunk: int, num_chunks: int) -> str:
    colour = shade(kind, chunk, num_chunks)
    red, green, blue = (round(255 * part) for part in colour)
    return f"{ink(colour)} on rgb({red},{green},{blue})"


def _basic_style(kind: Kind, chunk: int, num_chunks: int) -> str:
    return f"black on {'bright_' * (chunk % 2)}{_BASIC[kind]}"


def _axis(end: float, per_column: float, margin: int, unit: str) -> tuple[Text, Text]:
    """A line of ticks and a line of their numbers, the unit behind the last one."""
    columns = round(end / per_column)
    step = tick_step(end, max(columns // 10, 1))
    ticks, numbers = [" "] * (margin + columns + 1), ""
    for i in range(int(end / step * (1 + 1e-9)) + 1):
        column = margin + _column(i * step, per_column)
        ticks[column] = "|"
        numbers = f"{numbers.ljust(column)}{i * step:g}"
    return Text("".join(ticks).rstrip(), "dim"), Text(f"{numbers} {unit}".rstrip(), "dim")


def _legend(drawn: Sequence[Panel], width: int, style: Style) -> list[Text]:
    """What letters and colours mean, in as many lines as it takes."""
    entries = [
        Text().append(f" {kind} ", style(kind, 0, 1)).append(f" {MEANINGS[kind]}")
        for kind in MEANINGS
        if any(kind in panel.kinds for panel in drawn)
    ]
    entries.append(Text(f"{_IDLE} bubble"))
    if any(panel.num_chunks > 1 for panel in drawn):
        entries.append(Text("small letter: odd chunk"))
    lines = [Text()]
    for entry in entries:
        if len(lines[-1]) and len(lines[-1]) + 3 + len(entry) > width:
            lines.append(Text())
        lines[-1].append("   " if len(lines[-1]) else "").append(entry)
    return lines
