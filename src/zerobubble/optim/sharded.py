"""Optimizer state shared out over the replicas of a pipeline (ZeRO stage 1), for any optimizer of torch.

Every replica has all gradients after a step of the pipeline. So each may update some of the parameters only, keep the
optimizer's state for those alone, and tell the others the new values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_map_only

from zerobubble.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.optim import Optimizer

    from zerobubble.runtime import Pipeline
    from zerobubble.runtime.replicas import Replicas

    AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def shard_optimizer(optimizer: AnyOptimizer, pipeline: Pipeline) -> AnyOptimizer:
    """Make each replica of `pipeline` keep the state of `optimizer` for its share of the parameters only.

    A share is made of whole parameters, about as many bytes for each replica; who has which follows from their order
    and sizes. `optimizer.step()` updates the own share and gives it to the others, which is collective among the
    replicas. Parameters get the bits that they get without this, from any optimizer that treats each of them by
    itself. Parameter groups, schedulers of the learning rate and gradient scalers work as ever.

    `state_dict()` becomes collective among the replicas, and is complete on each of them, what the others keep on the
    CPU; `load_state_dict` takes such a state, or that of an optimizer that was not sharded, and keeps its part.

    Returns:
        `optimizer` itself. Without replicas it is left as it is.

    Raises:
        OptionError: it is sharded already; later, when `step` is given a closure.
    """
    if pipeline.replicas is None:
        return optimizer
    if is_sharded(optimizer):
        raise OptionError(f"this {type(optimizer).__name__} is sharded already; call shard_optimizer once")
    optimizer._zerobubble_sharded = True  # type: ignore[attr-defined]
    shard = _Shard(optimizer, pipeline.replicas)
    optimizer.register_step_pre_hook(shard.narrow)
    optimizer.register_step_post_hook(shard.widen)
    optimizer.register_state_dict_post_hook(shard.complete)
    optimizer.register_load_state_dict_pre_hook(shard.own_part)
    return optimizer


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether this replica keeps only a part of the optimizer's state."""
    return getattr(optimizer, "_zerobubble_sharded", False)


class _Shard:
    """Whose parameter each is, and the hooks of the optimizer."""

    def __init__(self, optimizer: Optimizer, replicas: Replicas) -> None:
        self._replicas = replicas
        self._owner: dict[Tensor, int] = {}
        self._whole: list[list[Tensor]] | None = None
        self._assign(optimizer)
        for parameter in [p for p in optimizer.state if self._owner.get(p, replicas.index) != replicas.index]:
            del optimizer.state[parameter]

    def narrow(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a step: show the optimizer the own parameters only."""
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise OptionError("a sharded optimizer takes no closure: gradients come from the step of the pipeline")
        self._restore(optimizer)  # should the last step have failed half-way
        self._assign(optimizer)
        self._whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if self._owner[p] == self._replicas.index]

    def widen(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """After a step: give everyone every parameter."""
        self._restore(optimizer)
        owned: list[list[Tensor]] = [[] for _ in range(self._replicas.count)]
        for parameter, owner in self._owner.items():
            if parameter.requires_grad:
                owned[owner].append(parameter)
        self._replicas.share_out(owned)

    def complete(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The state of all replicas."""
        parts = self._replicas.gather(tree_map_only(Tensor, Tensor.cpu, state["state"]))
        parts[self._replicas.index] = state["state"]
        merged = {key: value for part in parts for key, value in part.items()}
        order = {key: place for place, key in enumerate(_keys(state["param_groups"]))}
        return {**state, "state": {key: merged[key] for key in sorted(merged, key=lambda key: order.get(key, -1))}}

    def own_part(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Of a complete state, what belongs to the own parameters (and to none)."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._assign(optimizer)
        owner = {key: self._owner[p] for key, p in zip(_keys(state["param_groups"]), parameters)}
        mine = self._replicas.index
        return {**state, "state": {key: value for key, value in state["state"].items() if owner.get(key, mine) == mine}}

    def _restore(self, optimizer: Optimizer) -> None:
        if self._whole is not None:
            for group, parameters in zip(optimizer.param_groups, self._whole, strict=True):
                group["params"] = parameters
            self._whole = None

    def _assign(self, optimizer: Optimizer) -> None:
        """Give every parameter without an owner to the replica with the fewest bytes, the largest first."""
        loads = [0] * self._replicas.count
        for parameter, owner in self._owner.items():
            loads[owner] += parameter.nbytes
        new = [p for group in optimizer.param_groups for p in group["params"] if p not in self._owner]
        for parameter in sorted(new, key=lambda p: -p.nbytes):
            owner = loads.index(min(loads))
            self._owner[parameter] = owner
            loads[owner] += parameter.nbytes


def _keys(groups: Sequence[Mapping[str, Any]]) -> Iterable[Any]:
    """Under which keys the state of the parameters stands, in their order."""
    return (key for group in groups for key in group["params"])
