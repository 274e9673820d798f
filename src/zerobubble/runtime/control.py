"""Numbers and small objects between all ranks, on the CPU and apart from the activations: losses, norms, timelines.

Point to point over gloo, so that nobody waits before a value is read and no GPU stream is disturbed. Every rank sends
and expects in the same order; messages of one tag between two ranks arrive in that order.
"""

from __future__ import annotations

import pickle
from collections import deque
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from zerobubble.runtime.sends import NEVER, Reaper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

T = TypeVar("T")

_EXPECTED = 1024
"""Messages that a rank may expect, of all peers together, before the oldest is waited for."""
_PATIENCE_SECONDS = 30.0
"""A rank that is done stays until the others took what it sent, which the slowest may still need."""


class Tag(IntEnum):
    """What a message is about. Each tag has an order of its own."""

    LOSS = 1
    STATE = 2
    SIZE = 3
    OBJECT = 4


class Arrival:
    """A tensor on its way here. `wait` returns it."""

    def __init__(self, work: dist.Work, tensor: Tensor, timeout: float) -> None:
        self._work: dist.Work | None = work
        self._tensor = tensor
        self._timeout = timedelta(seconds=timeout)

    def wait(self) -> Tensor:
        """The tensor. Raises RuntimeError when it does not come in time or its sender is gone."""
        if self._work is not None:
            self._work.wait(self._timeout)
            self._work = None  # waiting twice for one work of gloo would wait for another message
        return self._tensor


class ControlChannel:
    """One rank's end of it.

    Args:
        peers: ranks in `group` of all ranks of the pipeline, in the pipeline's order.
        rank: this process's place in `peers`.
        group: a gloo group that carries nothing else.
        timeout: seconds that a wait may take.
    """

    def __init__(self, peers: Sequence[int], rank: int, group: dist.ProcessGroup, timeout: float) -> None:
        self._peers = peers
        self._rank = rank
        self._group = group
        self._timeout = timeout
        self._reaper = Reaper("zerobubble-control", min(timeout, _PATIENCE_SECONDS))
        self._expected: deque[Arrival] = deque()
        self._others = [peer for place, peer in enumerate(peers) if place != rank]

    def send(self, tensor: Tensor, tag: Tag) -> None:
        """Start to send `tensor` to every other rank; from a GPU once it is computed, without waiting for that."""
        if tensor.device.type == "cuda":
            self._send_when_computed(tensor, tag)
        else:
            self._post(tensor.contiguous(), tag)

    def expect(self, source: int, shape: Sequence[int], dtype: torch.dtype, tag: Tag) -> Arrival:
        """The next tensor that rank `source` sends under `tag`."""
        arrival = self._receive(source, shape, dtype, tag)
        self._expected.append(arrival)  # gloo writes into the tensor even if nobody reads it
        if len(self._expected) > _EXPECTED:
            self._expected.popleft().wait()
        return arrival

    def gather(self, value: T) -> list[T]:
        """What every rank gives, by rank. Collective; waits."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._post(torch.tensor([len(data)]), Tag.SIZE)
        self._post(data, Tag.OBJECT)
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        sizes = [self._receive(rank, (1,), torch.int64, Tag.SIZE) for rank in others]
        arrivals = [
            self._receive(rank, (int(size.wait()),), torch.uint8, Tag.OBJECT)
            for rank, size in zip(others, sizes, strict=True)
        ]
        gathered: dict[int, Any] = {self._rank: value}
        for rank, arrival in zip(others, arrivals, strict=True):
            gathered[rank] = pickle.loads(arrival.wait().numpy().tobytes())
        return [gathered[rank] for rank in range(len(self._peers))]

    def _receive(self, source: int, shape: Sequence[int], dtype: torch.dtype, tag: Tag) -> Arrival:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        work = dist.irecv(tensor, group=self._group, group_src=self._peers[source], tag=tag)
        assert work is not None
        return Arrival(work, tensor, self._timeout)

    def _post(self, tensor: Tensor, tag: Tag) -> None:
        for work in _started(tensor, tag, self._group, self._others):
            self._reaper.add(work, tensor)

    def _send_when_computed(self, tensor: Tensor, tag: Tag) -> None:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._reaper.run(partial(_send_copy, copy, event, tag, self._group, self._others))


def _started(tensor: Tensor, tag: Tag, group: dist.ProcessGroup, peers: Sequence[int]) -> list[dist.Work]:
    works = []
    for peer in peers:
        with suppress(RuntimeError):  # a peer that has left wants nothing: who misses something from it says so
            works.append(dist.isend(tensor, group=group, group_dst=peer, tag=tag))
    return [work for work in works if work is not None]


def _send_copy(
    tensor: Tensor, event: torch.cuda.Event, tag: Tag, group: dist.ProcessGroup, peers: Sequence[int]
) -> None:
    event.synchronize()
    for work in _started(tensor, tag, group, peers):
        work.wait(NEVER)
