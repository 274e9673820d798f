"""What a step depends on beyond a rank's own gradients: the partial state of one rank, and the full state of all.

The state is the norm of each gradient; one that is NaN or infinite says that an element is. Everything that is decided
here is decided by every rank alike, from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING

from zerobubble.runtime.grad_norm import clip_coefficient, total_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_SURELY = 1 + 1e-9
"""A rank's own norm exceeds the limit surely, so that the norm over all ranks does, whatever the rounding."""


@dataclass(frozen=True)
class Verdict:
    """How the step is to be taken.

    Attributes:
        norm: of all gradients.
        skip: whether no step is taken.
        coefficient: by what the gradients are multiplied.
    """

    norm: float
    skip: bool
    coefficient: float

    @property
    def plain(self) -> bool:
        """Whether the step is what it would be without clipping and checks."""
        return not self.skip and self.coefficient == 1.0


@dataclass(frozen=True)
class Rules:
    """By what the gradients are judged.

    Attributes:
        clip_norm: their largest norm; None for no limit.
        norm_type: which norm.
        check_finite: whether a step is skipped when a gradient is not finite.
    """

    clip_norm: float | None
    norm_type: float
    check_finite: bool

    def judge(self, norms: Iterable[float]) -> Verdict:
        """The verdict on gradients of these norms, one of each, in any order."""
        norm = total_norm(norms, self.norm_type)
        skip = self.check_finite and not isfinite(norm)
        return Verdict(norm, skip, clip_coefficient(norm, self.clip_norm))

    def foretell(self, norms: Iterable[float]) -> bool:
        """Whether a rank's own norms already say that the verdict will not be `plain`."""
        norm = total_norm(norms, self.norm_type)
        if not isfinite(norm):
            return self.check_finite
        return self.clip_norm is not None and norm > self.clip_norm * _SURELY


class FullState:
    """The norms of all ranks, on their way, and the verdict on them."""

    def __init__(self, norms: Callable[[], list[float]], rules: Rules) -> None:
        self._norms = norms
        self._rules = rules

    @cached_property
    def verdict(self) -> Verdict:
        """How the step is to be taken. Waits for all ranks; raises `PeerError` when one does not step."""
        return self._rules.judge(self._norms())
