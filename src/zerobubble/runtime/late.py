"""Values that are on their way: reading one waits for it, having one does not."""

from __future__ import annotations

from functools import total_ordering
from typing import TYPE_CHECKING, SupportsFloat

if TYPE_CHECKING:
    from collections.abc import Callable


@total_ordering
class LateValue:
    """A number that another rank computes, say the loss.

    `value.item()`, `float(value)`, printing, comparing and adding wait for it; `repr` does not.
    """

    def __init__(self, resolve: Callable[[], SupportsFloat]) -> None:
        self._resolve: Callable[[], SupportsFloat] | None = resolve
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

    def __str__(self) -> str:
        return str(self.item())

    def __eq__(self, other: object) -> bool:
        return self.item() == (other.item() if isinstance(other, LateValue) else other)

    def __lt__(self, other: SupportsFloat) -> bool:
        return self.item() < float(other)

    def __add__(self, other: SupportsFloat) -> float:
        return self.item() + float(other)

    __radd__ = __add__

    def __sub__(self, other: SupportsFloat) -> float:
        return self.item() - float(other)

    def __rsub__(self, other: SupportsFloat) -> float:
        return float(other) - self.item()

    def __mul__(self, other: SupportsFloat) -> float:
        return self.item() * float(other)

    __rmul__ = __mul__

    def __neg__(self) -> float:
        return -self.item()

    def __abs__(self) -> float:
        return abs(self.item())

    def __truediv__(self, other: SupportsFloat) -> float:
        return self.item() / float(other)

    def __round__(self, digits: int = 0) -> float:
        return round(self.item(), digits)

    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"LateValue({'on its way' if self._value is None else self._value})"
