"""Waiting for sends in a thread of its own, so that a sent tensor is let go as soon as it is sent."""

from __future__ import annotations

import weakref
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import sleep
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist
    from torch import Tensor

_Errand: TypeAlias = "Callable[[], None]"

NEVER = timedelta(days=365)
"""Sends have no timeout of their own: gloo would close the connection under whoever waits for something else."""

_LAZY_SECONDS = 0.002
"""How long a send is left alone. Waking a thread for each would cost the ranks more than the sends themselves."""


class Reaper:
    """Holds what is being sent until it is sent.

    Args:
        name: of the thread.
        patience: seconds that the end of the process waits for what is still on its way.
    """

    def __init__(self, name: str, patience: float) -> None:
        self._queue: SimpleQueue[_Errand | None] = SimpleQueue()
        thread = Thread(target=_reap, args=(self._queue,), name=name, daemon=True)
        thread.start()
        weakref.finalize(self, _stop, self._queue, thread, patience)

    def add(self, work: dist.Work, tensor: Tensor) -> None:
        """Hold `tensor` until `work`, its send, is done."""
        self._queue.put(partial(_finish, work, tensor))

    def run(self, errand: Callable[[], None]) -> None:
        """Call `errand` in the thread, after what was added before. A RuntimeError counts as a peer that is gone."""
        self._queue.put(errand)


def _reap(queue: SimpleQueue[_Errand | None]) -> None:
    while (errand := queue.get()) is not None:
        sleep(_LAZY_SECONDS)
        while errand is not None:
            with suppress(RuntimeError):  # the peer is gone: whoever waits for it says so
                errand()
            del errand  # while the next one is looked for
            try:
                errand = queue.get_nowait()
            except Empty:
                break
        else:
            return


def _stop(queue: SimpleQueue[_Errand | None], thread: Thread, patience: float) -> None:
    queue.put(None)
    thread.join(patience)


def _finish(work: dist.Work, tensor: Tensor) -> None:
    """Block this thread until `tensor` is sent; on CUDA without holding up the stream that computes."""
    if tensor.device.type != "cuda":
        work.wait(NEVER)
        return
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work.wait()
    stream.synchronize()
