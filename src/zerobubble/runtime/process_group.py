"""The transport between processes: `torch.distributed` point to point, gloo on CPUs and NCCL on GPUs.

A message of a hop is its tensors, one after the other. While their forms are not known yet (in the first step, or with
`dynamic_shapes`) a header with the skeleton travels ahead of them, on the same link and in the same order.
"""

from __future__ import annotations

import pickle
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.errors import PeerError, ShapeError
from zerobubble.runtime.groups import group_ranks
from zerobubble.runtime.parcel import Parcel, forms_in
from zerobubble.runtime.sends import Reaper
from zerobubble.runtime.watch import Watched, Watcher

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from zerobubble.lower import Message
    from zerobubble.op import Op
    from zerobubble.runtime.groups import Links
    from zerobubble.runtime.status import StatusBoard

_HEADER_BYTES = 512
_PATIENCE_SECONDS = 2.0


@dataclass
class _Incoming:
    """A posted receive: its buffers and the works that fill them; empty while the form is not known."""

    message: Message
    skeleton: Any = None
    tensors: tuple[Tensor, ...] = ()
    works: list[dist.Work] = field(default_factory=list)
    posted: bool = False
    watched: Watched | None = None


class ProcessGroupTransport:
    """One rank's end of the links to all other ranks.

    Args:
        rank: of this process in the pipeline.
        links: the process group of every link (source, target), from `link_groups`.
        members: global rank of every rank of the pipeline.
        device: where tensors are received.
        timeout: seconds that a wait may take.
        status: what the ranks tell each other when something goes wrong.
        dynamic_shapes: whether tensors may change their form in every step.
        watches: whether `arrived` will be asked (a thread per link then waits for the messages).
    """

    def __init__(
        self,
        rank: int,
        links: Links,
        members: Sequence[int],
        device: torch.device,
        timeout: float,
        status: StatusBoard,
        dynamic_shapes: bool = False,
        watches: bool = False,
    ) -> None:
        self.turn: AbstractContextManager[object] = nullcontext()
        self.status = status
        self._rank = rank
        self._device = device
        self._timeout = timeout
        self._dynamic = dynamic_shapes
        self._links = {link: (group, group_ranks(group, members)) for link, group in links.items()}
        self._incoming: dict[int, deque[_Incoming]] = {source: deque() for source, _ in links}
        self._arrived: dict[Message, Parcel] = {}
        self._skeletons: dict[tuple[Op, int], Any] = {}
        self._watchers = {source: Watcher(device) for source in self._incoming} if watches else {}
        self._reaper = Reaper("zerobubble-sends", _PATIENCE_SECONDS)

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
            self._take(incoming, message)
            self._arrived[incoming.message] = Parcel(incoming.skeleton, incoming.tensors)
        return self._arrived.pop(message)

    def arrived(self, message: Message, patience: float) -> bool:
        """Whether it is here. One of unknown form, and one that will not come, count as news: `receive` tells more."""
        if message in self._arrived:
            return True
        incoming = next(i for i in self._incoming[message.source] if i.message == message)
        return incoming.watched is None or incoming.watched.done(patience)

    def _take(self, incoming: _Incoming, message: Message) -> None:
        """Wait for the tensors of `incoming`, which come before or with `message`."""
        if incoming.watched is None:
            for work in incoming.works:
                self._wait(work, message)
            return
        begin = monotonic()
        if not incoming.watched.done(self._timeout) or incoming.watched.failed:
            raise self._peer_error(message, monotonic() - begin)
        if self._device.type == "cuda":  # there, to be done may mean to have failed, and this stream must wait as well
            for work in incoming.works:
                self._wait(work, message)

    def _post_tensors(self, incoming: _Incoming, skeleton: Any) -> None:
        incoming.skeleton, incoming.posted = skeleton, True
        incoming.tensors = tuple(
            torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms_in(skeleton)
        )
        incoming.works = [self._irecv(tensor, incoming.message) for tensor in incoming.tensors if tensor.numel()]
        if watcher := self._watchers.get(incoming.message.source):
            incoming.watched = watcher.watch(incoming.works)

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
        group, ranks = self._links[message.source, self._rank]
        try:
            return group.recv([_real(tensor)], ranks[message.source], 0)  # dist.irecv checks at length what we know
        except RuntimeError:
            raise self._peer_error(message, 0.0) from None

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
        group, ranks = self._links[self._rank, message.target]
        try:
            work = group.send([_real(tensor)], ranks[message.target], 0)
        except RuntimeError:
            raise PeerError(
                f"rank {self._rank} could not send {message.producer} to rank {message.target}: "
                f"the connection was closed. {self._last_words(message.target)}"
            ) from None
        self._reaper.add(work, tensor)

    # ------------------------------------------------------------------------------------------------ status

    def finished(self, op: Op, step: int) -> None:
        """Note what this rank finished last."""
        self.status.finished(op, step)

    def failed(self, error: BaseException, where: str) -> None:
        """Write down why this rank stops, for the messages of the others."""
        self.status.fail(error, where)


def _real(tensor: Tensor) -> Tensor:
    """The same bytes as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


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
