"""Trains a small GPT on text with one schedule, one process per rank.

    torchrun --nproc-per-node 2 examples/train_gpt.py --schedule zb_h1 --steps 50
    torchrun --nproc-per-node 4 examples/train_gpt.py --replicas 2          two pipelines of two ranks

With CUDA each process takes one GPU and they talk over NCCL; without it each takes one CPU thread, over gloo.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zerobubble as zb
from zerobubble import notation
from zerobubble.demo.text import load_text
from zerobubble.models import GPTConfig, gpt_layers, gpt_partition, next_token_loss

PRINT_EVERY = 10
EVALUATION_BATCHES = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedule",
        default="zb_h1",
        help="name of a generator, a schedule file (.csv, .json, .txt), or auto: measure for some steps, plan, go on",
    )
    parser.add_argument("--memory-limit", type=float, help="bytes of activations per rank, for auto")
    parser.add_argument("--microbatches", type=int, default=4, help="per step; a schedule file has its own")
    parser.add_argument("--steps", type=int, default=50, help="training steps of this run")
    parser.add_argument("--replicas", type=int, default=1, help="pipelines that share the processes and the data")
    parser.add_argument("--samples", type=int, default=16, help="per step and replica, over all microbatches")
    parser.add_argument("--blocks", type=int, default=4, help="transformer blocks; at least one per stage")
    parser.add_argument("--data", type=Path, help="text file or folder; by default the source of Python's library")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save", type=Path, help="write a checkpoint here at the end")
    parser.add_argument("--load", type=Path, help="go on from this checkpoint, which may be of another schedule")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as in: torchrun --nproc-per-node 2 examples/train_gpt.py")
    return arguments


def start_process_group() -> None:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, memory_limit: float | None
) -> zb.Schedule | zb.Auto:
    if name == "auto":
        return zb.Auto(num_microbatches, memory_limit)
    if Path(name).is_file():
        return notation.load(Path(name))
    return zb.generate(name, num_ranks, num_microbatches)


def save(path: Path, pipeline: zb.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 writes the parts of all ranks as one file. Nothing in it depends on schedule, ranks or replicas."""
    state = optimizer.state_dict()
    names = state["param_groups"][0]["param_names"]
    own = to_cpu((pipeline.state_dict(), {names[i]: values for i, values in state["state"].items()}))
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, parts)
    if parts is not None:
        models, optimizers = zip(*parts)
        whole = {"step": pipeline.step_count, "model": merged(models), "optimizer": merged(optimizers)}
        torch.save(whole, path)


def load(path: Path, pipeline: zb.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Every rank takes its own part of the file."""
    whole = torch.load(path, map_location="cpu", weights_only=True)
    pipeline.load_state_dict(whole["model"])
    pipeline.step_count = whole["step"]
    state = optimizer.state_dict()
    names = state["param_groups"][0]["param_names"]
    state["state"] = {i: whole["optimizer"][name] for i, name in enumerate(names)}
    optimizer.load_state_dict(state)


def to_cpu(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), value)


def merged(parts: Any) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what schedule auto chooses, and why
    start_process_group()
    config = GPTConfig(blocks=arguments.blocks)
    num_ranks = dist.get_world_size() // arguments.replicas
    schedule = make_schedule(arguments.schedule, num_ranks, arguments.microbatches, arguments.memory_limit)
    mesh = init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu",
        (arguments.replicas, num_ranks),
        mesh_dim_names=("replicas", "pipeline"),
    )
    partition = gpt_partition(config, num_ranks if isinstance(schedule, zb.Auto) else schedule.num_stages)
    pipeline = zb.Pipeline(gpt_layers(config), next_token_loss, schedule, partition=partition, mesh=mesh)
    optimizer = torch.optim.AdamW(pipeline.named_parameters(), lr=arguments.learning_rate)
    zb.shard_optimizer(optimizer, pipeline)  # each replica keeps its share of the state
    if arguments.load:
        load(arguments.load, pipeline, optimizer)

    text = load_text(arguments.data, config.context)
    begin, is_first = pipeline.step_count, dist.get_rank() == 0
    own = slice(mesh.get_local_rank("replicas"), None, arguments.replicas)
    for step in range(begin, begin + arguments.steps):
        inputs, targets = text.batch(step, arguments.samples * arguments.replicas, config.context)
        loss = pipeline.step(inputs[own], targets[own])
        optimizer.step()
        optimizer.zero_grad()
        # the loss comes from the last stage: to read it is to wait for it, so only now and then
        if is_first and (step % PRINT_EVERY == 0 or step + 1 == begin + arguments.steps):
            print(f"step {step:4}  loss {loss:.4f}", flush=True)

    held_out = [
        pipeline.evaluate(*text.held_out_batch(i, arguments.samples, config.context)) for i in range(EVALUATION_BATCHES)
    ]
    mean = math.fsum(map(float, held_out)) / len(held_out)
    if is_first:
        print(f"held-out loss {mean:.4f} nats per byte; unigram entropy {text.unigram_entropy():.4f}")
    if arguments.save:
        save(arguments.save, pipeline, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
