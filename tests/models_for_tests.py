"""Small models and runs that several tests share, importable by the processes that tests start."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from strategies import random_schedule

import zerobubble as zb
from zerobubble.models import GPTConfig, gpt_layers, gpt_partition, next_token_loss
from zerobubble.runtime import Pipeline
from zerobubble.schedule import Placement

torch.set_num_threads(1)  # as in the processes: some kernels add up in another order with more threads

TINY_GPT = GPTConfig(vocabulary=32, context=12, width=16, heads=2, blocks=8, dropout=0.2)


def tiny_batch(samples=8, length=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (samples, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def tiny_pipeline(schedule, config=TINY_GPT, dtype=torch.float32, **options):
    """A pipeline over the tiny GPT; more stages than blocks are filled with the identity."""
    layers = [lambda make=make: make().to(dtype) for make in gpt_layers(config)]
    if schedule.num_stages <= config.blocks:
        options.setdefault("partition", gpt_partition(config, schedule.num_stages))
    return Pipeline(layers, next_token_loss, schedule, seed=3, **options)


def train_tiny(pipeline, steps=2):
    """Losses of some AdamW steps."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        losses.append(pipeline.step(*tiny_batch(seed=step)))
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def gradients_after_one_step(report, names, num_ranks, num_microbatches):
    """For each generator: loss, and this rank's gradients by name."""
    found = {}
    for name in names:
        pipeline = tiny_pipeline(zb.generate(name, num_ranks, num_microbatches), timeout=60)
        loss = pipeline.step(*tiny_batch()).item()
        found[name] = loss, {key: p.grad for key, p in pipeline.named_parameters()}
    return found


def losses_on_processes(report, name, num_ranks, num_microbatches, steps):
    return train_tiny(tiny_pipeline(zb.generate(name, num_ranks, num_microbatches), timeout=60), steps)


def changing_shapes(report, dynamic_shapes):
    pipeline = tiny_pipeline(zb.zb_h1(2, 2), timeout=20, dynamic_shapes=dynamic_shapes)
    return [pipeline.step(*tiny_batch(length=length)).item() for length in (12, 12, 7, 12)]


def long_run(report, name, steps):
    """After each tenth of a long run: resident KiB, open files."""
    pipeline = tiny_pipeline(zb.generate(name, 2, 4), timeout=60)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    tenths = []
    for _ in range(10):
        for step in range(steps // 10):
            loss = pipeline.step(*tiny_batch(seed=step))
            optimizer.step()
            optimizer.zero_grad()
        loss.item()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
        tenths.append((resident, len(os.listdir("/proc/self/fd"))))
    return tenths


class Faulty(torch.nn.Module):
    """Does something wrong in the forward of a microbatch of a step, on the rank where it lives."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 6:
            self.wrong()
        return x


def faulty_pipeline(report, rank, wrong, timeout):
    """Two ranks; something goes wrong on `rank` in the second step."""
    layers = [torch.nn.Linear(4, 4), Faulty(wrong if rank == 0 else int), torch.nn.Linear(4, 4),
              Faulty(wrong if rank == 1 else int)]  # fmt: skip
    pipeline = Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 4), timeout=timeout)
    try:
        for _ in range(3):
            pipeline.step(torch.ones(4, 4), torch.ones(4))
    except zb.ZeroBubbleError as error:
        report((dist.get_rank(), str(error)))
        raise


def small_gradients(schedule, num_layers, **options):
    """Gradients, by name, of this process's part of a small model of `num_layers` layers after a step."""

    def layer():
        return torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))

    partition = None if schedule.num_stages == num_layers else [num_layers]
    pipeline = Pipeline(
        [layer] * num_layers, lambda y, _: (y**2).mean(), schedule, partition=partition, timeout=60, **options
    )
    pipeline.step(torch.randn(2 * schedule.num_microbatches, 4, generator=torch.Generator().manual_seed(0)))
    return {name: p.grad for name, p in pipeline.named_parameters()}


def run_random_schedules(report, seeds):
    return [small_gradients(random_schedule(Placement.v(2), 3, Random(seed)), 4) for seed in seeds]


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in backward")


class Breaks(torch.nn.Module):
    """Raises in the backward from its third call on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return RaisesInBackward.apply(x) if self.calls > 2 else x


def two_linear_ranks(timeout, **options):
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    return Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 4), timeout=timeout, **options)


def misfortune(report, kind, timeout=15.0):
    """Two ranks, several steps; the misfortune of this kind meets rank 1."""
    rank = dist.get_rank()
    unlucky = rank == 1
    if kind == "late start" and unlucky:
        time.sleep(4)
    if kind == "backward":
        layers = [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), Breaks())]
        pipeline = Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 4), timeout=timeout)
    else:
        pipeline = two_linear_ranks(timeout)
    try:
        for step in range(4):
            if unlucky and step == 2:
                if kind == "optimizer":
                    raise ArithmeticError("in the optimizer")
                if kind == "less data":
                    os._exit(0)  # its loop ends; the process goes
                if kind == "dtype":
                    pipeline.module.to(torch.float64)
            loss = pipeline.step(torch.ones(4, 4), torch.ones(4))
        return loss.item()
    except zb.ZeroBubbleError as error:
        report((rank, str(error)))
        raise


def one_step(report, seconds):
    """A start with some ranks late by chance."""
    time.sleep(seconds[dist.get_rank()])
    return two_linear_ranks(60).step(torch.ones(4, 4)).item()


def five_hundred_microbatches(report):
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    pipeline = Pipeline(layers, lambda y, _: y.mean(), zb.zb_v(2, 500), timeout=60)
    return [pipeline.step(torch.ones(500, 4)).item() for _ in range(2)]


def lonely_evaluation(report):
    pipeline = two_linear_ranks(5)
    try:
        if dist.get_rank() == 1:
            pipeline.evaluate(torch.ones(4, 4))
        else:
            time.sleep(12)
    except zb.ZeroBubbleError as error:
        report(str(error))
        raise


def changing_lengths_on_four_ranks(report, lengths):
    pipeline = tiny_pipeline(zb.zb_h1(4, 4), timeout=60, dynamic_shapes=True)
    return [pipeline.step(*tiny_batch(length=length)).item() for length in lengths]
