"""The same pipeline on real processes over gloo: same numbers, late losses, and errors that name rank, op and peer.

Every run has a time limit and its own process group; `launch` stops what is left.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from models_for_tests import (
    changing_shapes,
    faulty_pipeline,
    gradients_after_one_step,
    long_run,
    losses_on_processes,
    tiny_batch,
    tiny_pipeline,
    train_tiny,
)

import zerobubble as zb
from zerobubble.errors import PipelineError
from zerobubble.models import GPTConfig, gpt_layers, gpt_partition, next_token_loss
from zerobubble.runtime import Pipeline, launch

LIMIT = 120


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_schedule_gives_the_gradients_of_a_single_process_bit_for_bit(num_ranks):
    pipeline = tiny_pipeline(zb.gpipe(1, 4))
    expected_loss = pipeline.step(*tiny_batch()).item()
    expected = {name: p.grad for name, p in pipeline.named_parameters()}
    names = list(zb.GENERATORS)
    by_rank = launch(gradients_after_one_step, num_ranks, names, num_ranks, 4, time_limit=LIMIT)
    for name in names:
        assert [found[name][0] for found in by_rank] == [expected_loss] * num_ranks
        gradients = {key: value for found in by_rank for key, value in found[name][1].items()}
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[key], expected[key]) for key in expected), name


def test_losses_of_a_run_are_those_of_the_in_process_pipeline():
    expected = train_tiny(tiny_pipeline(zb.one_f_one_b(1, 8)), steps=4)
    for losses in launch(losses_on_processes, 2, "zb_v", 2, 8, 4, time_limit=LIMIT):
        assert losses == expected


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="waits for another way to count than Linux's /proc")
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
def test_two_thousand_steps_take_no_more_memory_and_no_more_files(name):
    for tenths in launch(long_run, 2, name, 2_000, time_limit=900):
        resident, files = zip(*tenths[1:], strict=True)
        assert max(resident) < min(resident) + 8 * 1024, "KiB"
        assert len(set(files)) == 1


def test_dynamic_shapes_let_the_sequence_length_change():
    in_process = tiny_pipeline(zb.zb_h1(2, 2))
    expected = [in_process.step(*tiny_batch(length=length)).item() for length in (12, 12, 7, 12)]
    assert launch(changing_shapes, 2, True, time_limit=LIMIT) == [expected, expected]


def test_without_dynamic_shapes_a_changed_shape_is_an_error_that_names_it():
    with pytest.raises(PipelineError, match=r"0F0 .*\[4, 12, 16\] .*to .*\[4, 7, 16\].*dynamic_shapes=True"):
        launch(changing_shapes, 2, False, time_limit=LIMIT)


def memory_of_gathers(report):
    """Bytes that are still held after what all ranks exchanged was taken."""
    pipeline = tiny_pipeline(zb.zb_h1(2, 2), timeout=60)
    for _ in range(5):
        pipeline._world.gather({pipeline._world.ranks[0]: bytes(2**20)})
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype is torch.uint8)


def test_what_ranks_exchange_is_let_go():
    for held in launch(memory_of_gathers, 2, time_limit=LIMIT):
        assert held < 2**21  # the last one may still be on its way


def raise_error():
    raise ValueError("bad luck")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stall():
    time.sleep(60)


def news_of(rank, wrong, timeout=60.0):
    news = {}
    with pytest.raises(PipelineError) as caught:
        launch(faulty_pipeline, 2, rank, wrong, timeout, on_news=lambda item: news.update([item]), time_limit=LIMIT)
    return news, str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_stops_all_with_its_reason(rank):
    error = news_of(rank, raise_error)[1]
    assert f"rank {rank} failed" in error
    assert "ValueError: bad luck" in error


def test_a_rank_that_is_killed_is_named():
    assert "rank 1" in news_of(1, die)[1]


def test_a_rank_that_stalls_is_named_with_op_peer_and_what_it_finished_last():
    begin = time.monotonic()
    news, _ = news_of(1, stall, timeout=8.0)
    assert time.monotonic() - begin < 55  # it would stall for 60 s
    assert "rank 0 waited for 1B1 from rank 1 to run 0B1: not there after 8 s" in news[0]
    assert "The last that rank 1 told is that it finished 1B0 of step 1" in news[0]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_starting_process_ends_all_ranks_at_once(how):
    code = (
        "import time, zerobubble.runtime as r\n"
        "import test_distributed as t\n"
        "if __name__ == '__main__':\n"
        "    r.launch(t.sleep_long, 2, on_news=lambda pid: print(pid, flush=True))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    script = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
        start_new_session=True,
    )  # fmt: skip
    assert script.stdout is not None
    pids = [int(script.stdout.readline()) for _ in range(2)]
    script.send_signal(how)
    assert script.wait(timeout=20) != 0
    end = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(is_running, pids))


def is_running(pid):
    """Whether the process is there and no zombie that nobody has asked for yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def memory_traces(report, num_ranks):
    """Measured memory of every schedule on a GPT of 16 small blocks."""
    config = GPTConfig(width=32, heads=2, blocks=16, context=16, dropout=0.1)
    found = {}
    for name in zb.GENERATORS:
        schedule = zb.generate(name, num_ranks, 2 * num_ranks)
        partition = gpt_partition(config, schedule.num_stages)
        pipeline = Pipeline(gpt_layers(config), next_token_loss, schedule, partition=partition, timeout=60)
        batch = tiny_batch(samples=4 * num_ranks, length=16)
        for _ in range(2):  # the first step agrees on shapes
            pipeline.step(*batch)
        found[name] = pipeline.measure_memory(*batch)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_measured_peak_of_every_rank_is_the_simulated_one_within_five_percent(num_ranks):
    """pytorch#136766, #138119, #128910: live bytes after each op equal the plan."""
    for name, trace in launch(memory_traces, num_ranks, num_ranks, time_limit=200)[0].items():
        activation, weight = trace.per_stage()
        costs = zb.Costs(activation_memory=activation, weight_memory=weight)
        predicted = zb.simulate(trace.schedule, costs).peak_memory
        assert trace.peaks == pytest.approx(predicted, rel=0.05), name
        assert max(live[-1] for live in trace.live_bytes) < 0.01 * max(predicted), f"{name} keeps something"


def sleep_long(report):
    report(os.getpid())
    time.sleep(60)
