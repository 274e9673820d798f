"""What makes a schedule runnable. Reports every fault with its place, the ops around it, and what would mend it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.errors import ScheduleError
from zerobubble.memory import held_memory
from zerobubble.op import Kind, Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerobubble.schedule import Schedule

_SHOWN_FAULTS = 12


@dataclass(frozen=True)
class Fault:
    """One broken rule of a schedule.

    Attributes:
        rule: the rule's name: `shape`, `placement`, `range`, `once`, `complete`, `order`, `deadlock` or `memory`.
        message: what is wrong, and what would mend it.
        rank: the rank where it shows, or None when an op is nowhere.
        position: the index in that rank's order, or None.
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
    """
    faults = find_faults(schedule, memory_limit, costs)
    if faults:
        shown = [f"{i}. {fault}" if len(faults) > 1 else str(fault) for i, fault in enumerate(faults[:_SHOWN_FAULTS], 1)]
        if len(faults) > _SHOWN_FAULTS:
            shown.append(f"... and {len(faults) - _SHOWN_FAULTS} more faults")
        title = f"schedule {schedule.name!r} cannot run: {len(faults)} fault{'s' * (len(faults) > 1)}"
        raise ScheduleError("\n".join([title, *shown]), faults)


def find_faults(schedule: Schedule, memory_limit: float | None = None, costs: Costs | None = None) -> list[Fault]:
    """Every fault of `schedule`, in the order in which one would mend them; an empty list means that it can run."""
    faults = [*_misplaced(schedule), *_counts(schedule)]
    if not faults:
        faults += _stuck(schedule)
    if not faults and memory_limit is not None:
        faults += _memory(schedule, memory_limit, costs or Costs())
    return faults


def draw(order: Iterable[Op], rank: int, position: int, around: int = 3) -> str:
    """The ops around `position` in a rank's order, the one there in brackets."""
    ops = [f"[{op}]" if i == position else str(op) for i, op in enumerate(order)]
    first, last = max(position - around, 0), position + around + 1
    shown = ["..."] * (first > 0) + ops[first:last] + ["..."] * (last < len(ops))
    return f"  rank {rank} | {' '.join(shown)}"


def _fault(schedule: Schedule, rule: str, rank: int, position: int, message: str) -> Fault:
    return Fault(rule, message, rank, position, draw(schedule.orders[rank], rank, position))


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    if len(schedule.orders) != schedule.num_ranks:
        yield Fault(
            "shape",
            f"the placement has {schedule.num_ranks} ranks, but there are {len(schedule.orders)} orders of ops; "
            "give one order per rank",
        )
    if schedule.num_microbatches < 1:
        yield Fault("shape", f"a schedule needs at least one microbatch; got {schedule.num_microbatches}")
    for rank, order in enumerate(schedule.orders):
        for position, op in enumerate(order):
            if not 0 <= op.stage < schedule.num_stages or not 0 <= op.microbatch < schedule.num_microbatches:
                yield _fault(
                    schedule, "range", rank, position,
                    f"{op} is out of range: stages are 0..{schedule.num_stages - 1} and microbatches "
                    f"0..{schedule.num_microbatches - 1}; remove it or raise the counts",
                )  # fmt: skip
            elif schedule.placement.ranks[op.stage] != rank:
                yield _fault(
                    schedule, "placement", rank, position,
                    f"{op} is on rank {rank}, but stage {op.stage} lies on rank {schedule.placement.ranks[op.stage]}; "
                    "move it there",
                )  # fmt: skip


def _counts(schedule: Schedule) -> Iterator[Fault]:
    """Each stage and microbatch needs F once and either B and W once each, or BW once."""
    places: dict[Op, tuple[int, int]] = {}
    for rank, order in enumerate(schedule.orders):
        for position, op in enumerate(order):
            if op in places:
                yield _fault(
                    schedule, "once", rank, position,
                    f"{op} is there twice (first at rank {places[op][0]}, position {places[op][1]}); remove one",
                )  # fmt: skip
            places.setdefault(op, (rank, position))
    absent: Counter[str] = Counter()
    for stage in range(schedule.num_stages):
        for microbatch in range(max(schedule.num_microbatches, 0)):
            kinds = frozenset(k for k in Kind if Op(stage, k, microbatch) in places)
            if kinds in _COMPLETE:
                continue
            if Kind.BW in kinds and kinds & {Kind.B, Kind.W}:
                rank, position = places[Op(stage, Kind.BW, microbatch)]
                yield _fault(
                    schedule, "once", rank, position,
                    f"stage {stage}, microbatch {microbatch} has BW beside B or W: its gradient would count twice; "
                    "keep either BW, or B and W",
                )  # fmt: skip
            missing = {Kind.F} - kinds if Kind.BW in kinds else {Kind.F, Kind.B, Kind.W} - kinds
            for kind in sorted(missing):
                absent[f"{Op(stage, kind, microbatch)} is missing on rank {schedule.placement.ranks[stage]}"] += 1
    for message in absent:
        yield Fault("complete", f"{message}; add it, or BW in place of B and W")


_COMPLETE = (frozenset({Kind.F, Kind.B, Kind.W}), frozenset({Kind.F, Kind.BW}))


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
            for need in needs(op, schedule.num_stages):
                later = places.get(need, -1)
                if later > position:
                    faults.append(
                        _fault(
                            schedule, "order", rank, position,
                            f"{op} stands before {order[later]} (position {later}), which it needs; move it behind",
                        )  # fmt: skip
                    )
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
                yield _fault(
                    schedule, "memory", rank, position,
                    f"{order[position]} needs {held:g} of activation memory on rank {rank}, over the limit of {limit:g}; "
                    "run a B or W before it, or raise the limit",
                )  # fmt: skip
                break
