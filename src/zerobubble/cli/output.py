"""Where the commands write: tables and drawings to standard output, errors to standard error, JSON as one line."""

from __future__ import annotations

import json
import shutil
import sys

from rich.console import Console
from rich.text import Text

_NEVER_WRAPS = 10_000
_DRAWING_WIDTH = 120


def console() -> Console:
    """Standard output: as wide as the terminal, or never wrapping a line when it is none."""
    return Console(width=None if sys.stdout.isatty() else _NEVER_WRAPS, markup=False, highlight=False)


def drawing_width() -> int:
    """Characters per line of a drawing: the terminal's, or what the variable COLUMNS says."""
    return shutil.get_terminal_size((_DRAWING_WIDTH, 24)).columns


def print_json(data: object) -> None:
    """Print one object on one line."""
    sys.stdout.write(json.dumps(data) + "\n")


def print_error(message: str) -> None:
    """Print what went wrong, as one paragraph."""
    error = Console(stderr=True, markup=False, highlight=False)
    error.print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)
