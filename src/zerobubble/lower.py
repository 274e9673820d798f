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
from typing import TYPE_CHECKING, TypeAlias

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.simulate import op_times
from zerobubble.validate import validate

if TYPE_CHECKING:
    from zerobubble.op import Op
    from zerobubble.schedule import Schedule

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

    def __str__(self) -> str:
        return "\n".join(f"{type(i).__name__.lower():8}{i.op if isinstance(i, Run) else i.message}" for i in self.instructions)


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """One program per rank. The schedule may hold forwards only (evaluation); otherwise it must be complete.

    Raises:
        ScheduleError: the schedule is invalid.
    """
    if any(op.kind != "F" for op in schedule.ops()):
        validate(schedule)
    receives = _receives(schedule)
    sends = _sends(schedule)
    return tuple(Program(rank, _instructions(schedule, rank, receives[rank], sends)) for rank in range(schedule.num_ranks))


def _awaits(op: Op, schedule: Schedule) -> tuple[Message, ...]:
    """The messages that bring what `op` needs from other ranks."""
    ranks = schedule.placement.ranks
    target = ranks[op.stage]
    return tuple(
        Message(need, op.stage, ranks[need.stage], target)
        for need in needs(op, schedule.num_stages)
        if ranks[need.stage] != target
    )


def _sends(schedule: Schedule) -> dict[Op, list[Message]]:
    """Producer -> the messages to send when it ends."""
    sends: dict[Op, list[Message]] = {}
    for op in schedule.ops():
        for message in _awaits(op, schedule):
            sends.setdefault(message.producer, []).append(message)
    return sends


def _receives(schedule: Schedule) -> list[dict[int, list[Message]]]:
    """Per rank, position in its order -> the receives to post just before that op."""
    starts, _ = op_times(schedule, Costs().resolve(schedule.placement))
    started = {result(op): starts[rank][i] for rank, order in enumerate(schedule.orders) for i, op in enumerate(order)}
    receives: list[dict[int, list[Message]]] = []
    for rank, order in enumerate(schedule.orders):
        messages = sorted((m for op in order for m in _awaits(op, schedule)), key=lambda m: started[m.producer])
        posts: dict[int, list[Message]] = {}
        for message in messages:
            position = bisect_left(starts[rank], started[message.producer]) - _LEAD
            posts.setdefault(max(position, 0), []).append(message)
        receives.append(posts)
    return receives


def _instructions(
    schedule: Schedule, rank: int, receives: dict[int, list[Message]], sends: dict[Op, list[Message]]
) -> tuple[Instruction, ...]:
    instructions: list[Instruction] = []
    for position, op in enumerate(schedule.orders[rank]):
        instructions += map(Receive, receives.get(position, ()))
        instructions.append(Run(op, _awaits(op, schedule)))
        instructions += map(Send, sends.get(result(op), ()))
    return tuple(instructions)
