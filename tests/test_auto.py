"""`schedule="auto"`: measures, plans and switches in the same run, without a change of any number."""

from __future__ import annotations

import logging

import pytest
import torch
from models_for_tests import TINY_GPT, tiny_batch, tiny_pipeline, train_tiny

import zerobubble as zb
from zerobubble.errors import OptionError, PipelineError, ScheduleError
from zerobubble.models import gpt_layers, gpt_partition, next_token_loss
from zerobubble.op import Kind
from zerobubble.runtime import Auto, Pipeline, Profile, launch
from zerobubble.runtime.auto import choose
from zerobubble.runtime.emulation import emulated_loss, emulation

LIMIT = 150
HEAVY = zb.Costs((10, 10, 15), (11, 11, 17), (9, 9, 13), (2, 12), 3, 2, unit="ms")


class Caught(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def catch():
    caught, log = Caught(), logging.getLogger("zerobubble")
    log.setLevel(logging.INFO)
    log.addHandler(caught)
    return caught.messages


def emulated_auto(report):
    messages = catch()
    stages = emulation(HEAVY, zb.zb_h1(3, 6))
    auto = Auto(6, profile_steps=3)
    pipeline = Pipeline(stages.layers(), emulated_loss, auto, wrap_transport=stages.delayed)
    for _ in range(auto.steps + 1):
        before = pipeline.schedule
        pipeline.step(torch.ones(6, 1))
    assert before == auto.safe_schedule(3)
    for _ in range(2):
        pipeline.step(torch.ones(6, 1))
    with pytest.raises(OptionError, match="memory limit of 1:"):  # on every rank, though rank 0 alone plans
        pipeline.replan(memory_limit=1, steps=2)
    return pipeline.schedule, pipeline.plan, messages, stages.bytes


def test_an_emulated_model_is_measured_right_and_its_plan_beats_the_handcrafted_schedules():
    by_rank = launch(emulated_auto, 3, time_limit=LIMIT)
    schedule, plan, messages, unit = by_rank[0]
    assert [found[0] for found in by_rank] == [schedule] * 3
    assert [len(found[2]) for found in by_rank] == [1, 0, 0]
    assert "step 5: going on with plan" in messages[0]
    assert messages[0].endswith(plan.notes[0])
    truth = HEAVY.resolve(schedule.placement)
    for key in ("forward", "backward_input", "backward_weight"):
        assert getattr(plan.costs, key) == pytest.approx(getattr(truth, key), rel=0.1, abs=0.5), key
    assert plan.costs.communication == pytest.approx(HEAVY.communication, rel=0.1, abs=1)
    assert [m / unit for m in plan.costs.activation_memory] == pytest.approx([3] * 3, rel=0.01)
    assert [m / unit for m in plan.costs.weight_memory] == pytest.approx([2] * 3, rel=0.01)
    least = min(
        zb.simulate(other, HEAVY).cost
        for other in (zb.generate(name, 3, 6) for name in ("gpipe", "one_f_one_b", "zb_h1", "zb_h2"))
        if max(zb.simulate(other, HEAVY).peak_memory) <= 9
    )
    timeline = zb.simulate(schedule, HEAVY)
    assert timeline.cost < least
    assert max(timeline.peak_memory) <= 9


def train_switching(report, steps):
    """A run that switches, and what it ends with."""
    partition = gpt_partition(TINY_GPT, 2)
    auto = Auto(4, profile_steps=2, memory_limit=1e9)
    pipeline = Pipeline(gpt_layers(TINY_GPT), next_token_loss, auto, partition=partition, seed=3)
    before = pipeline.schedule
    losses = train_tiny(pipeline, steps)
    return losses, pipeline.state_dict(), before != pipeline.schedule


def test_a_run_that_switched_is_one_that_never_did_bit_for_bit():
    expected = tiny_pipeline(zb.one_f_one_b(1, 4))
    losses = train_tiny(expected, steps=7)
    state = expected.state_dict()
    by_rank = launch(train_switching, 2, 7, time_limit=LIMIT)
    found = {name: value for _, own, _ in by_rank for name, value in own.items()}
    assert [switched for *_, switched in by_rank] == [True, True]
    assert [own for own, *_ in by_rank] == [losses, losses]
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


# ---------------------------------------------------------------------------------------------------- in this process


def emulated(schedule, **options):
    """Two ranks whose ops take no time to speak of."""
    stages = emulation(zb.Costs(0.2, 0.2, 0.2, unit="ms"), zb.zb_h1(2, 4))
    return Pipeline(stages.layers(), emulated_loss, schedule, **options)


def test_the_word_auto_is_enough():
    pipeline = Pipeline([torch.nn.Linear(2, 2)] * 2, lambda y, _: y.sum(), Auto(4, num_ranks=2, profile_steps=1))
    assert pipeline.schedule == zb.one_f_one_b(2, 4).divided()
    with pytest.raises(OptionError, match="num_microbatches=8"):
        emulated("auto")
    with pytest.raises(OptionError, match=r"Auto\(\.\.\., num_ranks=\.\.\.\)"):
        emulated("auto", num_microbatches=4)
    with pytest.raises(OptionError, match='go with schedule="auto"'):
        emulated(zb.zb_h1(2, 4), memory_limit=5)


@pytest.mark.parametrize(("placement", "chunks"), [("linear", None), ("v", None), ("loop", 3), ("wave", 4)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_safe_schedule_keeps_to_the_placement_and_to_the_memory_of_1f1b(placement, chunks, num_ranks):
    schedule = Auto(8, placement=placement, chunks=chunks).safe_schedule(num_ranks)
    zb.validate(schedule)
    chunks = schedule.num_stages // num_ranks
    assert {op.kind for op in schedule.ops()} == {Kind.F, Kind.B, Kind.W}
    peak = max(zb.simulate(schedule, zb.Costs(weight_memory=1)).peak_memory)
    assert peak <= (num_ranks * chunks if placement != "loop" else num_ranks * chunks + num_ranks - 1)
    for stage in range(schedule.num_stages):
        ws = [op.microbatch for op in schedule.ops() if (op.stage, op.kind) == (stage, Kind.W)]
        assert ws == sorted(ws)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches must be a whole number of at least 1"),
        ({"num_microbatches": 4, "warmup_steps": 1}, "warmup_steps must be"),
        ({"num_microbatches": 4, "placement": "auto"}, "placement must be fixed"),
        ({"num_microbatches": 4, "memory_limit": 0}, "memory_limit must be a positive"),
    ],
)
def test_auto_refuses_what_cannot_be(options, message):
    with pytest.raises(OptionError, match=message):
        Auto(**options)


def profile(costs, divided=True):
    return Profile(costs, {}, 1, divided)


def test_what_is_as_good_as_the_plan_stays():
    even, best = profile(zb.Costs((1,) * 4, (1,) * 4, (1,) * 4)), zb.zb_h2(4, 12)
    found = choose(even, best, None)
    assert found.schedule == best
    assert found.notes[0].startswith("staying with zb_h2")
    better = choose(even, zb.one_f_one_b(4, 12).divided(), 7)
    assert better.timeline.cost == zb.simulate(best).cost
    assert better.notes[0].startswith("going on with")


def test_where_times_vary_much_what_holds_up_best_is_chosen():
    """The plan is tight: under a jitter of 0.2 another schedule of the V is cheaper on average (docs/plan.md)."""
    costs = zb.Costs((10,) * 7 + (14,), (11,) * 7 + (15,), (9,) * 7 + (13,), 2, 1, 1)
    safe = Auto(8, placement="v").safe_schedule(4)
    steady = choose(Profile(costs, {}, 1, True), safe, None)
    jitter = {
        key: tuple(t * 0.27 for t in getattr(costs, key)) for key in ("forward", "backward_input", "backward_weight")
    }
    noisy = Profile(costs, jitter, 1, True)
    assert noisy.jitter == pytest.approx(0.2, rel=0.01)
    found = choose(noisy, safe, None)
    assert steady.timeline.cost <= found.timeline.cost
    means = [zb.jitter.simulate_jitter(one.schedule, costs, 0.2, 200, seed=1).mean for one in (found, steady)]
    assert means[0] < means[1]


def test_a_limit_that_what_runs_exceeds_is_kept():
    even = profile(zb.Costs((1,) * 4, (1,) * 4, (1,) * 4))
    assert max(choose(even, zb.zb_h2(4, 12), 4).timeline.peak_memory) <= 4


def test_what_cannot_be_planned_says_why():
    schedule = zb.zb_h1(2, 4)
    with pytest.raises(PipelineError, match=r"divided\(\)"):
        choose(profile(zb.Costs(), divided=False), schedule, None)
    with pytest.raises(PipelineError, match="measure_memory"):
        choose(profile(zb.Costs(activation_memory=0)), schedule, None)
    with pytest.raises(OptionError, match=r"memory limit of 0\.5"):
        choose(profile(zb.Costs((1, 1))), schedule, 0.5)


def test_a_pipeline_replans_on_request():
    pipeline = emulated(zb.one_f_one_b(2, 4).divided())
    batch = torch.ones(4, 1)
    for _ in range(3):
        pipeline.step(batch)
    pipeline.measure_memory(batch)
    found = pipeline.replan(memory_limit=1e9, steps=2)
    assert pipeline.plan is found
    assert pipeline.schedule == found.schedule
    assert pipeline.timelines() == []  # those of the other schedule are gone
    with pytest.raises(PipelineError, match="0 were taken"):
        pipeline.replan()
    pipeline.step(batch)
    assert pipeline.timelines()[0].schedule == found.schedule


def test_a_schedule_that_the_user_chose_is_not_replaced():
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    pipeline = zb.Pipeline(layers, lambda y, _: y.sum(), zb.Auto(4, num_ranks=2, profile_steps=1))
    pipeline.use(zb.zb_h1(2, 4))
    for _ in range(6):
        pipeline.step(torch.ones(4, 2))
    assert pipeline.schedule == zb.zb_h1(2, 4)


def test_another_schedule_over_the_same_stages():
    pipeline, other = (tiny_pipeline(zb.zb_h1(2, 4)) for _ in range(2))
    for one in (pipeline, other):
        train_tiny(one, steps=1)
    pipeline.use(zb.zb_h2(2, 4))
    assert train_tiny(pipeline, steps=1) == train_tiny(other, steps=1)
    pipeline.use(zb.gpipe(2, 8))  # other microbatches: the same up to rounding and dropout
    assert float(pipeline.evaluate(*tiny_batch())) == pytest.approx(float(other.evaluate(*tiny_batch())), rel=1e-5)
    with pytest.raises(OptionError, match=r"lie on ranks \[0, 1\] and cannot move; .* \[0, 1, 1, 0\]"):
        pipeline.use(zb.zb_v(2, 4))
    broken = zb.Schedule(zb.Placement.linear(2), 1, ((), ()))
    with pytest.raises(ScheduleError):
        pipeline.use(broken)
