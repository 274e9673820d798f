"""`Pipeline` with all ranks in this process: the numbers are those of plain autograd, under every schedule."""

from __future__ import annotations

import pytest
import torch
from models_for_tests import TINY_GPT, tiny_batch, tiny_pipeline, train_tiny
from torch import nn

import zerobubble as zb
from zerobubble.errors import OptionError, PipelineError, ScheduleError
from zerobubble.models import gpt_layers, next_token_loss
from zerobubble.op import B, Kind, W
from zerobubble.runtime import Pipeline
from zerobubble.schedule import make_schedule


def schedules(num_ranks, num_microbatches):
    for name, generator in zb.GENERATORS.items():
        yield zb.generate(name, num_ranks, num_microbatches)
        if generator.takes_chunks:
            yield zb.generate(name, num_ranks, num_microbatches, chunks=1)


def loss_and_gradients(schedule, **options):
    pipeline = tiny_pipeline(schedule, **options)
    loss = pipeline.step(*tiny_batch())
    return loss.item(), {name: p.grad for name, p in pipeline.named_parameters()}


def plain_autograd(num_microbatches, dtype, config=TINY_GPT):
    """The same model, data and dropout masks without any pipeline: one microbatch after the other."""
    pipeline = tiny_pipeline(zb.gpipe(1, num_microbatches), config, dtype)
    layers = [pipeline.module[str(number)] for number in range(config.blocks + 2)]
    for module in layers:
        for child in module.modules():
            if hasattr(child, "dropout") and isinstance(child.dropout, float):
                child.dropout = 0.0
            if isinstance(child, nn.Dropout):
                child.p = 0.0
    inputs, targets = tiny_batch()
    total = 0.0
    for x, y in zip(inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches)):
        value = x
        for layer in layers:
            value = layer(value)
        loss = next_token_loss(value, y) * (len(x) / len(inputs))
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in pipeline.named_parameters()}


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_gradients_are_bit_identical_over_schedules_ranks_and_placements_with_dropout(num_microbatches):
    expected = None
    for num_ranks in (1, 2, 4):
        for schedule in schedules(num_ranks, num_microbatches):
            loss, gradients = loss_and_gradients(schedule)
            expected = expected or (loss, gradients)
            assert loss == expected[0], schedule.name
            assert gradients.keys() == expected[1].keys()
            different = [name for name, g in gradients.items() if not torch.equal(g, expected[1][name])]
            assert not different, (schedule.name, num_ranks, different)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_gradients_equal_plain_autograd(num_microbatches, dtype, tolerance):
    config = type(TINY_GPT)(**{**TINY_GPT.__dict__, "dropout": 0.0})
    expected_loss, expected = plain_autograd(num_microbatches, dtype, config)
    for schedule in (zb.one_f_one_b(2, num_microbatches), zb.zb_v(4, num_microbatches), zb.zb_h2(4, num_microbatches)):
        loss, gradients = loss_and_gradients(schedule, config=config, dtype=dtype)
        assert loss == pytest.approx(expected_loss, abs=tolerance)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance, msg=name)


def test_dropout_is_on_and_differs_between_steps_and_microbatches():
    pipeline = Pipeline([nn.Dropout(0.5)], lambda y, _: y.sum(), zb.gpipe(1, 4))
    sums = [pipeline.step(torch.ones(4, 1000)).item() for _ in range(3)]
    assert len(set(sums)) == 3
    seen = []
    Pipeline([nn.Dropout(0.5)], lambda y, _: seen.append(y) or y.sum(), zb.gpipe(1, 2)).step(torch.ones(2, 1000))
    assert not torch.equal(seen[0], seen[1])


def test_training_leaves_the_users_own_randomness_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_pipeline(zb.zb_v(2, 3)).step(*tiny_batch())
    assert torch.equal(torch.rand(3), expected)


def test_initial_weights_do_not_depend_on_the_layout():
    one, four = tiny_pipeline(zb.gpipe(1, 2)), tiny_pipeline(zb.zb_v(4, 2))
    assert one.state_dict().keys() == four.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, four.state_dict()[name])
    blocks = [value for name, value in one.state_dict().items() if name.endswith("mlp_up.weight")]
    assert not torch.equal(blocks[0], blocks[1])


def test_a_checkpoint_continues_under_another_layout_as_if_nothing_had_happened():
    uninterrupted = tiny_pipeline(zb.zb_h1(2, 4))
    losses = [*train_tiny(uninterrupted, 1), uninterrupted.step(*tiny_batch(seed=9)).item()]

    first = tiny_pipeline(zb.zb_h1(2, 4))
    before = train_tiny(first, 1)
    second = tiny_pipeline(zb.zb_v(4, 4))
    second.load_state_dict(first.state_dict())
    second.step_count = first.step_count
    assert [*before, second.step(*tiny_batch(seed=9)).item()] == losses


def test_several_steps_before_the_optimizer_equal_one_big_batch_with_a_token_count():
    inputs, targets = tiny_batch(samples=8)
    config = type(TINY_GPT)(**{**TINY_GPT.__dict__, "dropout": 0.0})

    def summed(logits, target):
        return next_token_loss(logits, target) * target.numel()

    def gradients(schedule, batches):
        pipeline = Pipeline(gpt_layers(config), summed, schedule, seed=3)
        losses = [pipeline.step(x, y, token_count=targets.numel()).item() for x, y in batches]
        return sum(losses), [p.grad for p in pipeline.parameters()]

    whole = gradients(zb.zb_h1(2, 8), [(inputs, targets)])
    halves = gradients(zb.zb_h1(2, 4), [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])])
    assert halves[0] == pytest.approx(whole[0], rel=1e-6)
    for a, b in zip(whole[1], halves[1]):
        torch.testing.assert_close(a, b)


def test_a_batch_of_ten_in_four_microbatches_gives_the_mean_over_samples():
    layer = nn.Linear(3, 1)
    x = torch.randn(10, 3)
    layer(x).mean().backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    loss = Pipeline([layer], lambda y, _: y.mean(), zb.zb_h1(1, 4)).step(x)
    torch.testing.assert_close(layer.weight.grad, expected)
    assert loss.item() == pytest.approx(layer(x).mean().item())


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, mask, scale=1.0):
        return self.linear(x) * mask * scale


def test_keyword_inputs_reach_every_stage_cut_or_shared():
    layers = [Masked() for _ in range(4)]
    x, mask = torch.randn(6, 3), torch.rand(6, 3)
    scale = torch.rand(3)
    value = x
    for layer in layers:
        value = layer(value, mask, scale=scale)
    value.sum().backward()
    expected = [layer.linear.weight.grad.clone() for layer in layers]
    for layer in layers:
        layer.zero_grad()
    pipeline = Pipeline(layers, lambda y, _: y.sum(), zb.zb_v(2, 3))
    pipeline.step(x, mask=mask, scale=zb.Shared(scale), token_count=1.0)
    for layer, gradient in zip(layers, expected):
        torch.testing.assert_close(layer.linear.weight.grad, gradient)


class Forked(nn.Module):
    """Several outputs: a tensor, one that needs no gradient, an integer tensor and a plain number."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.a(x), self.b(x), x.detach() * 2, torch.arange(len(x)), 7


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, a, b, constant, index, number):
        return {"x": self.linear(a) + constant, "y": [b * number, index]}


class Last(nn.Module):
    def forward(self, x, y):
        return x.sum() + (y[0] * y[1].unsqueeze(1)).sum()


def test_any_pytree_crosses_a_hop_and_every_output_keeps_its_own_gradient():
    layers = [Forked(), Joined(), Last()]
    x = torch.randn(4, 3)
    Last()(**layers[1](*layers[0](x))).backward()
    expected = [p.grad.clone() for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    pipeline = Pipeline(layers, lambda loss, _: loss, zb.zb_h2(3, 1))
    pipeline.step(x)
    for p, gradient in zip(pipeline.parameters(), expected):
        torch.testing.assert_close(p.grad, gradient)


def test_a_frozen_first_stage_and_a_stage_without_parameters_are_legal():
    frozen = nn.Linear(3, 3).requires_grad_(False)
    last = nn.Linear(3, 3)
    pipeline = Pipeline([frozen, nn.GELU(), last], lambda y, _: y.sum(), zb.zb_h1(3, 2))
    pipeline.step(torch.randn(4, 3))
    assert frozen.weight.grad is None
    assert last.weight.grad is not None


def test_evaluation_has_no_dropout_takes_other_shapes_and_leaves_training_as_it_was():
    pipeline = tiny_pipeline(zb.zb_v(2, 4))
    first = pipeline.evaluate(*tiny_batch(samples=5, length=7)).item()
    assert first == pipeline.evaluate(*tiny_batch(samples=5, length=7)).item()
    assert all(module.training for module in pipeline.module.modules())
    assert all(p.grad is None for p in pipeline.parameters())
    assert pipeline.step_count == 0


def test_w_out_of_microbatch_order_is_legal_and_right_to_rounding():
    schedule = zb.zb_h1(2, 3)
    rest = schedule.only({Kind.F, Kind.B}).orders
    turned = [[*order, W(rank, 2), W(rank, 0), W(rank, 1)] for rank, order in enumerate(rest)]
    other = make_schedule("turned", schedule.placement, 3, turned)
    expected, got = loss_and_gradients(schedule), loss_and_gradients(other)
    assert got[0] == expected[0]
    for name, gradient in got[1].items():
        torch.testing.assert_close(gradient, expected[1][name])


def test_the_loss_is_late_and_reads_like_a_number():
    loss = Pipeline([nn.Linear(3, 3)], lambda y, _: (y * 0).sum() + 2, zb.gpipe(1, 2)).step(torch.ones(4, 3))
    assert repr(loss) == "LateValue(on its way)"
    assert str(loss) == "2.0"
    assert loss < 3
    assert loss >= 2
    assert sum([loss, loss]) / 2 == loss == 2
    assert f"{loss:.3f}" == "2.000"


def test_autocast_around_the_step_holds_on_every_rank():
    seen = []
    layers = [nn.Linear(4, 4) for _ in range(4)]
    for layer in layers:
        layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    pipeline = Pipeline(layers, lambda y, _: y.float().sum(), zb.zb_v(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        pipeline.step(torch.ones(4, 4))
    assert set(seen) == {torch.bfloat16}
    assert layers[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_clipping_is_by_the_norm_over_all_ranks_and_the_same_bit_for_bit_under_every_layout(norm_type):
    """torchtitan#596: clipping saw the norm of one stage only."""
    found = []
    for num_ranks in (1, 2, 4):
        for schedule in schedules(num_ranks, 3):
            pipeline = tiny_pipeline(schedule)
            pipeline.step(*tiny_batch())
            whole = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in pipeline.parameters()]), norm_type)
            norm = pipeline.clip_grad_norm_(0.1, norm_type)
            assert norm == pytest.approx(whole.item(), rel=1e-5)
            found.append((norm, sum(p.grad.double().sum().item() for _, p in sorted(pipeline.named_parameters()))))
    assert len(set(found)) == 1
    clipped = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in pipeline.parameters()]), norm_type)
    assert clipped.item() == pytest.approx(0.1, rel=1e-4)


def test_measured_timeline_has_every_op_in_order():
    pipeline = tiny_pipeline(zb.zb_h1(2, 4))
    pipeline.step(*tiny_batch())
    pipeline.step(*tiny_batch())
    first, second = pipeline.timelines(last=5)
    for timeline in (first, second):
        for starts, ends, order in zip(timeline.starts, timeline.ends, timeline.schedule.orders, strict=True):
            assert len(starts) == len(ends) == len(order)
            assert all(a <= b for pair in zip(starts, ends) for a, b in [pair])
            assert list(starts) == sorted(starts)


# ------------------------------------------------------------------------------------------------ errors


def test_a_broken_schedule_is_refused_before_anything_is_built():
    schedule = zb.zb_h1(2, 3)
    orders = [[op for op in order if op != B(0, 1)] for order in schedule.orders]
    broken = make_schedule("broken", schedule.placement, 3, orders)
    built = []
    with pytest.raises(ScheduleError, match="rank 0 lacks 0B1"):
        Pipeline([lambda: built.append(1), lambda: built.append(1)], lambda y, _: y, broken)
    assert not built


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": [1, 1, 1]}, "10 layers cannot be cut into 2 stages"),
        ({"partition": [10, 0]}, "at least 1"),
        ({"partition": [4, 5]}, "whose sum is 10"),
        ({"partition": 2}, "must be a list with the number of layers of each stage; got 2"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        tiny_pipeline(zb.zb_h1(2, 3), **options)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (nn.Linear(2, 2), "must be a list of modules.*got one Linear"),
        ([nn.Linear(2, 2), 3], r"layers\[1\] must be a module or a function that makes one; got 3"),
        ([nn.Linear(2, 2), torch.relu], r"layers\[1\] is no module, so it must be a function that makes one"),
        ([nn.Linear(2, 2), lambda: 5], r"layers\[1\] must be a module or make one; got int"),
    ],
)
def test_what_is_no_list_of_layers_is_refused(layers, message):
    with pytest.raises(OptionError, match=message):
        Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 3))


def test_an_nn_sequential_is_a_list_of_layers():
    Pipeline(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), lambda y, _: y.sum(), zb.zb_h1(2, 3)).step(torch.ones(3, 2))


def test_too_few_layers_are_refused():
    with pytest.raises(OptionError, match="2 layers cannot be cut into 4 stages"):
        Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], lambda y, _: y.sum(), zb.zb_v(2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.step(torch.ones(3, 3)), "batch of 3 cannot be cut into 4 microbatches"),
        (lambda p: p.step(torch.ones(4, 3), (torch.ones(4), torch.ones(5))), r"disagree on the batch size .*\[4, 5\]"),
        (lambda p: p.step(torch.ones(4, 3), msak=torch.ones(4, 3)), "no layer takes a keyword argument 'msak'.*'mask'"),
        (lambda p: p.load_state_dict({}), "has no entry '0.linear.weight'"),
        (lambda p: p.load_state_dict({k: v[:1] for k, v in p.state_dict().items()}), "does not fit the layers"),
        (lambda p: p.step(torch.ones(4, 3), torch.ones(8)), "inputs have a batch size of 4, targets of 8"),
        (lambda p: p.step(torch.ones(4, 3), token_count=0), "token_count must be a positive number; got 0"),
        (lambda p: p.clip_grad_norm_(0.0), "max_norm must be a positive number"),
    ],
)
def test_bad_calls_name_what_is_wrong_and_the_pipeline_goes_on(call, message):
    pipeline = Pipeline([Masked(), Masked()], lambda y, _: y.sum(), zb.zb_h1(2, 4))
    with pytest.raises(OptionError, match=message):
        call(pipeline)
    pipeline.step(torch.ones(4, 3), mask=torch.ones(4, 3))


def test_a_loss_that_is_no_single_number_is_refused():
    with pytest.raises(PipelineError, match=r"0-dimensional.*got a tensor of shape \[2, 3\]"):
        Pipeline([nn.Linear(3, 3)], lambda y, _: y, zb.gpipe(1, 2)).step(torch.ones(4, 3))


class Raises(nn.Module):
    broken = True

    def forward(self, x):
        if self.broken and len(x):
            raise ZeroDivisionError("in my layer")
        return x


def test_an_error_in_a_layer_comes_through_as_it_is_and_the_next_step_works():
    layers = [nn.Linear(3, 3), Raises(), nn.Linear(3, 3)]
    pipeline = Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(3, 4), timeout=10)
    with pytest.raises(ZeroDivisionError, match="in my layer") as caught:
        pipeline.step(torch.ones(4, 3))
    assert getattr(caught.value, "__notes__", ["This happened on rank 1, in 1F0 of step 0."]) == [
        "This happened on rank 1, in 1F0 of step 0."
    ]
    layers[1].broken = False
    pipeline.step(torch.ones(4, 3))


def test_planning_names_do_not_need_torch(tmp_path):
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import zerobubble as zb; zb.simulate(zb.zb_v(2, 3)); zb.Pipeline"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'zerobubble[train]'" in run.stderr
