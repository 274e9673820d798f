"""Zero bubble pipeline parallelism for PyTorch: schedules, planning, and a runtime that trains with them.

Planning works without torch; `Pipeline` and what trains needs it and is imported when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerobubble.costs import Costs
from zerobubble.errors import ZeroBubbleError
from zerobubble.generators import (
    GENERATORS,
    generate,
    gpipe,
    interleaved,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from zerobubble.lower import lower
from zerobubble.notation import load
from zerobubble.op import Kind, Op
from zerobubble.planner import Plan, plan
from zerobubble.schedule import Placement, Schedule
from zerobubble.simulate import simulate
from zerobubble.timeline import Timeline
from zerobubble.validate import validate

if TYPE_CHECKING:
    from zerobubble.optim import PostValidatedOptimizer as PostValidatedOptimizer
    from zerobubble.optim import SynchronousOptimizer as SynchronousOptimizer
    from zerobubble.optim import shard_optimizer as shard_optimizer
    from zerobubble.runtime import Auto as Auto
    from zerobubble.runtime import Pipeline as Pipeline
    from zerobubble.runtime import Shared as Shared
    from zerobubble.runtime import add_loss as add_loss
    from zerobubble.runtime import unsplit as unsplit

__version__ = "0.1.0"

_NEED_TORCH = {
    **dict.fromkeys(("Auto", "Pipeline", "Shared", "add_loss", "unsplit"), "zerobubble.runtime"),
    **dict.fromkeys(("PostValidatedOptimizer", "SynchronousOptimizer", "shard_optimizer"), "zerobubble.optim"),
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name]), name)


__all__ = [
    "GENERATORS", "Costs", "Kind", "Op", "Placement", "Plan", "Schedule", "Timeline", "ZeroBubbleError",
    "generate", "gpipe", "interleaved", "load", "lower", "one_f_one_b", "plan", "simulate", "v_half", "v_min",
    "validate", "zb_h1", "zb_h2", "zb_v",
]  # fmt: skip
