"""Values that are on their way: reading one waits for it, having one does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class LateValue:
    """A number that another rank computes, say the loss. `float(value)`, `value.item()` and printing wait for it."""

    def __init__(self, resolve: Callable[[], Tensor]) -> None:
        self._resolve: Callable[[], Tensor] | None = resolve
        self._value: float | None = None

    def item(self) -> float:
        """The number. Waits until it is there; raises `PeerError` when it will not come."""
        if self._value is None:
            assert self._resolve is not None
            self._value = float(self._resolve())
            self._resolve = None
        return self._value

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"LateValue({'on its way' if self._value is None else self._value})"
