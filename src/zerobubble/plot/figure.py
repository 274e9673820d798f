"""Timelines as SVG or PNG, through matplotlib (extra `plot`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from zerobubble.errors import MissingExtraError
from zerobubble.plot.layout import MEANINGS, NO_MATPLOTLIB, ink, panels, shade, shared_unit, tick_step

try:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch
    from matplotlib.textpath import TextToPath
except ImportError as error:
    raise MissingExtraError(NO_MATPLOTLIB) from error

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from zerobubble.op import Kind, Op
    from zerobubble.plot.layout import Box, Panel
    from zerobubble.timeline import Timeline

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "svg.fonttype": "path",
    "svg.hashsalt": "zerobubble",
    "hatch.linewidth": 0.6,
    "axes.unicode_minus": False,
}
_BUBBLE: dict[str, Any] = {"facecolor": "#f3f3f3", "edgecolor": "#c4c4c4", "hatch": "/////", "linewidth": 0.0}
_LINE = "#222222"
_MARK = "#d0021b"
_GAP = 0.09
"""White space above and below the boxes, as a share of a rank's row."""

_FILL = 0.78
"""The most of a box's width that its number may take."""
_SMALLEST = 5.0
"""Points: a smaller number is not written."""
_MANY = 20_000
"""With more boxes than this, an SVG holds them as one picture."""

# inches
_LEFT, _RIGHT, _TOP, _HEAD, _AXIS, _LEGEND, _NOTE = 0.72, 0.2, 0.06, 0.54, 0.44, 0.32, 0.17


def write(
    timelines: Sequence[tuple[str, Timeline]], path: Path, notes: Sequence[str] = (), marked: Collection[Op] = ()
) -> None:
    """Write the drawing to `path`; its suffix, .svg or .png, says as what. The same timelines give the same bytes.

    Raises:
        OptionError: no timeline, or timelines with different units.
        OSError: the file cannot be written.
    """
    with rc_context(_STYLE):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        draw(timelines, notes, marked).savefig(path, dpi=160, metadata=metadata)


def draw(timelines: Sequence[tuple[str, Timeline]], notes: Sequence[str] = (), marked: Collection[Op] = ()) -> Figure:
    """The timelines one above the other over one time axis.

    Per rank a row of boxes, one per op: colour says the kind, its shade the chunk, the number the microbatch. Grey is
    the bubble: the rank's time until its next step may begin. Lines across the ranks part warm-up, steady phase and
    cool-down. The ops in `marked` have a frame, and the lines of `notes` stand beneath.

    Raises:
        OptionError: no timeline, or timelines with different units.
    """
    drawn = panels(timelines)
    unit = shared_unit(drawn)
    sheet = _Sheet.of(drawn, len(notes))
    with rc_context(_STYLE):
        figure = Figure(figsize=(sheet.width, sheet.height), facecolor="white")
        FigureCanvasAgg(figure)
        for panel, bottom in zip(drawn, sheet.bottoms, strict=True):
            axes = _axes(figure, sheet, panel, bottom)
            _draw_panel(axes, sheet, panel)
            _frame(axes, panel, marked)
        axes.set_xlabel(f"time ({unit})" if unit else "time", fontsize=9, color=_LINE, labelpad=2)
        axes.tick_params(labelbottom=True)
        _legend(figure, sheet, drawn)
        for i, note in enumerate(reversed(notes)):
            y = (_NOTE * (i + 0.4)) / sheet.height
            figure.text(_LEFT / sheet.width, y, note, fontsize=8, color=_LINE, va="bottom", parse_math=False)
    return figure


class _Sheet(NamedTuple):
    """Sizes of the whole drawing, in inches."""

    width: float
    height: float
    row: float
    bottoms: tuple[float, ...]
    end: float
    foot: float

    @property
    def axes_width(self) -> float:
        """Width of the time axis."""
        return self.width - _LEFT - _RIGHT

    @property
    def points(self) -> float:
        """Points of the paper per unit of time."""
        return self.axes_width * 72 / self.end

    @classmethod
    def of(cls, drawn: Sequence[Panel], num_notes: int = 0) -> _Sheet:
        """Rows as high as reads well, lower where there are many; as wide as the typical op needs for its number."""
        rows = [len(panel.timeline.starts) for panel in drawn]
        row = min(max(14.0 / sum(rows), 0.1), 0.32)
        end = max(panel.end for panel in drawn) or 1.0
        typical = min(_typical_duration(panel) for panel in drawn) or end
        width = min(max(10.0, _LEFT + _RIGHT + 0.16 * end / typical), 20.0)
        foot = _NOTE * num_notes
        height = _TOP + sum(_HEAD + row * count for count in rows) + _AXIS + _LEGEND + foot
        bottoms, y = [], height - _TOP
        for count in rows:
            y -= _HEAD + row * count
            bottoms.append(y)
        return cls(width, height, row, tuple(bottoms), end, foot)


def _typical_duration(panel: Panel) -> float:
    durations = sorted(box.end - box.start for rank in range(len(panel.timeline.starts)) for box in panel.boxes(rank))
    return durations[len(durations) // 2] if durations else 0.0


def _axes(figure: Figure, sheet: _Sheet, panel: Panel, bottom: float) -> Axes:
    ranks = len(panel.timeline.starts)
    axes = figure.add_axes(
        (_LEFT / sheet.width, bottom / sheet.height, sheet.axes_width / sheet.width, ranks * sheet.row / sheet.height)
    )
    axes.set_xlim(0, sheet.end)
    axes.set_ylim(ranks, 0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    step = tick_step(sheet.end, int(sheet.axes_width / 0.6))
    axes.set_xticks([i * step for i in range(int(sheet.end / step * (1 + 1e-9)) + 1)])
    axes.tick_params(axis="x", labelsize=8, color="#999999", labelcolor=_LINE, length=3, labelbottom=False)
    every = max(1, round(0.16 / sheet.row))
    shown = range(0, ranks, every)
    axes.set_yticks([rank + 0.5 for rank in shown], [f"rank {rank}" for rank in shown])
    axes.tick_params(axis="y", labelsize=min(9.0, 45 * sheet.row * every), labelcolor=_LINE, length=0, pad=5)
    return axes


def _draw_panel(axes: Axes, sheet: _Sheet, panel: Panel) -> None:
    windows = [_rectangle(rank, start, end) for rank, (start, end) in enumerate(panel.windows)]
    axes.add_collection(PolyCollection(windows, zorder=1, **_BUBBLE), autolim=False)
    boxes = [box for rank in range(len(windows)) for box in panel.boxes(rank)]
    axes.add_collection(
        PolyCollection(
            [_rectangle(box.rank, box.start, box.end) for box in boxes],
            facecolors=[shade(box.op.kind, box.chunk, panel.num_chunks) for box in boxes],
            edgecolors="white",
            rasterized=len(boxes) > _MANY,
            linewidths=min(0.8, 0.1 * _typical_duration(panel) * sheet.points),
            zorder=2,
        ),
        autolim=False,
    )
    _number(axes, sheet, panel, boxes)
    _mark_phases(axes, sheet, panel)
    _head(axes, sheet, panel)


def _frame(axes: Axes, panel: Panel, marked: Collection[Op]) -> None:
    ranks = range(len(panel.timeline.starts)) if marked else ()
    frames = [_rectangle(b.rank, b.start, b.end) for rank in ranks for b in panel.boxes(rank) if b.op in marked]
    axes.add_collection(
        PolyCollection(frames, facecolors="none", edgecolors=_MARK, linewidths=1.6, zorder=5), autolim=False
    )


def _rectangle(rank: int, start: float, end: float) -> list[tuple[float, float]]:
    top, bottom = rank + _GAP, rank + 1 - _GAP
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _number(axes: Axes, sheet: _Sheet, panel: Panel, boxes: Sequence[Box]) -> None:
    """Microbatch numbers where they fit, all in one size."""
    digit = _text_width("0", 1.0)
    room = [
        (box, _FILL * (box.end - box.start) * sheet.points / (digit * len(str(box.op.microbatch)))) for box in boxes
    ]
    size = min(8.0, 42 * sheet.row, *(fits for _, fits in room if fits >= _SMALLEST), 8.0)
    for box, fits in room:
        if fits >= size >= _SMALLEST:
            axes.text(
                (box.start + box.end) / 2, box.rank + 0.5, str(box.op.microbatch), fontsize=size, ha="center",
                va="center_baseline", color=ink(shade(box.op.kind, box.chunk, panel.num_chunks)), zorder=4,
            )  # fmt: skip


def _mark_phases(axes: Axes, sheet: _Sheet, panel: Panel) -> None:
    """A line down the ranks at the end of warm-up, and one at the start of cool-down; the words over the first rank."""
    ends = list(zip(*panel.phases))
    for times in ends:
        steps = [(time, edge) for rank, time in enumerate(times) for edge in (rank, rank + 1)]
        axes.add_collection(
            LineCollection([steps], colors=_LINE, linewidths=1.3, capstyle="butt", zorder=3), autolim=False
        )


def _head(axes: Axes, sheet: _Sheet, panel: Panel) -> None:
    """Title and figures on one line, and below it the names of the phases over the first rank."""
    above = axes.get_ylim()[1]
    first, last = panel.phases[0]
    window = panel.windows[0]
    for name, start, end in (("warm-up", window[0], first), ("steady", first, last), ("cool-down", last, window[1])):
        if _text_width(name, 8) + 4 <= (end - start) * sheet.points:
            axes.annotate(
                name, ((start + end) / 2, above), (0, 3), textcoords="offset points", fontsize=8, ha="center",
                va="bottom", color="#555555", style="italic",
            )  # fmt: skip
    room = sheet.axes_width * 72 - _text_width(panel.caption, 9) - 16
    title = _shortened(panel.title, room)
    for text, x, anchor, weight, size in ((title, 0, "left", "bold", 11), (panel.caption, 1, "right", "normal", 9)):
        axes.annotate(
            text, (x, 1), (0, 17), xycoords="axes fraction", textcoords="offset points", fontsize=size, ha=anchor,
            va="bottom", weight=weight, color=_LINE, parse_math=False,
        )  # fmt: skip


def _shortened(title: str, room: float) -> str:
    if _text_width(title, 11, weight="bold") <= room:
        return title
    while title and _text_width(title + "…", 11, weight="bold") > room:
        title = title[:-1]
    return title + "…"


def _text_width(text: str, size: float, weight: str = "normal") -> float:
    """Width of `text` in points."""
    font = FontProperties(family="DejaVu Sans", weight=weight)
    width, _, _ = TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return float(width) * size / font.get_size_in_points()


def _legend(figure: Figure, sheet: _Sheet, drawn: Sequence[Panel]) -> None:
    kinds: list[Kind] = [kind for kind in MEANINGS if any(kind in panel.kinds for panel in drawn)]
    chunks = max(panel.num_chunks for panel in drawn)
    handles: list[Any] = [Patch(facecolor=shade(kind, 0, chunks)) for kind in kinds]
    labels = [f"{kind}  {MEANINGS[kind]}" for kind in kinds]
    handles.append(Patch(**_BUBBLE))
    labels.append("bubble")
    if chunks > 1:
        handles.append(tuple(Patch(facecolor=shade(kinds[0], chunk, chunks)) for chunk in range(chunks)))
        labels.append("chunks 0 and 1" if chunks == 2 else f"chunks 0 to {chunks - 1}")
    figure.legend(
        handles, labels, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, ncols=len(labels), frameon=False,
        loc="lower left", bbox_to_anchor=((_LEFT - 0.07) / sheet.width, (0.02 + sheet.foot) / sheet.height), fontsize=9,
        handlelength=1.5, handleheight=1.0, columnspacing=1.8, borderpad=0.2, labelcolor=_LINE,
    )  # fmt: skip
