"""What each rank finished last and why one failed: a board that all ranks read when something goes wrong."""

from __future__ import annotations

import weakref
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from zerobubble.op import Op

_INTERVAL_SECONDS = 0.5
_PATIENCE_SECONDS = 2.0
_FAILED = "failed"


def board_name(number: int, first: int) -> str:
    """The name of the board of a pipeline: the how-manieth of its processes it is, and the global rank of its first."""
    return f"pipeline {number} of {first}"


class Notices:
    """What stands on the board of this name, to read."""

    def __init__(self, name: str) -> None:
        self.store = PrefixStore(f"zerobubble/{name}", dist.distributed_c10d._get_default_store())

    def failure(self) -> str | None:
        """Why the first rank that failed did, if one said so."""
        return self._get(_FAILED)

    def read(self, rank: int) -> str:
        """What `rank` finished last, as far as it said."""
        return self._get(_finished_key(rank)) or "nothing that it told of"

    def _get(self, key: str) -> str | None:
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError:
            return None


class StatusBoard:
    """One rank's view of the board, which lies in the store of `torch.distributed`.

    Boards of different names do not see each other. A thread writes what was finished twice a second, so that noting
    an op costs the executor nothing.
    """

    def __init__(self, rank: int, name: str) -> None:
        self._rank = rank
        self._notices = Notices(name)
        self._store = self._notices.store
        self._last = _Last(rank)
        stop = Event()
        thread = Thread(target=_publish, args=(self._store, self._last, stop), name="zerobubble-status", daemon=True)
        thread.start()
        weakref.finalize(self, _stop_publishing, stop, thread)

    def finished(self, op: Op, step: int) -> None:
        """Note the last op that this rank finished."""
        self._last.op = (op, step)

    def fail(self, error: BaseException, where: str) -> None:
        """Write down that this rank stops because of `error`. The first failure of all ranks is kept."""
        text = f"rank {self._rank} failed in {where}: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # without a store, the closed connection will tell the others that much
            self._last.write(self._store)
            self._store.compare_set(_FAILED, "", text)

    def failure(self) -> str | None:
        """Why the first rank that failed did, if one said so."""
        return self._notices.failure()

    def read(self, rank: int) -> str:
        """What `rank` finished last, as far as it said."""
        return self._notices.read(rank)


class _Last:
    """What a rank finished last, as it stands on the board."""

    def __init__(self, rank: int) -> None:
        self.op: tuple[Op, int] | None = None
        self._key = _finished_key(rank)
        self._written: tuple[Op, int] | None = None

    def write(self, store: Store) -> None:
        """Write it where it changed."""
        if self.op is not None and self.op != self._written:
            self._written = self.op
            store.set(self._key, f"{self.op[0]} of step {self.op[1]}")


def _publish(store: Store, last: _Last, stop: Event) -> None:
    with suppress(RuntimeError):  # the store is gone, and with it whoever would read
        while not stop.wait(_INTERVAL_SECONDS):
            last.write(store)
        last.write(store)


def _stop_publishing(stop: Event, thread: Thread) -> None:
    stop.set()
    thread.join(_PATIENCE_SECONDS)


def _finished_key(rank: int) -> str:
    return f"finished/{rank}"
