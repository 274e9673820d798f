"""The B/W split: gradients are those of autograd, B leaves them for W, and only what W needs stays alive."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerobubble.models.gpt import Block, GPTConfig
from zerobubble.runtime import SplitBackward, WeightStore
from zerobubble.runtime.live_memory import LiveMemory
from zerobubble.runtime.split import backward


class Function(nn.Module):
    """A module made of a function of (module, x) and parameters of the given shapes, named a, b, ..."""

    def __init__(self, function, *shapes):
        super().__init__()
        for name, shape in zip("abc", shapes):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def tokens(*shape):
    return torch.randint(0, 7, shape)


# module, input, share of the parameters whose gradient must wait for W
CASES = {
    "linear": (lambda: nn.Linear(4, 3), (2, 5, 4), 1.0),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4), 1.0),
    "linear on a vector": (lambda: nn.Linear(4, 3), (4,), 1.0),
    "embedding": (lambda: nn.Embedding(7, 3), tokens(2, 5), 1.0),
    "embedding with padding": (lambda: nn.Embedding(7, 3, padding_idx=-2), tokens(2, 5), 1.0),
    "matmul": (lambda: Function(lambda m, x: x @ m.a, (4, 3)), (2, 5, 4), 1.0),
    "addmm": (lambda: Function(lambda m, x: torch.addmm(m.b, x, m.a), (4, 3), (3,)), (5, 4), 1.0),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 9), 1.0),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, dilation=2), (2, 3, 9, 9), 1.0),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), 1.0),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 2, 3), (2, 4, 5), 1.0),
    "transposed conv2d": (
        lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1, groups=2), (2, 4, 5, 5), 1.0,
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8), 0.9),
    "layer norm": (lambda: nn.LayerNorm(4), (2, 5, 4), 0.0),
    "batch norm": (lambda: nn.BatchNorm1d(4), (6, 4), 0.0),
    "scaled by a parameter": (lambda: Function(lambda m, x: x * m.a, (4,)), (2, 4), 0.0),
    "recurrent": (lambda: Function(lambda m, x: m.lstm(x)[0]), (2, 5, 4), 0.0),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4), 0.0),
    "used twice": (lambda: Function(lambda m, x: F.linear(F.linear(x, m.a), m.a), (4, 4)), (2, 4), 1.0),
    "used by linear and otherwise": (lambda: Function(lambda m, x: F.linear(x, m.a) * m.a.sum(), (4, 4)), (2, 4), 1.0),
    "no parameter": (lambda: nn.GELU(), (2, 4), 0.0),
    "unused parameter": (lambda: Function(lambda m, x: x + 1, (3,)), (2, 4), 0.0),
    "frozen weight": (lambda: freeze(nn.Linear(4, 3), "weight"), (2, 4), 0.0),
    "frozen bias": (lambda: freeze(nn.Linear(4, 3), "bias"), (2, 4), 1.0),
}  # fmt: skip


def freeze(module, name):
    getattr(module, name).requires_grad_(False)
    return module


def build(kind):
    torch.manual_seed(0)
    make, x, share = CASES[kind]
    module = make()
    if kind == "recurrent":
        module.lstm = nn.LSTM(4, 3, batch_first=True)
    x = torch.randn(x).requires_grad_() if isinstance(x, tuple) else x
    return module, x, share


def gradients(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def clear(module, x):
    module.zero_grad()
    x.grad = None


def split_step(module, x, output_gradient):
    """F and B under the split. Returns the store, ready for W."""
    store = WeightStore()
    with SplitBackward(store):
        y = module(x)
    if y.requires_grad:
        backward([y], [output_gradient], store)
    return store


@pytest.mark.parametrize("kind", CASES)
def test_gradients_are_those_of_autograd_accumulated_over_two_microbatches(kind):
    module, x, _ = build(kind)
    output_gradient = torch.randn_like(module(x))
    for _ in range(2):
        if (y := module(x)).requires_grad:
            y.backward(output_gradient)
    expected, expected_x = gradients(module), x.grad
    clear(module, x)

    for _ in range(2):
        split_step(module, x, output_gradient).run()

    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, expected_x)


@pytest.mark.parametrize("kind", CASES)
def test_the_share_of_parameters_that_waits_for_w(kind):
    module, x, share = build(kind)
    split_step(module, x, torch.ones_like(module(x)))
    trained = [p for p in module.parameters() if p.requires_grad]
    waiting = sum(p.numel() for p in trained if p.grad is None)
    if kind == "unused parameter":
        waiting = 0  # it never gets a gradient
    assert waiting >= share * sum(p.numel() for p in trained)
    assert share > 0 or waiting == 0


def test_w_adds_in_place():
    module, x, _ = build("linear")
    split_step(module, x, torch.ones_like(module(x))).run()
    before = module.weight.grad
    value = before.clone()
    split_step(module, x, torch.ones_like(module(x))).run()
    assert module.weight.grad is before
    torch.testing.assert_close(before, 2 * value)


def test_w_lets_each_operand_go_before_it_computes_the_next_gradient():
    store, parameter = WeightStore(), nn.Parameter(torch.zeros(2))
    operands, alive = [], []

    def contribution(total, operand):
        alive.append(sum(reference() is not None for reference in operands))
        return operand.clone() if total is None else total.add_(operand)

    for value in range(3):
        operand = torch.full((2,), float(value))
        operands.append(weakref.ref(operand))
        store.add(parameter, contribution, operand)
        del operand
    store.run()
    assert alive == [3, 2, 1]
    assert parameter.grad.tolist() == [3.0, 3.0]


def test_the_first_layer_is_split_though_its_input_needs_no_gradient():
    module = nn.Linear(4, 3)
    store = split_step(module, torch.randn(2, 4), torch.ones(2, 3))
    assert module.weight.grad is None
    assert len(store) == 2


def test_without_gradients_nothing_is_stored():
    store = WeightStore()
    with SplitBackward(store), torch.no_grad():
        assert not nn.Linear(4, 3)(torch.randn(2, 4)).requires_grad
    assert len(store) == 0


def test_modules_can_be_made_inside_the_mode():
    with SplitBackward(WeightStore()):
        assert nn.Linear(4, 3)(torch.randn(2, 4)).requires_grad


def test_autocast_keeps_fp32_gradients_and_casts_what_waits():
    module = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.backward(torch.ones_like(y))
    expected = gradients(module)
    module.zero_grad()
    store = WeightStore()
    with SplitBackward(store), torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    backward([y], [torch.ones_like(y)], store)
    assert {t.dtype for t in store.tensors()} == {torch.bfloat16}
    store.run()
    for name, gradient in gradients(module).items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.float(), expected[name], rtol=2e-2, atol=2e-2)


def test_after_b_of_a_gpt_block_only_inputs_and_output_gradients_of_weights_are_alive_and_after_w_nothing():
    width = 64
    block = Block(GPTConfig(width=width, heads=4, dropout=0.0))
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(2, 32, width, requires_grad=True)
    unit = x.numel() * x.element_size()
    store = WeightStore()
    with LiveMemory() as live:
        with SplitBackward(store):
            y = block(x)
        after_f = live.bytes
        gradient = torch.ones_like(y)
        backward([y], [gradient], store)
        del y, gradient
        x.grad = None
        after_b = live.bytes
        store.run()
        after_w = live.bytes
    # inputs: of qkv 1, of attention output 1, of MLP 1 + 4; output gradients: 3 + 1 + 4 + 1; in units of x
    # (one input or output gradient may share its memory with another, never the reverse)
    assert after_b <= 16 * unit + 1024
    assert after_b < after_f
    assert after_w == 0


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block
        self.calls = 0

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x):
        self.calls += 1
        return self.block(x)


def test_a_checkpointed_block_is_recomputed_once_with_the_same_dropout_masks():
    module = Checkpointed(Block(GPTConfig(width=16, dropout=0.5)))
    x = torch.randn(2, 8, 16, requires_grad=True)
    torch.manual_seed(1)
    module.block(x).sum().backward()
    expected, expected_x = gradients(module), x.grad
    clear(module, x)

    torch.manual_seed(1)
    store = WeightStore()
    with SplitBackward(store):
        y = module(x)
    backward([y], [torch.ones_like(y)], store)
    assert module.calls == 2
    assert module.block.mlp_up.weight.grad is None
    store.run()

    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, expected[name])
    torch.testing.assert_close(x.grad, expected_x)
