"""What both optimizers share: they look like the optimizer that they wrap, and judge gradients by all ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from zerobubble.errors import OptionError, PipelineError
from zerobubble.optim.grad_state import FullState, Rules, Verdict
from zerobubble.optim.scaling import LossScale
from zerobubble.runtime.grad_norm import check_clipping, gradient_norms
from zerobubble.runtime.late import LateValue
from zerobubble.runtime.pipeline import Pipeline, pipeline_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from zerobubble.optim.undo import Gradients


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer for learning-rate schedulers and checkpoints, with the groups and the state of another one.

    It is a `torch.optim.Optimizer` because schedulers insist on that; it holds nothing of its own under those names.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clip_norm: float | None,
        norm_type: float,
        check_finite: bool,
        scaler: GradScaler | None,
        pipeline: Pipeline | None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, WrappedOptimizer):
            raise OptionError(f"give an optimizer of torch, such as torch.optim.AdamW(...); got {optimizer!r}")
        check_clipping(clip_norm, norm_type)
        self._optimizer = optimizer
        self._pipeline = pipeline or pipeline_of(p for group in optimizer.param_groups for p in group["params"])
        self._rules = Rules(clip_norm, norm_type, check_finite)
        self._scale = LossScale(scaler) if scaler is not None and scaler.is_enabled() else None
        self._full: FullState | None = None
        if self._scale is not None and not check_finite:
            raise OptionError("a loss scale is found by steps that are not finite: check_finite must stay on")
        if self._scale is not None:
            self._refuse_part_of_the_parameters()
            self._pipeline.validation.loss_scale = partial(_scale_of, ref(self))

    def _refuse_part_of_the_parameters(self) -> None:
        own = {p for group in self._optimizer.param_groups for p in group["params"]}
        left = [name for name, p in self._pipeline.module.named_parameters() if p.requires_grad and p not in own]
        if left:
            raise OptionError(
                "an optimizer with a loss scale needs all parameters of its pipeline, as losses are scaled for all; "
                f"{left[0]} is missing ({len(left)} in all)"
            )

    # ------------------------------------------------------------------------------------------------ the step

    @property
    def grad_norm(self) -> LateValue:
        """The norm of the gradients of the last step over all ranks, before clipping. Reading it waits for them.

        Raises:
            PipelineError: there was no step yet.
        """
        full = self._full
        if full is None:
            raise PipelineError("there is no gradient norm yet: take a step first")
        return LateValue(lambda: full.verdict.norm)

    def validate(self) -> None:
        """Make sure that the last step is final."""

    def _take(self) -> tuple[Gradients, Tensor]:
        """Take the gradients off the parameters, unscaled, and tell all ranks their norms, which are returned too."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        if self._scale is not None:
            self._scale.unscale(gradient for _, gradient in gradients)
        norms = self._norms(dict(gradients))
        self._full = FullState(self._pipeline.validation.exchange(norms), self._rules)
        return gradients, norms

    def _norms(self, gradients: dict[nn.Parameter, Tensor]) -> Tensor:
        """One per parameter of the pipeline that lives here, 0 for those without gradient."""
        parameters = self._pipeline.module.parameters()
        return gradient_norms([gradients.get(parameter) for parameter in parameters], self._rules.norm_type)

    @torch.no_grad()
    def _step(self, gradients: Gradients, verdict: Verdict | None = None) -> None:
        """Step as the verdict says; without one, as if it were plain."""
        if verdict is not None and verdict.skip:
            return
        for parameter, gradient in gradients:
            if verdict is not None and not verdict.plain:
                gradient.mul_(verdict.coefficient)
            parameter.grad = gradient
        try:
            self._optimizer.step()
        finally:
            for parameter, _ in gradients:
                parameter.grad = None

    def _conclude(self, verdict: Verdict) -> None:
        """The step is final."""
        if self._scale is not None:
            self._scale.update(finite=not verdict.skip)

    # ------------------------------------------------------------------------------------------------ as an optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimizer, final."""
        self.validate()
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self._optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        """Hooks and whatever else the wrapped optimizer has. They run with each of its steps, amended ones too."""
        if name == "_optimizer":  # it is not there before __init__
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. `step` has done so already."""
        self._optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the same pipeline, after validating the last step."""
        self.validate()
        self._optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer, after validating the last step; with a scaler, its state as `scaler`."""
        self.validate()
        state: dict[str, Any] = self._optimizer.state_dict()
        return state if self._scale is None else {**state, "scaler": self._scale.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or the state of the wrapped optimizer alone."""
        self.validate()
        state = dict(state_dict)
        scaler = state.pop("scaler", None)
        self._optimizer.load_state_dict(state)
        if scaler is not None and self._scale is not None:
            self._scale.scaler.load_state_dict(scaler)


def _scale_of(optimizer: ref[WrappedOptimizer]) -> float:
    """By what losses are multiplied, as long as the optimizer is there that divides the gradients."""
    alive = optimizer()
    return 1.0 if alive is None or alive._scale is None else alive._scale.get()


def refuse_closure(closure: Callable[[], float] | None) -> None:
    """Raise `OptionError` for a closure: the pipeline has computed loss and gradients before the step."""
    if closure is not None:
        raise OptionError("step takes no closure: pipeline.step has computed the gradients already")
