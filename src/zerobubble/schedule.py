"""Placements and schedules: immutable values that say what runs where and in which order, and nothing of time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from zerobubble.dependencies import needs, result
from zerobubble.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from zerobubble.op import Kind, Op


@dataclass(frozen=True)
class Placement:
    """Stage -> rank. `ranks[s]` is the rank of stage `s`; stages are numbered in data-flow order.

    Raises:
        OptionError: no stage at all, something that is no rank, or a rank below the highest one that holds no stage.
    """

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.ranks:
            raise OptionError("placement []: a pipeline needs at least one stage")
        wrong = next((rank for rank in self.ranks if type(rank) is not int or rank < 0), None)
        if wrong is not None:
            raise OptionError(f"placement {list(self.ranks)}: ranks are whole numbers from 0; got {wrong!r}")
        holders = set(self.ranks)
        idle = next((rank for rank in range(max(holders)) if rank not in holders), None)
        if idle is not None:
            raise OptionError(
                f"placement {list(self.ranks)}: every rank from 0 to the highest must hold a stage; "
                f"rank {idle} holds none"
            )

    @classmethod
    def linear(cls, num_ranks: int) -> Placement:
        """One stage per rank, in order."""
        return cls(tuple(range(num_ranks)))

    @classmethod
    def loop(cls, num_ranks: int, chunks: int) -> Placement:
        """Stage s on rank s mod p: each further chunk starts again at rank 0."""
        return cls(tuple(range(num_ranks)) * chunks)

    @classmethod
    def v(cls, num_ranks: int) -> Placement:
        """Down the ranks, then back up: first and last stage share rank 0."""
        return cls.wave(num_ranks, 2)

    @classmethod
    def wave(cls, num_ranks: int, chunks: int) -> Placement:
        """Down, up, down, ...: every second chunk runs from the last rank to the first."""
        down = tuple(range(num_ranks))
        return cls(sum((down if c % 2 == 0 else down[::-1] for c in range(chunks)), ()))

    @cached_property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.ranks)

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has (p)."""
        return max(self.ranks) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in data-flow order: chunk c of the rank is the c-th of them."""
        return tuple(stage for stage, holder in enumerate(self.ranks) if holder == rank)

    @property
    def style(self) -> str:
        """`linear`, `loop`, `v`, `wave`, or `custom` when it is none of these."""
        p, chunks = self.num_ranks, self.num_stages // self.num_ranks
        for name, other in (
            ("linear", Placement.linear(p)),
            ("v", Placement.v(p)),
            ("loop", Placement.loop(p, chunks)),
            ("wave", Placement.wave(p, chunks)),
        ):
            if self == other:
                return name
        return "custom"


@dataclass(frozen=True, repr=False)
class Schedule:
    """An order of ops per rank: `orders[rank]` is what that rank runs, first to last. Says nothing about time.

    A schedule is only data and may be wrong; `zerobubble.validate.validate` says whether it can run.
    """

    placement: Placement
    num_microbatches: int
    orders: tuple[tuple[Op, ...], ...]
    name: str = field(default="custom", compare=False)

    @property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has (p)."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.placement.num_stages

    @cached_property
    def num_ops(self) -> int:
        """How many ops all ranks run in one step."""
        return sum(map(len, self.orders))

    @cached_property
    def progress(self) -> Progress:
        """The ops in an order in which they could run one at a time, and how far that gets each rank."""
        return _progress(self.orders, self.num_stages)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank} | {' '.join(map(str, order))}" for rank, order in enumerate(self.orders))

    def __repr__(self) -> str:
        sizes = f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        return f"<Schedule {self.name}: {sizes}, {self.num_ops} ops>"

    def ops(self) -> Iterator[Op]:
        """All ops, rank by rank."""
        for order in self.orders:
            yield from order

    def only(self, kinds: Collection[Kind]) -> Schedule:
        """The same orders with the ops of other kinds left out (the forwards alone serve evaluation)."""
        return self._filtered(lambda op: op.kind in kinds)

    def first_microbatches(self, count: int) -> Schedule:
        """The same orders for the first `count` microbatches only. A valid schedule stays valid."""
        shorter = self._filtered(lambda op: op.microbatch < count)
        return Schedule(self.placement, min(count, self.num_microbatches), shorter.orders, self.name)

    def divided(self) -> Schedule:
        """The same orders with every BW as its B and, right behind it, its W."""
        orders = tuple(tuple(part for op in order for part in op.parts()) for order in self.orders)
        return Schedule(self.placement, self.num_microbatches, orders, f"{self.name} with B and W apart")

    def _filtered(self, keep: Callable[[Op], bool]) -> Schedule:
        orders = tuple(tuple(op for op in order if keep(op)) for order in self.orders)
        return Schedule(self.placement, self.num_microbatches, orders, self.name)


def make_schedule(name: str, placement: Placement, num_microbatches: int, orders: Sequence[Iterable[Op]]) -> Schedule:
    """A schedule from any iterables of ops, one per rank."""
    return Schedule(placement, num_microbatches, tuple(tuple(order) for order in orders), name)


class Progress(NamedTuple):
    """How far a schedule can run.

    Attributes:
        sequence: (rank, position) of ops, each after all that it needs.
        stopped: per rank, the position of the first op that can never start; the length of its order when it gets done.
    """

    sequence: tuple[tuple[int, int], ...]
    stopped: tuple[int, ...]


def _progress(orders: Sequence[Sequence[Op]], num_stages: int) -> Progress:
    """Run every rank as far as it gets, in turn; a rank that must wait goes on when its result is there."""
    done: set[Op] = set()
    waiting: dict[Op, list[int]] = {}
    positions = [0] * len(orders)
    sequence: list[tuple[int, int]] = []
    runnable = list(range(len(orders)))[::-1]
    while runnable:
        rank = runnable.pop()
        order, position = orders[rank], positions[rank]
        while position < len(order):
            op = order[position]
            missing = [need for need in needs(op, num_stages) if need not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            made = result(op)
            done.add(made)
            sequence.append((rank, position))
            position += 1
            if made in waiting:
                runnable.extend(waiting.pop(made))
        positions[rank] = position
    return Progress(tuple(sequence), tuple(positions))
