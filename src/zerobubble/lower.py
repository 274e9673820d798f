"""Lowering: a schedule becomes one program per rank, with every receive and send in its place.

A message crosses from one rank to another over the *link* of that directed pair of ranks. Its receive is posted where
the order of the whole schedule, simulated with equal times, says that the sender starts to compute it, and `_LEAD` ops
before that. So receives of a link stand in the order in which the sender sends, and a rank that waits for a result
has already posted every receive for what was sent before it: even if sends block until their receive is posted
(rendezvous), a schedule without deadlock runs to its end.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.op import Kind
from zerobubble.simulate import op_times
from zerobubble.validate import validate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerobubble.op import Op
    from zerobubble.schedule import Placement, Schedule

_LEAD = 1


@dataclass(frozen=True)
class Message:
    """What `producer` makes and an op of stage `consumer_stage` on another rank needs.

    An activation goes to the next stage, an input gradient to the previous one. `producer` is named as by
    `dependencies.result`: B stands for B or BW.
    """

    producer: Op
    consumer_stage: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.producer} (rank {self.source} -> {self.target})"


@dataclass(frozen=True)
class Receive:
    """Post the receive of `message`; does not wait."""

    message: Message


@dataclass(frozen=True)
class Run:
    """Run `op`, after waiting for the messages in `awaits`."""

    op: Op
    awaits: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Send:
    """Start to send `message`; does not wait."""

    message: Message


Instruction: TypeAlias = "Receive | Run | Send"


@dataclass(frozen=True)
class Program:
    """What one rank does in a step, in order."""

    rank: int
    instructions: tuple[Instruction, ...]

    @property
    def links(self) -> frozenset[tuple[int, int]]:
        """(source, target) of the links that this rank sends on."""
        messages = (i.message for i in self.instructions if isinstance(i, Send))
        return frozenset((message.source, message.target) for message in messages)

    def __str__(self) -> str:
        return "\n".join(
            f"{type(i).__name__.lower():8}{i.op if isinstance(i, Run) else i.message}" for i in self.instructions
        )


def lower(schedule: Schedule, forward_only: bool = False) -> tuple[Program, ...]:
    """One program per rank; with `forward_only` its forwards alone, for evaluation.

    Raises:
        ScheduleError: the schedule is invalid.
    """
    validate(schedule)
    if forward_only:
        schedule = schedule.only({Kind.F})
    awaits = [[_awaits(op, schedule.placement) for op in order] for order in schedule.orders]
    receives = _receives(schedule, awaits)
    sends: dict[Op, list[Message]] = {}
    for message in chain.from_iterable(chain.from_iterable(awaits)):
        sends.setdefault(message.producer, []).append(message)
    return tuple(
        Program(rank, tuple(_instructions(order, awaits[rank], receives[rank], sends)))
        for rank, order in enumerate(schedule.orders)
    )


Awaits: TypeAlias = "Sequence[tuple[Message, ...]]"
"""Per position in a rank's order, the messages that bring what the op there needs from other ranks."""


def _awaits(op: Op, placement: Placement) -> tuple[Message, ...]:
    ranks = placement.ranks
    target = ranks[op.stage]
    return tuple(
        [
            Message(need, op.stage, ranks[need.stage], target)
            for need in needs(op, placement.num_stages)
            if ranks[need.stage] != target
        ]
    )


def _receives(schedule: Schedule, awaits: Sequence[Awaits]) -> list[dict[int, list[Message]]]:
    """Per rank, position in its order -> the receives to post just before that op."""
    starts, _ = op_times(schedule, Costs().resolve(schedule.placement))
    started = {result(op): starts[rank][i] for rank, order in enumerate(schedule.orders) for i, op in enumerate(order)}
    receives: list[dict[int, list[Message]]] = []
    for rank, awaited in enumerate(awaits):
        messages = sorted(chain.from_iterable(awaited), key=lambda message: started[message.producer])
        posts: dict[int, list[Message]] = {}
        for message in messages:
            position = bisect_left(starts[rank], started[message.producer]) - _LEAD
            posts.setdefault(max(position, 0), []).append(message)
        receives.append(posts)
    return receives


def _instructions(
    order: Sequence[Op], awaits: Awaits, receives: dict[int, list[Message]], sends: dict[Op, list[Message]]
) -> Iterator[Instruction]:
    for position, op in enumerate(order):
        yield from map(Receive, receives.get(position, ()))
        yield Run(op, awaits[position])
        yield from map(Send, sends.get(result(op), ()))
