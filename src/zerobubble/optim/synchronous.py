"""The optimizer that waits for all ranks before it steps: the reference for the one that does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerobubble.optim.undo import check_undo
from zerobubble.optim.wrapper import WrappedOptimizer, refuse_closure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from zerobubble.runtime.pipeline import Pipeline


class SynchronousOptimizer(WrappedOptimizer):
    """Clips and checks by the gradients of all ranks, for which `step` waits. Arguments: `PostValidatedOptimizer`."""

    def __init__(
        self,
        optimizer: Optimizer,
        clip_norm: float | None = None,
        norm_type: float = 2.0,
        check_finite: bool = True,
        scaler: GradScaler | None = None,
        undo: str = "snapshot",
        *,
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__(optimizer, clip_norm, norm_type, check_finite, scaler, pipeline)
        check_undo(undo, optimizer)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step, and clear the gradients. Waits until every rank has told of its gradients."""
        refuse_closure(closure)
        gradients, _ = self._take()
        assert self._full is not None
        verdict = self._full.verdict
        self._step(gradients, verdict)
        self._conclude(verdict)
