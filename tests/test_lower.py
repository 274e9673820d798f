"""Lowering: sends and receives pair up, in one order on both sides, and nothing hangs even when sends block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import rendezvous
from hypothesis import given
from strategies import schedules

from zerobubble import Kind, Placement, lower, zb_h1
from zerobubble.dependencies import needs, result
from zerobubble.errors import ScheduleError
from zerobubble.lower import Message, Receive, Run, Send, Validate
from zerobubble.op import BW, F
from zerobubble.schedule import make_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerobubble import Op, Schedule
    from zerobubble.lower import Program


def messages(program: Program, kind: type[Receive] | type[Send]) -> list[Message]:
    return [instruction.message for instruction in program.instructions if isinstance(instruction, kind)]


def by_link(listed: Iterable[Message]) -> dict[tuple[int, int], list[Message]]:
    links: dict[tuple[int, int], list[Message]] = {}
    for message in listed:
        links.setdefault((message.source, message.target), []).append(message)
    return links


def warm_up(program: Program) -> list[Op]:
    """The ops before `Validate`."""
    (at,) = [i for i, instruction in enumerate(program.instructions) if isinstance(instruction, Validate)]
    return [instruction.op for instruction in program.instructions[:at] if isinstance(instruction, Run)]


def crossings(schedule: Schedule) -> set[Message]:
    """Activations go to the next stage and input gradients to the previous one, where these lie on another rank."""
    ranks, expected = schedule.placement.ranks, set()
    for op in schedule.ops():
        other = {Kind.F: op.stage + 1, Kind.B: op.stage - 1, Kind.BW: op.stage - 1}.get(op.kind, -1)
        if 0 <= other < schedule.num_stages and ranks[other] != ranks[op.stage]:
            expected.add(Message(result(op), other, ranks[op.stage], ranks[other]))
    return expected


# ------------------------------------------------------------------------------------------------ any valid schedule


@given(schedules(max_ranks=5, max_chunks=3))
def test_any_valid_schedule_runs_to_its_end_when_sends_block_until_their_receive_is_posted(schedule):
    ran = rendezvous.run(lower(schedule))
    assert sorted(ran) == sorted(schedule.ops())


@given(schedules(max_ranks=5, max_chunks=3))
def test_when_the_last_step_is_amended_the_warm_ups_run_twice_and_nothing_stale_is_left(schedule):
    programs = lower(schedule)
    ran = rendezvous.run(programs, amended=True)
    assert sorted(ran) == sorted([*schedule.ops(), *(op for program in programs for op in warm_up(program))])


@given(schedules(max_ranks=5, max_chunks=3))
def test_a_warm_up_is_the_forwards_that_need_nothing_from_behind_another_ranks_validate(schedule):
    programs = lower(schedule)
    early = {op for program in programs for op in warm_up(program)}
    for program, order in zip(programs, schedule.orders, strict=True):
        length = len(warm_up(program))
        assert all(op.kind is Kind.F and early.issuperset(needs(op, schedule.num_stages)) for op in order[:length])
        following = order[length]
        assert following.kind is not Kind.F or not early.issuperset(needs(following, schedule.num_stages))


@given(schedules(max_ranks=5, max_chunks=3))
def test_what_follows_validate_needs_a_forward_on_every_rank_so_that_waiting_there_delays_nothing(schedule):
    ranks = schedule.placement.ranks
    before = {}  # per result, the ranks that must have begun the step for it to be there
    for rank, position in schedule.progress.sequence:
        order = schedule.orders[rank]
        op = order[position]
        sources = [before[need] for need in needs(op, schedule.num_stages)]
        previous = [before[result(order[position - 1])]] if position else []
        before[result(op)] = {rank}.union(*sources, *previous)
    for program in lower(schedule):
        following = schedule.orders[program.rank][len(warm_up(program))]
        assert before[result(following)] == set(ranks)


@given(schedules())
def test_each_message_is_sent_once_and_received_once(schedule):
    programs = lower(schedule)
    for kind in (Send, Receive):
        listed = [message for program in programs for message in messages(program, kind)]
        assert len(listed) == len(set(listed))
        assert set(listed) == crossings(schedule)


@given(schedules())
def test_receives_of_a_link_are_posted_in_the_order_in_which_the_sender_sends(schedule):
    programs = lower(schedule)
    sent = by_link(message for program in programs for message in messages(program, Send))
    received = by_link(message for program in programs for message in messages(program, Receive))
    assert sent == received


@given(schedules())
def test_each_rank_runs_its_order_and_waits_for_what_comes_from_other_ranks(schedule):
    ranks = schedule.placement.ranks
    for program, order in zip(lower(schedule), schedule.orders, strict=True):
        runs = [instruction for instruction in program.instructions if isinstance(instruction, Run)]
        assert tuple(run.op for run in runs) == order
        for run in runs:
            remote = [need for need in needs(run.op, schedule.num_stages) if ranks[need.stage] != program.rank]
            assert [message.producer for message in run.awaits] == remote


@given(schedules())
def test_a_receive_is_posted_before_the_op_that_waits_for_it_and_a_send_follows_its_producer_at_once(schedule):
    for program in lower(schedule):
        posted, last = set(), None
        for instruction in program.instructions:
            match instruction:
                case Receive(message):
                    posted.add(message)
                case Run(op, awaits):
                    assert posted.issuperset(awaits)
                    last = op
                case Send(message):
                    assert message.producer == result(last)


@given(schedules())
def test_forwards_alone_can_be_lowered_for_evaluation(schedule):
    ran = rendezvous.run(lower(schedule, forward_only=True))
    assert sorted(ran) == [op for op in sorted(schedule.ops()) if op.kind is Kind.F]


# ------------------------------------------------------------------------------------------------ details


def test_a_program_reads_as_what_the_rank_does():
    # rank 0 | 0F0 .   .    .    0BW0 -
    # rank 1 | .   1F0 1BW0 -
    orders = [[F(0, 0), BW(0, 0)], [F(1, 0), BW(1, 0)]]
    first, last = lower(make_schedule("tiny", Placement.linear(2), 1, orders))
    assert str(first).splitlines() == [
        "run     0F0",
        "send    0F0 (rank 0 -> 1)",
        "validate",
        "receive 1B0 (rank 1 -> 0)",
        "run     0BW0",
    ]
    assert str(last).splitlines() == [
        "receive 0F0 (rank 0 -> 1)",
        "run     1F0",
        "validate",
        "run     1BW0",
        "send    1B0 (rank 1 -> 0)",
    ]


def test_receives_are_posted_ahead_of_need():
    """Else a sender whose send blocks would stand still while its peer computes something else."""
    program = lower(zb_h1(4, 8))[1]
    waits = [
        program.instructions.index(Receive(message)) + 1 < index
        for index, run in enumerate(program.instructions)
        if isinstance(run, Run)
        for message in run.awaits
    ]
    assert sum(waits) > len(waits) / 2


def test_stages_on_one_rank_send_each_other_nothing():
    orders = [[F(0, 0), F(1, 0), BW(1, 0), BW(0, 0)]]
    (program,) = lower(make_schedule("alone", Placement((0, 0)), 1, orders))
    assert [type(instruction) for instruction in program.instructions] == [Run, Run, Validate, Run, Run]


@pytest.mark.parametrize("forward_only", [False, True])
def test_an_invalid_schedule_is_refused_also_where_only_its_forwards_run(forward_only):
    orders = [[F(0, 0), BW(0, 0)], [F(1, 0)]]
    with pytest.raises(ScheduleError, match="rank 1 lacks 1B0 and 1W0; add them"):
        lower(make_schedule("wrong", Placement.linear(2), 1, orders), forward_only)
