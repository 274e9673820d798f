"""Cutting a batch into microbatches: any pytree of tensors and other values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zerobubble.errors import OptionError


@dataclass(frozen=True)
class Shared:
    """Wraps a value that every microbatch gets whole, instead of its slice along the batch dimension."""

    value: Any


def split(tree: Any, num_microbatches: int, what: str) -> tuple[list[Any], list[int] | None]:
    """Cut every tensor in `tree` along dimension 0 into `num_microbatches` nearly equal parts.

    `Shared` values, tensors without dimensions and values that are no tensors go to every microbatch whole.

    Returns:
        One tree per microbatch, and the number of samples in each (None where no tensor was cut).

    Raises:
        OptionError: the tensors disagree on the batch size, or there are fewer samples than microbatches.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda value: isinstance(value, Shared))
    sizes = {len(leaf) for leaf in leaves if _is_cut(leaf)}
    if len(sizes) > 1:
        raise OptionError(
            f"{what}: the tensors disagree on the batch size (dimension 0): {sorted(sizes)}; "
            "wrap those that every microbatch needs whole in zerobubble.Shared"
        )
    batch_size = next(iter(sizes), num_microbatches)
    if batch_size < num_microbatches:
        raise OptionError(
            f"{what}: a batch of {batch_size} cannot be cut into {num_microbatches} microbatches; "
            "give at least one sample per microbatch, or plan with fewer microbatches"
        )
    columns = [
        leaf.tensor_split(num_microbatches) if _is_cut(leaf) else [_whole(leaf)] * num_microbatches for leaf in leaves
    ]
    rows = [list(row) for row in zip(*columns)] if columns else [[]] * num_microbatches
    size, rest = divmod(batch_size, num_microbatches)
    counts = [size + (mb < rest) for mb in range(num_microbatches)] if sizes else None
    return [pytree.tree_unflatten(row, spec) for row in rows], counts


def _is_cut(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _whole(leaf: object) -> object:
    return leaf.value if isinstance(leaf, Shared) else leaf
