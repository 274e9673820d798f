"""Replicas of a pipeline average their gradients, and train as one process on the whole batch does."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from replicas_for_tests import (
    Block,
    batch,
    gradients_of,
    play,
    squares,
    start_alone,
    sum_of_squares,
    tied_layers,
    train,
    train_on_replicas,
)

import zerobubble as zb
from zerobubble.errors import OptionError
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


@pytest.fixture(scope="module")
def played():
    """What every rank of two pipelines of two ranks returned in each scenario; ranks 0 and 1 are replica 0."""
    results = launch(play, 4, time_limit=2 * LIMIT)
    return {name: [result[name] for result in results] for name in results[0]}


def check_training(results, num_ranks, replicas):
    losses, expected = train(Pipeline([Block] * 8, squares, zb.gpipe(1, 4)), lambda step: batch(step, replicas))
    for name in results[0]:
        by_replica = [results[i : i + num_ranks] for i in range(0, len(results), num_ranks)]
        for step, whole in enumerate(expected):
            states = [united(part[name][1][step] for part in pipeline) for pipeline in by_replica]
            assert all(equal(state, states[0]) for state in states), (name, step)
            assert close(states[0], whole), (name, step)
        mean = torch.tensor([pipeline[0][name][0] for pipeline in by_replica]).mean(0)
        assert torch.allclose(mean, torch.tensor(losses))


def test_two_pipelines_of_two_ranks_train_as_one_process_on_the_whole_batch(played):
    check_training(played["train_three_schedules"], 2, 2)


@pytest.mark.slow
def test_two_pipelines_of_four_ranks_train_as_one_process_on_the_whole_batch():
    check_training(launch(train_on_replicas, 8, ["one_f_one_b", "zb_h1", "zb_v"], 4, 2, time_limit=2 * LIMIT), 4, 2)


@pytest.mark.slow
def test_three_pipelines_of_two_ranks_do_so_too():
    check_training(launch(train_on_replicas, 6, ["zb_h1", "zb_v"], 2, 3, time_limit=LIMIT), 2, 3)


def test_with_a_token_count_of_all_replicas_parts_may_differ_in_size(played):
    pipeline = Pipeline([Block] * 4, sum_of_squares, zb.gpipe(1, 2))
    inputs, targets = batch(0, 2)
    whole = pipeline.step(inputs, targets, token_count=targets.numel()).item()
    losses, gradients = zip(*played["count_tokens"])
    assert equal(united(gradients[:2]), united(gradients[2:]))
    assert close(united(gradients[:2]), gradients_of(pipeline))
    assert (losses[0] + losses[2]) / 2 == pytest.approx(whole)


def test_under_no_sync_gradients_add_up_and_the_next_step_averages_all_that_is_there(played):
    """As under DistributedDataParallel: also what was there before, and what had been averaged stays as it is."""
    found, reduced = zip(*played["accumulate"])
    assert set(map(tuple, reduced)) == {(False, True, True)}
    assert not equal(found[0][0], found[2][0])
    pipeline = Pipeline([Block] * 4, squares, zb.gpipe(1, 2))
    for parameter in pipeline.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    for step in range(3):
        pipeline.step(*batch(step, 2))
        if step > 0:
            assert equal(united(f[step] for f in found[:2]), united(f[step] for f in found[2:]))
            assert close(united(f[step] for f in found[:2]), gradients_of(pipeline))


def test_a_parameter_gets_a_gradient_where_any_replica_has_one_and_none_where_none_has(played):
    first, _, second, _ = played["select"]
    missing = {name for name, gradient in first.items() if gradient is None}
    assert missing == {f"0.{part}.{name}" for part in ("frozen", "unused") for name in ("weight", "bias")}
    assert {name for name, gradient in second.items() if gradient is None} == missing
    assert all(torch.equal(first[name], second[name]) for name in first.keys() - missing)
    assert first["0.chosen.weight"].abs().sum() > 0


def test_a_weight_that_two_stages_of_a_rank_share_is_averaged_once_after_the_last_of_them(played):
    results, stages = zip(*played["train_tied"])
    _, expected = train(Pipeline(tied_layers(), squares, zb.gpipe(1, 4)), lambda step: batch(step, 2))
    for step, whole in enumerate(expected):
        states = [united(result[1][step] for result in results[i : i + 2]) for i in (0, 2)]
        assert equal(*states)
        assert close(states[0], {name: whole[name] for name in states[0]})
    assert stages[0][-1] is None
    assert stages[0].count(None) == 1


def test_replicas_start_with_the_weights_and_buffers_of_the_first_and_draw_dropout_of_their_own(played):
    weights, losses, gradients = zip(*played["start"])
    assert equal(united(weights[:2]), united(weights[2:]))
    assert losses[0] != losses[2]
    alone, gradients_alone = start_alone(united(weights[:2]))
    assert losses[:2] == (alone, alone)
    assert equal(united(gradients[:2]), gradients_alone)


def test_clipping_gives_the_same_norm_and_gradients_on_every_replica(played):
    norms, gradients = zip(*played["clip"])
    assert len(set(norms)) == 1
    assert equal(united(gradients[:2]), united(gradients[2:]))
    squared = [gradient.square().sum() for gradient in united(gradients[:2]).values()]
    assert torch.stack(squared).sum().sqrt().item() == pytest.approx(1e-3)


def test_memory_is_measured_op_by_op_and_leaves_no_gradients(played):
    orders = zb.zb_h1(2, 4).orders
    assert played["measure"] == [(list(map(len, orders)), True)] * 4


# ---------------------------------------------------------------------------------------------------- overlap


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_v"])
def test_reductions_begin_and_end_while_the_last_weight_gradients_are_computed(played, name):
    """Emulated: every W sleeps 20 ms per layer, so that the tail of a rank takes some hundred ms."""
    timeline, reductions = played["overlap"][0][name]
    for rank in range(2):
        done = [reduction for reduction in reductions if reduction.rank == rank]
        assert len(done) == 4
        assert all(reduction.start <= reduction.end for reduction in done)
        begin, end = timeline.starts[rank][-1], timeline.ends[rank][-1]
        assert timeline.schedule.orders[rank][-1].kind in (Kind.W, Kind.BW)
        assert any(reduction.end < end for reduction in done)
        assert min(reduction.start for reduction in done) < end - 20, (begin, end)


def test_without_replicas_there_is_nothing_to_reduce():
    pipeline = Pipeline([Block, Block], squares, zb.zb_h1(2, 4))
    with pipeline.no_sync():
        pipeline.step(*batch(0, 1))
    assert pipeline.replicas is None
    assert pipeline.reductions() == [[]]


# ---------------------------------------------------------------------------------------------------- optimizer state


def test_a_sharded_optimizer_gives_the_same_bits_with_groups_schedules_and_its_state_loaded_anew(played):
    for (parameters, state, _), (expected, whole_state, _) in played["shard"]:
        assert equal(parameters, expected)
        assert state["param_groups"] == whole_state["param_groups"]
        assert list(state["state"]) == list(whole_state["state"])
        assert all(equal(state["state"][key], whole_state["state"][key]) for key in state["state"])


def test_each_replica_keeps_the_state_of_about_as_many_bytes_and_all_together_of_each_parameter_once(played):
    for rank in (0, 1):
        shares = [played["shard"][process][0][2] for process in (rank, rank + 2)]
        largest = 12 * 24 * 8
        assert sum(shares) == played["shard"][rank][1][2]
        assert abs(shares[0] - shares[1]) <= largest


def test_post_validation_over_replicas_amends_alike_and_with_a_sharded_optimizer_too(played):
    for (sharded, counts), (whole, whole_counts), (reference, _) in played["post_validate"]:
        assert equal(sharded, reference)
        assert equal(whole, reference)
        assert counts == whole_counts == (4, 4, 0, 1)


def test_replicas_that_plan_themselves_go_on_with_one_schedule(played):
    (first, then), *others = played["plan_itself"]
    assert then != first
    assert all(other == (first, then) for other in others)


def test_a_sharded_optimizer_refuses_a_closure_and_a_second_sharding(played):
    said, parameters = zip(*played["closure"])
    for closure, again, reverse in said:
        assert "takes no closure" in closure
        assert "AdamW is sharded already" in again
        assert "which a sharded optimizer does not keep" in reverse
    assert equal(united(parameters[:2]), united(parameters[2:]))


# ---------------------------------------------------------------------------------------------------- refusals


def test_meshes_and_layers_that_do_not_fit_are_refused_by_name(played):
    for said in played["refusals"]:
        assert "give either mesh or group" in said["both"]
        assert "of one dimension (the pipeline) or two (replicas, pipeline); got 3 dimensions" in said["dimensions"]
        assert "4 ranks, but the last dimension of the mesh, the pipeline's, has 2" in said["size"]
        assert re.search(r"layers of replicas . and . differ.*\('[01]\.(bias|weight)'", said["layers"])
        assert re.search(r"replicas . and . have another schedule", said["schedule"])
        assert "every rank must be given the same schedule" in said["rank"]


def test_what_is_no_mesh_is_refused():
    with pytest.raises(OptionError, match="mesh must be a DeviceMesh of one dimension"):
        Pipeline([Block], squares, zb.zb_h1(1, 1), mesh=(2, 1))


def test_a_mesh_of_one_dimension_is_the_pipeline(played):
    pipeline = Pipeline([Block] * 4, squares, zb.gpipe(1, 4))
    expected = [pipeline.step(*batch(step, 1)).item() for step in range(2)]
    assert played["one_dimension"] == [(True, expected)] * 4


# ---------------------------------------------------------------------------------------------------- faults

DYING = """
import os, signal, sys, time, torch, torch.distributed as dist, zerobubble as zb
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
mesh = init_device_mesh("cpu", (2, 2))
timeout = 8 if sys.argv[1] == "sleeps" else 60
pipeline = zb.Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 4), mesh=mesh, timeout=timeout)
for step in range(4):
    if dist.get_rank() == 3 and step == 2:
        time.sleep(1.5 if sys.argv[1] == "dies" else 60)  # what it finished last is told twice a second
        os.kill(os.getpid(), signal.SIGKILL)
    pipeline.step(torch.ones(4, 4), torch.ones(4))
"""


def survivors(folder, how):
    """Two pipelines of two ranks; something happens to rank 1 of replica 1 in step 2. What the others say, by rank."""
    (folder / "dying.py").write_text(DYING)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "4"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "dying.py", how],
            cwd=folder,
            env={**env, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[1] for process in processes[:3]]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert all(process.returncode != 0 for process in processes)
    return said


@pytest.mark.parametrize(
    ("how", "trouble"),
    [("dies", "connection was closed"), pytest.param("sleeps", "not there after 8 s", marks=pytest.mark.slow)],
)
def test_when_a_rank_of_one_replica_dies_or_sleeps_all_others_end_and_name_what_they_waited_for(tmp_path, how, trouble):
    first, second, third = survivors(tmp_path, how)
    assert re.search(r"PeerError: rank 0 waited for .* from rank 1", third)
    assert "rank 1 of replica 0 waited for the gradients of stage 1 from the other replicas: " in second
    assert "Last told: rank 1 of replica 1 finished 1W3 of step 1" in second
    assert trouble in second
    assert "PeerError: rank 0" in first
