"""A machine that runs lowered programs, stricter than any transport: a send blocks until its receive is posted."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from zerobubble.lower import Receive, Run, Send, Validate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerobubble import Op
    from zerobubble.lower import Instruction, Message, Program

    Link = tuple[int, int]


def run(programs: Sequence[Program], amended: bool = False) -> list[Op]:
    """Run `programs` to their end; the ops in the order in which they ran.

    With `amended`, every rank starts again when it first reaches its `Validate`.

    Raises:
        AssertionError: a rank gets stuck, a link's receives are not in the order of its sends, or a message is posted,
            sent or left over when it should not be.
    """
    return _Machine(programs, amended).run()


class _Machine:
    def __init__(self, programs: Sequence[Program], amended: bool) -> None:
        self.programs = programs
        self.next = [0] * len(programs)
        self.posted: dict[Link, list[Message]] = defaultdict(list)
        self.sent: dict[Link, list[Message]] = defaultdict(list)
        self.amended = [amended] * len(programs)
        self.arrived: Counter[Message] = Counter()
        self.ran: list[Op] = []

    def run(self) -> list[Op]:
        while any([self._advance(rank) for rank in range(len(self.programs))]):  # noqa: C419 - every rank gets its turn
            pass
        for rank, program in enumerate(self.programs):
            stuck = program.instructions[self.next[rank] : self.next[rank] + 1]
            assert not stuck, f"rank {rank} hangs at {stuck[0]}"
        assert self.posted == self.sent
        assert not +self.arrived, "something was sent that nobody took in"
        return self.ran

    def _advance(self, rank: int) -> bool:
        """Run `rank` as far as it gets; whether that was anywhere."""
        instructions, moved = self.programs[rank].instructions, False
        while self.next[rank] < len(instructions) and self._step(rank, instructions[self.next[rank]]):
            self.next[rank] += 1
            moved = True
        return moved

    def _step(self, rank: int, instruction: Instruction) -> bool:
        match instruction:
            case Receive(message):
                assert message.target == rank
                self.posted[_link(message)].append(message)
            case Send(message):
                assert message.source == rank
                posted, sent = self.posted[_link(message)], self.sent[_link(message)]
                if len(posted) == len(sent):
                    return False
                assert posted[len(sent)] == message, f"{posted[len(sent)]} is received where {message} is sent"
                sent.append(message)
                self.arrived[message] += 1
            case Run(op, awaits):
                if not all(self.arrived[message] for message in awaits):
                    return False
                self.arrived.subtract(awaits)
                self.ran.append(op)
            case Validate() if self.amended[rank]:
                return self._start_again(rank, instruction)
        return True

    def _start_again(self, rank: int, validate: Validate) -> bool:
        """Take in what is stale, then go back to before the first instruction."""
        if not all(self.arrived[message] for message in validate.stale):
            return False
        self.arrived.subtract(validate.stale)
        self.amended[rank] = False
        self.next[rank] = -1
        return True


def _link(message: Message) -> Link:
    return message.source, message.target
