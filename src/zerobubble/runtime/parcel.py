"""What crosses from stage to stage: any pytree, taken apart into its tensors and a skeleton of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zerobubble.runtime.inlet import Inlet

if TYPE_CHECKING:
    from collections.abc import Iterable


class TensorForm(NamedTuple):
    """All of a tensor but its data: what a receiver must know before the data comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Parcel(NamedTuple):
    """A value that crosses a hop.

    Attributes:
        skeleton: the value with a `TensorForm` in the place of each tensor.
        tensors: its tensors, detached, in the order of the pytree.
    """

    skeleton: Any
    tensors: tuple[Tensor, ...]

    def forms(self) -> list[TensorForm]:
        """The forms of the tensors, in their order."""
        return forms_in(self.skeleton)


def forms_in(skeleton: Any) -> list[TensorForm]:
    """The tensor forms in a skeleton, in the order of the pytree."""
    if isinstance(skeleton, TensorForm):
        return [skeleton]
    return [leaf for leaf in pytree.tree_leaves(skeleton, is_leaf=_is_form) if isinstance(leaf, TensorForm)]


def form_of(tensor: Tensor) -> TensorForm:
    """The form of `tensor`."""
    return TensorForm(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def pack(value: Any) -> tuple[Parcel, list[Tensor]]:
    """Take `value` apart. Returns the parcel, and the original tensors that require grad."""
    if isinstance(value, Tensor):
        return Parcel(form_of(value), (value.detach(),)), [value] if value.requires_grad else []
    leaves, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    skeleton = pytree.tree_unflatten([form_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    return Parcel(skeleton, tuple(t.detach() for t in tensors)), [t for t in tensors if t.requires_grad]


def pack_gradients(gradients: Iterable[Tensor]) -> Parcel:
    """The parcel that carries the input gradients of a stage back to the previous one."""
    tensors = tuple(gradients)
    return Parcel(tuple(form_of(t) for t in tensors), tensors)


def unpack(parcel: Parcel) -> tuple[Any, list[Inlet]]:
    """Put a value together again. Returns it, and an inlet for each of its tensors that requires grad."""
    inlets: list[Inlet] = []
    tensors = []
    for form, tensor in zip(parcel.forms(), parcel.tensors):
        if form.requires_grad and torch.is_grad_enabled():
            inlets.append(Inlet())
            tensor = inlets[-1].open(tensor)
        tensors.append(tensor)
    if isinstance(parcel.skeleton, TensorForm):
        return tensors[0], inlets
    leaves, spec = pytree.tree_flatten(parcel.skeleton, is_leaf=_is_form)
    rest = iter(tensors)
    return pytree.tree_unflatten([next(rest) if _is_form(leaf) else leaf for leaf in leaves], spec), inlets


def _is_form(leaf: object) -> bool:
    return isinstance(leaf, TensorForm)
