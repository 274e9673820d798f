"""Counts the bytes of tensors that are alive, on any device, for measuring what activations a rank really holds."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context: counts the storages that ops allocate in this thread until they are freed. Slow: for measuring only.

    Attributes:
        bytes: of the storages allocated inside and still alive.
        peak: the most that `bytes` has been.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` and take note of what it allocated."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._note(leaf, counted=False)
        output = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._note(leaf, counted=True)
        return output

    def _note(self, tensor: Tensor, counted: bool) -> None:
        """Remember a storage seen for the first time; what came in from outside does not count."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if counted else 0
        if key not in self._known:
            self._known.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size
