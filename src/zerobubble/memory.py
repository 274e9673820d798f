"""The rule of activation memory, written once: what a rank holds while it runs its ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobubble.op import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerobubble.costs import StageCosts
    from zerobubble.op import Op


def held_memory(order: Sequence[Op], costs: StageCosts) -> Iterator[float]:
    """Per op of a rank's `order`, the most activation memory that the rank holds while the op runs or when it ends.

    F adds M_B when it starts; B turns M_B into M_W when it ends; W frees M_W and BW frees M_B when they end.
    """
    held = 0.0
    for op in order:
        before, held = held, held_after(held, op, costs)
        yield max(before, held)


def held_after(held: float, op: Op, costs: StageCosts) -> float:
    """What a rank holds after `op`, if it held `held` before."""
    activation, weight = costs.activation_memory[op.stage], costs.weight_memory[op.stage]
    if op.kind is Kind.F:
        return held + activation
    if op.kind is Kind.B:
        return held + weight - activation
    return held - (weight if op.kind is Kind.W else activation)


def peak_memory(order: Sequence[Op], costs: StageCosts) -> float:
    """The most activation memory that a rank holds when it runs `order`, in the unit of the costs."""
    return max(held_memory(order, costs), default=0.0)
