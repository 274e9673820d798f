"""What users of other pipelines ran into, by its report: symptom and cause there, and what holds here.

More of them stand where their part is tested: twice recomputed checkpoints and tied weights in test_modules.py, hangs
in test_faults.py, memory in test_distributed.py, clipping, masks and initial weights in test_pipeline.py.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from models_for_tests import changing_lengths_on_four_ranks, tiny_batch, tiny_pipeline
from torch import nn

import zerobubble as zb
from zerobubble.errors import OptionError, PipelineError
from zerobubble.runtime import Pipeline, launch


def gradients(layers):
    found = [p.grad for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    return found


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_pytorch_180952_a_weight_used_twice_in_a_stage_counts_each_use_once():
    """There the gradient was doubled: both uses of the parameter group were walked for each of them."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    layers = [nn.Sequential(shared, nn.Tanh(), shared), nn.Linear(4, 4)]
    x = torch.randn(4, 4)
    layers[1](layers[0](x)).sum().backward()
    expected = gradients(layers)
    Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 1)).step(x)
    assert_same(gradients(layers), expected)


class Chunked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 12)

    def forward(self, x):
        return self.linear(x).chunk(3, -1)


class Weighted(nn.Module):
    def forward(self, a, b, c):
        return a + 10 * b + 100 * c


def test_pytorch_170277_every_chunk_of_an_output_keeps_its_own_gradient():
    """There the gradients of chunked outputs were summed into the first: they share a node of the graph."""
    layers = [Chunked(), Weighted()]
    x = torch.randn(2, 4)
    layers[1](*layers[0](x)).sum().backward()
    expected = gradients(layers)
    Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 1)).step(x)
    assert_same(gradients(layers), expected)


def test_pytorch_144530_data_parallel_modules_whose_hooks_w_would_miss_are_refused(tmp_path):
    """There gradients of split stages were never reduced, and replicas drifted apart without a word."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        with pytest.raises(OptionError, match=r"layers\[0\] holds a DistributedDataParallel"):
            Pipeline([wrapped], lambda y, _: y.sum(), zb.zb_h1(1, 2))
    finally:
        torch.distributed.destroy_process_group()


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        share = self.linear(x).softmax(-1)
        zb.add_loss(0.1 * (share.mean(0) ** 2).sum())
        return x * share


@pytest.mark.parametrize("name", list(zb.GENERATORS))
def test_automodel_1408_a_loss_of_a_middle_layer_counts_the_same_under_every_layout(name):
    """There it never reached its router, or at a scale that depended on the layout."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Router(), Router(), nn.Linear(4, 4)]
    x = torch.randn(6, 4)
    for part in x.tensor_split(3):
        value, extra = layers[0](part), 0
        for router in layers[1:3]:
            share = router.linear(value).softmax(-1)
            extra = extra + 0.1 * (share.mean(0) ** 2).sum()
            value = value * share
        ((layers[3](value) ** 2).mean() + extra).div(3).backward()
    expected = gradients(layers)
    pipeline = Pipeline(layers, lambda y, _: (y**2).mean(), zb.generate(name, 2, 3))
    pipeline.step(x)
    assert_same(gradients(layers), expected)
    pipeline.evaluate(x)


def test_automodel_1408_a_loss_outside_a_pipeline_is_not_lost_in_silence():
    with pytest.raises(PipelineError, match="in the forward of a layer that a Pipeline runs"):
        Router()(torch.randn(2, 4))


def test_torchtitan_1733_deepspeed_7773_accumulation_leaves_earlier_sums_alone():
    """There a second step rescaled what the first had summed, or scaled at every stage."""
    pipeline = tiny_pipeline(zb.zb_v(2, 4))
    pipeline.step(*tiny_batch(seed=1))
    first = {name: p.grad.clone() for name, p in pipeline.named_parameters()}
    pipeline.step_count = 0  # the same dropout again
    pipeline.step(*tiny_batch(seed=1))
    for name, p in pipeline.named_parameters():
        torch.testing.assert_close(p.grad, 2 * first[name])


def test_pytorch_129732_activations_between_stages_have_the_dtype_that_autocast_gave_them():
    """There the receiver guessed float32."""
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append(x.dtype)
            return x.float()

    with torch.autocast("cpu", torch.bfloat16):
        Pipeline([nn.Linear(4, 4), Spy()], lambda y, _: y.sum(), zb.zb_h1(2, 2)).step(torch.ones(4, 4))
    assert seen == [torch.bfloat16] * 2


def test_megatron_5100_deepspeed_5696_lengths_that_change_in_every_step_at_four_stages():
    """There the exchange of shapes ran in another order than the tensors, or kept the first batch's length."""
    lengths = [5, 12, 3, 3, 9]
    pipeline = tiny_pipeline(zb.zb_v(2, 4))
    expected = [pipeline.step(*tiny_batch(length=length)).item() for length in lengths]
    assert launch(changing_lengths_on_four_ranks, 4, lengths, time_limit=120) == [expected] * 4


def test_torchtitan_474_the_checkpoint_of_all_ranks_together_is_complete():
    """There half of the parameters were missing."""
    whole = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    pipeline = Pipeline(whole, lambda y, _: y.sum(), zb.zb_v(2, 2))
    assert pipeline.state_dict().keys() == whole.state_dict().keys()


def test_reference_fork_73_what_ran_is_what_was_planned():
    """There the executed order differed from the plan."""
    pipeline = tiny_pipeline(zb.zb_h2(2, 4))
    pipeline.step(*tiny_batch())
    (timeline,) = pipeline.timelines()
    assert timeline.schedule == pipeline.schedule
    for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:]))


@pytest.mark.parametrize("num_ranks", [4, 5, 8, 16])
def test_pytorch_130210_zb_h2_is_bubble_free_beyond_four_ranks_too(num_ranks):
    assert zb.simulate(zb.zb_h2(num_ranks, 2 * num_ranks)).bubble_rate == 0


class Penalised(nn.Module):
    """Differentiates within its forward, as force fields and gradient penalties do."""

    def __init__(self, allowed):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.allowed = allowed

    def forward(self, x):
        with zb.unsplit() if self.allowed else contextlib.nullcontext():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(inner).pow(2).sum(), inner, create_graph=True)
        return x + slope


def test_a_derivative_within_a_forward_is_refused_or_right_never_silently_wrong():
    with pytest.raises(PipelineError, match=r"zerobubble\.unsplit"):
        Pipeline([Penalised(False)], lambda y, _: y.sum(), zb.gpipe(1, 2)).step(torch.randn(4, 4))
    layers = [nn.Linear(4, 4), Penalised(True)]
    x = torch.randn(4, 4)
    layers[1](layers[0](x)).sum().backward()
    expected = gradients(layers)
    Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 1)).step(x)
    assert_same(gradients(layers), expected)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        return torch.fft.irfft(torch.einsum("bi,io->bo", spectrum, self.weight) + spectrum @ self.weight, n=4)


def test_complex_weights_get_their_gradient_from_plain_autograd():
    layers = [Spectral(), nn.Linear(4, 4)]
    x = torch.randn(4, 4)
    layers[1](layers[0](x)).sum().backward()
    expected = gradients(layers)
    Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 1)).step(x)
    assert_same(gradients(layers), expected)


class Odd(nn.Module):
    """Calls that a handler does not expect: keyword operands, an output buffer, vmap."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.vmap(self.linear)(x)
        z = torch.bmm(y.unsqueeze(0), mat2=y.detach().mT.unsqueeze(0))[0]
        with torch.no_grad():
            torch.mm(x, x.mT, out=torch.empty(len(x), len(x)))
        return y + z.mean()


def test_unusual_calls_go_to_plain_autograd():
    layers = [Odd(), nn.Linear(4, 4)]
    x = torch.randn(4, 4)
    layers[1](layers[0](x)).sum().backward()
    expected = gradients(layers)
    Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 1)).step(x)
    assert_same(gradients(layers), expected)


class Masked(nn.Module):
    def forward(self, x, mask):
        return x * mask


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self._checkpoint_wrapped_module = inner

    def forward(self, *args, **kwargs):
        return self._checkpoint_wrapped_module(*args, **kwargs)


class TakesAll(nn.Module):
    def forward(self, x, **keywords):
        return x * keywords["mask"]


def test_keywords_reach_wrapped_layers_and_those_that_take_any():
    seen = []
    layers = [nn.Linear(1, 1), Masked(), Wrapper(Masked()), TakesAll()]
    pipeline = Pipeline(layers, lambda y, _: seen.append(y.detach()) or y.sum(), zb.zb_h1(2, 2))
    with torch.no_grad():
        layers[0].weight.fill_(1.0)
        layers[0].bias.fill_(0.0)
    pipeline.step(torch.ones(2, 1), mask=torch.tensor([[2.0], [3.0]]))
    assert [y.item() for y in seen] == [8.0, 27.0]


class Island(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


def test_a_float32_island_within_autocast_keeps_float32_gradients():
    torch.manual_seed(0)
    layers = [Island(), Island()]
    x = torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = layers[1](layers[0](x)).sum()
    loss.backward()
    expected = gradients(layers)
    with torch.autocast("cpu", torch.bfloat16):
        Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 1)).step(x)
    assert_same(gradients(layers), expected)


def test_gradients_that_were_there_survive_a_step_that_fails_also_those_of_tied_weights():
    embedding = nn.Linear(4, 4)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = embedding.weight

        def forward(self, x):
            x.register_hook(lambda grad: 1 / 0)
            return nn.functional.linear(x, self.weight)

    embedding.weight.grad = torch.ones(4, 4)
    with pytest.raises(ZeroDivisionError):
        Pipeline([embedding, Tied()], lambda y, _: y.sum(), zb.zb_h1(2, 1)).step(torch.randn(2, 4))
    assert torch.equal(embedding.weight.grad, torch.ones(4, 4))


def test_a_step_without_gradients_is_refused():
    with torch.no_grad(), pytest.raises(PipelineError, match="use evaluate"):
        Pipeline([nn.Linear(4, 4)], lambda y, _: y.sum(), zb.gpipe(1, 2)).step(torch.ones(2, 4))
