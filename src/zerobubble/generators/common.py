"""What the generators share: checking sizes, and grouping backward ops."""

from __future__ import annotations

from zerobubble.errors import OptionError


def check_sizes(**sizes: int) -> None:
    """Raise `OptionError` unless every size is a whole number of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"{name} must be a whole number of at least 1; got {size!r}")
