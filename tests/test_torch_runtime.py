"""Our CSV in the runtime of `torch.distributed.pipelining`: it trains, and gets the gradients of a single process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerobubble as zb
from zerobubble import notation
from zerobubble.planner import plan
from zerobubble.runtime import launch

WIDTH, LAYERS, SAMPLES, LIMIT = 8, 8, 16, 120


def layers() -> list[nn.Module]:
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator)


def cut(num_stages: int) -> list[nn.Sequential]:
    size = LAYERS // num_stages
    whole = layers()
    return [nn.Sequential(*whole[size * s : size * (s + 1)]) for s in range(num_stages)]


def train_in_torch(report, path: str, ranks: list[int], num_microbatches: int):
    """One step in torch's schedule runtime; losses per microbatch and gradients per stage and name."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank = dist.get_rank()
    modules = cut(len(ranks))
    mine = [stage for stage, holder in enumerate(ranks) if holder == rank]
    stages = [PipelineStage(modules[stage], stage, len(ranks), torch.device("cpu")) for stage in mine]
    schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(path, format="compute_only")
    inputs, targets = batch()
    losses: list[torch.Tensor] = []
    arguments = (inputs,) if 0 in mine else ()
    schedule.step(*arguments, target=targets if len(ranks) - 1 in mine else None, losses=losses)
    gradients = {(s, name): p.grad for s in mine for name, p in modules[s].named_parameters()}
    return [loss.item() for loss in losses], gradients


def train_all_in_torch(report, jobs):
    return [train_in_torch(report, *job) for job in jobs]


def planned(placement: str) -> zb.Schedule:
    """A schedule that no generator makes."""
    costs = zb.Costs(forward=(1, 2), backward_input=(1.5, 1), communication=0.5)
    return plan(costs, 2, 4, memory_limit=1.75, placement=placement, effort="quick").schedule


@pytest.fixture(scope="module")
def schedules() -> list[zb.Schedule]:
    names = ["one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v"]
    return [
        *(zb.generate(name, 2, 4) for name in names),
        *(planned(placement) for placement in ("linear", "v", "wave")),
    ]


def test_torch_gets_the_losses_and_gradients_of_a_single_process(schedules, tmp_path):
    jobs = []
    for i, schedule in enumerate(schedules):
        path = tmp_path / f"{i}.csv"
        path.write_text(notation.to_csv(schedule, "torch"))
        jobs.append((str(path), list(schedule.placement.ranks), schedule.num_microbatches))
    made = {notation.to_csv(zb.generate(name, 2, 4)) for name in zb.GENERATORS}
    assert not made & {notation.to_csv(schedule) for schedule in schedules if schedule.name == "plan"}
    by_rank = launch(train_all_in_torch, 2, jobs, time_limit=LIMIT)
    for schedule, found in zip(schedules, zip(*by_rank, strict=True), strict=True):
        check(schedule, found)


def check(schedule: zb.Schedule, found) -> None:
    model, (inputs, targets) = nn.Sequential(*cut(schedule.num_stages)), batch()
    count = schedule.num_microbatches
    pieces = zip(inputs.chunk(count), targets.chunk(count), strict=True)
    losses = [nn.functional.mse_loss(model(x), y) for x, y in pieces]
    (sum(losses) / count).backward()
    assert [of_rank for of_rank, _ in found if of_rank] == [pytest.approx([loss.item() for loss in losses])]
    gradients = {f"{stage}.{name}": grad for _, of_rank in found for (stage, name), grad in of_rank.items()}
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], msg=lambda text, key=key: f"{schedule.name} {key}: {text}")
