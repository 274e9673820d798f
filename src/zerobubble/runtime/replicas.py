"""Replicas of a pipeline: where a process stands among them, and what its counterparts exchange.

The counterparts of a process are those of the same rank in the other replicas: they hold the same layers. What they
exchange goes over process groups of its own, and on CUDA over the streams of those, so that no activation waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerobubble.errors import OptionError, PeerError
from zerobubble.runtime.control import ControlChannel
from zerobubble.runtime.groups import control_group, gradient_group, group_ranks
from zerobubble.runtime.sends import Reaper
from zerobubble.runtime.status import Notices, board_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from zerobubble.runtime.status import StatusBoard

T = TypeVar("T")

_PATIENCE_SECONDS = 2.0
_SMALL_BYTES = 2**20
"""Tensors below this size travel together."""


@dataclass(frozen=True)
class MeshPlace:
    """Where this process stands in a mesh.

    Attributes:
        pipelines: per replica, the global ranks of its pipeline's ranks.
        replica: this process's replica.
        rank: its rank in the pipeline.
        group: the processes of its pipeline.
    """

    pipelines: tuple[tuple[int, ...], ...]
    replica: int
    rank: int
    group: dist.ProcessGroup


def place_in(mesh: Any, num_ranks: int) -> MeshPlace:
    """This process's place in `mesh`, [ranks of the pipeline] or [replicas, ranks of the pipeline].

    Raises:
        OptionError: it is no such mesh, has another number of ranks, or this process is not in it.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        got = f"{mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else repr(mesh)
        raise OptionError(
            f"mesh must be a DeviceMesh of one dimension (the pipeline) or two (replicas, pipeline); got {got}; take "
            "the part of a larger mesh that these make, as in mesh['replicas', 'pipeline']"
        )
    size = mesh.size(mesh.ndim - 1)
    if size != num_ranks:
        raise OptionError(
            f"the schedule has {num_ranks} ranks, but the last dimension of the mesh, the pipeline's, has {size}; "
            f"make the schedule for {size} ranks or a mesh of shape (replicas, {num_ranks})"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise OptionError(f"this process (rank {dist.get_rank()}) is not in the mesh; make no Pipeline here")
    pipelines = tuple(map(tuple, mesh.mesh.reshape(-1, size).tolist()))
    return MeshPlace(pipelines, coordinate[0] if mesh.ndim == 2 else 0, coordinate[-1], mesh.get_group(mesh.ndim - 1))


class Replicas:
    """One process's end of what it exchanges with its counterparts. Collective among them, as are all its methods.

    Args:
        place: of this process in the mesh.
        device: where the model lives.
        timeout: seconds that a wait may take.
        number: of the pipeline, as on the status boards.
        status: the board of the own pipeline.

    Attributes:
        index: the replica of this process.
        count: how many replicas there are.
    """

    def __init__(
        self, place: MeshPlace, device: torch.device, timeout: float, number: int, status: StatusBoard
    ) -> None:
        self.index, self.count = place.replica, len(place.pipelines)
        self._rank = place.rank
        self._device = device
        self._timeout = timeout
        self._status = status
        self._boards = [Notices(board_name(number, members[0])) for members in place.pipelines]
        members = [members[place.rank] for members in place.pipelines]
        self._group = gradient_group(members, device, timeout)
        self._peers = group_ranks(self._group, members)
        control = control_group(members, timeout)
        peers = group_ranks(control, members)
        self._control = ControlChannel([peers[i] for i in range(self.count)], self.index, control, timeout)
        self._abandoned: Reaper | None = None

    def start_sum(self, tensor: Tensor) -> dist.Work:
        """Start to add `tensor` up over the replicas, in place. Hold it until the work has been waited for.

        Raises:
            PeerError: the connection to a counterpart is closed.
        """
        try:
            work: dist.Work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError:
            raise self._peer_error("a bucket of gradients", 0.0) from None
        return work

    def wait(self, work: dist.Work, what: str, begin: float) -> None:
        """Wait for `what`, which was started at `begin` (seconds); on CUDA only the current stream does.

        Raises:
            PeerError: it does not come.
        """
        try:
            work.wait() if self._device.type == "cuda" else work.wait(timedelta(seconds=self._timeout))
        except RuntimeError:
            raise self._peer_error(what, perf_counter() - begin) from None

    def abandon(self, works: Iterable[tuple[dist.Work | None, Tensor | None]]) -> None:
        """Hold what a broken-off step left under way until it is done: others may still write to it."""
        for work, tensor in works:
            if work is not None and tensor is not None and not work.is_completed():
                self._abandoned = self._abandoned or Reaper("zerobubble-abandoned", _PATIENCE_SECONDS)
                self._abandoned.add(work, tensor)

    def gather(self, value: T) -> list[T]:
        """What every replica gives, by replica, exchanged on the CPU. Waits."""
        begin = perf_counter()
        try:
            return self._control.gather(value)
        except RuntimeError:
            what = "what all replicas exchange (every one must make this call)"
            raise self._peer_error(what, perf_counter() - begin) from None

    @torch.no_grad()
    def share_out(self, owned: Sequence[Sequence[Tensor]]) -> None:
        """Give every replica the values that the tensors in `owned[i]` have at replica i, in place. Waits."""
        under_way = []
        for owner, tensors in enumerate(owned):
            for bucket in _buckets(tensors):
                flat = _bytes(bucket[0]) if len(bucket) == 1 else torch.cat([_bytes(tensor) for tensor in bucket])
                under_way.append((owner, bucket, flat, self._start_broadcast(flat, owner), perf_counter()))
        try:
            for owner, bucket, flat, work, begin in under_way:
                self.wait(work, f"the values of replica {owner} (every replica must make this call)", begin)
                if owner != self.index:
                    _unpack(flat, bucket)
        except PeerError:
            self.abandon((work, flat) for _, _, flat, work, _ in under_way)
            raise

    def _start_broadcast(self, tensor: Tensor, owner: int) -> dist.Work:
        try:
            work: dist.Work | None = dist.broadcast(
                tensor, group=self._group, group_src=self._peers[owner], async_op=True
            )
        except RuntimeError:
            raise self._peer_error(f"the values of replica {owner}", 0.0) from None
        assert work is not None
        return work

    def refuse_different(self, what: str, value: object) -> None:
        """Raise `OptionError` on every replica where `value`, say the schedule, is not the same on all."""
        for replica, others in enumerate(self.gather(value)):
            if others != value:
                raise OptionError(f"replicas {self.index} and {replica} have another {what}; give all the same")

    def start_equal(self, module: nn.Module) -> None:
        """Give every replica the parameters and buffers of replica 0.

        Raises:
            OptionError: the replicas do not hold the same ones.
        """
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        forms = [(name, str(t.dtype), tuple(t.shape), t.requires_grad) for name, t in state.items()]
        for replica, others in enumerate(self.gather(forms)):
            if others != forms:
                different = sorted(map(str, set(others) ^ set(forms)))
                raise OptionError(
                    f"rank {self._rank}: the layers of replicas {self.index} and {replica} differ in their parameters "
                    f"or buffers: {different[0] if different else 'their order'}; give every replica the same layers"
                )
        self.share_out([list(state.values())])

    def _peer_error(self, what: str, waited: float) -> PeerError:
        trouble = "a connection was closed" if waited < self._timeout else f"not there after {self._timeout:g} s"
        others = [(i, board) for i, board in enumerate(self._boards) if i != self.index]
        causes = [f"In replica {i}, {failure.rstrip('.')}. " for i, board in others if (failure := board.failure())]
        told = "; ".join(f"rank {self._rank} of replica {i} finished {board.read(self._rank)}" for i, board in others)
        error = PeerError(
            f"rank {self._rank} of replica {self.index} waited for {what} from the other replicas: {trouble}. "
            f"{''.join(causes)}Last told: {told}."
        )
        self._status.fail(error, "what it exchanges with other replicas")
        return error


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Large contiguous tensors alone, the others together; elements of many bytes first, so that all are aligned."""
    small: list[Tensor] = []
    for tensor in sorted(tensors, key=lambda tensor: -tensor.element_size()):
        if tensor.nbytes >= _SMALL_BYTES and tensor.is_contiguous():
            yield [tensor]
        elif tensor.numel():
            small.append(tensor)
    if small:
        yield small


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes [nbytes]; where it is contiguous, they are its own."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    if len(tensors) > 1 or not tensors[0].is_contiguous():
        for tensor, piece in zip(tensors, torch.split(flat, [tensor.nbytes for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
