"""Randomness that does not depend on schedule or partition: every layer draws from a seed of its own."""

from __future__ import annotations

import struct
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_for(*numbers: int) -> int:
    """A 63-bit seed that depends on all `numbers` (say seed, step, microbatch, layer) and their order."""
    digest = blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generators(device: torch.device) -> list[torch.Generator]:
    """The default generators of the CPU and of `device`."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@contextmanager
def own_randomness(device: torch.device) -> Iterator[list[torch.Generator]]:
    """Context: `generators(device)`, to be seeded at will; their state is put back after."""
    own = generators(device)
    states = [generator.get_state() for generator in own]
    try:
        yield own
    finally:
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)
