"""What lies between a pipeline and optimizers that step ahead: when to validate, and the way back to a step's start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor, nn

    from zerobubble.runtime.stage import Batch, Stage
    from zerobubble.runtime.world import World


class Ahead(Protocol):
    """An optimizer that took its last step before it knew the gradients of all ranks."""

    def validate(self) -> None:
        """Wait until they are known, and amend the step where it was wrong."""

    def was_amended(self) -> bool:
        """Validate; whether the step was taken wrong, so that all ranks must run again what ran since."""


class Validation:
    """One process's part of validating the optimizers' last step.

    Args:
        module: the layers that live here.
        stages: the stages that live here.
        world: where all of them live.
        sizes: the number of parameters that live with each rank; all in one process count for its first.

    Attributes:
        loss_scale: by what losses are multiplied from the next `Validate` on.
    """

    def __init__(self, module: nn.Module, stages: Collection[Stage], world: World, sizes: Sequence[int]) -> None:
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self._module = module
        self._stages = stages
        self._world = world
        self._sizes = sizes
        self._ahead: list[Ahead] = []
        self._start: _Start | None = None

    @property
    def alone(self) -> bool:
        """Whether all ranks live in this process."""
        return len(self._world.ranks) == len(self._sizes)

    def exchange(self, norms: Tensor) -> Callable[[], list[float]]:
        """Start to give `norms`, one number per parameter that lives here, to every rank.

        Every rank must make this call; what is returned waits for the numbers of all and gives them, by rank.
        """
        first, *others = self._world.ranks
        vectors = {first: norms, **dict.fromkeys(others, norms.new_empty(0))}
        arrivals = self._world.exchange(vectors, self._sizes)
        return lambda: torch.cat(arrivals()).tolist()

    def expect(self, optimizer: Ahead) -> None:
        """`optimizer` has stepped ahead: ask it at the next `Validate`."""
        self._ahead.append(optimizer)

    def finish(self) -> None:
        """Make sure that parameters and optimizer state are final. Waits for the other ranks to take their step."""
        for optimizer in self._ahead:
            optimizer.validate()

    def begin(self) -> None:
        """A training step begins: note what its forwards change, in case that they must run again."""
        self._start = _Start(self._module) if self._ahead else None

    def check(self, batch: Batch) -> bool:
        """At `Validate`: whether the program must start again; if so, nothing is left of what ran so far."""
        amended = [optimizer.was_amended() for optimizer in self._ahead]  # each must validate
        self._ahead.clear()
        batch.loss_scale = self.loss_scale()
        if any(amended):
            assert self._start is not None
            self._start.bring_back()
            batch.losses.clear()
            for stage in self._stages:
                stage.clear()
            torch.clear_autocast_cache()  # it holds casts of the wrong weights
        self._start = None
        return any(amended)


class _Start:
    """The buffers as they are now. Random numbers need nothing: they depend on step, microbatch and layer."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [
            (owner, name, buffer, None if buffer is None else buffer.clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
        ]

    @torch.no_grad()
    def bring_back(self) -> None:
        for owner, name, buffer, value in self._buffers:
            owner._buffers[name] = buffer if buffer is None or value is None else buffer.copy_(value)
