"""What no schedule can beat, and why: lower bounds on the cost (the largest span of a rank) of any schedule.

The span of rank r begins with its first op, a forward of its first stage: all else in its span is counted from there,
whenever that is. Every argument holds for any order of microbatches, any waiting, and undivided backwards as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from zerobubble.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerobubble.costs import StageCosts
    from zerobubble.schedule import Placement


@dataclass(frozen=True)
class Bound:
    """A cost that no schedule can beat, and the argument that says so."""

    value: float
    reason: str


def lower_bound(
    costs: StageCosts, placement: Placement, num_microbatches: int, memory_limit: float | None = None
) -> Bound:
    """The largest of `lower_bounds`."""
    return lower_bounds(costs, placement, num_microbatches, memory_limit)[0]


def lower_bounds(
    costs: StageCosts, placement: Placement, num_microbatches: int, memory_limit: float | None = None
) -> list[Bound]:
    """What no schedule can beat in cost, largest first: per argument, the rank for which it says most.

    Args:
        costs: costs per stage of `placement`.
        placement: stage -> rank.
        num_microbatches: m.
        memory_limit: activation memory of every rank, in the unit of the costs; None for no limit.

    Raises:
        OptionError: no microbatch, or a limit that is negative or NaN.
    """
    if num_microbatches < 1:
        raise OptionError(f"a step needs at least one microbatch; got {num_microbatches}")
    if memory_limit is not None and not memory_limit >= 0:
        raise OptionError(f"the memory limit must be a number that is not negative; got {memory_limit!r}")
    limit = math.inf if memory_limit is None else memory_limit + 1e-9 * max(memory_limit, 1.0)
    case = _Case(costs, placement, num_microbatches, limit)
    arguments = (case.work, case.streams, case.ends, case.rounds, case.occupancy)
    families = [list(argument()) for argument in arguments]
    bounds = [_rounded_down(max(family, key=lambda bound: bound.value)) for family in families if family]
    return sorted(bounds, key=lambda bound: -bound.value)


def _rounded_down(bound: Bound) -> Bound:
    """Sums of many times round differently in a simulation: a hair is taken off so that none falls below the bound."""
    return Bound(bound.value * (1.0 - 1e-11), bound.reason)


class _Case:
    """Costs, placement, m and limit, with the sums that the arguments share. Stages are in data-flow order."""

    def __init__(self, costs: StageCosts, placement: Placement, num_microbatches: int, limit: float) -> None:
        self.m, self.limit, self.placement = num_microbatches, limit, placement
        rows = zip(costs.forward, costs.backward_input, costs.backward_weight, costs.backward_full)
        # An undivided backward may be cheaper than its parts: the parts of the bound are no more than it.
        rows_used = [(f, min(b, full), max(min(b + w, full) - b, 0.0)) for f, b, w, full in rows]
        self.F: tuple[float, ...] = tuple(f for f, _, _ in rows_used)
        self.B: tuple[float, ...] = tuple(b for _, b, _ in rows_used)
        self.W: tuple[float, ...] = tuple(w for _, _, w in rows_used)
        self.memory = costs.activation_memory
        self.weight_memory = tuple(map(min, costs.weight_memory, costs.activation_memory))
        down = zip(self.F, (*costs.hop, 0.0))
        self.down = [0.0, *accumulate(time + hop for time, hop in down)]
        """From the start of stage 0's F to when stage s can start its own."""
        self.stages = [placement.stages_of(rank) for rank in range(placement.num_ranks)]

    def per_microbatch(self, stages: Sequence[int]) -> float:
        """Work of `stages` for one microbatch."""
        return sum(self.F[s] + self.B[s] + self.W[s] for s in stages)

    def round_trip(self, stage: int) -> float:
        """The least time from the start of a microbatch's F on `stage` to the start of its B there."""
        last = len(self.F) - 1
        way_back = sum(self.B[s] for s in range(stage + 1, last + 1)) + self._hops(stage, last)
        return self.down[last] + self.F[last] - self.down[stage] + way_back

    def _hops(self, first: int, last: int) -> float:
        """Latency between two stages."""
        return self.down[last] - self.down[first] - sum(self.F[first:last])

    def way_back(self, start: int, end: int) -> float:
        """The least time from the end of a microbatch's B on `start` to the end of its B on the earlier stage `end`."""
        return sum(self.B[end:start]) + self._hops(end, start)

    # Each argument gives one bound per rank or stage.

    def work(self) -> Iterator[Bound]:
        """A rank must run all its ops."""
        for rank, stages in enumerate(self.stages):
            yield Bound(self.m * self.per_microbatch(stages), f"work: rank {rank} is busy that long")

    def streams(self) -> Iterator[Bound]:
        """From rank r's first F to when rank q is through with stage s, and the way from there back up to r.

        Rank q is through with all F of s, or with all B of s. By then it has run what must come before, also what
        memory has forced it to. It has idled as well while its first B was under way and memory held too few F to fill
        that time; those F are among what it must run, so the idle time comes on top.
        """
        for rank, own in enumerate(self.stages):
            for other, stages in enumerate(self.stages):
                later = [s for s in stages if s >= own[0]]
                for s in later:
                    yield from self._streams_through(rank, other, later, s)

    def _streams_through(self, rank: int, other: int, later: Sequence[int], stage: int) -> Iterator[Bound]:
        """The two streams of `other`, of whose stages only `later` are counted, that end with `stage`."""
        first = self.stages[rank][0]
        arrival, wait = self.down[later[0]] - self.down[first], self._idle_before(later)
        way_up = self.way_back(stage, first) + self.W[first]
        begin = f"stream: rank {rank} waits for its first microbatch to reach rank {other}, for all forwards"
        yield Bound(
            arrival + wait + self._until_last_backward(later, stage) + way_up,
            f"{begin} and backwards of stage {stage} there, and for the last one's way back",
        )
        first_b_comes_before_last_f = self.m > self._most_forwards(stage)
        turn = self.round_trip(stage) - self.F[stage] + self.B[stage]
        yield Bound(
            arrival + wait * first_b_comes_before_last_f + self._until_last_forward(later, stage) + turn + way_up,
            f"{begin} of stage {stage} there with the backwards that make room for them, and for the last one's way "
            "down and back",
        )

    def _until_last_forward(self, stages: Sequence[int], stage: int) -> float:
        """Work of `stages` of one rank that must be done when the last F of `stage` ends.

        All F up to that stage are; of their B and W only what memory holds can be left.
        """
        passed = [s for s in stages if s <= stage]
        undone = [(self.memory[s], self.B[s] + self.W[s], self.m) for s in passed]
        undone += [(self.weight_memory[s], self.W[s], self.m) for s in passed]
        backward = self.m * sum(self.B[s] + self.W[s] for s in passed)
        return self.m * sum(self.F[s] for s in passed) + max(backward - _most_work_held(undone, self.limit), 0.0)

    def _until_last_backward(self, stages: Sequence[int], stage: int) -> float:
        """Work of `stages` of one rank that must be done when the last B of `stage` ends."""
        forward = sum(self.F[s] for s in stages)
        backward = sum(self.B[s] for s in stages if s >= stage)
        return self.m * (forward + backward) + self._forced_weight_ops(stages, stage)

    def _forced_weight_ops(self, stages: Sequence[int], stage: int) -> float:
        """Time of the W that cannot wait for the last B of `stage` to start, for want of memory.

        Of the stages from `stage` on, all B but that last one have run; those W that have not hold memory.
        """
        if self.limit == math.inf:
            return 0.0
        rows = [(self.weight_memory[s], self.W[s], self.m - (s == stage)) for s in stages if s >= stage]
        total = sum(work * count for _, work, count in rows)
        return max(total - _most_work_held(rows, self.limit - self.memory[stage]), 0.0)

    def ends(self) -> Iterator[Bound]:
        """Memory before the first B and after the last F bounds the work that can fill the waits there."""
        for rank, stages in enumerate(self.stages):
            head, tail = self._idle_before(stages), self._idle_after(stages)
            # Not all forwards fit before the first B, so the last one comes after it: the waits are apart.
            apart = self.m > self._most_forwards(stages[0])
            idle = head + tail if apart else max(head, tail)
            yield Bound(
                self.m * self.per_microbatch(stages) + idle,
                f"memory at the ends: before rank {rank}'s first backward arrives it can run only the forwards that "
                "memory holds, and after its last forward only what memory has kept for it",
            )

    def _most_forwards(self, stage: int) -> float:
        """How many microbatches can have run F but not B on `stage`."""
        return min(self.m, _floor(self.limit, self.memory[stage]))

    def _idle_before(self, stages: Sequence[int]) -> float:
        """Idle time of a rank before its first B can start: only forwards can run until then."""
        first, last = stages[0], stages[-1]
        wait = self.down[last] - self.down[first] + self.round_trip(last)
        if len(stages) == 1:
            return max(wait - self._most_forwards(first) * self.F[first], 0.0)
        return max(wait - _most_work_held([(self.memory[s], self.F[s], self.m) for s in stages], self.limit), 0.0)

    def _idle_after(self, stages: Sequence[int]) -> float:
        """Idle time between a rank's last F of its first stage and that microbatch's B there."""
        first = stages[0]
        wait = self.round_trip(first) - self.F[first]
        room = self.limit - self.memory[first]
        chunks = [(self.memory[s], self.weight_memory[s], s) for s in stages]
        if len(stages) == 1:
            kept = [(self.memory[first], self.B[first] + self.W[first], self.m - 1)]
        else:
            wait -= sum(self.F[s] + self.B[s] + self.W[s] for s in stages[1:])
            kept = list(self._partly_done(stages))
        kept += [(weight, self.W[s], self.m) for _, weight, s in chunks]
        return max(wait - _most_work_held(kept, room), 0.0)

    def _partly_done(self, stages: Sequence[int]) -> Iterator[tuple[float, float, int]]:
        """What a microbatch holds and has left on a rank after some of the rank's F, or after all F and some B."""
        left = self.per_microbatch(stages)
        for count in range(1, len(stages) + 1):
            done = stages[:count]
            yield sum(self.memory[s] for s in done), left - sum(self.F[s] for s in done), self.m - 1
        for count in range(len(stages) - 1, 0, -1):
            rest = stages[:count]
            yield sum(self.memory[s] for s in rest), sum(self.B[s] + self.W[s] for s in rest), self.m - 1

    def rounds(self) -> Iterator[Bound]:
        """No more microbatches under way on a stage than memory holds, each for at least its round trip."""
        for stage, memory in enumerate(self.memory):
            at_once = self._most_forwards(stage)
            if not 1 <= at_once < self.m:
                continue
            stay = self.round_trip(stage) + self.B[stage]
            full = self.limit - at_once * memory < self.weight_memory[stage]
            gap = stay + (min(self.W[stage], self.B[stage]) if full else 0.0)
            whole, rest = divmod(self.m - 1, int(at_once))
            first = self.stages[self.placement.ranks[stage]][0]
            begin = self.down[stage] - self.down[first]
            last_start = max(whole * gap, (whole * at_once) * self.F[stage]) + rest * self.F[stage]
            end = max(self.W[stage], self.way_back(stage, first) + self.W[first])
            yield Bound(
                begin + last_start + stay + end,
                f"rounds: stage {stage} has room for {int(at_once)} microbatches, and each stays for its round trip",
            )

    def occupancy(self) -> Iterator[Bound]:
        """Memory times time: what all microbatches hold on a rank, over the limit."""
        for rank, stages in enumerate(self.stages):
            held = sum(
                self.memory[s] * (self.round_trip(s) + self.B[s]) + self.weight_memory[s] * self.W[s] for s in stages
            )
            value = self.m * held / self.limit if self.limit > 0 else 0.0
            yield Bound(value, f"memory over time: what rank {rank} must hold, over what it may hold")


def _floor(limit: float, memory: float) -> float:
    """How often `memory` goes into `limit`."""
    return math.floor(limit / memory) if memory > 0 and limit < math.inf else math.inf


def _most_work_held(kept: Sequence[tuple[float, float, int]], room: float) -> float:
    """The most work that (memory, work, how many) leave to be done within `room`: a fractional knapsack."""
    total, room = 0.0, max(room, 0.0)
    for memory, work, count in sorted(kept, key=lambda each: -each[1] / (each[0] or 1e-300)):
        share = count if memory * count <= room else room / memory
        total += share * work
        room = max(room - share * memory, 0.0)  # rounding must not make it negative
    return total
