"""Where a pipeline's ranks live: all in this process, or one per process of `torch.distributed`.

Both worlds offer the same: the ranks that live here, their transports, and what is done by all ranks together.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from zerobubble.errors import OptionError, PeerError
from zerobubble.runtime.late import LateValue
from zerobubble.runtime.process_group import ProcessGroupTransport, link_groups
from zerobubble.runtime.status import StatusBoard
from zerobubble.runtime.transport import LocalHub, LocalTransport, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

T = TypeVar("T")

_pipelines = count()
"""Numbers the pipelines of this process; every process makes them in the same order."""

Link: TypeAlias = "tuple[int, int]"


class World(Protocol):
    """Where the ranks of a pipeline live."""

    ranks: tuple[int, ...]
    """The ranks that live in this process."""

    survives: bool
    """Whether all ranks are in step with each other again after one has failed."""

    def transport(self, rank: int, links: Collection[Link], dynamic_shapes: bool) -> Transport:
        """A new transport for `rank` over `links` (source, target). Every process makes its transports in one order."""

    def run(self, tasks: Mapping[int, Callable[[], None]]) -> None:
        """Run one task per rank that lives here, at the same time; raise the first error."""

    def from_rank(self, source: int, value: Tensor | None) -> LateValue:
        """The number that rank `source` gives as `value`, on its way to every process."""

    def gather(self, values: Mapping[int, T]) -> list[T]:
        """What every rank gives, by rank, in every process. Collective; waits."""


class LocalWorld:
    """All ranks in this process, as threads that take turns."""

    survives = True

    def __init__(self, num_ranks: int, device: torch.device, timeout: float) -> None:
        self.ranks = tuple(range(num_ranks))
        self._device = device
        self._hub = LocalHub(num_ranks, timeout)

    def transport(self, rank: int, links: Collection[Link], dynamic_shapes: bool) -> Transport:
        """A transport that hands parcels over by reference; shapes may change at will."""
        return LocalTransport(self._hub, rank)

    def run(self, tasks: Mapping[int, Callable[[], None]]) -> None:
        """Run every rank in a thread; the first error that is not a consequence of another one is raised."""
        self._hub.reset()
        modes = _thread_modes(self._device.type)

        def with_modes(task: Callable[[], None]) -> None:
            with modes():
                task()

        with ThreadPoolExecutor(len(tasks), thread_name_prefix="zerobubble-rank") as pool:
            futures = [pool.submit(with_modes, task) for task in tasks.values()]
            wait(futures)
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerError)):
            raise error

    def from_rank(self, source: int, value: Tensor | None) -> LateValue:
        """The value, which is already here."""
        assert value is not None
        return LateValue(lambda: value)

    def gather(self, values: Mapping[int, T]) -> list[T]:
        """The values by rank."""
        return [values[rank] for rank in self.ranks]


def _thread_modes(device_type: str) -> Callable[[], AbstractContextManager[object]]:
    """What this thread has set and a new one would not: gradients on or off, and autocast."""
    grad_enabled = torch.is_grad_enabled()
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)

    @contextmanager
    def modes() -> Iterator[None]:
        with torch.set_grad_enabled(grad_enabled), torch.autocast(device_type, dtype, enabled=autocast):
            yield

    return modes


class DistributedWorld:
    """One rank per process of `torch.distributed`."""

    survives = False

    def __init__(self, num_ranks: int, device: torch.device, timeout: float) -> None:
        self._rank = dist.get_rank()
        self.ranks: tuple[int, ...] = (self._rank,)
        size = dist.get_world_size()
        if size != num_ranks:
            raise OptionError(
                f"the schedule has {num_ranks} ranks, but torch.distributed has {size} processes; "
                f"start {num_ranks} processes or make the schedule for {size} ranks"
            )
        self._num_ranks = num_ranks
        self._device = device
        self._timeout = timeout
        limit = timedelta(seconds=timeout)
        self._control = dist.new_group(timeout=limit)
        self._objects = dist.new_group(timeout=limit, backend="gloo")
        self._status = StatusBoard(self._rank, f"pipeline {next(_pipelines)}")
        self._links: dict[Link, dist.ProcessGroup] = {}

    def transport(self, rank: int, links: Collection[Link], dynamic_shapes: bool) -> Transport:
        """A transport over point-to-point communication. Links are made once and used by all transports in turn."""
        new = sorted(set(links) - self._links.keys())
        if new:
            self._links.update(link_groups(new, self._device, self._timeout))
        return ProcessGroupTransport(rank, self._links, self._device, self._timeout, self._status, dynamic_shapes)

    def run(self, tasks: Mapping[int, Callable[[], None]]) -> None:
        """Run the one task of this process."""
        for task in tasks.values():
            task()

    def from_rank(self, source: int, value: Tensor | None) -> LateValue:
        """Start to broadcast the value; nobody waits until it is read."""
        tensor = torch.empty((), device=self._device, dtype=torch.float64)
        if value is not None:
            tensor.copy_(value)
        work = dist.broadcast(tensor, src=source, group=self._control, async_op=True)
        assert work is not None

        def resolve() -> Tensor:
            with self._naming(f"the loss of rank {source}"):
                work.wait()
            return tensor

        return LateValue(resolve)

    def gather(self, values: Mapping[int, T]) -> list[T]:
        """Exchange the values on the CPU."""
        gathered: list[Any] = [None] * self._num_ranks
        with self._naming("what all ranks exchange (every rank must make this call)"):
            dist.all_gather_object(gathered, values[self._rank], group=self._objects)
        return gathered

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Context: a failed wait for `what` becomes an error that says so, and why."""
        begin = monotonic()
        try:
            yield
        except RuntimeError as error:
            late = monotonic() - begin >= self._timeout
            trouble = f"not there after {self._timeout:g} s" if late else "a connection was closed"
            cause = self._status.failure() or str(error)
            raise PeerError(f"rank {self._rank} waited for {what}: {trouble}. Cause: {cause}.") from None
