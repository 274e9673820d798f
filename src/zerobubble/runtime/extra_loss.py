"""Losses of layers in the middle of the model, such as the balance of a mixture of experts."""

from __future__ import annotations

from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerobubble.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterator

_here = local()


def add_loss(loss: Tensor) -> None:
    """Called in the forward of a layer: minimise `loss` [] too, for this microbatch.

    It is weighted as the main loss is (mean over microbatches, or the token count), whatever the layout, and is not
    part of the number that `Pipeline.step` returns. In evaluation, and where activation checkpointing runs a forward
    again, it does nothing.

    Raises:
        PipelineError: not called from a forward that a pipeline runs, or the loss is not 0-dimensional.
    """
    if torch._C._current_graph_task_id() != -1:
        return  # a checkpoint runs this forward again, within the backward
    if not hasattr(_here, "losses"):
        raise PipelineError("add_loss must be called in the forward of a layer that a Pipeline runs")
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise PipelineError(f"add_loss takes a 0-dimensional tensor, the loss of one microbatch; got {loss!r}")
    if loss.requires_grad:
        _here.losses.append(loss)


@contextmanager
def collecting(losses: list[Tensor]) -> Iterator[None]:
    """Context: `add_loss` appends to `losses`."""
    _here.losses = losses
    try:
        yield
    finally:
        del _here.losses
