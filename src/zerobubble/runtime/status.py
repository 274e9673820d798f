"""What each rank finished last and why one failed: a board that all ranks read when something goes wrong."""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from zerobubble.op import Op

_INTERVAL_SECONDS = 0.5
_FAILED = "zerobubble/failed"


class StatusBoard:
    """One rank's view of the board, which lies in the store of `torch.distributed`.

    A thread writes `last_finished` there twice a second, so that noting an op costs the executor nothing.
    """

    def __init__(self, rank: int) -> None:
        self.last_finished: tuple[Op, int] | None = None
        self._rank = rank
        self._store = dist.distributed_c10d._get_default_store()
        self._stop = Event()
        Thread(target=self._publish, name="zerobubble-status", daemon=True).start()

    def _publish(self) -> None:
        written = None
        while not self._stop.wait(_INTERVAL_SECONDS):
            if self.last_finished != written:
                written = self.last_finished
                try:
                    self._write()
                except RuntimeError:
                    return  # the store is gone, and with it whoever would read

    def _write(self) -> None:
        self._store.set(f"zerobubble/finished/{self._rank}", _describe(self.last_finished))

    def fail(self, error: BaseException, where: str) -> None:
        """Write down that this rank stops because of `error`. The first failure of all ranks is kept."""
        self._stop.set()
        text = f"rank {self._rank} failed in {where}: {type(error).__name__}: {error}"
        try:
            self._write()
            self._store.compare_set(_FAILED, "", text)
        except RuntimeError:
            pass  # the store is gone; the closed connection will tell the others that much

    def failure(self) -> str | None:
        """Why the first rank that failed did, if one said so."""
        return self._get(_FAILED)

    def read(self, rank: int) -> str:
        """What `rank` finished last, as far as it said."""
        return self._get(f"zerobubble/finished/{rank}") or "nothing that it told of"

    def _get(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None


def _describe(finished: tuple[Op, int] | None) -> str:
    return "nothing" if finished is None else f"{finished[0]} of step {finished[1]}"
