"""The loss scale for fp16, as `torch.amp.GradScaler` keeps it, but decided from the gradients of all ranks."""

from __future__ import annotations

import struct
from math import isfinite
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.amp import GradScaler


class LossScale:
    """The scale that `scaler` holds. Its factors and its interval are the scaler's; only the decision is ours."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler

    def get(self) -> float:
        """By what losses are multiplied now."""
        return self.scaler.get_scale()

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide the gradients by it, in place."""
        inverse = 1.0 / self.get()
        for gradient in gradients:
            gradient.mul_(inverse)

    def update(self, finite: bool) -> None:
        """After a step: back off where it was not finite, grow after enough in a row that were."""
        state = self.scaler.state_dict()
        scale, streak = state["scale"], state["_growth_tracker"] + 1 if finite else 0
        if not finite:
            scale = _float32(scale * state["backoff_factor"])
        elif streak == state["growth_interval"]:
            grown = _float32(scale * state["growth_factor"])
            scale, streak = grown if isfinite(grown) else scale, 0
        self.scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": streak})


def _float32(value: float) -> float:
    """`value` as the scaler's tensor holds it."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return float("inf")
    return float(rounded)
