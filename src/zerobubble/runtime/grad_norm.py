"""The norm of the gradients over all ranks, and what to clip by: one rule, the same bit for bit under every layout."""

from __future__ import annotations

from math import fsum, inf, isfinite, isnan, nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerobubble.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable


def gradient_norms(gradients: Iterable[Tensor | None], norm_type: float) -> Tensor:
    """The norm of each gradient, 0 where there is none: [gradients], float64, on the device of the gradients."""
    zero = torch.zeros((), dtype=torch.float64)
    norms = [zero if gradient is None else _norm(gradient, norm_type) for gradient in gradients]
    device = next((norm.device for norm in norms if norm is not zero), zero.device)
    return torch.stack([norm.to(device) for norm in norms]) if norms else zero.new_empty(0)


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    dtype = torch.complex128 if gradient.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), norm_type, dtype=dtype)
    return norm


def total_norm(norms: Iterable[float], norm_type: float) -> float:
    """The norm of all gradients together, from the norm of each.

    It is NaN or infinite where one of them is. The sum is rounded once, so that their order does not matter.
    """
    listed = list(norms)
    largest = nan if any(map(isnan, listed)) else max(listed, default=0.0)
    if norm_type == inf or largest == 0.0 or not isfinite(largest):
        return largest
    total: float = fsum((norm / largest) ** norm_type for norm in listed) ** (1 / norm_type)
    return largest * total


def clip_coefficient(total: float, max_norm: float | None) -> float:
    """By what gradients of norm `total` are multiplied so that it is at most `max_norm`; 1 where it is not finite."""
    return max_norm / total if max_norm is not None and isfinite(total) and total > max_norm else 1.0


def check_clipping(max_norm: float | None, norm_type: float) -> None:
    """Raise `OptionError` where gradients cannot be clipped so."""
    if max_norm is not None and not max_norm > 0:
        raise OptionError(f"max_norm must be a positive number; got {max_norm!r}")
    if not norm_type > 0:
        raise OptionError(f"norm_type must be a positive number or infinity; got {norm_type!r}")
