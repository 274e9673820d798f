"""Training runs whose gradients are bent at chosen steps, for tests of the optimizers; importable by processes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerobubble as zb
from zerobubble.runtime import Pipeline

torch.set_num_threads(1)

LAYERS = 8
WIDTH = 6
CLIP = 0.5
SAMPLES = 12

# What the gradients of a step are bent to, layer by layer: the norm of each over CLIP
FINE, POOLED, LONE = 0.1, 0.42, 50.0
"""POOLED: only all layers together exceed CLIP, those of one rank do not."""

BENDS = ("fine", "pooled", "lone", "nan", "inf")


@dataclass(frozen=True)
class Run:
    """One training run: what happens to the gradients of each step, and what is read after some of them."""

    schedule: zb.Schedule
    bends: tuple[str, ...]
    optimizer: str = "adamw"
    seed: int = 0
    scaled: bool = False
    autocast: bool = False
    reactive: bool = False
    reads: dict[int, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    adaptive: bool = False

    @property
    def steps(self) -> int:
        return len(self.bends)


class Half(nn.Module):
    """Rounds to fp16, forward and backward: large scales overflow here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.half().float()


class Block(nn.Module):
    """A layer with dropout; every second one has batch norm, and one is not split (autocast caches its weight)."""

    def __init__(self, number: int, scaled: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=number % 2 == 0)  # batch norm takes a bias away
        self.norm = nn.BatchNorm1d(WIDTH) if number % 2 else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.number = number
        self.round = Half() if scaled else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with zb.unsplit() if self.number == 0 else nullcontext():
            y = self.linear(x)
        return x + self.round(self.dropout(self.norm(y)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """With noise from the process's own random state: a loss function may draw, too."""
    return ((output + 0.01 * torch.randn_like(output) - target) ** 2).mean()


def pipeline_of(run: Run) -> Pipeline:
    layers = [lambda n=n: Block(n, run.scaled) for n in range(LAYERS)]
    reactive = zb.Costs(unit="ms") if run.reactive else None
    return Pipeline(layers, loss_of, run.schedule, seed=run.seed, timeout=60, reactive=reactive)


def inner_optimizer(run: Run, pipeline: Pipeline) -> torch.optim.Optimizer:
    parameters = list(pipeline.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


def bend(pipeline: Pipeline, kind: str, random: Random) -> None:
    """Bend the gradients, by layer, so that the outcome does not depend on where the layers live."""
    chosen, element = str(random.randrange(LAYERS)), random.randrange(WIDTH)
    for number, layer in pipeline.module.items():
        gradients = [p.grad for p in layer.parameters()]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        over = POOLED if kind == "pooled" else LONE if kind == "lone" and number == chosen else FINE
        for gradient in gradients:
            gradient.mul_(over * CLIP / norm)
        if number == chosen and kind in ("nan", "inf"):
            gradients[0][element, 0] = float(kind)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator)


def copied(pipeline: Pipeline, optimizer: Any) -> dict[str, Any]:
    """Everything that a checkpoint holds, by names that do not depend on the layout."""
    found: dict[str, Any] = {key: value.clone() for key, value in pipeline.state_dict().items()}
    names = {parameter: name for name, parameter in pipeline.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[parameter]}/{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
    found["scale"] = optimizer.state_dict().get("scaler")
    found["lr"] = [group["lr"] for group in optimizer.param_groups]
    return found


def train(run: Run, synchronous: bool = False) -> dict[str, Any]:
    """Losses, norms, what was read on the way, and the final checkpoint of this process's part."""
    torch.manual_seed(run.seed)
    pipeline = pipeline_of(run)
    kind = zb.SynchronousOptimizer if synchronous else zb.PostValidatedOptimizer
    options = {} if synchronous else {**run.options, "adaptive": run.adaptive}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3) if run.scaled else None
    norm_type = run.options.get("norm_type", 2.0)
    options = {key: value for key, value in options.items() if key != "norm_type"}
    clip = 20.0 if run.scaled else CLIP
    optimizer = kind(inner_optimizer(run, pipeline), clip, norm_type, scaler=scaler, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    random = Random(run.seed)
    losses, norms, read = [], [], {}
    for step, bent in enumerate(run.bends):
        with torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
            losses.append(pipeline.step(*batch(step)))
        if not run.scaled:
            bend(pipeline, bent, random)
        optimizer.step()
        norms.append(optimizer.grad_norm)
        scheduler.step()
        what = run.reads.get(step, "")
        if what == "checkpoint" or (what == "lonely checkpoint" and (synchronous or dist.get_rank() == 0)):
            read[step] = copied(pipeline, optimizer)
        elif what == "evaluate":
            read[step] = pipeline.evaluate(*batch(1000 + step)).item()
        elif what == "use":
            pipeline.use(zb.gpipe(pipeline.schedule.num_ranks, pipeline.schedule.num_microbatches))
    return {
        "losses": [loss.item() for loss in losses],
        "norms": [norm.item() for norm in norms],
        "read": read,
        "end": copied(pipeline, optimizer),
        "counts": None if synchronous else optimizer.counts,
    }


def train_all(_report: Any, runs: list[Run]) -> list[dict[str, Any]]:
    return [train(run) for run in runs]


def train_both(_report: Any, runs: list[Run]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(train(run, synchronous=True), train(run)) for run in runs]


def train_with_two_optimizers(_report: Any, run: Run) -> list[Any]:
    """The end of a synchronous run and of one ahead, each with an optimizer for weights and one for biases."""
    ends = []
    for kind in (zb.SynchronousOptimizer, zb.PostValidatedOptimizer):
        pipeline = pipeline_of(run)
        weights = [p for p in pipeline.parameters() if p.dim() > 1]
        biases = [p for p in pipeline.parameters() if p.dim() == 1]
        optimizers = [kind(torch.optim.AdamW(weights), CLIP), kind(torch.optim.SGD(biases, lr=0.1), CLIP / 2)]
        random = Random(run.seed)
        for step, bent in enumerate(run.bends):
            pipeline.step(*batch(step))
            bend(pipeline, bent, random)
            for optimizer in optimizers:
                optimizer.step()
        norms = [optimizer.grad_norm.item() for optimizer in optimizers]
        ends.append(({key: value.clone() for key, value in pipeline.state_dict().items()}, norms))
    return [*ends, [optimizer.counts.amended for optimizer in optimizers]]


def reference(run: Run) -> dict[str, Any]:
    """The same run in this process, with one stage, waiting for the norm before every step."""
    one = zb.gpipe(1, run.schedule.num_microbatches)
    return train(replace(run, schedule=one), synchronous=True)


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.isnan(), other.isnan()) and torch.equal(
            one.nan_to_num(), other.nan_to_num()
        )  # fmt: skip
    if isinstance(one, float):
        return one == other or (one != one and other != other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_same_run(run: Run, parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """All ranks' parts together are what the reference gives."""
    where = f"{run.schedule!r}, {run.optimizer}, {run.bends[:20]}"
    for part in parts:
        assert part["losses"] == expected["losses"], f"losses: {where}"
        assert same(part["norms"], expected["norms"]), f"norms: {where}"
        for step, value in part["read"].items():
            assert_part(value, expected["read"][step], f"read after step {step}: {where}")
        assert_part(part["end"], expected["end"], f"end: {where}")
    found = set().union(*(part["end"].keys() for part in parts))
    assert found == expected["end"].keys()


def assert_close_run(run: Run, parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """As far as rounding goes, all ranks' parts together are what the reference gives."""
    for part in parts:
        torch.testing.assert_close(part["losses"], expected["losses"], rtol=1e-3, atol=1e-4)
        for key, value in part["end"].items():
            torch.testing.assert_close(value, expected["end"][key], rtol=1e-2, atol=1e-4, msg=key)


def assert_part(value: Any, expected: Any, where: str) -> None:
    if not isinstance(value, dict):
        assert value == expected, where
        return
    different = [key for key in value if not same(value[key], expected[key])]
    assert not different, f"{different[:5]} differ, {where}"
