"""Emulated compute: layers that sleep their times, so that real processes rehearse a schedule without a GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from zerobubble.runtime.deferred import Rule, apply
from zerobubble.runtime.split import register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerobubble.runtime.weight_store import WeightStore


@dataclass(frozen=True)
class Times:
    """Seconds that a layer sleeps in F, B and W."""

    forward: float
    backward_input: float
    backward_weight: float


class EmulatedLayer(nn.Module):
    """Passes its input [...] on unchanged, after sleeping. F, B and W take their own times under any schedule."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep T_F."""
        return emulated(x, self.weight, self.times)


def emulated(x: Tensor, weight: Tensor, times: Times) -> Tensor:
    """Sleep T_F; under the split, B sleeps T_B and W sleeps T_W. Returns a copy of `x`."""
    if has_torch_function((x, weight)):
        output: Tensor = handle_torch_function(emulated, (x, weight), x, weight, times)
        return output
    time.sleep(times.forward)
    return x.clone()


def emulated_loss(output: Tensor, _targets: Any) -> Tensor:
    """A loss that costs nothing: the sum."""
    return output.sum()


def _forward(x: Tensor, _parameters: Sequence[Tensor | None], options: tuple[Any, ...]) -> Tensor:
    time.sleep(options[0].forward)
    return x.clone()


def _input_gradient(grad: Tensor, _x: Tensor, _parameters: Sequence[Tensor | None], options: tuple[Any, ...]) -> Tensor:
    time.sleep(options[0].backward_input)
    return grad.clone()


def _weight_gradient(
    accumulator: Tensor | None, _x: Tensor | None, grad: Tensor, shape: torch.Size, options: tuple[Any, ...]
) -> Tensor:
    time.sleep(options[0].backward_weight)
    return grad.new_zeros(shape) if accumulator is None else accumulator


_RULE = Rule(_forward, _input_gradient, (_weight_gradient,), (False,), autocasts=False)


def _deferred(store: WeightStore, x: Tensor, weight: Tensor, times: Times) -> Tensor:
    return apply(_RULE, store, x, (weight,), (times,))


register(emulated, _deferred)
