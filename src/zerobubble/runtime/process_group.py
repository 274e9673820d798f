"""The transport between processes: `torch.distributed` point to point, gloo on CPUs and NCCL on GPUs.

A message of a hop is its tensors, one after the other. While their forms are not known yet (in the first step, or with
`dynamic_shapes`) a header with the skeleton travels ahead of them, on the same link and in the same order.
"""

from __future__ import annotations

import pickle
import weakref
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.errors import PeerError, ShapeError
from zerobubble.runtime.parcel import Parcel, forms_in

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from contextlib import AbstractContextManager

    from zerobubble.lower import Message
    from zerobubble.op import Op
    from zerobubble.runtime.status import StatusBoard

_HEADER_BYTES = 512
_PATIENCE_SECONDS = 2.0
_NEVER = timedelta(days=365)
"""Sends have no timeout of their own: gloo would close the connection under whoever waits for something else."""


@dataclass
class _Incoming:
    """A posted receive: its buffers and the works that fill them; empty while the form is not known."""

    message: Message
    skeleton: Any = None
    tensors: tuple[Tensor, ...] = ()
    works: list[dist.Work] = field(default_factory=list)
    posted: bool = False


class ProcessGroupTransport:
    """One rank's end of the links to all other ranks.

    Args:
        rank: of this process in `group`.
        links: the process group of every link (source, target), from `link_groups`.
        device: where tensors are received.
        timeout: seconds that a wait may take.
        status: what the ranks tell each other when something goes wrong.
        dynamic_shapes: whether tensors may change their form in every step.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[tuple[int, int], dist.ProcessGroup],
        device: torch.device,
        timeout: float,
        status: StatusBoard,
        dynamic_shapes: bool = False,
    ) -> None:
        self.turn: AbstractContextManager[object] = nullcontext()
        self.status = status
        self._rank = rank
        self._device = device
        self._timeout = timeout
        self._dynamic = dynamic_shapes
        self._groups = links
        self._incoming: dict[int, deque[_Incoming]] = {source: deque() for source, _ in links}
        self._arrived: dict[Message, Parcel] = {}
        self._skeletons: dict[tuple[Op, int], Any] = {}
        self._reaper = _Reaper()

    # ------------------------------------------------------------------------------------------------ receiving

    def post(self, message: Message) -> None:
        """Post the receive where the form is known; else note that it comes, in order."""
        incoming = _Incoming(message)
        skeleton = None if self._dynamic else self._skeletons.get(_key(message))
        if skeleton is not None:
            self._post_tensors(incoming, skeleton)
        self._incoming[message.source].append(incoming)

    def receive(self, message: Message) -> Parcel:
        """Take messages off the link in their order until `message` is there."""
        while message not in self._arrived:
            incoming = self._incoming[message.source].popleft()
            if not incoming.posted:
                skeleton = self._receive_header(message)
                self._skeletons[_key(incoming.message)] = skeleton
                self._post_tensors(incoming, skeleton)
            for work in incoming.works:
                self._wait(work, message)
            self._arrived[incoming.message] = Parcel(incoming.skeleton, incoming.tensors)
        return self._arrived.pop(message)

    def _post_tensors(self, incoming: _Incoming, skeleton: Any) -> None:
        incoming.skeleton, incoming.posted = skeleton, True
        incoming.tensors = tuple(
            torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms_in(skeleton)
        )
        incoming.works = [self._irecv(tensor, incoming.message) for tensor in incoming.tensors if tensor.numel()]

    def _receive_header(self, message: Message) -> Any:
        head = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=self._device)
        self._wait(self._irecv(head, message), message)
        data = head.cpu().numpy().tobytes()
        size, data = int.from_bytes(data[:8], "little"), data[8:]
        if size > len(data):
            rest = torch.empty(size - len(data), dtype=torch.uint8, device=self._device)
            self._wait(self._irecv(rest, message), message)
            data += rest.cpu().numpy().tobytes()
        return pickle.loads(data[:size])

    def _irecv(self, tensor: Tensor, message: Message) -> dist.Work:
        group = self._groups[message.source, self._rank]
        try:
            work = dist.irecv(tensor, group=group, group_src=_group_rank(group, message.source))
        except RuntimeError:
            raise self._peer_error(message, 0.0) from None
        assert work is not None
        return work

    def _wait(self, work: dist.Work, message: Message) -> None:
        begin = monotonic()
        try:
            work.wait() if self._device.type == "cuda" else work.wait(timedelta(seconds=self._timeout))
        except RuntimeError:
            raise self._peer_error(message, monotonic() - begin) from None

    def _peer_error(self, message: Message, waited: float) -> PeerError:
        peer = message.source
        trouble = "the connection was closed" if waited < self._timeout else f"not there after {self._timeout:g} s"
        consumer = message.producer._replace(stage=message.consumer_stage)
        return PeerError(
            f"rank {self._rank} waited for {message.producer} from rank {peer} to run {consumer}: {trouble}. "
            f"{self._last_words(peer)}"
        )

    def _last_words(self, peer: int) -> str:
        failure = self.status.failure()
        cause = f"Cause: {failure}. " if failure else ""
        return f"{cause}The last that rank {peer} told is that it finished {self.status.read(peer)}."

    # ------------------------------------------------------------------------------------------------ sending

    def send(self, message: Message, parcel: Parcel) -> None:
        """Start to send the tensors of `parcel`, after a header where the receiver does not know their forms yet."""
        key = _key(message)
        known = self._skeletons.get(key)
        if known is None or self._dynamic:
            self._skeletons[key] = parcel.skeleton
            for header in _header(parcel.skeleton):
                self._isend(header.to(self._device), message)
        elif known != parcel.skeleton:
            raise ShapeError(
                f"rank {self._rank}: {message.producer} for rank {message.target} changed from "
                f"{_forms(known)} to {_forms(parcel.skeleton)}; build the pipeline with dynamic_shapes=True "
                "if shapes, requires_grad or values that are no tensors differ between steps"
            )
        for tensor in parcel.tensors:
            if tensor.numel():
                self._isend(tensor.contiguous(), message)

    def _isend(self, tensor: Tensor, message: Message) -> None:
        group = self._groups[self._rank, message.target]
        try:
            work = dist.isend(tensor, group=group, group_dst=_group_rank(group, message.target))
        except RuntimeError:
            raise PeerError(
                f"rank {self._rank} could not send {message.producer} to rank {message.target}: "
                f"the connection was closed. {self._last_words(message.target)}"
            ) from None
        assert work is not None
        self._reaper.add(work, tensor)

    # ------------------------------------------------------------------------------------------------ status

    def finished(self, op: Op, step: int) -> None:
        """Note what this rank finished last."""
        self.status.finished(op, step)

    def failed(self, error: BaseException, where: str) -> None:
        """Write down why this rank stops, for the messages of the others."""
        self.status.fail(error, where)


class _Reaper:
    """Waits for sends in a thread of its own, so that a sent tensor is let go as soon as it is sent."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[dist.Work, Tensor] | None] = SimpleQueue()
        thread = Thread(target=_reap, args=(self._queue,), name="zerobubble-sends", daemon=True)
        thread.start()
        weakref.finalize(self, _stop_reaping, self._queue, thread)

    def add(self, work: dist.Work, tensor: Tensor) -> None:
        self._queue.put((work, tensor))


def _reap(queue: SimpleQueue[tuple[dist.Work, Tensor] | None]) -> None:
    while (sent := queue.get()) is not None:
        with suppress(RuntimeError):  # the peer is gone: whoever waits for it says so
            _finish(*sent)
        del sent


def _stop_reaping(queue: SimpleQueue[tuple[dist.Work, Tensor] | None], thread: Thread) -> None:
    queue.put(None)
    thread.join(_PATIENCE_SECONDS)


def _finish(work: dist.Work, tensor: Tensor) -> None:
    """Block this thread until `tensor` is sent; on CUDA without holding up the stream that computes."""
    if tensor.device.type != "cuda":
        work.wait(_NEVER)
        return
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work.wait()
    stream.synchronize()


def link_groups(
    links: Collection[tuple[int, int]], device: torch.device, timeout: float
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """The process group of every link (source, target), all made up front in one order. Collective.

    On gloo all links share one group, apart from every other traffic. On NCCL each direction of each pair of
    ranks has its own, so that no link ever waits for another.
    """
    limit = timedelta(seconds=timeout)
    if device.type != "cuda":
        return dict.fromkeys(links, dist.new_group(timeout=limit, backend="gloo"))
    groups = {(a, b): dist.new_group([a, b], timeout=limit, backend="nccl") for a, b in links}
    for (a, b), made in groups.items():  # NCCL connects at first use: use every link now, in the same order everywhere
        if dist.get_rank() in (a, b):
            dist.broadcast(torch.zeros(1, device=device), src=a, group=made)
    return groups


def _group_rank(group: dist.ProcessGroup, peer: int) -> int:
    """The number of `peer` in the link's group, which holds either all ranks or just the two."""
    return peer if group.size() != 2 else 1 - group.rank()


def _key(message: Message) -> tuple[Op, int]:
    return message.producer, message.consumer_stage


def _header(skeleton: Any) -> list[Tensor]:
    data = pickle.dumps(skeleton)
    data = len(data).to_bytes(8, "little") + data
    parts = [data[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"), data[_HEADER_BYTES:]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]


def _forms(skeleton: Any) -> str:
    text = ", ".join(f"{form}{' requiring grad' * form.requires_grad}" for form in forms_in(skeleton))
    return text or "no tensor"
