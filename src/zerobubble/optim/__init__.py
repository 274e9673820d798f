"""What optimizers of a pipeline need beyond torch's own."""

from __future__ import annotations

from zerobubble.optim.sharded import shard_optimizer

__all__ = ["shard_optimizer"]
