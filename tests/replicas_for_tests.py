"""Runs on replicas of a pipeline, importable by the processes that tests start."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerobubble as zb
from zerobubble.runtime import Pipeline
from zerobubble.runtime.emulation import EmulatedLayer, Times, emulated, emulated_loss

torch.set_num_threads(1)  # as in the processes: some kernels add up in another order with more threads

WIDTH, SAMPLES = 12, 8


class Block(nn.Module):
    """A residual block in doubles, with parameters that wait for W and some that do not."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.double()

    def forward(self, x):
        return x + self.dropout(self.down(self.up(self.norm(x)).tanh())) * self.scale


def squares(output, targets):
    return ((output - targets) ** 2).mean()


def sum_of_squares(output, targets):
    return ((output - targets) ** 2).sum()


def batch(step, replicas, replica=None):
    """The whole batch of a step, or a replica's part of it."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, SAMPLES * replicas, WIDTH, generator=generator, dtype=torch.float64)
    part = slice(None) if replica is None else slice(SAMPLES * replica, SAMPLES * (replica + 1))
    return inputs[part], targets[part]


def on_replicas(layers, schedule, replicas, loss_fn=squares, bucket_cap_mb=0.002, **options):
    """A pipeline, with buckets so small that every stage has several."""
    mesh = init_device_mesh("cpu", (replicas, schedule.num_ranks), mesh_dim_names=("replicas", "pipeline"))
    return Pipeline(layers, loss_fn, schedule, mesh=mesh, timeout=60, bucket_cap_mb=bucket_cap_mb, **options)


def replica_of(num_ranks):
    return dist.get_rank() // num_ranks


def adamw(pipeline):
    return torch.optim.AdamW(pipeline.parameters(), lr=1e-2)


def parameters_of(pipeline):
    return {name: p.detach().clone() for name, p in pipeline.named_parameters()}


def gradients_of(pipeline):
    return {name: None if p.grad is None else p.grad.clone() for name, p in pipeline.named_parameters()}


def train(pipeline, make_batch, steps=3, make_optimizer=adamw, **options):
    """Losses of some steps, and the parameters after each."""
    optimizer = make_optimizer(pipeline)
    losses, parameters = [], []
    for step in range(steps):
        losses.append(pipeline.step(*make_batch(step), **options))
        optimizer.step()
        optimizer.zero_grad()
        parameters.append(parameters_of(pipeline))
    return [loss.item() for loss in losses], parameters


def train_on_replicas(report, names, num_ranks, replicas):
    replica, found = replica_of(num_ranks), {}
    for name in names:
        pipeline = on_replicas([Block] * 8, zb.generate(name, num_ranks, 4), replicas)
        found[name] = train(pipeline, lambda step: batch(step, replicas, replica))
    return found


def count_tokens():
    """Replicas with parts of different size, and the number of elements of all together."""
    pipeline = on_replicas([Block] * 4, zb.zb_h1(2, 2), 2, sum_of_squares)
    inputs, targets = batch(0, 2)
    part = slice(0, 5) if replica_of(2) == 0 else slice(5, None)
    loss = pipeline.step(inputs[part], targets[part], token_count=targets.numel())
    return loss.item(), gradients_of(pipeline)


def accumulate():
    """Gradients after a step under `no_sync`, after one more, and after another one; there were some before."""
    pipeline = on_replicas([Block] * 4, zb.zb_h1(2, 2), 2)
    replica, found = replica_of(2), []
    for parameter in pipeline.parameters():
        parameter.grad = torch.full_like(parameter, replica)
    with pipeline.no_sync():
        pipeline.step(*batch(0, 2, replica))
    found.append(gradients_of(pipeline))
    for step in (1, 2):
        pipeline.step(*batch(step, 2, replica))
        found.append(gradients_of(pipeline))
    return found, [len(buckets) > 0 for buckets in pipeline.reductions(last=3)]


class Selective(nn.Module):
    """Has parameters that are frozen, that nobody uses, and that one replica alone uses."""

    def __init__(self, uses):
        super().__init__()
        self.base, self.frozen, self.unused, self.chosen = (nn.Linear(WIDTH, WIDTH).double() for _ in range(4))
        self.frozen.requires_grad_(False)
        self.uses = uses

    def forward(self, x):
        x = self.frozen(self.base(x))
        return self.chosen(x) if self.uses else x


def select():
    replica = replica_of(2)
    pipeline = on_replicas([Selective(replica == 0), Block()], zb.zb_h1(2, 2), 2)
    pipeline.step(*batch(0, 2, replica))
    return gradients_of(pipeline)


def tied_layers():
    """First and last layer use one weight."""
    torch.manual_seed(0)
    layers = [Block(), Block(), Block(), Block()]
    layers[3].up.weight = layers[0].up.weight
    return layers


def train_tied():
    pipeline = on_replicas(tied_layers(), zb.zb_v(2, 4), 2)
    result = train(pipeline, lambda step: batch(step, 2, replica_of(2)))
    return result, [bucket.stage for bucket in pipeline.reductions()[0] if bucket.rank == 0]


def start():
    """Weights at the start where every process made its own; the same data everywhere, with dropout."""
    torch.manual_seed(dist.get_rank())
    layers = [Block(0.3), nn.BatchNorm1d(WIDTH).double(), Block(0.3)]
    layers[1].running_mean += dist.get_rank()
    pipeline = on_replicas(layers, zb.zb_h1(2, 2), 2)
    weights = {name: value.clone() for name, value in pipeline.state_dict().items()}
    with pipeline.no_sync():
        loss = pipeline.step(*batch(0, 1)).item()
    return weights, loss, gradients_of(pipeline)


def start_alone(weights):
    """The same without replicas."""
    pipeline = Pipeline([Block(0.3), nn.BatchNorm1d(WIDTH).double(), Block(0.3)], squares, zb.gpipe(1, 2))
    pipeline.load_state_dict(weights)
    return pipeline.step(*batch(0, 1)).item(), gradients_of(pipeline)


def refusals():
    """What wrong meshes and layers are told."""
    schedule = zb.zb_h1(2, 2)
    two = init_device_mesh("cpu", (2, 2))

    def refused(layers=(Block, Block), schedule=schedule, **options):
        try:
            Pipeline(layers, squares, schedule, timeout=30, **options)
        except zb.ZeroBubbleError as error:
            return str(error)

    return {
        "both": refused(mesh=two, group=dist.group.WORLD),
        "dimensions": refused(mesh=init_device_mesh("cpu", (2, 2, 1))),
        "size": refused(mesh=two, schedule=zb.zb_h1(4, 4)),
        "layers": refused([nn.Linear(4, 4 + replica_of(2)) for _ in range(2)], mesh=two),
        "schedule": refused(schedule=(zb.zb_h1, zb.zb_h2)[replica_of(2)](2, 4), mesh=two),
        "rank": refused(schedule=(zb.zb_h1, zb.zb_h2)[dist.get_rank() % 2](2, 4), mesh=two),
    }


def one_dimension():
    """A mesh of the pipeline alone; the losses of two steps."""
    mesh = init_device_mesh("cpu", (4,))
    pipeline = Pipeline([Block] * 4, squares, zb.zb_h1(4, 4), mesh=mesh, timeout=60)
    return pipeline.replicas is None, [pipeline.step(*batch(step, 1)).item() for step in range(2)]


def clip():
    """Norm over the whole pipeline, and the clipped gradients."""
    pipeline = on_replicas([Block] * 4, zb.zb_v(2, 4), 2)
    pipeline.step(*batch(0, 2, replica_of(2)))
    return pipeline.clip_grad_norm_(1e-3), gradients_of(pipeline)


def measure():
    """Bytes alive after every op, and whether measuring leaves gradients behind."""
    pipeline = on_replicas([Block] * 4, zb.zb_h1(2, 4), 2)
    part = batch(0, 2, replica_of(2))
    pipeline.step(*part)
    trace = pipeline.measure_memory(*part)
    return list(map(len, trace.live_bytes)), all(p.grad is None for p in pipeline.parameters())


class Slow(nn.Module):
    """An emulated layer with a weight of some size."""

    def __init__(self, times, elements):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self.times = times

    def forward(self, x):
        return emulated(x, self.weight, self.times)


def overlap():
    """Per schedule, timeline and reductions of the second step, with four layers of slow W per rank."""
    found = {}
    for name in ("one_f_one_b", "zb_h1", "zb_v"):
        layers = [lambda: Slow(Times(0.002, 0.002, 0.02), 1000)] * 8
        pipeline = on_replicas(layers, zb.generate(name, 2, 4), 2, emulated_loss)
        for _ in range(2):
            pipeline.step(torch.ones(4, 1))
        found[name] = pipeline.timelines()[0], pipeline.reductions()[0]
    return found


def optimizer_in_groups(pipeline):
    """Weight decay for matrices only, and a learning rate that falls."""
    matrices = [p for p in pipeline.parameters() if p.dim() > 1]
    others = [p for p in pipeline.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train_sharded(shard):
    """Parameters after some steps; halfway the optimizer is made anew from its state."""
    pipeline = on_replicas([Block] * 4, zb.zb_v(2, 4), 2)
    optimizer = shard(optimizer_in_groups(pipeline), pipeline)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        if step == 2:
            state = optimizer.state_dict()
            optimizer = shard(optimizer_in_groups(pipeline), pipeline)
            optimizer.load_state_dict(state)
            scheduler.optimizer = optimizer
        pipeline.step(*batch(step, 2, replica_of(2)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    kept = sum(parameter.nbytes for parameter in optimizer.state)
    return parameters_of(pipeline), optimizer.state_dict(), kept


def not_sharded(optimizer, pipeline):
    return optimizer


def shard():
    """Training with the optimizer sharded, and as it is."""
    return train_sharded(zb.shard_optimizer), train_sharded(not_sharded)


def closure():
    """What a sharded optimizer says to a closure and to being sharded again, and whether it works after."""
    pipeline = on_replicas([Block] * 4, zb.zb_h1(2, 4), 2)
    optimizer = zb.shard_optimizer(adamw(pipeline), pipeline)
    said = []
    for wrong in (lambda: optimizer.step(lambda: 0.0), lambda: zb.shard_optimizer(optimizer, pipeline)):
        try:
            wrong()
        except zb.ZeroBubbleError as error:
            said.append(str(error))
    try:
        zb.PostValidatedOptimizer(optimizer, undo="reverse")
    except zb.ZeroBubbleError as error:
        said.append(str(error))
    pipeline.step(*batch(0, 2, replica_of(2)))
    optimizer.step()
    return said, parameters_of(pipeline)


def train_clipped(wrap, shard):
    """Parameters after steps that are all clipped, and one that is skipped on all replicas."""
    pipeline = on_replicas([Block] * 4, zb.zb_h1(2, 4), 2)
    optimizer = wrap(shard(adamw(pipeline), pipeline), clip_norm=0.1)
    for step in range(4):
        inputs, targets = batch(step, 2, replica_of(2))
        pipeline.step(inputs * (math.inf if step == 2 and replica_of(2) == 1 else 1.0), targets)
        optimizer.step()
    parameters, counts = parameters_of(pipeline), getattr(optimizer, "counts", None)
    return parameters, counts and dataclasses.astuple(counts)


def post_validate():
    """The same by three ways."""

    def ahead(optimizer, **options):
        return zb.PostValidatedOptimizer(optimizer, **options, adaptive=False)

    waiting = zb.SynchronousOptimizer

    ways = (ahead, zb.shard_optimizer), (ahead, not_sharded), (waiting, not_sharded)
    return [train_clipped(*way) for way in ways]


def plan_itself():
    """The schedules with which a pipeline that plans itself began and went on."""
    layers = [lambda: EmulatedLayer(Times(0.002, 0.002, 0.002))] * 2
    pipeline = on_replicas(
        layers, zb.Auto(6, memory_limit=1e9, profile_steps=2, effort="quick", num_ranks=2), 2, emulated_loss
    )
    first = pipeline.schedule
    for _ in range(5):
        pipeline.step(torch.ones(6, 1))
    return first, pipeline.schedule


def train_three_schedules():
    return train_on_replicas(None, ["one_f_one_b", "zb_h1", "zb_v"], 2, 2)


SCENARIOS = (
    train_three_schedules,
    count_tokens,
    accumulate,
    select,
    train_tied,
    start,
    refusals,
    one_dimension,
    clip,
    measure,
    overlap,
    shard,
    closure,
    post_validate,
    plan_itself,
)


def play(report):
    """All scenarios on two pipelines of two ranks: what each returned, by name."""
    return {scenario.__name__: scenario() for scenario in SCENARIOS}
