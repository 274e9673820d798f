"""Ops, the dependency rule, placements and schedules as values."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements, schedules

from zerobubble import Kind, Op, Placement, errors
from zerobubble.dependencies import needs, result
from zerobubble.errors import OptionError, ZeroBubbleError
from zerobubble.op import BW, B, F, W
from zerobubble.schedule import make_schedule
from zerobubble.validate import find_faults

# ------------------------------------------------------------------------------------------------ ops and their needs


def test_an_op_prints_as_its_notation():
    assert list(map(str, (F(2, 0), B(0, 3), W(0, 3), BW(10, 12)))) == ["2F0", "0B3", "0W3", "10BW12"]


@pytest.mark.parametrize(
    ("op", "waits_for"),
    [
        # stage 0          1          2        of microbatch 5
        #       0F5  ->  1F5   ->   2F5
        #        |         |          |        each B also needs the F of its own stage
        #       0B5  <-  1B5   <-   2B5
        #       0W5      1W5        2W5
        (F(0, 5), []),
        (F(1, 5), [F(0, 5)]),
        (B(2, 5), [F(2, 5)]),
        (B(1, 5), [F(1, 5), B(2, 5)]),
        (BW(1, 5), [F(1, 5), B(2, 5)]),
        (W(1, 5), [B(1, 5)]),
    ],
    ids=str,
)
def test_what_an_op_waits_for(op, waits_for):
    assert list(needs(op, num_stages=3)) == waits_for


def test_bw_gives_the_same_result_as_b_and_others_their_own():
    assert result(BW(1, 2)) == result(B(1, 2)) == B(1, 2)
    assert result(F(1, 2)) == F(1, 2)
    assert result(W(1, 2)) == W(1, 2)


# ------------------------------------------------------------------------------------------------ placements


@pytest.mark.parametrize(
    ("placement", "style", "stages"),
    [
        (Placement.linear(3), "linear", [(0,), (1,), (2,)]),
        (Placement.loop(3, 2), "loop", [(0, 3), (1, 4), (2, 5)]),
        (Placement.v(3), "v", [(0, 5), (1, 4), (2, 3)]),
        (Placement.wave(2, 4), "wave", [(0, 3, 4, 7), (1, 2, 5, 6)]),
        (Placement((1, 0, 0)), "custom", [(1, 2), (0,)]),
        (Placement.linear(1), "linear", [(0,)]),
        (Placement.wave(1, 3), "loop", [(0, 1, 2)]),
    ],
    ids=str,
)
def test_styles_of_placement(placement, style, stages):
    assert placement.style == style
    assert [placement.stages_of(rank) for rank in range(placement.num_ranks)] == stages


@given(placements())
def test_every_stage_lies_on_exactly_one_rank(placement):
    stages = [stage for rank in range(placement.num_ranks) for stage in placement.stages_of(rank)]
    assert sorted(stages) == list(range(placement.num_stages))


def test_a_placement_given_as_a_list_is_the_same_placement():
    assert Placement([0, 1, 0]) == Placement((0, 1, 0))
    assert hash(Placement([0, 1, 0])) == hash(Placement((0, 1, 0)))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((), "needs at least one stage"),
        ((0, 2), "every rank from 0 to the highest must hold a stage; rank 1 holds none"),
        ((1,), "rank 0 holds none"),
        ((0, 10**12), "rank 1 holds none"),
        ((0, -1), "whole numbers from 0; got -1"),
        ((0, 1.0), "whole numbers from 0; got 1.0"),
        ((0, True), "whole numbers from 0; got True"),
        ((0, "1"), "whole numbers from 0; got '1'"),
    ],
    ids=str,
)
def test_a_placement_that_leaves_a_rank_out_is_refused_at_once(ranks, message):
    with pytest.raises(OptionError, match=message):
        Placement(ranks)


# ------------------------------------------------------------------------------------------------ schedules


@given(schedules())
def test_progress_runs_every_op_once_and_after_all_that_it_needs(schedule):
    done: set[Op] = set()
    for rank, position in schedule.progress.sequence:
        op = schedule.orders[rank][position]
        assert done.issuperset(needs(op, schedule.num_stages))
        assert op not in done
        done.update((op, result(op)))
    assert len(schedule.progress.sequence) == schedule.num_ops
    assert schedule.progress.stopped == tuple(map(len, schedule.orders))


def test_progress_says_where_each_rank_stops():
    # rank 0 | 0F0 [0B0] 0W0      waits for 1B0
    # rank 1 | 1F0 [1B1] 1B0      waits for 1F1, which nobody runs
    schedule = make_schedule(
        "stuck", Placement.linear(2), 1, [[F(0, 0), B(0, 0), W(0, 0)], [F(1, 0), B(1, 1), B(1, 0)]]
    )
    assert schedule.progress.stopped == (1, 1)


@given(schedules(), st.integers(1, 6))
def test_the_first_microbatches_of_a_valid_schedule_are_a_valid_schedule(schedule, count):
    shorter = schedule.first_microbatches(count)
    assert shorter.num_microbatches == min(count, schedule.num_microbatches)
    assert find_faults(shorter) == []


@given(schedules())
def test_only_keeps_the_order_of_the_kinds_asked_for(schedule):
    forwards = schedule.only({Kind.F})
    assert list(forwards.ops()) == [op for op in schedule.ops() if op.kind is Kind.F]
    assert forwards.placement == schedule.placement
    assert len(forwards.progress.sequence) == forwards.num_ops


@given(schedules())
def test_schedules_are_equal_by_what_runs_not_by_name(schedule):
    twin = make_schedule("twin", schedule.placement, schedule.num_microbatches, map(iter, schedule.orders))
    assert twin == schedule
    assert hash(twin) == hash(schedule)
    assert twin != schedule.only({Kind.F})


def test_a_schedule_cannot_be_changed():
    schedule = make_schedule("fixed", Placement.linear(1), 1, [[F(0, 0), BW(0, 0)]])
    with pytest.raises(FrozenInstanceError):
        schedule.num_microbatches = 2


# ------------------------------------------------------------------------------------------------ the core as a whole


def test_every_error_can_be_caught_as_one_and_most_as_a_builtin():
    for name, builtin in {
        "OptionError": ValueError,
        "ScheduleError": ValueError,
        "NotationError": ValueError,
        "CostsError": ValueError,
        "MissingExtraError": ImportError,
        "PipelineError": RuntimeError,
        "PeerError": errors.PipelineError,
        "ShapeError": errors.PipelineError,
    }.items():
        assert issubclass(getattr(errors, name), ZeroBubbleError)
        assert issubclass(getattr(errors, name), builtin)
        assert f"── {name} " in errors.__doc__


def test_planning_works_where_torch_is_not_installed():
    script = (
        "import sys; sys.modules['torch'] = None; import zerobubble as zb, zerobubble.notation;"
        "print(zb.simulate(zb.zb_h2(4, 8)).bubble_rate, len(zb.lower(zb.zb_v(2, 3))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.0", "2"]


def test_divided_backwards_stand_where_the_whole_one_stood():
    schedule = make_schedule("mine", Placement.linear(1), 2, [[F(0, 0), BW(0, 0), F(0, 1), B(0, 1), W(0, 1)]])
    assert schedule.divided().orders == ((F(0, 0), B(0, 0), W(0, 0), F(0, 1), B(0, 1), W(0, 1)),)
    assert schedule.divided().divided() == schedule.divided()
