"""The process groups of a pipeline: apart from every other traffic, made up front in one order."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Links = dict[tuple[int, int], dist.ProcessGroup]


def control_group(members: Sequence[int], timeout: float) -> dist.ProcessGroup:
    """A gloo group of the processes `members` (global ranks), also where the default is NCCL. Collective among them."""
    return _group(members, timeout, "gloo")


def link_groups(
    links: Collection[tuple[int, int]], members: Sequence[int], device: torch.device, timeout: float
) -> Links:
    """The process group of every link (source, target), both ranks in the pipeline. Collective among `members`.

    On gloo all links share one group. On NCCL each direction of each pair of ranks has its own, so that no link ever
    waits for another; a process has only those of its own links.
    """
    if device.type != "cuda":
        return dict.fromkeys(links, _group(members, timeout, "gloo"))
    mine = members.index(dist.get_rank())
    groups = {(a, b): _group((members[a], members[b]), timeout, "nccl") for a, b in links if mine in (a, b)}
    for (a, _), made in groups.items():  # NCCL connects at first use: use every link now, in the same order everywhere
        dist.broadcast(torch.zeros(1, device=device), src=members[a], group=made)
    return groups


def gradient_group(members: Sequence[int], device: torch.device, timeout: float) -> dist.ProcessGroup:
    """The group over which the processes `members` reduce gradients; on NCCL with a stream of its own. Collective."""
    return _group(members, timeout, "nccl" if device.type == "cuda" else "gloo")


def group_ranks(group: dist.ProcessGroup, members: Sequence[int]) -> dict[int, int]:
    """The number in `group` of every one of `members`, by its place there, as far as it belongs to the group."""
    inside = dist.get_process_group_ranks(group)
    return {place: inside.index(member) for place, member in enumerate(members) if member in inside}


def _group(members: Sequence[int], timeout: float, backend: str) -> dist.ProcessGroup:
    """A new group. Only its members need to make the call, all in the same order."""
    made: dist.ProcessGroup = dist.new_group(
        list(members), timeout=timedelta(seconds=timeout), backend=backend, use_local_synchronization=True
    )
    return made
