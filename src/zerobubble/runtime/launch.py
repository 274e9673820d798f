"""Starts a pipeline's processes on this machine, for the demo, benchmarks and tests. For clusters use `torchrun`."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from datetime import timedelta
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from zerobubble.errors import PeerError, PipelineError

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1


def launch(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 600.0,
    time_limit: float | None = None,
    on_news: Callable[[Any], None] | None = None,
) -> list[Any]:
    """Run `function(report, *args)` in `num_ranks` new processes, over gloo on loopback, one thread each.

    Args:
        function: importable by name. `report(news)` hands a small value to `on_news` in this process.
        num_ranks: how many processes.
        *args: passed on; must be picklable.
        timeout: seconds for the start and for collectives.
        time_limit: seconds after which all processes are stopped; by default they may take as long as they need.
        on_news: called here with whatever the ranks report, while they run.

    Returns:
        What the function returned, by rank.

    Raises:
        PipelineError: a process failed; all others have been stopped. Says which one, and why.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = mp.get_context("spawn").Queue()
    processes = start_processes(  # type: ignore[no-untyped-call]
        _entry, (function, num_ranks, store.port, timeout, queue, args), num_ranks, join=False, daemon=True
    )
    inbox = _Inbox(queue, on_news)
    try:
        end = monotonic() + (time_limit or float("inf"))
        while not processes.join(timeout=_POLL_SECONDS):
            inbox.empty()
            if monotonic() > end:
                raise PipelineError(f"{function.__name__} was stopped: not done after {time_limit:g} s")
        inbox.empty()
    except (ProcessRaisedException, ProcessExitedException) as error:
        inbox.empty()
        raise PipelineError(inbox.cause() or f"rank {error.error_index} died: {error}") from None
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [inbox.results[rank] for rank in range(num_ranks)]


class _Inbox:
    """What the ranks send home: news, results, and why they failed."""

    def __init__(self, queue: Any, on_news: Callable[[Any], None] | None) -> None:
        self.results: dict[int, Any] = {}
        self._failures: list[tuple[bool, str]] = []
        self._queue = queue
        self._on_news = on_news

    def empty(self) -> None:
        """Take in all that has come."""
        while True:
            try:
                kind, rank, data = self._queue.get_nowait()
            except Empty:
                return
            value = pickle.loads(data)
            if kind == "result":
                self.results[rank] = value
            elif kind == "failure":
                self._failures.append(value)
            elif self._on_news is not None:
                self._on_news(value)

    def cause(self) -> str | None:
        """Why the first rank failed that did not fail because of another one."""
        return min(self._failures, key=lambda failure: failure[0])[1] if self._failures else None


def _die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when the one that started it is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _entry(
    rank: int,
    function: Callable[..., Any],
    num_ranks: int,
    port: int,
    timeout: float,
    queue: Any,
    args: tuple[Any, ...],
) -> None:
    os.setpgrp()  # an interrupt reaches the starting process alone, which then stops all ranks at once
    _die_with_parent()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)

    def put(kind: str, value: Any) -> None:  # whole copies: shared memory would go with this process
        queue.put((kind, rank, pickle.dumps(value)))

    try:
        put("result", function(lambda news: put("news", news), *args))
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        text = f"rank {rank} failed: {type(error).__name__}: {error} {notes}".rstrip()
        put("failure", (isinstance(error, PeerError), text))
        raise
    finally:
        queue.close()
        queue.join_thread()
    dist.barrier()
    dist.destroy_process_group()
