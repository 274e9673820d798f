"""The weight gradients of one stage and one microbatch that wait for their W."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Contribution = Callable[..., torch.Tensor]
    """Called as (accumulator or None, *operands): adds a gradient in place, or returns the first one."""


class WeightStore:
    """What B leaves for W: per use of a parameter, the operands of its gradient, and how to compute and add it.

    Attributes:
        recomputes: whether a forward under this store saved tensors through hooks (activation checkpointing), so that
            the backward must run under the same function mode to recompute the same graph.
    """

    __slots__ = ("_entries", "recomputes")

    def __init__(self) -> None:
        self._entries: list[tuple[torch.Tensor, Contribution, tuple[Any, ...]]] = []
        self.recomputes = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, parameter: torch.Tensor, contribution: Contribution, *operands: Any) -> None:
        """Leave a gradient of `parameter` to be computed at W from `operands`."""
        self._entries.append((parameter, contribution, operands))

    @torch.no_grad()
    def run(self) -> None:
        """W: compute every gradient that was left, in the order in which B left them, add it to `.grad`, let go."""
        for parameter, contribution, operands in self._entries:
            parameter.grad = contribution(parameter.grad, *operands).to(parameter.dtype)
        self._entries.clear()

    def tensors(self) -> list[torch.Tensor]:
        """What the store keeps alive (for measuring M_W)."""
        return [value for *_, operands in self._entries for value in operands if isinstance(value, torch.Tensor)]
