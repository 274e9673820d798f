"""The parts of the optimizers, and what they refuse. What they do on processes: test_post_validation.py."""

from __future__ import annotations

from copy import deepcopy
from math import inf, isfinite, isnan, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models_for_tests import tiny_batch, tiny_pipeline
from torch import nn

import zerobubble as zb
from zerobubble.errors import OptionError, PipelineError
from zerobubble.optim.grad_state import Rules
from zerobubble.optim.scaling import LossScale
from zerobubble.optim.undo import Reverse, Settings, Snapshot
from zerobubble.runtime import Pipeline
from zerobubble.runtime.grad_norm import clip_coefficient, gradient_norms, total_norm
from zerobubble.runtime.live_memory import LiveMemory

# ------------------------------------------------------------------------------------------------ the norm

NORMS = st.lists(st.floats(0, 1e300) | st.sampled_from([0.0, inf, nan]), max_size=30)


@given(NORMS, st.sampled_from([0.5, 1.0, 2.0, 3.0, inf]), st.randoms())
def test_the_norm_does_not_depend_on_the_order(norms, norm_type, random):
    shuffled = random.sample(norms, len(norms))
    one, other = total_norm(norms, norm_type), total_norm(shuffled, norm_type)
    assert one == other or (isnan(one) and isnan(other))
    assert isfinite(one) == all(map(isfinite, norms)) or norm_type < 1 or max(norms) > 1e290


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, inf])
def test_the_norm_is_that_of_torch(norm_type):
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2))]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn_like(parameter)
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1e9, norm_type).item()
    norms = gradient_norms([p.grad for p in parameters], norm_type).tolist()
    assert norms[2] == 0.0
    assert total_norm(norms, norm_type) == pytest.approx(expected)


def test_nothing_is_clipped_by_a_norm_that_is_not_finite():
    assert clip_coefficient(4.0, 1.0) == 0.25
    assert clip_coefficient(1.0, 1.0) == clip_coefficient(inf, 1.0) == clip_coefficient(nan, 1.0) == 1.0


@given(NORMS.filter(bool), NORMS, st.floats(1e-3, 1e3), st.sampled_from([1.0, 2.0, inf]), st.booleans())
def test_what_a_rank_foretells_comes_true(own, others, clip_norm, norm_type, check_finite):
    rules = Rules(clip_norm, norm_type, check_finite)
    if rules.foretell(own):
        assert not rules.judge(own + others).plain or not all(map(isfinite, own + others))


@pytest.mark.parametrize("norm_type", [2.0, inf])
def test_norm_and_step_are_the_same_bit_for_bit_under_every_schedule_and_rank_count(norm_type):
    found = set()
    for num_ranks in (1, 2, 4):
        for name in zb.GENERATORS:
            pipeline = tiny_pipeline(zb.generate(name, num_ranks, 4))
            optimizer = zb.PostValidatedOptimizer(torch.optim.SGD(pipeline.parameters(), lr=0.1), 0.1, norm_type)
            pipeline.step(*tiny_batch())
            optimizer.step()
            moved = sum(p.double().sum().item() for _, p in sorted(pipeline.named_parameters()))
            found.add((optimizer.grad_norm.item(), moved))
    assert len(found) == 1


# ------------------------------------------------------------------------------------------------ undo

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, weight_decay=0.1, maximize=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}


def parameters_with_gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (3,))]
    gradients = [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(6)]
    return parameters, gradients


def take(optimizer, parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_undone_from_a_snapshot_might_never_have_been(name):
    parameters, gradients = parameters_with_gradients(0)
    optimizer = OPTIMIZERS[name](parameters)
    other, same_gradients = parameters_with_gradients(0)
    never_undone = OPTIMIZERS[name](other)
    for step, step_gradients in enumerate(gradients):
        if step in (0, 3, 5):
            settings = Settings(optimizer)
            undo = Snapshot(optimizer, list(zip(parameters, step_gradients)))
            take(optimizer, parameters, step_gradients)
            settings.put_back()
            undo()
        take(optimizer, parameters, step_gradients)
        take(never_undone, other, same_gradients[step])
        assert all(map(torch.equal, parameters, other))
    assert str(optimizer.state_dict()) == str(never_undone.state_dict())


REVERSIBLE = {
    f"{kind.__name__} {options}": (kind, options)
    for kind, options in [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1, "maximize": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
        (torch.optim.AdamW, {"fused": True}),
    ]
}


@pytest.mark.parametrize("name", REVERSIBLE)
def test_a_step_undone_by_arithmetic_is_undone_but_for_rounding(name):
    kind, options = REVERSIBLE[name]
    parameters, gradients = parameters_with_gradients(1)
    parameters = [nn.Parameter(p.detach().double()) for p in parameters]
    optimizer = kind(parameters, lr=0.05, **options)
    for step_gradients in gradients:
        step_gradients = [gradient.double() for gradient in step_gradients]
        before = [p.detach().clone() for p in parameters], deepcopy(optimizer.state_dict()["state"])
        undo = Reverse(optimizer, list(zip(parameters, step_gradients)))
        take(optimizer, parameters, step_gradients)
        assert not torch.allclose(parameters[0], before[0][0])
        undo()
        torch.testing.assert_close([p.detach() for p in parameters], before[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(optimizer.state_dict()["state"], before[1], rtol=1e-10, atol=1e-12)
        take(optimizer, parameters, step_gradients)


def held_bytes(undo, kind, **options):
    """What is alive more, after a step that is not the first, as long as it may have to be undone."""
    parameters, gradients = parameters_with_gradients(0)
    optimizer = kind(parameters, lr=0.1, **options)
    take(optimizer, parameters, gradients[0])
    with LiveMemory() as memory:
        kept = undo(optimizer, list(zip(parameters, gradients[1])))
        take(optimizer, parameters, gradients[1])
        held = memory.bytes
        kept()
    return held / sum(p.nbytes for p in parameters)


def test_reverse_holds_no_memory_and_a_snapshot_what_the_docs_say():
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    assert held_bytes(Reverse, adamw) == held_bytes(Reverse, sgd, momentum=0.9) == 0
    assert held_bytes(Snapshot, adamw) == pytest.approx(3, abs=0.2)  # and the counts of steps
    assert held_bytes(Snapshot, sgd, momentum=0.9) == 2
    assert held_bytes(Snapshot, sgd) == 1
    assert held_bytes(Snapshot, sgd, momentum=0.9, nesterov=True) == 3  # with the gradients
    assert held_bytes(Snapshot, torch.optim.RMSprop) == pytest.approx(3, abs=0.2)


def test_settings_come_back_but_what_was_set_since_stays():
    optimizer = torch.optim.AdamW(parameters_with_gradients(0)[0], lr=torch.tensor(0.1))
    (group,) = optimizer.param_groups
    lr = group["lr"]
    before = Settings(optimizer)
    group["eps"] = 1.0  # by the step itself
    after = Settings(optimizer)
    lr.fill_(0.5)  # by a scheduler
    now = Settings(optimizer)
    before.put_back()
    assert (lr.item(), group["eps"]) == (pytest.approx(0.1), 1e-8)
    now.put_back(unlike=after)
    assert (lr.item(), group["eps"]) == (0.5, 1e-8)
    assert group["lr"] is lr


# ------------------------------------------------------------------------------------------------ loss scale


@given(st.lists(st.booleans(), max_size=40), st.sampled_from([(2.0, 0.5), (1.7, 0.3)]), st.integers(1, 4))
def test_the_loss_scale_is_that_of_torchs_scaler(finite, factors, interval):
    growth, backoff = factors
    ours, torchs = (torch.amp.GradScaler("cpu", 2.0**120, growth, backoff, interval) for _ in range(2))
    scale = LossScale(ours)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    torchs.scale(torch.zeros(1))
    for is_finite in finite:
        parameter.grad = torch.tensor([0.0 if is_finite else inf])
        torchs.step(optimizer)
        torchs.update()
        scale.update(is_finite)
        assert ours.state_dict() == torchs.state_dict()


def test_losses_are_scaled_as_long_as_there_is_an_optimizer_that_divides_the_gradients():
    pipeline, inner, optimizer = pipeline_and_optimizer(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))

    def first_gradient():
        pipeline.zero_grad()
        pipeline.step_count = 0
        pipeline.step(*tiny_batch())
        return next(pipeline.parameters()).grad.clone()

    scaled = first_gradient()
    del optimizer
    assert torch.equal(scaled, 8 * first_gradient())
    zb.PostValidatedOptimizer(inner)
    assert torch.equal(scaled, 8 * first_gradient())


# ------------------------------------------------------------------------------------------------ as an optimizer


def test_a_loss_scale_is_for_an_optimizer_of_all_parameters_and_no_other_one_takes_it_away():
    pipeline, inner, _ = pipeline_and_optimizer()
    first, *others = (torch.optim.SGD([p], lr=0.1) for p in pipeline.parameters())
    with pytest.raises(OptionError, match=r"needs all parameters of its pipeline.* is missing"):
        zb.PostValidatedOptimizer(first, scaler=torch.amp.GradScaler("cpu"))
    scaled = zb.PostValidatedOptimizer(inner, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    zb.PostValidatedOptimizer(others[0])
    assert pipeline.validation.loss_scale() == 8.0
    del scaled


def pipeline_and_optimizer(kind=None, **options):
    pipeline = tiny_pipeline(zb.zb_h1(2, 4))
    inner = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    return pipeline, inner, (kind or zb.PostValidatedOptimizer)(inner, **options)


@pytest.mark.parametrize("kind", [zb.PostValidatedOptimizer, zb.SynchronousOptimizer])
def test_clipping_is_that_of_torch_with_the_norm_of_all_ranks(kind):
    pipeline, _, optimizer = pipeline_and_optimizer(kind, clip_norm=0.1)
    plain = tiny_pipeline(zb.zb_h1(2, 4))
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):
        assert pipeline.step(*tiny_batch(seed=step)).item() == plain.step(*tiny_batch(seed=step)).item()
        norm = plain.clip_grad_norm_(0.1)
        adamw.step()
        adamw.zero_grad()
        optimizer.step()
        assert optimizer.grad_norm.item() == norm
    assert all(map(torch.equal, pipeline.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", [zb.PostValidatedOptimizer, zb.SynchronousOptimizer])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(kind):
    pipeline, _, optimizer = pipeline_and_optimizer(kind)
    before = [p.detach().clone() for p in pipeline.parameters()]
    pipeline.step(*tiny_batch())
    next(pipeline.parameters()).grad[0, 0] = nan
    optimizer.step()
    assert all(map(torch.equal, pipeline.parameters(), before))
    assert all(p.grad is None for p in pipeline.parameters())


def test_without_the_check_it_is_taken():
    pipeline, _, optimizer = pipeline_and_optimizer(check_finite=False)
    pipeline.step(*tiny_batch())
    next(pipeline.parameters()).grad[0, 0] = nan
    optimizer.step()
    assert next(pipeline.parameters()).isnan().sum() == 1


def test_schedulers_of_torch_take_it():
    pipeline, inner, optimizer = pipeline_and_optimizer()
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    ]
    pipeline.step(*tiny_batch())
    optimizer.step()
    schedulers[0].step()
    schedulers[1].step(1.0)
    schedulers[2].step()
    assert optimizer.param_groups is inner.param_groups
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 1e-2


def test_a_checkpoint_is_that_of_the_wrapped_optimizer_and_takes_the_scaler_along():
    pipeline, inner, optimizer = pipeline_and_optimizer(scaler=torch.amp.GradScaler("cpu", growth_interval=1))
    pipeline.step(*tiny_batch())
    optimizer.step()
    state = deepcopy(optimizer.state_dict())
    assert str({key: state[key] for key in state if key != "scaler"}) == str(inner.state_dict())
    assert state["scaler"]["scale"] == 2.0**17
    _, other_inner, other = pipeline_and_optimizer(scaler=torch.amp.GradScaler("cpu"))
    other.load_state_dict(state)
    assert str(other.state_dict()) == str(state)
    other.load_state_dict(inner.state_dict())
    assert str(other_inner.state_dict()) == str(inner.state_dict())


def test_hooks_and_repr_are_those_of_the_wrapped_optimizer():
    pipeline, inner, optimizer = pipeline_and_optimizer()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    pipeline.step(*tiny_batch())
    optimizer.step()
    assert calls == [1]
    assert repr(inner) in repr(optimizer)
    assert optimizer.defaults is inner.defaults


def test_parameters_may_be_added_later():
    pipeline = tiny_pipeline(zb.zb_h1(2, 4))
    first, *rest = pipeline.parameters()
    optimizer = zb.PostValidatedOptimizer(torch.optim.SGD([first], lr=0.1))
    optimizer.add_param_group({"params": rest, "lr": 0.0})
    pipeline.step(*tiny_batch())
    optimizer.step()
    assert optimizer.grad_norm > 0
    assert all(p.grad is None for p in pipeline.parameters())


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"undo": "magic"}, "undo must be one of snapshot, reverse; got 'magic'"),
        ({"clip_norm": 0.0}, "max_norm must be a positive number; got 0.0"),
        ({"clip_norm": 1.0, "norm_type": -1.0}, "norm_type must be a positive number or infinity; got -1.0"),
        ({"scaler": torch.amp.GradScaler("cpu"), "check_finite": False}, "check_finite must stay on"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, message):
    for kind in (zb.PostValidatedOptimizer, zb.SynchronousOptimizer):
        with pytest.raises(OptionError, match=message):
            pipeline_and_optimizer(kind, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.RMSprop, "undo='reverse' knows SGD, Adam and AdamW; got RMSprop: take undo='snapshot'"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), r"amsgrad: .* \(parameter group 0\): take undo='snapshot'"),
        (lambda p: torch.optim.Adam(p, betas=(0.0, 0.9)), "a beta of 0"),
        (lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=1.0), "decay by the whole weight"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, foreach=True), "set foreach=False"),
    ],
)
def test_what_cannot_be_undone_by_arithmetic_is_refused(make, message):
    pipeline = tiny_pipeline(zb.zb_h1(2, 4))
    with pytest.raises(OptionError, match=message):
        zb.PostValidatedOptimizer(make(pipeline.parameters()), undo="reverse")


def test_the_pipeline_must_be_clear():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    one, other = (Pipeline(layers, lambda y, _: y.sum(), zb.zb_h1(2, 2)) for _ in range(2))
    inner = torch.optim.SGD(one.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"parameters belong to several pipelines: .* pipeline=\.\.\."):
        zb.PostValidatedOptimizer(inner)
    zb.PostValidatedOptimizer(inner, pipeline=other)
    with pytest.raises(OptionError, match=r"parameters are not those of one pipeline: .*pipeline\.parameters\(\)"):
        zb.PostValidatedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_calls_that_make_no_sense_are_refused():
    _, _, optimizer = pipeline_and_optimizer()
    with pytest.raises(OptionError, match="step takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(PipelineError, match="no gradient norm yet: take a step first"):
        _ = optimizer.grad_norm
    for wrong in ("AdamW", optimizer):
        with pytest.raises(OptionError, match=r"give an optimizer of torch, such as torch\.optim\.AdamW"):
            zb.PostValidatedOptimizer(wrong)
