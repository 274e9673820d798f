"""Where a received tensor enters a stage's graph, and where its gradient comes out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

_anchors: dict[torch.device, Tensor] = {}


def anchor(device: torch.device) -> Tensor:
    """A tensor that makes an autograd function's output require grad where none of its inputs does."""
    if device not in _anchors:
        _anchors[device] = torch.empty(0, device=device, requires_grad=True)
    return _anchors[device]


class Inlet:
    """The start of a stage's graph for one received tensor.

    The tensor that `open` returns is no leaf: it may be changed in place, and nothing but the graph keeps it alive.
    """

    __slots__ = ("_zeros", "gradient")

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self._zeros: Callable[[], Tensor] | None = None

    def open(self, tensor: Tensor) -> Tensor:
        """`tensor`, now requiring grad; `gradient` holds what B finds for it."""
        self._zeros = partial(torch.zeros, tensor.shape, dtype=tensor.dtype, device=tensor.device)
        entered: Tensor = _Enter.apply(anchor(tensor.device), [tensor.detach()], self)  # type: ignore[no-untyped-call]
        return entered

    def take(self) -> Tensor:
        """The gradient, zeros where the stage made no use of the tensor."""
        assert self._zeros is not None
        return self._zeros() if self.gradient is None else self.gradient


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, box: list[Tensor], inlet: Inlet) -> Tensor:
        ctx.inlet = inlet
        return box.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.inlet.gradient = gradient
        return None, None, None
