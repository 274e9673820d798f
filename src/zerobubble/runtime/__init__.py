"""Running schedules on real models: the B/W split, stages, transports, the executor and `Pipeline`. Needs torch."""

from __future__ import annotations

from zerobubble.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "training needs PyTorch, which is not installed: pip install 'zerobubble[train]'"
    ) from error

from zerobubble.runtime.auto import Auto
from zerobubble.runtime.batch import Shared
from zerobubble.runtime.extra_loss import add_loss
from zerobubble.runtime.late import LateValue
from zerobubble.runtime.launch import launch
from zerobubble.runtime.pipeline import Pipeline
from zerobubble.runtime.profile import MemoryTrace, Profile, measured_costs
from zerobubble.runtime.reducer import Reduction
from zerobubble.runtime.split import SplitBackward, unsplit
from zerobubble.runtime.weight_store import WeightStore

__all__ = [
    "Auto", "LateValue", "MemoryTrace", "Pipeline", "Profile", "Reduction", "Shared", "SplitBackward", "WeightStore",
    "add_loss", "launch", "measured_costs", "unsplit",
]  # fmt: skip
