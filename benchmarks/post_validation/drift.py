"""Claim: undo="reverse" takes no memory and drifts little; undo="snapshot" takes memory and drifts not at all.

A small GPT on the demo's text; every step is taken unclipped, undone, and taken again with its gradients halved, once
with each way to undo. Drift is the distance between the two runs over the size of what drifts: weights, biases, and
the optimizer's moments. Each run takes the gradients of its own parameters, so that a drift feeds on itself. The bias
of attention's keys has no influence on the loss: its gradient is rounding noise, which Adam takes for a direction.

    python benchmarks/post_validation/drift.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from zerobubble.models import GPTConfig, gpt_layers, next_token_loss
from zerobubble.optim.undo import STRATEGIES
from zerobubble.runtime.live_memory import LiveMemory

if TYPE_CHECKING:
    from torch import Tensor

OPTIMIZERS = {
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
}
CONFIG = GPTConfig(vocabulary=64, context=32, width=32, heads=2, blocks=2, dropout=0.0)
PARAMETERS = {"weights": 2, "biases": 1}
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


class Trainer:
    """One run."""

    def __init__(self, name: str, undo: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(make() for make in gpt_layers(CONFIG)))
        self.optimizer = OPTIMIZERS[name](list(self.model.parameters()))
        self.undo = undo
        self.held = 0

    def step(self, tokens: Tensor) -> None:
        """Step, undo, step with half the gradients. `held` is the bytes more that are alive before it is undone."""
        loss = next_token_loss(self.model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        gradients = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        with LiveMemory() as memory:
            undo = STRATEGIES[self.undo](self.optimizer, gradients)
            self.optimizer.step()
            self.held = memory.bytes
            undo()
        for _, gradient in gradients:
            gradient.mul_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self, what: str) -> list[Tensor]:
        """The weights (of two dimensions), the biases (of one), or one of the moments."""
        parameters = list(self.model.parameters())
        if what in PARAMETERS:
            return [p.detach() for p in parameters if p.dim() == PARAMETERS[what]]
        return [self.optimizer.state[p][what] for p in parameters if what in self.optimizer.state[p]]


def drift(one: Trainer, other: Trainer, what: str) -> float | None:
    pairs = list(zip(one.tensors(what), other.tensors(what)))
    if not pairs:
        return None
    distance = sum((a.double() - b.double()).square().sum().item() for a, b in pairs)
    size = sum(b.double().square().sum().item() for _, b in pairs)
    return (distance / size) ** 0.5


def text_batches(steps: int) -> list[Tensor]:
    """The same for every run."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(0, CONFIG.vocabulary, (997,), generator=generator)  # something that can be learned
    starts = torch.randint(0, 900, (steps, 8), generator=generator)
    return [torch.stack([pattern[s : s + CONFIG.context + 1] for s in row.tolist()]) for row in starts]


def measure(name: str, lengths: list[int]) -> dict[str, Any]:
    """Drift of each quantity after so many amended steps, and the bytes that each way to undo holds."""
    snapshot, reverse = Trainer(name, "snapshot"), Trainer(name, "reverse")
    found: dict[str, Any] = {"drift": {}}
    for step, tokens in enumerate(text_batches(max(lengths)), 1):
        snapshot.step(tokens)
        reverse.step(tokens)
        if step in lengths:
            found["drift"][step] = {what: drift(reverse, snapshot, what) for what in (*PARAMETERS, *MOMENTS)}
        if step == 2:  # in the first step the optimizer makes its state
            found["bytes"] = {"snapshot": snapshot.held, "reverse": reverse.held}
    found["bytes"]["parameters"] = sum(p.numel() * p.element_size() for p in snapshot.model.parameters())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="undo='reverse': relative drift, and bytes held until the step is final")
    for column in (
        "optimizer",
        "amended steps",
        "weights",
        "biases",
        "first moment",
        "second moment",
        "reverse",
        "snapshot",
    ):
        table.add_column(column, justify="right")
    rows = {}
    for name in OPTIMIZERS:
        rows[name] = row = measure(name, args.steps)
        for steps, by_what in row["drift"].items():
            first = by_what["momentum_buffer"] if by_what["exp_avg"] is None else by_what["exp_avg"]
            second = by_what["exp_avg_sq"]
            sizes = row["bytes"]
            table.add_row(
                name, str(steps), f"{by_what['weights']:.1e}", f"{by_what['biases']:.1e}", f"{first:.1e}",
                "" if second is None else f"{second:.1e}", f"{sizes['reverse']:,}",
                f"{sizes['snapshot']:,} ({sizes['snapshot'] / sizes['parameters']:.1f} x parameters)",
            )  # fmt: skip
    Console(width=130).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
