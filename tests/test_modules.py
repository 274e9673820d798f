"""Every kind of module and use that people have, under a zero-bubble pipeline: what plain autograd gives.

Each test runs ZB-V on two ranks (four stages) over three microbatches and compares with plain autograd, which
accumulates over the same microbatches.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from zerobubble.errors import PipelineError
from zerobubble.runtime import Pipeline

MICROBATCHES = 3


def mean_square(y, _targets):
    return (y.float() ** 2).mean()


def plain(layers, x, loss_fn=mean_square):
    """Losses and gradients of plain autograd with accumulation over the microbatches."""
    for part in x.tensor_split(MICROBATCHES):
        value = part
        for layer in layers:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        (loss_fn(value, None) / MICROBATCHES).backward()
    return take_gradients(layers)


def piped(layers, x, loss_fn=mean_square, schedule=None):
    pipeline = Pipeline(layers, loss_fn, schedule or zb.zb_v(2, MICROBATCHES))
    pipeline.step(x)
    return take_gradients(layers)


def take_gradients(layers):
    found = [p.grad for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    return found


def assert_same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Call(nn.Module):
    """A layer of a function of (module, x), with parameters a and b [4, 4] and c [4]."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.c = nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, *x):
        return self.function(self, *x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight**2

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight**2, (grad * 2 * x * weight).sum(0)


@torch.no_grad()
def without_gradient(x):
    return x * 2


FUNCTIONS = {
    "einsum": lambda m, x: torch.einsum("bi,ij->bj", x, m.a),
    "einsum, weight first": lambda m, x: torch.einsum("ij,bj -> bi", m.a, x),
    "einsum without arrow": lambda m, x: torch.einsum("bi,ij", x, m.a),
    "weight on the left": lambda m, x: (m.a @ x.mT).mT,
    "product of parameters": lambda m, x: x @ (m.a @ m.b),
    "batched product": lambda m, x: (x.unsqueeze(0) @ m.a.unsqueeze(0))[0],
    "multiplied and shifted": lambda m, x: x * m.c + m.c,
    "custom autograd function": lambda m, x: Square.apply(x, m.c),
    "stage input used twice": lambda m, x: F.linear(x, m.a) + F.linear(x, m.b),
    "weight used twice": lambda m, x: F.linear(F.linear(x, m.a), m.a, m.c),
    "weight used by linear and otherwise": lambda m, x: F.linear(x, m.a) * m.a.mean(),
    "in place on the input": lambda m, x: F.linear(x.relu_(), m.a),
    "output changed in place": lambda m, x: F.linear(x, m.a).relu_(),
    "output is a view": lambda m, x: F.linear(x, m.a).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)[:, :4],
    "output is the input": lambda m, x: x,
    "part without gradient": lambda m, x: F.linear(x, m.a) + without_gradient(x),
    "weights under no_grad": lambda m, x: x + F.linear(x, m.a.detach()),
    "slice of a parameter": lambda m, x: F.linear(x, torch.cat([m.a[:2], m.b[2:]])),
    "checkpointed": lambda m, x: checkpoint(lambda v: F.linear(v, m.a).relu(), x, use_reentrant=False),
    "checkpointed, reentrant": lambda m, x: checkpoint(lambda v: F.linear(v, m.a).relu(), x, use_reentrant=True),
    "backward hook on an activation": lambda m, x: hooked(F.linear(x, m.a)),
}  # fmt: skip


def hooked(y):
    y.register_hook(lambda grad: grad * 2)
    return y


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_function(kind):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), *[Call(FUNCTIONS[kind]) for _ in range(2)], nn.Linear(4, 4)]
    x = torch.randn(6, 4)
    assert_same(piped(layers, x), plain(layers, x))


MODULES = {
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (6, 5, 8)),
    "convolution and group norm": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()), (6, 4, 5, 5),
    ),
    "padding by name": (lambda: nn.Conv1d(4, 4, 3, padding="same"), (6, 4, 5)),
    "circular padding": (lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), (6, 4, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(4, 4, 3, padding=1), (6, 4, 5)),
    "RMS norm": (lambda: nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4)), (6, 4)),
    "bilinear": (lambda: Twice(nn.Bilinear(4, 4, 4)), (6, 4)),
    "recurrent": (lambda: First(nn.GRU(4, 4, batch_first=True)), (6, 3, 4)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), (6, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (6, 4)),
    "partly frozen": (lambda: partly_frozen(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), (6, 4)),
    "low-rank adapter": (lambda: Adapter(), (6, 4)),
    "nothing to train": (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(4, elementwise_affine=False)), (6, 4)),
}  # fmt: skip


class First(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


class Twice(First):
    def forward(self, x):
        return self.module(x, x)


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def partly_frozen(module):
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize("kind", MODULES)
def test_module(kind):
    torch.manual_seed(0)
    make, shape = MODULES[kind]
    layers = [make() for _ in range(4)]
    if not any(True for layer in layers for _ in layer.parameters()):
        layers[0] = nn.Linear(4, 4)
    x = torch.randn(shape)
    assert_same(piped(layers, x), plain(layers, x))


def test_batch_norm_updates_its_statistics_once_per_microbatch():
    torch.manual_seed(0)
    x = torch.randn(9, 4)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)]
    start = [{k: v.clone() for k, v in layer.state_dict().items()} for layer in layers]
    expected = plain(layers, x)
    statistics = [layer[1].running_var.clone() for layer in layers]
    for layer, state in zip(layers, start):
        layer.load_state_dict(state)
    assert_same(piped(layers, x), expected)
    for layer, running in zip(layers, statistics):
        torch.testing.assert_close(layer[1].running_var, running)
        assert layer[1].num_batches_tracked == MICROBATCHES


class Tied(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return F.linear(x, self.weight)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h2", "zb_v"])
def test_a_weight_tied_over_two_stages_gets_both_gradients_bit_identical_between_schedules(name):
    """pytorch: tied weight on the two stages of one rank had 0.47 of its gradient."""
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4)
    layers = [embedding, nn.Linear(4, 4), nn.Linear(4, 4), Tied(embedding)]
    x = torch.randint(0, 10, (6, 5))
    expected = plain(layers, x)
    reference = piped(layers, x, schedule=zb.gpipe(4, MICROBATCHES))
    got = piped(layers, x, schedule=zb.generate(name, 4 if name != "zb_v" else 2, MICROBATCHES))
    assert_same(got, expected)
    assert all(torch.equal(a, b) for a, b in zip(got, reference))


def test_hooks_on_parameters_fire_as_often_and_with_the_same_values_as_under_plain_autograd():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Call(FUNCTIONS["weight used by linear and otherwise"]), nn.LayerNorm(4), nn.Linear(4, 4)]
    x = torch.randn(6, 4)
    calls = {}

    def watch(key, p):
        p.register_hook(lambda grad: calls.setdefault((key, "gradient"), []).append(grad.clone()) or grad * 2)
        p.register_post_accumulate_grad_hook(lambda p: calls.setdefault((key, "sum"), []).append(p.grad.clone()))

    for number, layer in enumerate(layers):
        for name, p in layer.named_parameters():
            watch(f"{number}.{name}", p)
    expected = plain(layers, x)
    expected_calls = dict(calls)
    calls.clear()
    assert_same(piped(layers, x), expected)
    assert calls.keys() == expected_calls.keys()
    for key, values in calls.items():
        assert_same(values, expected_calls[key])


def test_module_hooks_fire_once_per_microbatch():
    calls = {"forward": 0, "backward": 0}
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[1].register_forward_hook(lambda *_: calls.update(forward=calls["forward"] + 1))
    layers[1].register_full_backward_hook(lambda *_: calls.update(backward=calls["backward"] + 1))
    piped(layers, torch.randn(6, 4))
    assert calls == {"forward": MICROBATCHES, "backward": MICROBATCHES}


def test_a_gradient_that_is_there_already_is_added_to():
    layers = [nn.Linear(4, 4) for _ in range(4)]
    x = torch.randn(6, 4)
    once = piped(layers, x)
    for layer in layers:
        layer.weight.grad = torch.ones_like(layer.weight)
    for before, after in zip(once[::2], piped(layers, x)[::2]):
        torch.testing.assert_close(after, before + 1)


def test_sparse_embeddings_are_refused_with_the_way_out():
    layers = [nn.Embedding(10, 4, sparse=True), *[nn.Linear(4, 4) for _ in range(3)]]
    with pytest.raises(PipelineError, match="sparse=False"):
        piped(layers, torch.randint(0, 10, (6, 5)))


def test_a_checkpointed_block_runs_its_forward_twice_per_microbatch_under_every_schedule():
    """torchtitan#773: every microbatch was recomputed twice under zero bubble."""
    for name in zb.GENERATORS:
        calls = []

        def block(m, v, calls=calls):
            calls.append(1)
            return F.linear(v, m.a).relu()

        layers = [
            Call(lambda m, x, block=block: checkpoint(lambda v: block(m, v), x, use_reentrant=False)) for _ in range(4)
        ]
        piped(layers, torch.randn(6, 4), schedule=zb.generate(name, 2, MICROBATCHES))
        assert len(calls) == 2 * 4 * MICROBATCHES, name


def test_the_split_report_says_what_waits_and_why_not():
    layers = [
        nn.Linear(4, 4),
        Call(lambda m, x: F.linear(x, m.a) * m.c),
        nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4).requires_grad_(False)),
        nn.Linear(4, 4),
    ]
    pipeline = Pipeline(layers, mean_square, zb.zb_v(2, MICROBATCHES))
    with pytest.raises(PipelineError, match="take a training step first"):
        pipeline.split_report()
    pipeline.step(torch.randn(6, 4))
    report = pipeline.split_report()
    reasons = {p.name: p.reason for p in report.parameters}
    assert [p.name for p in report.parameters if p.deferred] == ["0.weight", "0.bias", "1.a", "3.weight", "3.bias"]
    assert reasons["1.c"] == "gets its gradient in B, from mul"
    assert "not used" in reasons["1.b"]
    assert reasons["2.0.weight"] == "gets its gradient in B, from layer_norm"
    assert reasons["2.1.weight"] == "frozen: requires no gradient"
    assert report.share(0) == 1.0
    assert report.share(2) == 0.0
    assert "stage 1: 44.4% of the trained elements wait for W" in str(report)


def test_memory_is_flat_over_twenty_steps_without_the_garbage_collector():
    """pytorch#136507: reference cycles kept activations until the collector ran."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.GELU()) for _ in range(4)]
    pipeline = Pipeline(layers, mean_square, zb.zb_v(2, MICROBATCHES))
    x = torch.randn(6, 4)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(20):
            pipeline.step(x)
            counts.append(sum(type(o) is torch.Tensor for o in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[-1] == counts[4]


def test_a_weight_store_with_nothing_in_it_is_legal():
    """Reference fork #72: pop from an empty queue."""
    piped([nn.ReLU(), nn.GELU(), nn.Linear(4, 4), nn.Identity()], torch.randn(6, 4))
