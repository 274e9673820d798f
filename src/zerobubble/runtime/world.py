"""Where a pipeline's ranks live: all in this process, or one per process of `torch.distributed`.

Both worlds offer the same: the ranks that live here, their transports, and what is done by all ranks together.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from zerobubble.errors import OptionError, PeerError
from zerobubble.runtime.control import ControlChannel, Tag
from zerobubble.runtime.groups import control_group, group_ranks, link_groups
from zerobubble.runtime.late import LateValue
from zerobubble.runtime.process_group import ProcessGroupTransport
from zerobubble.runtime.status import StatusBoard, board_name
from zerobubble.runtime.transport import LocalHub, LocalTransport, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from zerobubble.runtime.groups import Links

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

    def transport(self, rank: int, links: Collection[Link], dynamic_shapes: bool, watches: bool) -> Transport:
        """A new transport for `rank` over `links` (source, target). Every process makes its transports in one order."""

    def run(self, tasks: Mapping[int, Callable[[], None]]) -> None:
        """Run one task per rank that lives here, at the same time; raise the first error."""

    def number_from(self, source: int) -> tuple[LateValue, Callable[[Tensor], None]]:
        """A number that rank `source` will give: the value, on its way, and what that rank calls with it."""

    def exchange(self, vectors: Mapping[int, Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Start to give everyone a vector (float64 [sizes[rank]]) of each rank; what is returned waits, by rank."""

    def gather(self, values: Mapping[int, T]) -> list[T]:
        """What every rank gives, by rank, in every process. Collective; waits."""


class LocalWorld:
    """All ranks in this process, as threads that take turns."""

    survives = True

    def __init__(self, num_ranks: int, device: torch.device, timeout: float) -> None:
        self.ranks = tuple(range(num_ranks))
        self._device = device
        self._hub = LocalHub(num_ranks, timeout)

    def transport(self, rank: int, links: Collection[Link], dynamic_shapes: bool, watches: bool) -> Transport:
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

    def number_from(self, source: int) -> tuple[LateValue, Callable[[Tensor], None]]:
        """The number is here as soon as it is given."""
        given: list[Tensor] = []
        return LateValue(lambda: given[0]), given.append

    def exchange(self, vectors: Mapping[int, Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """All vectors are here."""
        return lambda: [vectors[rank] for rank in self.ranks]

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

    def __init__(
        self, num_ranks: int, device: torch.device, timeout: float, group: dist.ProcessGroup | None = None
    ) -> None:
        self._members = dist.get_process_group_ranks(group)
        if len(self._members) != num_ranks:
            where = "torch.distributed" if group is None else "the group"
            raise OptionError(
                f"the schedule has {num_ranks} ranks, but {where} has {len(self._members)} processes; "
                f"start {num_ranks} processes or make the schedule for {len(self._members)} ranks"
            )
        self._rank = dist.get_rank(group)
        self.ranks: tuple[int, ...] = (self._rank,)
        self._device = device
        self._timeout = timeout
        control = control_group(self._members, timeout)
        peers = group_ranks(control, self._members)
        self._control = ControlChannel([peers[rank] for rank in range(num_ranks)], self._rank, control, timeout)
        self.number = next(_pipelines)
        self.status = StatusBoard(self._rank, board_name(self.number, self._members[0]))
        self._links: Links = {}

    def transport(self, rank: int, links: Collection[Link], dynamic_shapes: bool, watches: bool) -> Transport:
        """A transport over point-to-point communication. Links are made once and used by all transports in turn."""
        new = sorted(set(links) - self._links.keys())
        if new:
            self._links.update(link_groups(new, self._members, self._device, self._timeout))
        return ProcessGroupTransport(
            rank, self._links, self._members, self._device, self._timeout, self.status, dynamic_shapes, watches
        )

    def run(self, tasks: Mapping[int, Callable[[], None]]) -> None:
        """Run the one task of this process."""
        for task in tasks.values():
            task()

    def number_from(self, source: int) -> tuple[LateValue, Callable[[Tensor], None]]:
        """The number is on its way as soon as it is computed; nobody waits until it is read."""
        if source == self._rank:
            given: list[Tensor] = []

            def give(value: Tensor) -> None:
                given.append(value)
                self._control.send(value.double(), Tag.LOSS)

            return LateValue(lambda: given[0]), give
        arrival = self._control.expect(source, (), torch.float64, Tag.LOSS)

        def resolve() -> Tensor:
            with self._naming(f"the loss of rank {source}"):
                return arrival.wait()

        return LateValue(resolve), lambda _: None

    def exchange(self, vectors: Mapping[int, Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Every rank sends its vector to every other; nobody waits until they are read."""
        self._control.send(vectors[self._rank], Tag.STATE)
        arrivals = {
            rank: self._control.expect(rank, (size,), torch.float64, Tag.STATE)
            for rank, size in enumerate(sizes)
            if rank != self._rank
        }

        def resolve() -> list[Tensor]:
            with self._naming("what every rank tells of its gradients (every rank must step its optimizer)"):
                return [
                    arrivals[rank].wait() if rank in arrivals else vectors[rank].cpu() for rank in range(len(sizes))
                ]

        return resolve

    def gather(self, values: Mapping[int, T]) -> list[T]:
        """Exchange the values on the CPU."""
        with self._naming("what all ranks exchange (every rank must make this call)"):
            return self._control.gather(values[self._rank])

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Context: a failed wait for `what` becomes an error that says so, and why."""
        begin = monotonic()
        try:
            yield
        except RuntimeError as error:
            late = monotonic() - begin >= self._timeout
            trouble = f"not there after {self._timeout:g} s" if late else "a connection was closed"
            cause = self.status.failure() or str(error)
            raise PeerError(f"rank {self._rank} waited for {what}: {trouble}. Cause: {cause}.") from None
