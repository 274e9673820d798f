"""Two ways to take back an optimizer's step: from a copy, exactly, or by arithmetic, in place.

Each is made just before the step and called, without arguments, to undo it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from zerobubble.errors import OptionError
from zerobubble.optim.reverse import check_reversible, reverse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer

Gradients: TypeAlias = "Sequence[tuple[nn.Parameter, Tensor]]"
"""The parameters that a step changes, each with its gradient."""


class Undo(Protocol):
    """Made before a step: brings parameters, gradients and optimizer state back to what they were."""

    def __call__(self) -> None:
        """Undo the step."""


class Snapshot:
    """Keeps a copy of parameters, state and (where the step may write to them) gradients: exact for any optimizer."""

    def __init__(self, optimizer: Optimizer, gradients: Gradients) -> None:
        kept = [optimizer.state, [parameter.detach() for parameter, _ in gradients]]
        if not leaves_gradients_alone(optimizer):
            kept.append([gradient for _, gradient in gradients])
        self._back = saved(kept)

    @torch.no_grad()
    def __call__(self) -> None:
        """Undo the step."""
        self._back()


class Reverse:
    """Undoes SGD, Adam and AdamW by arithmetic: no memory, exact only to rounding. From section C of the paper."""

    def __init__(self, optimizer: Optimizer, gradients: Gradients) -> None:
        check_reversible(optimizer)
        self._optimizer = optimizer
        self._gradients = gradients
        self._first = {parameter for parameter, _ in gradients if not optimizer.state.get(parameter)}

    @torch.no_grad()
    def __call__(self) -> None:
        """Undo the step."""
        reverse(self._optimizer, dict(self._gradients), self._first)


STRATEGIES: dict[str, type[Snapshot] | type[Reverse]] = {"snapshot": Snapshot, "reverse": Reverse}


def check_undo(undo: str, optimizer: Optimizer) -> None:
    """Raise `OptionError` where `undo` is no strategy, or cannot undo the steps of `optimizer`."""
    if undo not in STRATEGIES:
        raise OptionError(f"undo must be one of {', '.join(STRATEGIES)}; got {undo!r}")
    if undo == "reverse":
        check_reversible(optimizer)


def leaves_gradients_alone(optimizer: Optimizer) -> bool:
    """Whether the step is known never to write to the gradients (SGD with Nesterov momentum and `foreach` does)."""
    plain = type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    return plain and not any(group.get("nesterov") for group in optimizer.param_groups)


def saved(value: Any) -> Callable[[], Any]:
    """Copies a nest of dicts, lists and tensors; what is returned brings it back, in the same dicts and tensors."""
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return lambda: value.copy_(copy)
    if isinstance(value, dict):
        entries = {key: saved(entry) for key, entry in value.items()}
        return lambda: _refill(value, {key: back() for key, back in entries.items()})
    if type(value) in (list, tuple):
        parts = [saved(part) for part in value]
        return lambda: type(value)(back() for back in parts)
    kept = deepcopy(value)
    return lambda: kept


def _refill(target: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    target.clear()
    target.update(entries)
    return target


class Settings:
    """The values of an optimizer's parameter groups (learning rates, ...) as they are now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._values = [
            {key: deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in self._groups
        ]

    def put_back(self, unlike: Settings | None = None) -> None:
        """Set the groups to these values; with `unlike`, only what differs from there."""
        for index, values in enumerate(self._values):
            for key, value in values.items():
                if unlike is None or not _same(value, unlike._values[index].get(key)):
                    _set(self._groups[index], key, value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """A tensor is written to where it lies: schedulers and captured graphs hold on to it."""
    present = group.get(key)
    if isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
        present.copy_(value)
    else:
        group[key] = deepcopy(value)
