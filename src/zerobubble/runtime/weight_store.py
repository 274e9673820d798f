"""The weight gradients of one stage and one microbatch that wait for their W."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Contribution = Callable[..., Tensor]
    """Called as (accumulator or None, *operands): adds a gradient in place, or returns the first one."""


class WeightStore:
    """What B leaves for W: per use of a parameter, the operands of its gradient, and how to compute and add it.

    Attributes:
        in_backward: whether B of this stage and microbatch is running.
        recomputes: whether a forward under this store saved tensors through hooks (activation checkpointing), so that
            the backward must run under the same function mode to recompute the same graph.
    """

    __slots__ = ("_deferred", "_entries", "in_backward", "recomputes")

    def __init__(self) -> None:
        self._entries: list[tuple[Tensor, Contribution, tuple[Any, ...]]] = []
        self._deferred: dict[Tensor, None] = {}
        self.in_backward = False
        self.recomputes = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def deferred(self) -> frozenset[Tensor]:
        """The parameters of which F announced a use whose gradient waits for W."""
        return frozenset(self._deferred)

    def announce(self, parameters: Iterable[Tensor | None]) -> None:
        """F: the gradients of these parameters (where they need one) will wait for W."""
        for parameter in parameters:
            if parameter is not None and parameter.requires_grad:
                self._deferred[parameter] = None

    def add(self, parameter: Tensor, contribution: Contribution, *operands: Any) -> None:
        """B: leave a gradient of `parameter` to be computed at W from `operands`."""
        self._entries.append((parameter, contribution, operands))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context for B: what autograd itself adds to a parameter with deferred uses waits for W with them.

        So a parameter gets its whole gradient of a microbatch at once, in its W, and its hooks see just that.
        """
        before = [(parameter, parameter.grad) for parameter in self._deferred]
        hooks = [(place, dict(place)) for parameter in self._deferred for place in _hooks(parameter)]
        for parameter in self._deferred:
            parameter.grad = None
        for place, _ in hooks:
            place.clear()
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False
            for place, functions in hooks:
                place.update(functions)
            for parameter, gradient in before:
                if parameter.grad is not None:
                    self.add(parameter, accumulate, parameter.grad)
                parameter.grad = gradient

    @torch.no_grad()
    def run(self) -> None:
        """W: compute every gradient that was left, add it to `.grad`, and let its operands go.

        What B left last comes first: right after B, that is still in a cache. The hooks of a parameter run once, on its
        whole gradient of the microbatch, as under plain autograd.
        """
        hooked: dict[Tensor, Tensor | None] = {}
        while self._entries:
            parameter, contribution, operands = self._entries.pop()
            if _hooks(parameter):
                hooked[parameter] = contribution(hooked.get(parameter), *operands)
                continue
            gradient = contribution(parameter.grad, *operands)
            parameter.grad = gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)
        for parameter, whole in hooked.items():
            assert whole is not None
            _add_through_hooks(parameter, whole.to(parameter.dtype))

    def by_parameter(self) -> dict[Tensor, WeightStore]:
        """What was left for each parameter, as a store of its own; this one lets go of it."""
        parts: dict[Tensor, WeightStore] = {}
        for entry in self._entries:
            parts.setdefault(entry[0], WeightStore())._entries.append(entry)
        self._entries.clear()
        return parts

    def tensors(self) -> list[Tensor]:
        """What the store keeps alive (for measuring M_W)."""
        return [value for *_, operands in self._entries for value in operands if isinstance(value, Tensor)]


def accumulate(accumulator: Tensor | None, gradient: Tensor) -> Tensor:
    """Add `gradient` to `accumulator` in place; without one, `gradient` becomes it."""
    return gradient if accumulator is None else accumulator.add_(gradient)


def _hooks(parameter: Tensor) -> list[dict[int, Callable[[Tensor], Any]]]:
    """The hooks on a parameter: on its gradient, and after its accumulation."""
    return [hooks for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if hooks]


def _add_through_hooks(parameter: Tensor, gradient: Tensor) -> None:
    for hook in tuple((parameter._backward_hooks or {}).values()):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    parameter.grad = accumulate(parameter.grad, gradient)
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
