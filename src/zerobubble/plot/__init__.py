"""Drawings of timelines, simulated and measured alike, several one above the other over one time axis.

One module per medium: `text` for the terminal, `figure` for SVG and PNG (needs matplotlib), `trace` for Perfetto and
Chrome. `layout` holds what they share.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zerobubble.errors import OptionError
from zerobubble.plot.text import text
from zerobubble.plot.trace import holds_timelines, read, to_json, trace

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zerobubble.op import Op
    from zerobubble.timeline import Timeline

SUFFIXES = {".svg": "a figure", ".png": "a figure", ".json": "a trace for ui.perfetto.dev or chrome://tracing"}
"""What `save` can write, by suffix."""


def save(
    timelines: Sequence[tuple[str, Timeline]], path: str | Path, notes: Sequence[str] = (), marked: Collection[Op] = ()
) -> None:
    """Draw `(title, timeline)` pairs into a file of the kind that its suffix says: .svg, .png, or .json for a trace.

    In a figure the lines of `notes` stand beneath, and the ops in `marked` have a frame.

    Raises:
        OptionError: another suffix, no timeline, timelines with different units under one axis, or a place that
            cannot be written.
        MissingExtraError: .svg or .png without matplotlib.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        possible = ", ".join(f"{known} ({what})" for known, what in SUFFIXES.items())
        raise OptionError(f"{path}: cannot tell what to draw from the suffix {path.suffix!r}; possible are {possible}")
    try:
        if suffix == ".json":
            path.write_text(to_json(timelines), encoding="utf-8")
        else:
            from zerobubble.plot.figure import write  # only here: it needs matplotlib

            write(timelines, path, notes, marked)
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror or error}") from None


__all__ = ["SUFFIXES", "holds_timelines", "read", "save", "text", "trace"]
