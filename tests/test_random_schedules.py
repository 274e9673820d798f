"""Any schedule that the validator accepts runs to its end and trains right; any other is refused before it starts."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_for_tests import run_random_schedules, small_gradients
from strategies import random_schedule, schedules

import zerobubble as zb
from zerobubble.errors import ScheduleError
from zerobubble.op import Kind
from zerobubble.runtime import Pipeline, launch
from zerobubble.schedule import Placement, make_schedule


def in_microbatch_order(schedule):
    """Whether each stage runs its B, and its W, in the order of microbatches."""
    for kinds in ({Kind.B, Kind.BW}, {Kind.W, Kind.BW}):
        for order in schedule.only(kinds).orders:
            for stage in {op.stage for op in order}:
                microbatches = [op.microbatch for op in order if op.stage == stage]
                if microbatches != sorted(microbatches):
                    return False
    return True


def assert_right(schedule, gradients):
    reference = small_gradients(zb.gpipe(1, schedule.num_microbatches), schedule.num_stages)
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, reference[name], rtol=1e-4, atol=1e-6)
        assert torch.equal(gradient, reference[name]) or not in_microbatch_order(schedule)


@given(schedules(max_ranks=3, max_chunks=2, max_microbatches=3))
@settings(max_examples=60)
def test_random_schedules_run_and_give_the_right_gradients(schedule):
    assert_right(schedule, small_gradients(schedule, schedule.num_stages))


@given(st.integers(0, 2**32), st.sampled_from(list(zb.GENERATORS)))
@settings(max_examples=30)
def test_generated_schedules_with_w_anywhere_stay_bit_identical(seed, name):
    """Move each W later by chance, in order: the gradients do not change by a bit."""
    random, schedule = Random(seed), zb.generate(name, 2, 3)
    orders = []
    for order in schedule.orders:
        moved, waiting = [], []
        for op in order:
            (waiting if op.kind is Kind.W else moved).append(op)
            while waiting and random.random() < 0.3:
                moved.append(waiting.pop(0))
        orders.append(moved + waiting)
    later = make_schedule("later", schedule.placement, 3, orders)
    assert_right(later, small_gradients(later, later.num_stages))


def test_random_schedules_on_processes():
    seeds = list(range(25))
    by_rank = launch(run_random_schedules, 2, seeds, time_limit=240)
    for seed, *parts in zip(seeds, *by_rank, strict=True):
        schedule = random_schedule(Placement.v(2), 3, Random(seed))
        assert_right(schedule, {name: gradient for part in parts for name, gradient in part.items()})


@given(schedules(max_ranks=3, max_chunks=2, max_microbatches=3), st.data())
@settings(max_examples=60)
def test_a_mutated_schedule_is_refused_before_anything_is_built(schedule, data):
    rank = data.draw(st.sampled_from([r for r, order in enumerate(schedule.orders) if order]))
    orders = [list(order) for order in schedule.orders]
    at = data.draw(st.integers(0, len(orders[rank]) - 1))
    how = data.draw(st.sampled_from(["drop", "double", "move"]))
    op = orders[rank].pop(at)
    if how == "double":
        orders[rank] += [op, op]
    elif how == "move":  # before what it needs, or to a rank where its stage does not lie
        needs_something = op.kind is not Kind.F
        if needs_something:
            orders[rank].insert(0, op)
        else:
            orders[rank].append(op)
    broken = make_schedule("broken", schedule.placement, schedule.num_microbatches, orders)
    built = []
    with pytest.raises(ScheduleError, match="rank"):
        Pipeline([lambda: built.append(1)] * schedule.num_stages, lambda y, _: y.sum(), broken)
    assert not built
