"""Replicas of a pipeline average their gradients, and train as one process on the whole batch does."""

from __future__ import annotations

import pytest
import torch
from replicas_for_tests import (
    Block,
    accumulate,
    batch,
    clip,
    count_tokens,
    different_layers,
    gradients_of,
    overlap,
    select,
    squares,
    start,
    sum_of_squares,
    tied_layers,
    train,
    train_on_replicas,
    train_tied,
    without_replicas,
)

import zerobubble as zb
from zerobubble.errors import OptionError, PipelineError
from zerobubble.lower import Finish, Run, finishing, lower, tails_by_stage
from zerobubble.notation import parse_op
from zerobubble.op import Kind
from zerobubble.runtime import Pipeline, launch

LIMIT = 120
ALL = pytest.mark.parametrize("name", zb.GENERATORS)


def equal(some, others):
    """Whether two states by name are the same bit for bit."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def close(some, others):
    """Whether two states of doubles by name are the same to rounding."""
    assert some.keys() == others.keys()
    return all(torch.allclose(some[name], others[name], rtol=1e-9, atol=1e-12) for name in some)


def united(parts):
    return {name: value for part in parts for name, value in part.items()}


# ---------------------------------------------------------------------------------------------------- lowering


@ALL
def test_every_op_runs_once_in_the_order_of_the_schedule_and_every_stage_finishes_once(name):
    schedule = tails_by_stage(zb.generate(name, 3, 6))
    zb.validate(schedule)
    for order, program in zip(schedule.orders, map(finishing, lower(schedule))):
        ran = [op for i in program.instructions for op in (i.ops if isinstance(i, Finish) else
                                                           (i.op,) if isinstance(i, Run) else ())]  # fmt: skip
        assert tuple(ran) == order
        finishes = [i.ops[-1].stage for i in program.instructions if isinstance(i, Finish)]
        assert sorted(finishes) == list(schedule.placement.stages_of(program.rank))


@ALL
def test_sorting_the_tails_changes_neither_times_nor_memory(name):
    schedule = zb.generate(name, 3, 6)
    before, after = zb.simulate(schedule), zb.simulate(tails_by_stage(schedule))
    assert (after.cost, after.peak_memory) == (before.cost, before.peak_memory)


def test_the_tail_of_a_rank_finishes_in_one_piece_per_stage():
    order = ["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1", "1W0", "0W0", "1W1", "0W1"]
    schedule = zb.Schedule(zb.Placement.v(1), 2, (tuple(map(parse_op, order)),))
    (program,) = map(finishing, lower(tails_by_stage(schedule)))
    assert str(program).splitlines()[-2:] == ["finish  1W0 1W1", "finish  0W0 0W1"]
    (program,) = map(finishing, lower(schedule))
    assert str(program).splitlines()[-2:] == ["finish  1W1", "finish  0W1"]


# ---------------------------------------------------------------------------------------------------- training


def check_training(num_ranks, replicas, names):
    results = launch(train_on_replicas, num_ranks * replicas, names, num_ranks, replicas, time_limit=LIMIT)
    losses, expected = train(Pipeline([Block] * 8, squares, zb.gpipe(1, 4)), lambda step: batch(step, replicas))
    for name in names:
        by_replica = [results[i : i + num_ranks] for i in range(0, len(results), num_ranks)]
        for step, whole in enumerate(expected):
            states = [united(part[name][1][step] for part in pipeline) for pipeline in by_replica]
            assert all(equal(state, states[0]) for state in states), (name, step)
            assert close(states[0], whole), (name, step)
        mean = torch.tensor([pipeline[0][name][0] for pipeline in by_replica]).mean(0)
        assert torch.allclose(mean, torch.tensor(losses))


def test_two_pipelines_of_two_ranks_train_as_one_process_on_the_whole_batch():
    check_training(2, 2, ["one_f_one_b", "zb_h1", "zb_v"])


@pytest.mark.slow
def test_two_pipelines_of_four_ranks_train_as_one_process_on_the_whole_batch():
    check_training(4, 2, ["one_f_one_b", "zb_h1", "zb_v"])


@pytest.mark.slow
def test_three_pipelines_of_two_ranks_do_so_too():
    check_training(2, 3, ["zb_h1", "zb_v"])


def test_with_a_token_count_of_all_replicas_parts_may_differ_in_size():
    pipeline = Pipeline([Block] * 4, sum_of_squares, zb.gpipe(1, 2))
    inputs, targets = batch(0, 2)
    whole = pipeline.step(inputs, targets, token_count=targets.numel()).item()
    (loss, gradients), (other_loss, other_gradients) = launch(count_tokens, 2, time_limit=LIMIT)
    assert equal(gradients, other_gradients)
    assert close(gradients, gradients_of(pipeline))
    assert (loss + other_loss) / 2 == pytest.approx(whole)


def test_under_no_sync_gradients_add_up_and_the_next_step_averages_all_that_is_there():
    """As under DistributedDataParallel: also what was there before, and what had been averaged stays as it is."""
    (first, reduced), (second, _) = launch(accumulate, 2, time_limit=LIMIT)
    assert reduced == [False, True, True]
    assert not equal(first[0], second[0])
    assert equal(first[1], second[1])
    assert equal(first[2], second[2])
    pipeline = Pipeline([Block] * 4, squares, zb.gpipe(1, 2))
    next(pipeline.parameters()).grad = torch.full((12,), 0.5, dtype=torch.float64)
    for step in range(3):
        pipeline.step(*batch(step, 2))
        if step > 0:
            assert close(first[step], gradients_of(pipeline))


def test_a_parameter_gets_a_gradient_where_any_replica_has_one_and_none_where_none_has():
    first, second = launch(select, 2, time_limit=LIMIT)
    missing = {name for name, gradient in first.items() if gradient is None}
    assert missing == {f"0.{part}.{name}" for part in ("frozen", "unused") for name in ("weight", "bias")}
    assert {name for name, gradient in second.items() if gradient is None} == missing
    assert all(torch.equal(first[name], second[name]) for name in first.keys() - missing)
    assert first["0.chosen.weight"].abs().sum() > 0


def test_a_weight_that_two_stages_of_a_rank_share_is_averaged_once_after_the_last_of_them():
    results = launch(train_tied, 4, time_limit=LIMIT)
    torch.manual_seed(0)
    _, expected = train(Pipeline(tied_layers(), squares, zb.gpipe(1, 4)), lambda step: batch(step, 2))
    for step, whole in enumerate(expected):
        states = [united(result[0][1][step] for result in results[i : i + 2]) for i in (0, 2)]
        assert equal(*states)
        assert close(states[0], {name: whole[name] for name in states[0]})
    assert results[0][1][-1] is None
    assert results[0][1].count(None) == 1


def test_replicas_start_with_the_weights_and_buffers_of_the_first_and_draw_dropout_of_their_own():
    (weights, loss, gradients), (others, other_loss, _) = launch(start, 2, time_limit=LIMIT)
    assert equal(weights, others)
    assert loss != other_loss
    alone, gradients_alone = without_replicas(weights)
    assert loss == alone
    assert equal(gradients, gradients_alone)


def test_clipping_gives_the_same_norm_and_gradients_on_every_replica():
    results = launch(clip, 4, time_limit=LIMIT)
    assert len({norm for norm, _ in results}) == 1
    assert all(equal(results[rank][1], results[rank + 2][1]) for rank in (0, 1))
    squares_of = [gradient.square().sum() for _, found in results[:2] for gradient in found.values()]
    assert torch.stack(squares_of).sum().sqrt() == pytest.approx(1e-3)


# ---------------------------------------------------------------------------------------------------- overlap


def test_reductions_begin_while_the_last_weight_gradients_are_computed():
    """Emulated: W sleeps, so whatever overlaps it has time to."""
    for name in ("one_f_one_b", "zb_h1", "zb_v"):
        timeline, reductions = launch(overlap, 4, name, 2, time_limit=LIMIT)[0]
        for rank in range(2):
            done = [reduction for reduction in reductions if reduction.rank == rank]
            end = timeline.ends[rank][-1]
            assert len(done) == 8
            assert sum(reduction.end < end - 10 for reduction in done) >= 2, (name, rank)
            assert all(reduction.start <= reduction.end for reduction in done)
            last = timeline.schedule.orders[rank][-1]
            assert last.kind in (Kind.W, Kind.BW)


def test_without_replicas_there_is_nothing_to_reduce():
    pipeline = Pipeline([Block, Block], squares, zb.zb_h1(2, 4))
    with pipeline.no_sync():
        pipeline.step(*batch(0, 1))
    assert pipeline.replicas is None
    assert pipeline.reductions() == [[]]


# ---------------------------------------------------------------------------------------------------- refusals


def test_layers_that_differ_between_replicas_are_named():
    with pytest.raises(PipelineError, match=r"layers of replicas 0 and 1 differ.*0\.(bias|weight)"):
        launch(different_layers, 2, time_limit=LIMIT)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(OptionError, match="mesh must be a DeviceMesh of one dimension"):
        Pipeline([Block], squares, zb.zb_h1(1, 1), mesh=(2, 1))
