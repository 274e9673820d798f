"""Optimizers of a pipeline: clipping and the check for NaN over all ranks without waiting; state over the replicas."""

from __future__ import annotations

from zerobubble.optim.post_validated import PostValidatedOptimizer, StepCounts
from zerobubble.optim.sharded import shard_optimizer
from zerobubble.optim.synchronous import SynchronousOptimizer

__all__ = ["PostValidatedOptimizer", "StepCounts", "SynchronousOptimizer", "shard_optimizer"]
