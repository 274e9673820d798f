"""Which layers make up which stage, and what makes a list of layers unusable."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from zerobubble.errors import OptionError
from zerobubble.runtime.randomness import own_randomness, seed_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zerobubble.runtime.stage import Stage
    from zerobubble.schedule import Schedule

Layer: TypeAlias = "nn.Module | Callable[[], nn.Module]"
"""A module, or a function that makes one where it is to live."""


def checked_layers(layers: Any) -> list[Layer]:
    """The layers as a list. Raises `OptionError` where they are none, or hold a wrapper that cannot work."""
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.Sequential, nn.ModuleList)):
        raise OptionError(f"layers must be a list of modules, so that it can be cut; got one {type(layers).__name__}")
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            _refuse_data_parallel(number, layer)
        if not callable(layer):
            raise OptionError(f"layers[{number}] must be a module or a function that makes one; got {layer!r}")
    return list(layers)


def _refuse_data_parallel(number: int, layer: nn.Module) -> None:
    """DDP and FSDP reduce gradients in hooks of the ordinary backward: what waits for W would never be reduced."""
    for module in layer.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) or type(module).__name__.startswith("FSDP"):
            raise OptionError(
                f"layers[{number}] holds a {type(module).__name__}: it reduces gradients in hooks of the ordinary "
                "backward, which miss what waits for W; give the plain module, and Pipeline a mesh with replicas"
            )


def stage_bounds(num_layers: int, schedule: Schedule, partition: Sequence[int] | None) -> list[range]:
    """The numbers of each stage's layers. Raises `OptionError` for a partition that does not fit."""
    stages = schedule.num_stages
    if partition is not None and not isinstance(partition, (list, tuple)):
        raise OptionError(f"partition must be a list with the number of layers of each stage; got {partition!r}")
    if partition is None:
        size, rest = divmod(num_layers, stages)
        partition = [size + (stage < rest) for stage in range(stages)]
    if len(partition) != stages or sum(partition) != num_layers or min(partition) < 1:
        raise OptionError(
            f"{num_layers} layers cannot be cut into {stages} stages as {list(partition)}: "
            f"give {stages} numbers of at least 1 whose sum is {num_layers}"
        )
    ends = [sum(partition[: stage + 1]) for stage in range(stages)]
    return [range(end - size, end) for end, size in zip(ends, partition, strict=True)]


def refuse_ties_between_ranks(layers: Sequence[Layer], bounds: Sequence[range], schedule: Schedule) -> None:
    """Every process holds parameters of its own: one that layers of two ranks share would drift apart, unnoticed."""
    rank_of: dict[nn.Parameter, tuple[int, int]] = {}
    for numbers, rank in zip(bounds, schedule.placement.ranks, strict=True):
        for number in numbers:
            layer = layers[number]
            for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
                other, where = rank_of.setdefault(parameter, (number, rank))
                if where != rank:
                    raise OptionError(
                        f"layers {other} and {number} share a parameter but lie on ranks {where} and {rank}; a tied "
                        "weight must lie on one rank: choose a V placement (such as zb_v), where the first and the "
                        "last stage share rank 0, or a partition that keeps the two layers together"
                    )


def used_by_several(stages: Iterable[Stage]) -> set[nn.Parameter]:
    """The parameters that more than one of `stages` uses."""
    uses = Counter(chain.from_iterable(stage.parameters() for stage in stages))
    return {parameter for parameter, count in uses.items() if count > 1}


def build_layer(layer: Layer, number: int, seed: int, device: torch.device) -> nn.Module:
    """The module of a layer on its device. One that is made here draws from randomness of its own.

    Raises:
        OptionError: `layer` makes no module.
    """
    if not isinstance(layer, nn.Module):
        with own_randomness(device) as generators:
            for generator in generators:
                generator.manual_seed(seed_for(seed, number))
            try:
                layer = layer()
            except TypeError as error:
                raise OptionError(
                    f"layers[{number}] is no module, so it must be a function that makes one when called without "
                    f"arguments; calling it failed: {error}"
                ) from error
    if not isinstance(layer, nn.Module):
        raise OptionError(f"layers[{number}] must be a module or make one; got {type(layer).__name__}")
    return layer.to(device)
