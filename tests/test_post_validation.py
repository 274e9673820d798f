"""Stepping ahead of the norm gives, after every step, bit for bit what waiting for it gives; on real processes.

The reference of every run is the same run in this process, with one stage and `SynchronousOptimizer`.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from post_validation_runs import (
    BENDS,
    Run,
    assert_close_run,
    assert_same_run,
    reference,
    same,
    train_all,
    train_both,
    train_with_two_optimizers,
)
from strategies import random_schedule

import zerobubble as zb
from zerobubble.errors import PeerError, PipelineError
from zerobubble.runtime import Pipeline, launch
from zerobubble.schedule import Placement

if TYPE_CHECKING:
    from zerobubble.optim import StepCounts

LIMIT = 120
FOUR = ("one_f_one_b", "zb_h1", "zb_h2", "zb_v")
EVERYTHING = ("pooled", "fine", "nan", "lone", "lone", "fine", "inf", "pooled", "fine", "pooled")
"""The first and the last step are amended, and several in a row; POOLED is news to every rank, LONE not to one."""


def check(num_ranks: int, runs: list[Run], time_limit: float = LIMIT) -> list[StepCounts]:
    """Run all of them on processes and compare each with its reference. Returns how each took its steps."""
    results = launch(train_all, num_ranks, runs, time_limit=time_limit)
    counts = []
    for run, *parts in zip(runs, *results, strict=True):
        compare = assert_close_run if run.options.get("undo") == "reverse" else assert_same_run
        compare(run, parts, reference(run))
        assert len({part["counts"] for part in parts}) == 1, "the ranks disagree on how they took their steps"
        counts.append(parts[0]["counts"])
    return counts


READS = {0: "checkpoint", 2: "evaluate", 3: "lonely checkpoint", 4: "evaluate", 9: "lonely checkpoint"}
AT_FIRST = ("pooled",) * 12 + ("fine",) * 20

TWO_RANKS = {
    "everything, 1F1B": Run(zb.one_f_one_b(2, 4), EVERYTHING, "sgd", seed=1),
    "everything, ZB-H1": Run(zb.zb_h1(2, 4), EVERYTHING, "adamw", seed=2),
    "everything, ZB-H2": Run(zb.zb_h2(2, 4), EVERYTHING, "sgd", seed=3),
    "everything, ZB-V": Run(zb.zb_v(2, 4), EVERYTHING, "adamw", seed=4),
    "nothing": Run(zb.zb_v(2, 4), ("fine",) * 6),
    "reads, ZB-H2": Run(zb.zb_h2(2, 4), EVERYTHING, "adamw", reads=READS),
    "reads, ZB-V": Run(zb.zb_v(2, 4), EVERYTHING, "sgd", reads=READS),
    "loss scale": Run(zb.zb_v(2, 4), ("",) * 16, scaled=True),
    "autocast": Run(zb.zb_h1(2, 4), EVERYTHING, autocast=True),
    "at first": Run(zb.zb_h1(2, 4), AT_FIRST, adaptive=True),
    "at first, stubborn": Run(zb.zb_h1(2, 4), AT_FIRST),
    "another schedule": Run(zb.zb_h1(2, 4), EVERYTHING, reads={0: "use"}),
    "reactive": Run(zb.zb_h2(2, 4), EVERYTHING, reactive=True),
    "reverse, SGD": Run(zb.zb_h1(2, 4), EVERYTHING, "sgd", options={"undo": "reverse"}),
    "reverse, AdamW": Run(zb.zb_v(2, 4), EVERYTHING, options={"undo": "reverse"}),
    "largest element": Run(zb.zb_v(2, 4), EVERYTHING, options={"norm_type": float("inf")}),
}


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, StepCounts]:
    """All of these, each compared with its reference: after every step the same bits. How they took their steps."""
    return dict(zip(TWO_RANKS, check(2, list(TWO_RANKS.values()))))


@pytest.mark.parametrize("name", [name for name in TWO_RANKS if name.startswith("everything")])
def test_clipped_and_skipped_steps_are_amended_exactly(two_ranks, name):
    counts = two_ranks[name]
    assert (counts.ahead, counts.amended, counts.waited, counts.skipped) == (10, 7, 0, 2)


def test_clipped_and_skipped_steps_are_amended_exactly_on_four_ranks():
    (counts,) = check(4, [Run(zb.zb_v(4, 4), EVERYTHING)])
    assert counts.amended == 7


def test_where_nothing_is_wrong_nothing_is_amended(two_ranks):
    assert (two_ranks["nothing"].ahead, two_ranks["nothing"].amended) == (6, 0)


@pytest.mark.parametrize("name", [name for name in TWO_RANKS if name.startswith("reads")])
def test_reading_right_after_an_amended_step_finds_it_amended(two_ranks, name):
    """A checkpoint on all ranks or on one alone, and an evaluation."""
    assert two_ranks[name].amended == 7


def test_the_schedule_may_change_right_after_an_amended_step(two_ranks):
    assert two_ranks["another schedule"].amended == 7


def test_a_rank_that_reacts_to_lateness_amends_as_well(two_ranks):
    assert two_ranks["reactive"].amended == 7


@pytest.mark.parametrize("name", [name for name in TWO_RANKS if name.startswith("reverse")])
def test_steps_undone_by_arithmetic_come_out_right_but_for_rounding(two_ranks, name):
    assert two_ranks[name].amended == 7


def test_no_cast_of_a_wrong_weight_is_left_in_autocasts_cache(two_ranks):
    assert two_ranks["autocast"].amended == 7


def test_the_loss_scale_backs_off_and_grows_as_in_the_synchronous_run(two_ranks):
    assert two_ranks["loss scale"].skipped >= 2


def test_where_every_step_must_be_amended_it_waits_and_resumes_when_that_is_over(two_ranks):
    adaptive, stubborn = two_ranks["at first"], two_ranks["at first, stubborn"]
    assert (adaptive.amended, adaptive.waited, adaptive.ahead) == (5, 21, 11)
    assert (stubborn.amended, stubborn.waited) == (12, 0)


def test_the_largest_element_serves_as_norm_too(two_ranks):
    assert two_ranks["largest element"].amended == 4  # POOLED exceeds no limit on single elements


def random_runs(seeds: range, num_ranks: int, steps: int) -> list[Run]:
    """Any schedule, any sequence of what may happen to the gradients."""
    runs = []
    for seed in seeds:
        random = Random(seed)
        placement = random.choice([Placement.v(num_ranks), Placement.linear(num_ranks), Placement.loop(num_ranks, 2)])
        bends = tuple(random.choice(BENDS) for _ in range(steps))
        reads = {random.randrange(steps): random.choice(["checkpoint", "evaluate", "lonely checkpoint"])}
        schedule = random_schedule(placement, random.randint(1, 5), random)
        adaptive = random.random() < 0.5
        runs.append(Run(schedule, bends, random.choice(["adamw", "sgd"]), seed, reads=reads, adaptive=adaptive))
    return runs


def check_random(num_ranks: int, runs: list[Run], time_limit: float) -> None:
    """Random schedules add up gradients in an order of their own, so that their reference runs on processes too."""
    for run, *parts in zip(runs, *launch(train_both, num_ranks, runs, time_limit=time_limit), strict=True):
        for synchronous, ahead in parts:
            assert_same_run(run, [ahead], synchronous)


def test_random_sequences_over_random_schedules_equal_the_synchronous_run():
    check_random(2, random_runs(range(10), 2, steps=5), LIMIT)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_sequences_over_random_schedules_equal_the_synchronous_run():
    for num_ranks, seeds in ((2, range(100, 220)), (3, range(220, 280)), (4, range(280, 310))):
        check_random(num_ranks, random_runs(seeds, num_ranks, steps=8), 1800)


SCENARIOS = {
    "nothing to amend": lambda random: "fine",
    "clipping at random steps": lambda random: random.choice(["fine", "fine", "pooled", "lone"]),
    "not finite at random steps": lambda random: random.choice(["fine", "fine", "fine", "nan", "inf"]),
    "clipping at every step": lambda random: "pooled",
    "both at once": lambda random: random.choice(BENDS),
    "loss scaling": lambda random: "",
}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_three_hundred_steps_of_every_schedule_optimizer_and_scenario(num_ranks):
    runs, expected = [], []
    for optimizer in ("adamw", "sgd"):
        for scenario, draw in SCENARIOS.items():
            random = Random(scenario)
            bends = tuple(draw(random) for _ in range(300))
            same = [
                Run(zb.generate(name, num_ranks, 4), bends, optimizer, 1, scenario == "loss scaling") for name in FOUR
            ]
            runs += same
            expected += [reference(same[0])] * len(same)
    results = launch(train_all, num_ranks, runs, time_limit=7000)
    for run, told, *parts in zip(runs, expected, *results, strict=True):
        assert_same_run(run, parts, told)


def test_two_optimizers_over_one_pipeline_amend_each_their_own():
    run = Run(zb.zb_v(2, 4), ("lone", "fine", "nan", "fine", "lone", "pooled", "fine"), seed=5)
    for synchronous, ahead, amended in launch(train_with_two_optimizers, 2, run, time_limit=LIMIT):
        assert same(list(synchronous[0].values()), list(ahead[0].values()))
        assert same(synchronous[1], ahead[1])
        assert amended[0] != amended[1]
        assert min(amended) >= 2


# ------------------------------------------------------------------------------------------------ who waits for whom


def two_linears(timeout: float = 60.0) -> tuple[Pipeline, zb.PostValidatedOptimizer]:
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    pipeline = Pipeline(layers, lambda y, _: y.square().mean(), zb.zb_h1(2, 4), timeout=timeout)
    return pipeline, zb.PostValidatedOptimizer(torch.optim.SGD(pipeline.parameters(), lr=0.1), clip_norm=1e-3)


def step_while_the_other_has_not(_report):
    """Rank 1 steps only after it has heard that rank 0's step has returned."""
    pipeline, optimizer = two_linears()
    pipeline.step(torch.ones(4, 4))
    if dist.get_rank() == 0:
        optimizer.step()
        dist.send(torch.ones(1), dst=1)
    else:
        dist.recv(torch.ones(1), src=0)
        optimizer.step()
    return optimizer.grad_norm.item()


def test_step_returns_before_the_other_rank_has_stepped():
    first, second = launch(step_while_the_other_has_not, 2, time_limit=LIMIT)
    assert first == second > 0


def save_after_the_other_is_gone(report):
    """Rank 1 fails in its step; what rank 0 has stepped ahead must not get into a file."""
    pipeline, optimizer = two_linears(timeout=10)
    pipeline.step(torch.ones(4, 4))
    if dist.get_rank() == 1:
        raise ArithmeticError("before its step")
    optimizer.step()
    for read in (optimizer.state_dict, pipeline.state_dict, lambda: list(pipeline.parameters())):
        try:
            read()
        except PeerError as error:
            report(str(error))
    raise ArithmeticError("done")


def test_a_step_that_can_no_longer_be_validated_cannot_be_saved():
    news = []
    with pytest.raises(PipelineError):
        launch(save_after_the_other_is_gone, 2, on_news=news.append, time_limit=LIMIT)
    assert len(news) == 3
    assert "rank 0 waited for what every rank tells of its gradients" in news[0]
