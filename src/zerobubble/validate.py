"""What makes a schedule runnable. Reports every fault with its place, the ops around it, and what would mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.errors import OptionError, ScheduleError
from zerobubble.memory import held_memory
from zerobubble.op import Kind, Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zerobubble.schedule import Schedule

_SHOWN_FAULTS = 12


@dataclass(frozen=True)
class Fault:
    """One broken rule of a schedule.

    Attributes:
        rule: the rule's name: `shape`, `placement`, `range`, `once`, `complete`, `order`, `deadlock` or `memory`.
        message: what is wrong, and what would mend it.
        rank: the rank where it shows, or None when it shows on none.
        position: the index in that rank's order, or None when an op is missing.
        drawing: the ops around the place, the faulty one in brackets.
    """

    rule: str
    message: str
    rank: int | None = None
    position: int | None = None
    drawing: str = ""

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.message, self.drawing)))


def validate(schedule: Schedule, memory_limit: float | None = None, costs: Costs | None = None) -> None:
    """Check that `schedule` can run: complete, each op once on its own rank, dependencies in order, no deadlock.

    A schedule without deadlock also has none when a send blocks until its receive is posted (rendezvous): lowering
    posts each receive before its rank can wait on anything that follows the send (`zerobubble.lower`).

    Args:
        schedule: the schedule.
        memory_limit: if given, no rank may hold more activation memory than this, in the unit of `costs`.
        costs: gives M_B and M_W for the memory limit; by default 1 and 0.5 on every stage.

    Raises:
        ScheduleError: lists every fault, each with rank, position and the ops around it.
        OptionError: the memory limit is negative or NaN.
    """
    faults = find_faults(schedule, memory_limit, costs)
    if faults:
        shown = list(map(str, faults[:_SHOWN_FAULTS]))
        if len(faults) > 1:
            shown = [f"{i}. {fault}" for i, fault in enumerate(shown, 1)]
        if len(faults) > _SHOWN_FAULTS:
            shown.append(f"... and {len(faults) - _SHOWN_FAULTS} more faults")
        title = f"schedule {schedule.name!r} cannot run: {len(faults)} fault{'s' * (len(faults) > 1)}"
        raise ScheduleError("\n".join([title, *shown]), faults)


def find_faults(schedule: Schedule, memory_limit: float | None = None, costs: Costs | None = None) -> list[Fault]:
    """Every fault of `schedule`, in the order in which one would mend them; an empty list means that it can run.

    Arguments as for `validate`. What can run is only asked of ops that are all there, memory only of what can run.
    """
    if memory_limit is not None and not memory_limit >= 0:
        raise OptionError(f"the memory limit must be a number that is not negative; got {memory_limit!r}")
    faults = [*_misplaced(schedule), *_repeated(schedule), *_incomplete(schedule)]
    if not faults:
        faults += _stuck(schedule)
    if not faults and memory_limit is not None:
        faults += _memory(schedule, memory_limit, costs or Costs())
    return faults


def draw(order: Sequence[Op], rank: int, position: int, around: int = 3) -> str:
    """The ops around `position` in a rank's order, the one there in brackets."""
    first, last = max(position - around, 0), position + around + 1
    ops = [f"[{op}]" if i == position else str(op) for i, op in enumerate(order[first:last], first)]
    shown = ["..."] * (first > 0) + ops + ["..."] * (last < len(order))
    return f"  rank {rank} | {' '.join(shown)}"


def _fault(schedule: Schedule, rule: str, rank: int, position: int, message: str) -> Fault:
    return Fault(rule, message, rank, position, draw(schedule.orders[rank], rank, position))


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    """Ops, orders and counts that the placement has no room for."""
    ranks, num_stages, num_microbatches = schedule.placement.ranks, schedule.num_stages, schedule.num_microbatches
    if len(schedule.orders) != schedule.num_ranks:
        yield Fault(
            "shape",
            f"the placement has {schedule.num_ranks} ranks, but there are {len(schedule.orders)} orders of ops; "
            "give one order per rank",
        )
    if num_microbatches < 1:
        yield Fault("shape", f"a schedule needs at least one microbatch; got {num_microbatches}")
    for rank, order in enumerate(schedule.orders):
        for position, op in enumerate(order):
            if not (0 <= op.stage < num_stages and 0 <= op.microbatch < num_microbatches):
                message = (
                    f"{op} is out of range: stages are 0..{num_stages - 1} and microbatches "
                    f"0..{num_microbatches - 1}; remove it or raise the counts"
                )
                yield _fault(schedule, "range", rank, position, message)
            elif ranks[op.stage] != rank:
                message = f"{op} is on rank {rank}, but stage {op.stage} lies on rank {ranks[op.stage]}; move it there"
                yield _fault(schedule, "placement", rank, position, message)


def _repeated(schedule: Schedule) -> Iterator[Fault]:
    """An op that is there twice, or a BW beside a B or W, would count a gradient twice."""
    places: dict[Op, tuple[int, int]] = {}
    for rank, order in enumerate(schedule.orders):
        for position, op in enumerate(order):
            if op in places:
                first = "rank {}, position {}".format(*places[op])
                message = f"{op} is there twice (first at {first}); remove one"
                yield _fault(schedule, "once", rank, position, message)
            places.setdefault(op, (rank, position))
    for op, (rank, position) in places.items():
        stage, kind, microbatch = op
        if kind is Kind.BW and (Op(stage, Kind.B, microbatch) in places or Op(stage, Kind.W, microbatch) in places):
            message = (
                f"stage {stage}, microbatch {microbatch} has BW beside B or W: its gradient would count twice; "
                "keep either BW, or B and W"
            )
            yield _fault(schedule, "once", rank, position, message)


_WHOLE = frozenset({Kind.F, Kind.BW})
_SPLIT = frozenset({Kind.F, Kind.B, Kind.W})


def _incomplete(schedule: Schedule) -> Iterator[Fault]:
    """Each stage and microbatch needs F and either B and W, or BW. Linear in the ops, not in the microbatches."""
    kinds: list[dict[int, set[Kind]]] = [{} for _ in range(schedule.num_stages)]
    for stage, kind, microbatch in schedule.ops():
        if 0 <= stage < schedule.num_stages and 0 <= microbatch < schedule.num_microbatches:
            kinds[stage].setdefault(microbatch, set()).add(kind)
    for stage, of_stage in enumerate(kinds):
        rank = schedule.placement.ranks[stage]
        for microbatch, have in sorted(of_stage.items()):
            need = _WHOLE if Kind.BW in have else _SPLIT
            if not need <= have:
                lack = [str(Op(stage, kind, microbatch)) for kind in Kind if kind in need - have]
                mend = "it" if len(lack) == 1 else "them"
                yield Fault("complete", f"rank {rank} lacks {' and '.join(lack)}; add {mend}", rank)
        for first, last in _gaps(sorted(of_stage), schedule.num_microbatches):
            which = f"microbatch {first}" if first == last else f"microbatches {first}..{last}"
            message = f"rank {rank} lacks every op of stage {stage} for {which}; add F, B and W (or F and BW)"
            yield Fault("complete", message, rank)


def _gaps(present: Iterable[int], end: int) -> Iterator[tuple[int, int]]:
    """First and last of each run of numbers in 0..end-1 that ascending `present` leaves out."""
    expected = 0
    for number in (*present, end):
        if number > expected:
            yield expected, number - 1
        expected = number + 1


def _stuck(schedule: Schedule) -> list[Fault]:
    """Why ranks cannot reach their end: ops in the wrong order on one rank, or a deadlock between ranks."""
    stopped = schedule.progress.stopped
    blocked = [rank for rank, order in enumerate(schedule.orders) if stopped[rank] < len(order)]
    return (_disorder(schedule) or [_deadlock(schedule, blocked)]) if blocked else []


def _disorder(schedule: Schedule) -> list[Fault]:
    """Ops that stand before something they need on their own rank."""
    faults = []
    for rank, order in enumerate(schedule.orders):
        places = {result(op): position for position, op in enumerate(order)}
        for position, op in enumerate(order):
            for later in (places.get(need, -1) for need in needs(op, schedule.num_stages)):
                if later > position:
                    message = f"{op} stands before {order[later]} (position {later}), which it needs; move it behind"
                    faults.append(_fault(schedule, "order", rank, position, message))
    return faults


def _deadlock(schedule: Schedule, blocked: list[int]) -> Fault:
    stopped = schedule.progress.stopped
    lines = ["Deadlock: no rank can make progress; on one of these ranks, run the awaited op earlier"]
    done = {result(op) for rank, order in enumerate(schedule.orders) for op in order[: stopped[rank]]}
    for rank in blocked:
        op = schedule.orders[rank][stopped[rank]]
        need = next(n for n in needs(op, schedule.num_stages) if n not in done)
        where = f"waits for {need} on rank {schedule.placement.ranks[need.stage]}"
        lines.append(f"{draw(schedule.orders[rank], rank, stopped[rank], around=2)}   {where}")
    return Fault("deadlock", "\n".join(lines), blocked[0], stopped[blocked[0]])


def _memory(schedule: Schedule, limit: float, costs: Costs) -> Iterator[Fault]:
    stage_costs = costs.resolve(schedule.placement)
    slack = 1e-9 * max(limit, 1.0)
    for rank, order in enumerate(schedule.orders):
        for position, held in enumerate(held_memory(order, stage_costs)):
            if held > limit + slack:
                message = (
                    f"{order[position]} needs {held:g} of activation memory on rank {rank}, "
                    f"over the limit of {limit:g}; run a B or W before it, or raise the limit"
                )
                yield _fault(schedule, "memory", rank, position, message)
                break
