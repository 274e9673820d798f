"""How parcels get from rank to rank: the interface, and the in-process transport for tests and notebooks."""

from __future__ import annotations

from threading import Condition, Lock
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from zerobubble.errors import PeerError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from zerobubble.lower import Message
    from zerobubble.op import Op
    from zerobubble.runtime.parcel import Parcel


class Transport(Protocol):
    """Carries the messages of one rank. Messages of a link arrive in the order in which their sender sends them."""

    turn: AbstractContextManager[object]
    """Held while an op computes: ranks that share a process take turns."""

    def post(self, message: Message) -> None:
        """Make ready to receive `message`; does not wait."""

    def receive(self, message: Message) -> Parcel:
        """Wait for `message`. Raises `PeerError` when its sender failed, died or let the timeout pass."""

    def arrived(self, message: Message, patience: float) -> bool:
        """Wait at most `patience` seconds for `message`; whether `receive` need not wait for it any more."""

    def send(self, message: Message, parcel: Parcel) -> None:
        """Start to send; does not wait, and lets go of the tensors when they are sent."""

    def finished(self, op: Op, step: int) -> None:
        """Note what this rank finished last, for the error messages of others."""

    def failed(self, error: BaseException, where: str) -> None:
        """Tell the others that this rank cannot go on, and in which op it stopped."""


class LocalHub:
    """What the ranks of one process share."""

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self.timeout = timeout
        self.parcels: dict[Message, Parcel] = {}
        self.changed = Condition()
        self.turn = Lock()
        self.last_finished = ["nothing"] * num_ranks
        self.failure: str | None = None

    def reset(self) -> None:
        """Forget the parcels and the failure of a broken-off step."""
        self.parcels.clear()
        self.failure = None


class LocalTransport:
    """Ranks as threads of one process: parcels are handed over by reference, and ops of different ranks take turns."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.turn: AbstractContextManager[object] = hub.turn
        self._hub = hub
        self._rank = rank

    def post(self, message: Message) -> None:
        """Nothing to do: a parcel can always be handed over."""

    def receive(self, message: Message) -> Parcel:
        """Wait for `message`."""
        hub = self._hub
        deadline = monotonic() + hub.timeout
        with hub.changed:
            while message not in hub.parcels:
                if hub.failure is None and hub.changed.wait(deadline - monotonic()):
                    continue
                raise PeerError(
                    hub.failure
                    or f"rank {self._rank} waited {hub.timeout:g} s for {message.producer} from rank {message.source}, "
                    f"which last finished {hub.last_finished[message.source]}"
                )
            return hub.parcels.pop(message)

    def arrived(self, message: Message, patience: float) -> bool:
        """Whether it was handed over; a failure elsewhere counts as news too."""
        hub = self._hub
        with hub.changed:
            return hub.changed.wait_for(lambda: message in hub.parcels or hub.failure is not None, patience)

    def send(self, message: Message, parcel: Parcel) -> None:
        """Hand `parcel` over."""
        with self._hub.changed:
            self._hub.parcels[message] = parcel
            self._hub.changed.notify_all()

    def finished(self, op: Op, step: int) -> None:
        """Note what this rank finished last."""
        self._hub.last_finished[self._rank] = f"{op} of step {step}"

    def failed(self, error: BaseException, where: str) -> None:
        """Wake all others with the news."""
        with self._hub.changed:
            if self._hub.failure is None:
                self._hub.failure = f"rank {self._rank} failed in {where}: {type(error).__name__}: {error}"
            self._hub.changed.notify_all()
