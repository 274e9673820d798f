"""The table of docs/modules.md: per kind of module, what the split does, ours beside torch's (`--update-golden`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from zerobubble.models.gpt import Block, GPTConfig
from zerobubble.runtime import SplitBackward, WeightStore
from zerobubble.runtime.inlet import Inlet
from zerobubble.runtime.live_memory import LiveMemory
from zerobubble.runtime.split import backward

PAGE = Path(__file__).parent.parent / "docs" / "modules.md"
HEAD = """# What the split does with each kind of module

Written by `pytest tests/test_module_table.py --update-golden`. Per kind of module, ours beside the split of
`torch.distributed.pipelining`: whether every gradient equals that of plain autograd, which share of the trained
elements waits for W, and the bytes kept after B over those kept after F. Bytes count the stage's input; its output and
its input gradient are sent away, so we let go of them (torch keeps the output until W). Where a stage's output is a
view, as after a linear layer on three dimensions, torch's split raises "Can't detach views in-place"; it got a copy.

| module | right | waits for W | bytes after B / F | torch: right | waits for W | bytes after B / F |
|---|---|---|---|---|---|---|
"""


class SwiGLU(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Experts(nn.Module):
    """Every expert sees every token; the weights of all experts are one tensor."""

    def __init__(self, width, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, width) / width)
        self.down = nn.Parameter(torch.randn(experts, width, width) / width)

    def forward(self, x):
        share = self.router(x).softmax(-1)
        y = torch.einsum("btd,edh->ebth", x, self.up).relu()
        return torch.einsum("ebth,bte->bth", torch.einsum("ebth,ehd->ebtd", y, self.down), share)


class LowRank(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class TiedTwice(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(self.linear(x).relu())


WIDTH = 32
KINDS = {
    "linear, ReLU, linear": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)),
    "GPT block": lambda: Block(GPTConfig(width=WIDTH, heads=4, dropout=0.0)),
    "RMS norm and SwiGLU": lambda: SwiGLU(WIDTH),
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True),
    "experts by einsum": lambda: Experts(WIDTH),
    "convolutions and batch norm": lambda: nn.Sequential(
        nn.Conv1d(16, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU(), nn.ConvTranspose1d(32, 16, 3, padding=1)
    ),
    "one weight used twice": lambda: TiedTwice(WIDTH),
    "low-rank adapter on a frozen weight": lambda: LowRank(WIDTH),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "LSTM": lambda: Recurrent(WIDTH),
}


def example(kind):
    torch.manual_seed(0)
    module = KINDS[kind]()
    x = torch.randn(8, 16, WIDTH)
    weights = [p for p in module.parameters() if p.requires_grad]
    module(x).sum().backward()
    expected = [p.grad.clone() for p in weights]
    for p in weights:
        p.grad = torch.zeros_like(p)
    return module, x, weights, expected


def size(tensor):
    return tensor.numel() * tensor.element_size()


def right(weights, expected):
    return all(torch.allclose(p.grad, e, rtol=1e-4, atol=1e-5) for p, e in zip(weights, expected))


def touched(p):
    return p.grad is not None and bool(p.grad.any())


def ours(kind):
    module, source, weights, expected = example(kind)
    store, inlet = WeightStore(), Inlet()
    with LiveMemory() as live:
        x = source.clone()
        with SplitBackward(store):
            y = module(inlet.open(x))
        del x
        edge, gradient = get_gradient_edge(y), torch.ones_like(y)
        after_f = live.bytes - size(y) - size(gradient)
        del y
        backward([edge], [gradient], store)
        del edge, gradient, inlet
        after_b = live.bytes
    needed = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in store.tensors()}
    beyond = after_b - sum(needed.values())
    waits = sum(p.numel() for p in weights if not touched(p)) / sum(p.numel() for p in weights)
    store.run()
    return right(weights, expected), waits, after_b / after_f, beyond


def torchs(kind):
    module, source, weights, expected = example(kind)
    try:
        with LiveMemory() as live:
            x = source.clone().requires_grad_()
            y = module(x)
            y = y.clone() if y._is_view() else y
            after_f = live.bytes
            gradient = torch.ones_like(y)
            input_gradients, groups = stage_backward_input([y], [gradient], [x], iter(weights))
            del x, gradient, input_gradients
            after_b = live.bytes
        waits = sum(p.numel() for p in weights if not touched(p)) / sum(p.numel() for p in weights)
        stage_backward_weight(iter(weights), groups)
    except Exception as error:
        return f"no: {type(error).__name__}", None, None
    return right(weights, expected), waits, after_b / after_f


def cells(found):
    correct, waits, kept = found
    if waits is None:
        return f"{correct} | - | -"
    return f"{'yes' if correct else '**no**'} | {waits:.0%} | {kept:.2f}"


def test_every_gradient_is_right_and_the_page_says_what_was_found(request):
    rows = []
    for kind in KINDS:
        found = ours(kind)
        assert found[0], kind
        rows.append(f"| {kind} | {cells(found[:3])} | {cells(torchs(kind))} |")
    page = HEAD + "\n".join(rows) + "\n"
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page, encoding="utf-8")
    assert page == PAGE.read_text(encoding="utf-8"), "if the change is meant: pytest --update-golden"


@pytest.mark.parametrize("kind", KINDS)
def test_after_b_nothing_is_alive_but_what_w_needs(kind):
    assert ours(kind)[3] == 0
