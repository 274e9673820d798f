"""A rank that is late runs what W it has, and nothing else changes: not the gradients, not a run that is on time."""

from __future__ import annotations

import time
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_for_tests import small_gradients
from strategies import schedules

import zerobubble as zb
from zerobubble.errors import CostsError
from zerobubble.memory import peak_memory
from zerobubble.op import Kind, Op
from zerobubble.runtime import Pipeline, launch
from zerobubble.runtime.emulation import EmulatedLayer, Times, emulated_loss
from zerobubble.runtime.reactive import Reactor

MEMORY = {"activation_memory": 1.0, "weight_memory": 0.4}
HURRIED = zb.Costs(1e-9, 1e-9, 1e-9, **MEMORY)
"""Against these every rank is late all the time."""
LIMIT = 120


def reacted(schedule, rank, costs, arrived, clock):
    """The order in which a rank runs its ops, by what its reactor says.

    `clock(i)` is the time after i ops; `arrived(op, deadline)` says whether what `op` takes in is there by then.
    """
    reactor, ran = Reactor(rank, schedule, costs), []

    def run(op):
        ran.append(op)
        reactor.ran(op, clock(len(ran)))

    for op in [*(op for op in schedule.orders[rank] if op.kind is not Kind.W), None]:
        while True:
            now = clock(len(ran))
            weight = reactor.weight_before(op, now, lambda patience, op=op, now=now: arrived(op, now + patience * 1e9))
            if weight is None:
                break
            run(weight)
        if op is not None:
            run(op)
    return ran


@given(schedules(max_ranks=3, max_chunks=2, max_microbatches=4), st.randoms(use_true_random=False))
def test_any_reaction_keeps_the_order_of_everything_else_and_the_memory(schedule, random):
    costs = zb.Costs(**MEMORY)
    for rank, order in enumerate(schedule.orders):
        ran = reacted(schedule, rank, costs, lambda *_: random.random() < 0.5, lambda i: i * random.random() * 3e6)
        assert sorted(ran) == sorted(order)
        assert [op for op in ran if op.kind is not Kind.W] == [op for op in order if op.kind is not Kind.W]
        for stage in range(schedule.num_stages):
            adds = [[op for op in o if op.stage == stage and op.kind in {Kind.W, Kind.BW}] for o in (ran, order)]
            assert adds[0] == adds[1]
        found = costs.resolve(schedule.placement)
        assert peak_memory(ran, found) <= peak_memory(order, found) + 1e-9


@given(schedules(max_ranks=3, max_chunks=2, max_microbatches=4))
def test_a_rank_on_time_follows_its_plan(schedule):
    costs = zb.Costs(1.0, 1.0, 1.0, **MEMORY)
    for rank, order in enumerate(schedule.orders):
        starts = [start * 1e6 for start in zb.simulate(schedule, costs).starts[rank]]
        on_time = [int(start) - 1 for start in [*starts, starts[-1]]]
        ran = reacted(schedule, rank, costs, lambda *_: True, on_time.__getitem__)
        assert ran == list(order)


@given(schedules(max_ranks=3, max_chunks=2, max_microbatches=4), st.sampled_from([1.0, 1.01, 1.2]))
def test_a_rank_that_begins_late_or_is_as_slow_as_all_others_follows_its_plan_too(schedule, slower):
    costs = zb.Costs(1.0, 1.0, 1.0, **MEMORY)
    simulated = zb.simulate(schedule, costs)
    for rank, order in enumerate(schedule.orders):
        starts, ends = simulated.starts[rank], simulated.ends[rank]
        late = {op: 1e9 + slower * start * 1e6 for op, start in zip(order, starts, strict=True)}
        times = [1e9, *(1e9 + slower * end * 1e6 for end in ends)]
        is_there = lambda op, deadline, late=late: late[op] <= deadline + 1  # noqa: E731
        ran = reacted(schedule, rank, costs, is_there, times.__getitem__)
        assert ran == list(order)


def test_a_late_rank_runs_a_w_instead_of_waiting_and_puts_it_off_when_it_can_go_on():
    schedule = zb.zb_h1(2, 2)
    waits, goes_on = (
        reacted(schedule, 1, HURRIED, lambda *_, there=there: there, lambda _: 10**9) for there in (False, True)
    )
    first_w = Op(1, Kind.W, 0)
    assert waits.index(first_w) == 2  # right after its B: the next forward is not there
    assert goes_on.index(first_w) > goes_on.index(Op(1, Kind.F, 1))


def test_times_that_are_no_times_are_refused():
    with pytest.raises(CostsError, match="'epochs' is no unit of real time"):
        Pipeline([torch.nn.Linear(2, 2)] * 2, lambda y, _: y.sum(), zb.zb_h1(2, 2), reactive=zb.Costs(unit="epochs"))


@given(schedules(max_ranks=3, max_chunks=2, max_microbatches=3))
@settings(max_examples=25)
def test_gradients_stay_the_same_bit_for_bit(schedule):
    plain = small_gradients(schedule, schedule.num_stages)
    reactive = small_gradients(schedule, schedule.num_stages, reactive=HURRIED)
    assert all(torch.equal(reactive[name], gradient) for name, gradient in plain.items())


class Stalls(torch.nn.Module):
    """Takes longer than anybody reckoned with."""

    def forward(self, x):
        time.sleep(0.15)
        return x * 1.0


def with_a_stall(report, reactive):
    """This rank's ops by start, and its gradient, where stage 0 stalls in its forwards."""
    seconds = 0.02
    layers = [torch.nn.Sequential(Stalls(), torch.nn.Linear(4, 4)), EmulatedLayer(Times(seconds, seconds, seconds))]
    torch.manual_seed(0)
    costs = zb.Costs(20.0, 20.0, 20.0, **MEMORY)
    pipeline = Pipeline(layers, emulated_loss, zb.zb_h2(2, 4), reactive=costs if reactive else None, timeout=60)
    for _ in range(2):  # the first step agrees on shapes
        pipeline.zero_grad()
        pipeline.step(torch.ones(4, 4))
    (timeline,) = pipeline.timelines()
    rows = zip(pipeline.schedule.orders[1], timeline.starts[1], strict=True)
    return [op for op, _ in sorted(rows, key=lambda row: row[1])], [p.grad for p in pipeline.parameters()]


def test_on_processes_a_stalled_rank_makes_the_other_run_its_w_early():
    plain, reactive = (launch(with_a_stall, 2, reacts, time_limit=LIMIT) for reacts in (False, True))
    assert plain[1][0] == list(zb.zb_h2(2, 4).orders[1])
    assert reactive[1][0] != plain[1][0]
    first_w, second_f = Op(1, Kind.W, 0), Op(1, Kind.F, 1)
    assert reactive[1][0].index(first_w) < reactive[1][0].index(second_f) < plain[1][0].index(first_w)
    pairs = zip(chain(*(g for _, g in plain)), chain(*(g for _, g in reactive)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
