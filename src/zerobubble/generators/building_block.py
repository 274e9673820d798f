"""V placements with controllable memory: one microbatch's ops laid out once, repeated every six slots, then compacted.

With unit times, a rank of a V placement has six slots of work per microbatch: F, B and W of two chunks. A microbatch
runs down the ranks, back up, down again with its backward and up again; the further it advances per rank, the longer
its activations live. Choosing that pace chooses the memory (Qi et al. 2024, arXiv 2405.15362).
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from zerobubble.costs import Costs
from zerobubble.op import Kind, Op, W
from zerobubble.schedule import Placement, Schedule, make_schedule
from zerobubble.simulate import op_times

if TYPE_CHECKING:
    from collections.abc import Sequence

PERIOD = 6
"""Slots of one microbatch on one rank."""


def repeat_block(name: str, num_ranks: int, num_microbatches: int, pace: Sequence[int]) -> Schedule:
    """The schedule that repeats one building block every six slots.

    Args:
        name: of the schedule.
        num_ranks: p.
        num_microbatches: m.
        pace: slots that a microbatch takes per rank on its four passes: F down, F up, B down, B up.
    """
    orders = []
    for ops in _block(num_ranks, pace):
        timed = [
            (slot + PERIOD * mb, Op(stage, kind, mb)) for slot, stage, kind in ops for mb in range(num_microbatches)
        ]
        orders.append([op for _, op in sorted(timed)])
    return _fill_cool_down(make_schedule(name, Placement.v(num_ranks), num_microbatches, orders))


def _fill_cool_down(schedule: Schedule) -> Schedule:
    """After the last F of a rank, B first, and each W into the first gap that has room for it."""
    steady = [max(i for i, op in enumerate(order) if op.kind is Kind.F) + 1 for order in schedule.orders]
    urgent = [
        [op for i, op in enumerate(order) if i < end or op.kind is Kind.B]
        for order, end in zip(schedule.orders, steady, strict=True)
    ]
    without = make_schedule(schedule.name, schedule.placement, schedule.num_microbatches, urgent)
    starts, ends = op_times(without, Costs().resolve(schedule.placement))
    orders = [_with_gaps_filled(*row) for row in zip(urgent, starts, ends, steady, strict=True)]
    return make_schedule(schedule.name, schedule.placement, schedule.num_microbatches, orders)


def _with_gaps_filled(ops: list[Op], starts: list[float], ends: list[float], steady: int) -> list[Op]:
    order, now = ops[:steady], ends[steady - 1]
    done = set(order)
    pending = [w for w in (W(op.stage, op.microbatch) for op in order if op.kind is Kind.B) if w not in done]
    for op, start, end in zip(ops[steady:], starts[steady:], ends[steady:], strict=True):
        while pending and now + 1 <= start:
            order.append(pending.pop(0))
            now += 1
        order.append(op)
        pending.append(W(op.stage, op.microbatch))
        now = end
    return order + pending


def _block(num_ranks: int, pace: Sequence[int]) -> list[list[tuple[int, int, Kind]]]:
    """Per rank, (slot, stage, kind) of one microbatch, no two in the same slot modulo the period."""
    for turns in sorted(product(range(1, PERIOD + 1), repeat=3), key=sum):
        passes = _passes(num_ranks, pace, turns)
        if all(len({slot % PERIOD for slot in slots}) == len(slots) for slots in passes):
            break
    else:  # pragma: no cover - the paces in use always fit
        raise AssertionError(f"no building block fits the pace {pace}")
    return [_with_weight_ops(rank, 2 * num_ranks - 1 - rank, slots) for rank, slots in enumerate(passes)]


def _passes(num_ranks: int, pace: Sequence[int], turns: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Per rank, the slots of its four passes when the microbatch waits `turns` slots at the three turning points."""
    last = num_ranks - 1
    starts = [0]
    for step, turn in zip(pace, turns):
        starts.append(starts[-1] + last * step + turn)
    return [
        (
            starts[0] + rank * pace[0],
            starts[1] + (last - rank) * pace[1],
            starts[2] + rank * pace[2],
            starts[3] + (last - rank) * pace[3],
        )
        for rank in range(num_ranks)
    ]


def _with_weight_ops(first: int, second: int, slots: tuple[int, int, int, int]) -> list[tuple[int, int, Kind]]:
    """Add each chunk's W in the first slot after its B that the passes leave free."""
    down, up, back_down, back_up = slots
    ops = [(down, first, Kind.F), (up, second, Kind.F), (back_down, second, Kind.B), (back_up, first, Kind.B)]
    taken = {slot % PERIOD for slot in slots}
    for stage, after in ((second, back_down), (first, back_up)):
        slot = next(s for s in range(after + 1, after + 1 + PERIOD) if s % PERIOD not in taken)
        taken.add(slot % PERIOD)
        ops.append((slot, stage, Kind.W))
    return ops
