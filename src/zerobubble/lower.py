"""Lowering: a schedule becomes one program per rank, with every receive and send in its place.

A message crosses from one rank to another over the *link* of that directed pair of ranks. Its receive is posted where
the order of the whole schedule, simulated with equal times, says that the sender starts to compute it, and `_LEAD` ops
before that. So receives of a link stand in the order in which the sender sends, and a rank that waits for a result
has already posted every receive for what was sent before it: even if sends block until their receive is posted
(rendezvous), a schedule without deadlock runs to its end.

Every program has one `Validate`, at the end of the rank's warm-up: there the optimizer's last step may be amended, and
the warm-up then runs again. The warm-ups of all ranks are closed: none needs a message that its sender sends behind
its own `Validate`, and what is sent in a warm-up is posted in one. What comes next needs, over other ops, a forward
on every rank, so that all of them have ended the step before: to wait there for news of it delays nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, TypeAlias

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.op import Kind
from zerobubble.simulate import op_times
from zerobubble.validate import validate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

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


@dataclass(frozen=True)
class Validate:
    """Validate the optimizer's last step. Where it is amended, all ranks run their programs again from the start.

    `stale` is what other ranks have sent by their `Validate` and this rank has posted but not received by its own, in
    order: it must take that in before it starts again.
    """

    stale: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Finish:
    """Run `ops`, the last of their stage (a run of W, or one BW), after waiting for the messages in `awaits`.

    The weights' part goes parameter by parameter, over the microbatches of all `ops` in their order. So gradients get
    done one after the other, and each is reduced over the replicas while those after it are still computed.
    """

    ops: tuple[Op, ...]
    awaits: tuple[Message, ...] = ()


Instruction: TypeAlias = "Finish | Receive | Run | Send | Validate"


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
        return "\n".join(map(_line, self.instructions))


def _line(instruction: Instruction) -> str:
    if isinstance(instruction, Validate):
        return "validate"
    return f"{type(instruction).__name__.lower():8}{_object(instruction)}"


def _object(instruction: Finish | Receive | Run | Send) -> Op | Message | str:
    if isinstance(instruction, Run):
        return instruction.op
    return " ".join(map(str, instruction.ops)) if isinstance(instruction, Finish) else instruction.message


def lower(schedule: Schedule, forward_only: bool = False) -> tuple[Program, ...]:
    """One program per rank; with `forward_only` its forwards alone, for evaluation.

    Forwards alone are all warm-up, and have no `Validate`.

    Raises:
        ScheduleError: the schedule is invalid.
    """
    validate(schedule)
    if forward_only:
        schedule = schedule.only({Kind.F})
    awaits = [[_awaits(op, schedule.placement) for op in order] for order in schedule.orders]
    warm_ups = _warm_ups(schedule, awaits)
    early = {op for order, length in zip(schedule.orders, warm_ups, strict=True) for op in order[:length]}
    receives = _receives(schedule, awaits, warm_ups, early)
    sends: dict[Op, list[Message]] = {}
    for message in chain.from_iterable(chain.from_iterable(awaits)):
        sends.setdefault(message.producer, []).append(message)
    return tuple(
        Program(rank, tuple(_instructions(order, awaits[rank], receives[rank], sends, warm_ups[rank], early)))
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


def _warm_ups(schedule: Schedule, awaits: Sequence[Awaits]) -> list[int]:
    """Per rank, how many of its first ops are warm-up: forwards that need only what the warm-ups of all ranks send."""
    lengths = [
        next((i for i, op in enumerate(order) if op.kind is not Kind.F), len(order)) for order in schedule.orders
    ]
    while True:
        early = {op for order, length in zip(schedule.orders, lengths, strict=True) for op in order[:length]}
        shorter = [
            next((i for i in range(length) if any(m.producer not in early for m in awaited[i])), length)
            for length, awaited in zip(lengths, awaits, strict=True)
        ]
        if shorter == lengths:
            return lengths
        lengths = shorter


def _receives(
    schedule: Schedule, awaits: Sequence[Awaits], warm_ups: Sequence[int], early: Collection[Op]
) -> list[dict[int, list[Message]]]:
    """Per rank, position in its order -> the receives to post just before that op.

    What is sent `early`, in a warm-up, is posted in the warm-up, and nothing else is: so no receive is left waiting for
    something later when the program starts again.
    """
    starts, _ = op_times(schedule, Costs().resolve(schedule.placement))
    started = {result(op): starts[rank][i] for rank, order in enumerate(schedule.orders) for i, op in enumerate(order)}
    receives: list[dict[int, list[Message]]] = []
    for rank, awaited in enumerate(awaits):
        messages = sorted(chain.from_iterable(awaited), key=lambda message: started[message.producer])
        posts: dict[int, list[Message]] = {}
        for message in messages:
            position = bisect_left(starts[rank], started[message.producer]) - _LEAD
            bounds = (0, warm_ups[rank]) if message.producer in early else (warm_ups[rank], len(starts[rank]))
            posts.setdefault(min(max(position, bounds[0]), bounds[1]), []).append(message)
        receives.append(posts)
    return receives


def _instructions(
    order: Sequence[Op],
    awaits: Awaits,
    receives: dict[int, list[Message]],
    sends: dict[Op, list[Message]],
    warm_up: int,
    early: Collection[Op],
) -> Iterator[Instruction]:
    for position, op in enumerate(order):
        posts = receives.get(position, ())
        if position == warm_up:
            yield from (Receive(message) for message in posts if message.producer in early)
            yield _validate(awaits, receives, warm_up, early)
            posts = [message for message in posts if message.producer not in early]
        yield from map(Receive, posts)
        yield Run(op, awaits[position])
        yield from map(Send, sends.get(result(op), ()))


def _validate(awaits: Awaits, receives: dict[int, list[Message]], warm_up: int, early: Collection[Op]) -> Validate:
    received = set(chain.from_iterable(awaits[:warm_up]))
    posted = chain.from_iterable(receives[position] for position in sorted(receives))
    return Validate(tuple(m for m in posted if m.producer in early and m not in received))


# -------------------------------------------------------------------------------------------- gradients over replicas


def tails_by_stage(schedule: Schedule) -> Schedule:
    """The same schedule with the W after each rank's last other op sorted by stage, so that one stage is done first.

    Nothing waits for a W, so the times of all other ops and the peak memory stay as they are.
    """
    return replace(schedule, orders=tuple(map(_tail_by_stage, schedule.orders)))


def _tail_by_stage(order: Sequence[Op]) -> tuple[Op, ...]:
    begin = max((i + 1 for i, op in enumerate(order) if op.kind is not Kind.W), default=0)
    stages = list(dict.fromkeys(op.stage for op in order[begin:]))
    return (*order[:begin], *sorted(order[begin:], key=lambda op: stages.index(op.stage)))


def finishing(program: Program) -> Program:
    """The same program with the last ops of each stage as one `Finish`: its last BW, or the W that stand together."""
    last = {i.op.stage: i for i in program.instructions if isinstance(i, Run)}
    instructions: list[Instruction] = []
    for _, group in groupby(program.instructions, _stage_of_w):
        runs = [*group]
        end = runs[-1]
        if isinstance(end, Run) and end is last[end.op.stage]:
            instructions.append(Finish(tuple(i.op for i in runs if isinstance(i, Run)), end.awaits))
        else:
            instructions += runs
    return replace(program, instructions=tuple(instructions))


def _stage_of_w(instruction: Instruction) -> object:
    """The same for W of one stage, different for anything else."""
    if isinstance(instruction, Run) and instruction.op.kind is Kind.W:
        return instruction.op.stage
    return instruction
