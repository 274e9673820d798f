"""When ops start and end, by the host's clock or a GPU's; and by how much the clocks of machines differ."""

from __future__ import annotations

from dataclasses import dataclass
from socket import gethostname
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Gather = Callable[[Mapping[int, Any]], list[Any]]

_ROUNDS = 15


@dataclass(frozen=True)
class Record:
    """What a clock marked in a step of one rank.

    Attributes:
        starts: one mark per op.
        ends: the same.
        groups: (position, number) of ops that ran as one and have the same marks: each counts as an equal part.
    """

    starts: Sequence[Any]
    ends: Sequence[Any]
    groups: Sequence[tuple[int, int]] = ()

    def read(self, clock: Clock) -> tuple[list[int], list[int]]:
        """When every op started and ended (ns)."""
        starts, ends = clock.read(self.starts), clock.read(self.ends)
        for first, size in self.groups:
            begin, length = starts[first], ends[first] - starts[first]
            cuts = [begin + length * i // size for i in range(size + 1)]
            starts[first : first + size], ends[first : first + size] = cuts[:-1], cuts[1:]
        return starts, ends


class Clock(Protocol):
    """Marks moments now, and says later when they were."""

    def now(self) -> Any:
        """A mark for this moment of the computation; does not wait."""

    def read(self, marks: Sequence[Any]) -> list[int]:
        """When the marks were, in ns of this machine's monotonic clock. May wait until the last one has passed."""


class HostClock:
    """The monotonic clock, for computation that is done when its call returns."""

    now = staticmethod(perf_counter_ns)

    def read(self, marks: Sequence[int]) -> list[int]:
        """The marks, which are times already."""
        return list(marks)


class CudaClock:
    """Events on the stream that computes: they pass when the GPU gets there, whatever the host does meanwhile.

    Not run on a GPU yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[int]:
        """Waits for the device. Differences to the first mark are exact to a microsecond; it is so to some ten."""
        if not marks:
            return []
        anchor = self.now()
        anchor.synchronize()
        first = perf_counter_ns() - round(marks[0].elapsed_time(anchor) * 1e6)
        return [first + round(marks[0].elapsed_time(mark) * 1e6) for mark in marks]


HOST_CLOCK = HostClock()


def clock_for(device: torch.device) -> Clock:
    """The clock by which ops on `device` are timed."""
    return CudaClock(device) if device.type == "cuda" else HOST_CLOCK


def offsets(gather: Gather, ranks: Sequence[int], host: str | None = None) -> list[int]:
    """By how much each rank's monotonic clock is ahead of rank 0's, in ns. Collective.

    0 for all on one machine. Between machines a moment that all ranks share, the end of an exchange, is read on every
    clock some times: good to about the time that a message takes. What is left cancels where both directions of a
    hop are averaged, as in `profile`.

    Args:
        gather: gives everyone what every rank gives.
        ranks: that live in this process.
        host: name of this machine.
    """
    hosts = gather(dict.fromkeys(ranks, host or gethostname()))
    if len(set(hosts)) == 1:
        return [0] * len(hosts)
    moments = []
    for _ in range(_ROUNDS):
        gather(dict.fromkeys(ranks))
        moments.append(perf_counter_ns())
    rows = gather(dict.fromkeys(ranks, moments))
    return [round(median(own - first for own, first in zip(row, rows[0], strict=True))) for row in rows]
