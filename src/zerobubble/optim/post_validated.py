"""The optimizer that steps before it knows the gradients of all ranks, and amends the step where it was wrong."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerobubble.optim.undo import STRATEGIES, Reverse, Settings, check_undo
from zerobubble.optim.wrapper import WrappedOptimizer, refuse_closure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from zerobubble.optim.grad_state import FullState
    from zerobubble.optim.undo import Gradients, Undo
    from zerobubble.runtime.pipeline import Pipeline

_REMEMBERED = 16
"""Steps whose verdicts decide whether to step ahead."""
_WAIT_FROM, _RESUME_BELOW = 5, 3
"""So many of them not plain: wait from the one, step ahead again below the other. An amended step loses one to two
times what a right one gains (benchmarks/post_validation)."""


@dataclass(frozen=True)
class StepCounts:
    """How the steps so far were taken.

    Attributes:
        ahead: before the gradients of all ranks were known.
        amended: of those ahead, how many turned out wrong: undone, taken again or skipped, and the forwards run again.
        waited: with all gradients known, because too many had to be amended, or because all ranks live here.
        skipped: not taken at all, since a gradient was not finite.
    """

    ahead: int = 0
    amended: int = 0
    waited: int = 0
    skipped: int = 0


@dataclass
class _Ahead:
    """A step that was taken ahead, until it is final."""

    gradients: Gradients
    full: FullState
    undo: Undo | None  # None: it was not taken, since this rank's own gradients spoke against it
    before: Settings
    after: Settings


class PostValidatedOptimizer(WrappedOptimizer):
    """Steps at once, as if nothing were to be clipped or skipped, and validates when all ranks have told (section 4).

    After every step, parameters, optimizer state and loss scale are bit for bit those of `SynchronousOptimizer`. The
    validation happens in the warm-up of the next `pipeline.step`, where nobody waits for it, and in whatever leaves the
    loop: `state_dict`, `evaluate`, `validate`, ... Where the step was wrong, all ranks undo it, take it as it should
    be, and run again the forwards that ran since.

    Args:
        optimizer: any of `torch.optim`, over parameters of one pipeline.
        clip_norm: the largest norm of the gradients of all ranks together; None not to clip.
        norm_type: which norm; infinity for the largest element.
        check_finite: whether to skip a step when any gradient is NaN or infinite.
        scaler: for fp16: losses are multiplied by its scale, and gradients divided. Do not call it yourself.
        undo: `snapshot`, exact, with a copy of parameters and state until the step is final; or `reverse`, by
            arithmetic in place, exact only to rounding, for SGD, Adam and AdamW.
        pipeline: whose parameters they are, where that is not clear.
        adaptive: whether to wait for all ranks while many steps would have to be amended.

    Attributes:
        counts: how the steps so far were taken.

    Raises:
        OptionError: the parameters belong to no pipeline or several, or the arguments do not fit each other.
    """

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
        adaptive: bool = True,
    ) -> None:
        super().__init__(optimizer, clip_norm, norm_type, check_finite, scaler, pipeline)
        check_undo(undo, optimizer)
        self.counts = StepCounts()
        self._strategy = STRATEGIES[undo]
        self._adaptive = adaptive
        self._waits = False
        self._recent: deque[bool] = deque(maxlen=_REMEMBERED)
        self._ahead: _Ahead | None = None
        self._amended = False

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step, and clear the gradients. Does not wait for other ranks."""
        refuse_closure(closure)
        self.validate()
        gradients, norms = self._take()
        assert self._full is not None
        if self._waits or self._pipeline.validation.alone:
            self._count(waited=1)
            self._step(gradients, self._full.verdict)
            self._conclude(self._full.verdict)
        else:
            self._count(ahead=1)
            self._step_ahead(gradients, self._full, self._foretell(norms))

    def _foretell(self, norms: Tensor) -> bool:
        """Whether this rank's own gradients speak against the step.

        To know, it would have to wait for a GPU, and does so only where a step by NaN could not be undone.
        """
        return (norms.device.type == "cpu" or self._strategy is Reverse) and self._rules.foretell(norms.tolist())

    def _step_ahead(self, gradients: Gradients, full: FullState, foretold: bool) -> None:
        before = Settings(self._optimizer)
        undo = None if foretold else self._strategy(self._optimizer, gradients)
        if not foretold:
            self._step(gradients)
        self._ahead = _Ahead(gradients, full, undo, before, Settings(self._optimizer))
        self._pipeline.validation.expect(self)

    def validate(self) -> None:
        """Make sure that the last step is final. Waits until every rank has taken it."""
        if self._ahead is None:
            return
        verdict = self._ahead.full.verdict
        ahead, self._ahead = self._ahead, None
        if not verdict.plain:
            self._amend(ahead)
            self._amended = True
            self._count(amended=1)
        self._conclude(verdict)

    def was_amended(self) -> bool:
        """Validate; whether what ran since the last step must run again. True once for each step that was amended."""
        self.validate()
        amended, self._amended = self._amended, False
        return amended

    def _amend(self, ahead: _Ahead) -> None:
        """Undo the step and take it as it should be, with the settings of then; what was set since stays set."""
        now = Settings(self._optimizer)
        ahead.before.put_back()
        if ahead.undo is not None:
            ahead.undo()
        self._step(ahead.gradients, ahead.full.verdict)
        now.put_back(unlike=ahead.after)

    def _conclude(self, verdict: Any) -> None:
        super()._conclude(verdict)
        self._count(skipped=int(verdict.skip))
        self._recent.append(not verdict.plain)
        if self._adaptive:
            wrong = sum(self._recent)
            self._waits = wrong >= (_RESUME_BELOW if self._waits else _WAIT_FROM)

    def _count(self, **more: int) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in more.items()})
