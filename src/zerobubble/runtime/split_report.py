"""Which parameters' gradients wait for W, and why others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from torch import Tensor


@dataclass(frozen=True)
class ParameterSplit:
    """What the split does with one parameter.

    Attributes:
        stage: where it is used.
        name: as in `Pipeline.named_parameters()`.
        elements: how many numbers it holds.
        deferred: whether its gradient waits for W.
        reason: why not: frozen, not used, or which functions took it in a way that leaves nothing for W.
    """

    stage: int
    name: str
    elements: int
    deferred: bool
    reason: str = ""


@dataclass(frozen=True)
class SplitReport:
    """What the split does with every parameter of the model. `str(report)` is a table."""

    parameters: tuple[ParameterSplit, ...]

    def share(self, stage: int | None = None) -> float:
        """The share of trained elements, of one stage or of all, whose gradient waits for W (1 where none trains)."""
        trained = [p for p in self.parameters if stage in (None, p.stage) and p.reason != FROZEN]
        elements = sum(p.elements for p in trained)
        return sum(p.elements for p in trained if p.deferred) / elements if elements else 1.0

    def __str__(self) -> str:
        lines = []
        for stage in sorted({p.stage for p in self.parameters}):
            lines.append(f"stage {stage}: {self.share(stage):.1%} of the trained elements wait for W")
            lines += [f"  {p.name}: {p.reason}" for p in self.parameters if p.stage == stage and not p.deferred]
        return "\n".join(lines)


FROZEN = "frozen: requires no gradient"


def describe(
    stage: int,
    named: Iterable[tuple[str, Tensor]],
    deferred: Set[Tensor],
    uses: Mapping[Tensor, Iterable[str]],
) -> list[ParameterSplit]:
    """A line per parameter of a stage, from what its first forward showed."""
    return [
        ParameterSplit(stage, name, p.numel(), p in deferred, "" if p in deferred else _reason(p, uses))
        for name, p in named
    ]


def _reason(parameter: Tensor, uses: Mapping[Tensor, Iterable[str]]) -> str:
    if not parameter.requires_grad:
        return FROZEN
    if parameter in uses:
        return f"gets its gradient in B, from {', '.join(uses[parameter])}"
    return "not used, or by a custom autograd function: gets what gradient there is in B"
