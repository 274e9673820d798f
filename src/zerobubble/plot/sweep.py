"""Bubble against memory as SVG or PNG, through matplotlib (extra `plot`): a curve per family, points for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from zerobubble.errors import MissingExtraError, OptionError
from zerobubble.plot.layout import NO_MATPLOTLIB

try:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter
except ImportError as error:
    raise MissingExtraError(NO_MATPLOTLIB) from error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

_STYLE: Any = {"font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "zerobubble"}
_LINE, _SOFT = "#222222", "#777777"
_COLOURS = ("#336bb0", "#ed9921", "#219c85", "#c95b42", "#7a5195", "#8c8c8c")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_WIDTH, _HEIGHT = 7.2, 4.4


class Labelled(NamedTuple):
    """A point with its name: memory per rank, and bubble rate."""

    name: str
    memory: float
    bubble_rate: float


class Line(NamedTuple):
    """A family: its name, and (memory limit, bubble rate) by rising limit."""

    name: str
    points: tuple[tuple[float, float], ...]


def write(lines: Sequence[Line], points: Sequence[Labelled], path: Path, title: str = "") -> None:
    """Write the picture to `path`; its suffix, .svg or .png, says as what. The same input gives the same bytes.

    Raises:
        OptionError: another suffix, or a place that cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise OptionError(f"{path}: a sweep is drawn as .svg or .png; got the suffix {path.suffix!r}")
    try:
        with rc_context(_STYLE):
            draw(lines, points, title).savefig(path, dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror or error}") from None


def draw(lines: Sequence[Line], points: Sequence[Labelled], title: str = "") -> Figure:
    """One curve per family over the memory limit, and the points with their names beside them."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.1, 0.13, 0.87, 0.77))
        _frame(axes, title)
        for line, colour, marker in zip(lines, _COLOURS * len(lines), _MARKERS * len(lines)):
            memory, bubbles = zip(*line.points, strict=True)
            axes.plot(memory, bubbles, color=colour, marker=marker, markersize=4.5, linewidth=1.6, label=line.name)
        for point in points:
            axes.plot([point.memory], [point.bubble_rate], "x", color=_LINE, markersize=5, markeredgewidth=1.2)
        axes.set_ylim(bottom=-0.01)
        axes.set_xlim(left=0)
        _names(axes, points)
        if lines:
            axes.legend(
                title="planned", title_fontsize=9, fontsize=9, frameon=False, loc="upper right", alignment="left"
            )
    return figure


def _frame(axes: Axes, title: str) -> None:
    axes.set_xlabel("activation memory per rank, at most", fontsize=9, color=_LINE)
    axes.set_ylabel("bubble rate", fontsize=9, color=_LINE)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.tick_params(labelsize=8, color=_SOFT, labelcolor=_LINE)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.set_title(title, fontsize=11, weight="bold", color=_LINE, loc="left", parse_math=False)


def _names(axes: Axes, points: Sequence[Labelled]) -> None:
    """Names to the right of their points, one above the other where points share a place."""
    low, high = axes.get_ylim()
    least = 0.035 * (high - low)
    taken: list[tuple[float, float]] = []
    width = axes.get_xlim()[1]
    for point in sorted(points, key=lambda one: (one.memory, one.bubble_rate)):
        height = point.bubble_rate
        while any(abs(height - y) < least and abs(point.memory - x) < 0.12 * width for x, y in taken):
            height += least
        taken.append((point.memory, height))
        axes.annotate(
            point.name, (point.memory, height), (6, 0), textcoords="offset points", fontsize=8, color=_LINE,
            va="center", annotation_clip=False, parse_math=False,
        )  # fmt: skip
