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


def split(tree: Any, num_microbatches: int) -> list[Any]:
    """Cut every tensor in `tree` along dimension 0 into `num_microbatches` nearly equal parts: one tree for each.

    `Shared` values, tensors without dimensions and values that are no tensors go to every microbatch whole.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda value: isinstance(value, Shared))
    columns = [
        leaf.tensor_split(num_microbatches) if _is_cut(leaf) else [_whole(leaf)] * num_microbatches for leaf in leaves
    ]
    rows = [list(row) for row in zip(*columns)] if columns else [[]] * num_microbatches
    return [pytree.tree_unflatten(row, spec) for row in rows]


def samples(tree: Any, num_microbatches: int, what: str) -> list[int] | None:
    """How many samples each microbatch of `tree` has; None where no tensor of it is cut.

    Raises:
        OptionError: the tensors disagree on the batch size, or there are fewer samples than microbatches.
    """
    leaves = pytree.tree_leaves(tree, is_leaf=lambda value: isinstance(value, Shared))
    sizes = {len(leaf) for leaf in leaves if _is_cut(leaf)}
    if len(sizes) > 1:
        raise OptionError(
            f"{what}: the tensors disagree on the batch size (dimension 0): {sorted(sizes)}; "
            "wrap those that every microbatch needs whole in zerobubble.Shared"
        )
    if not sizes:
        return None
    size, rest = divmod(sizes.pop(), num_microbatches)
    if size < 1:
        raise OptionError(
            f"{what}: a batch of {rest} cannot be cut into {num_microbatches} microbatches; "
            "give at least one sample per microbatch, or plan with fewer microbatches"
        )
    return [size + (mb < rest) for mb in range(num_microbatches)]


def _is_cut(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _whole(leaf: object) -> object:
    return leaf.value if isinstance(leaf, Shared) else leaf
