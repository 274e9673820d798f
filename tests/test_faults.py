"""Whatever happens to one rank, no other one hangs: each stops within its timeout and says who, what and why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from random import Random

import pytest
from models_for_tests import five_hundred_microbatches, lonely_evaluation, misfortune, one_step

from zerobubble.errors import PipelineError
from zerobubble.runtime import launch

LIMIT = 120


def failing(kind):
    news = {}
    begin = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        launch(misfortune, 2, kind, on_news=lambda item: news.update([item]), time_limit=LIMIT)
    assert time.monotonic() - begin < 60
    return news, str(caught.value)


def test_a_rank_that_raises_in_backward_tells_all_others():
    _, error = failing("backward")
    assert "rank 1 failed: ArithmeticError: in backward" in error
    if sys.version_info >= (3, 11):
        assert "on rank 1, in 1B2 of step 0" in error


def test_a_rank_that_raises_in_the_optimizer_stops_the_others():
    _, error = failing("optimizer")
    assert "rank 1 failed: ArithmeticError: in the optimizer" in error


def test_a_rank_whose_data_ran_out_is_named():
    """DeepSpeed#5568: stuck when one rank's data ran out."""
    news, _ = failing("less data")
    assert "rank 0 waited for 1B0 from rank 1 to run 0B0: the connection was closed" in news[0]


def test_a_changed_dtype_is_named():
    news, error = failing("dtype")
    assert "rank 1" in error + "".join(news.values())


def test_a_rank_that_starts_late_is_waited_for():
    results = launch(misfortune, 2, "late start", time_limit=LIMIT)
    assert results[0] == results[1]


def test_an_evaluation_on_one_rank_alone_ends_in_an_error_that_names_the_other():
    """Megatron-Bridge#6025: evaluation on the last rank alone hung the others."""
    news = []
    with pytest.raises(PipelineError):
        launch(lonely_evaluation, 2, on_news=news.append, time_limit=LIMIT)
    assert "rank 1 waited for 0F0 from rank 0 to run 1F0: not there after 5 s" in news[0]


def test_five_hundred_microbatches_in_a_step_hit_no_limit():
    first, second = launch(five_hundred_microbatches, 2, time_limit=LIMIT)
    assert first == second


@pytest.mark.slow
def test_a_hundred_starts_with_ranks_late_by_chance_never_hang():
    random = Random(0)
    for _ in range(100):
        results = launch(one_step, 2, [random.random(), random.random()], time_limit=60)
        assert results[0] == results[1]


SCRIPT = """
import os, torch, torch.distributed as dist, zerobubble as zb
# torch 2.13's own env:// finds the addresses of the first attempt again ("Connection refused"): a prefix per attempt
env = os.environ
store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(env["TORCHELASTIC_RESTART_COUNT"], store)
dist.init_process_group("gloo", store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))
layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
pipeline = zb.Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 4), timeout=30)
for step in range(3):
    pipeline.step(torch.ones(4, 4))
    if step == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        raise SystemExit("out of luck")
if dist.get_rank() == 0:
    print("done after restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""


def torchrun(folder, script, *arguments, options=()):
    """Run `script` under torchrun on two processes. Returns what it printed."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    done = subprocess.run(
        [*command, "script.py", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_torchrun_restarts_cleanly(tmp_path):
    assert "done after restart 1" in torchrun(tmp_path, SCRIPT, options=["--max-restarts", "1"])


LEAVING = """
import sys, time, torch, torch.distributed as dist, zerobubble as zb
dist.init_process_group("gloo")
layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
pipeline = zb.Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 4), timeout=30)
pipeline.step(torch.ones(4, 4))
early = int(sys.argv[1])
if dist.get_rank() != early:  # this rank's last W takes so long that the other one is gone by then
    slow = next(pipeline.parameters())
    slow.register_post_accumulate_grad_hook(lambda _: time.sleep(0.5))
loss = pipeline.step(torch.ones(4, 4))
if dist.get_rank() != early:
    print("the loss:", float(loss))
"""


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_may_leave_before_the_others_are_done(tmp_path, early):
    """A loss that nobody had read yet aborted the process at its end ("terminate called without ...")."""
    assert "the loss:" in torchrun(tmp_path, LEAVING, early)
