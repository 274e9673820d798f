"""Knowing whether a message has arrived without waiting for it: gloo's receives say so only to whoever waits."""

from __future__ import annotations

import weakref
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING

from zerobubble.runtime.sends import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

_POLL_SECONDS = 5e-5


class Watched:
    """Receives that somebody waits for.

    Attributes:
        failed: whether they will never be done, as the connection is gone.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works
        self.failed = False
        self.over = Event()

    def done(self, patience: float) -> bool:
        """Wait at most `patience` seconds; whether they are done, or failed."""
        return self.over.wait(patience)


class _Polled(Watched):
    """Receives of NCCL, which say so themselves. Not run on a GPU yet."""

    def done(self, patience: float) -> bool:
        deadline = monotonic() + patience
        while not all(work.is_completed() for work in self.works):
            if monotonic() > deadline:
                return False
            sleep(_POLL_SECONDS)
        return True


class Watcher:
    """Waits in a thread of its own for the receives of one link, in their order."""

    def __init__(self, device: torch.device) -> None:
        self._queue: SimpleQueue[Watched | None] | None = None
        if device.type != "cuda":
            self._queue = SimpleQueue()
            Thread(target=_watch, args=(self._queue,), name="zerobubble-watch", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)

    def watch(self, works: Sequence[dist.Work]) -> Watched:
        """Begin to wait for `works`."""
        if self._queue is None:
            return _Polled(works)
        watched = Watched(works)
        self._queue.put(watched)
        return watched


def _watch(queue: SimpleQueue[Watched | None]) -> None:
    while (watched := queue.get()) is not None:
        try:
            for work in watched.works:
                work.wait(NEVER)
        except RuntimeError:
            watched.failed = True
        watched.over.set()
        del watched
