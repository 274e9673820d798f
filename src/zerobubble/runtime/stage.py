"""One stage of the model: runs F, B and W of its layers and keeps, per microbatch, only what the next of them needs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import Parameter, signature
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zerobubble.errors import PipelineError
from zerobubble.runtime.extra_loss import collecting
from zerobubble.runtime.parcel import Parcel, pack, pack_gradients, unpack
from zerobubble.runtime.randomness import generators, seed_for
from zerobubble.runtime.split import SplitBackward, backward
from zerobubble.runtime.split_report import ParameterSplit, describe
from zerobubble.runtime.weight_store import WeightStore, accumulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from zerobubble.runtime.inlet import Inlet
    from zerobubble.runtime.split import Uses

    LossFunction = Callable[[Any, Any], Tensor]


@dataclass
class Batch:
    """What a step trains on, cut into microbatches: entry [i] of each list belongs to microbatch i.

    Attributes:
        step: number of the training step; with seed, microbatch and layer it fixes the randomness.
        inputs: input of the first stage.
        targets: second argument of the loss function.
        keywords: keyword arguments for every layer that names them.
        weights: by what the loss of each microbatch is multiplied.
        loss_scale: by what the backward multiplies every loss on top of that (for fp16).
        losses: filled by the last stage: the loss of each microbatch before weighting (0-dimensional).
    """

    step: int
    inputs: Sequence[Any]
    targets: Sequence[Any]
    keywords: Sequence[Mapping[str, Any]]
    weights: Sequence[float]
    loss_scale: float = 1.0
    losses: dict[int, Tensor] = field(default_factory=dict)

    def total_loss(self) -> Tensor:
        """The weighted sum of the losses, always added in the order of microbatches."""
        losses = torch.stack([self.losses[mb] * self.weights[mb] for mb in sorted(self.losses)])
        return torch.cumsum(losses, 0)[-1]


_NOTHING = nullcontext()


class _Saved(NamedTuple):
    """What F keeps for B."""

    inlets: list[Inlet]
    outputs: list[GradientEdge]  # what goes to the next stage, then the losses
    weights: list[Tensor]  # the gradients of the losses; the other outputs get theirs from the next stage
    store: WeightStore


class Stage:
    """The layers of one stage.

    Args:
        index: number of the stage in data-flow order.
        layers: (number in the model, module) in order; each gets the output of the one before it. A tuple is passed
            as positional arguments, a dict as keyword arguments, anything else as the only argument.
        seed: base of the deterministic randomness.
        device: where it runs.
        loss_fn: on the last stage, (output, target) -> 0-dimensional loss of a microbatch.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[tuple[int, nn.Module]],
        seed: int,
        device: torch.device,
        loss_fn: LossFunction | None = None,
    ) -> None:
        self.index = index
        self._layers = [(number, layer, keyword_names(layer)) for number, layer in layers]
        self._seed = seed
        self._device = device
        self._generators = generators(device)
        self._loss_fn = loss_fn
        self._saved: dict[int, _Saved] = {}
        self._stores: dict[int, WeightStore] = {}
        self._shared: dict[nn.Parameter, Tensor | None] = {}
        self._split: list[ParameterSplit] | None = None

    def share(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the gradients of these parameters, which other stages use too, apart until `add_shared_gradients`.

        So they are summed stage by stage, whatever the order in which a schedule runs the stages.
        """
        own = set(self.parameters())
        self._shared = dict.fromkeys((p for p in parameters if p in own), None)

    def add_shared_gradients(self) -> None:
        """At the end of a step: add what this stage found for the parameters that it shares to their `.grad`."""
        for parameter, gradient in self._shared.items():
            if gradient is not None:
                parameter.grad = accumulate(parameter.grad, gradient)
                self._shared[parameter] = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the layers, each once."""
        seen = {p: None for _, layer, _ in self._layers for p in layer.parameters()}
        return iter(seen)

    def split_report(self) -> list[ParameterSplit]:
        """What the split does with each parameter, as the first training forward showed.

        Raises:
            PipelineError: there was none yet.
        """
        if self._split is None:
            raise PipelineError("there is no split to report on yet: take a training step first")
        return self._split

    def forward(self, batch: Batch, microbatch: int, parcel: Parcel | None) -> Parcel | None:
        """F: run the layers. Returns the parcel for the next stage, None on the last one.

        `parcel` is what the previous stage sent; the first stage takes its input from `batch`.
        """
        value, inlets = unpack(parcel) if parcel else (batch.inputs[microbatch], [])
        del parcel
        store = WeightStore()
        uses: Uses | None = {} if self._split is None else None
        extra: list[Tensor] = []
        with SplitBackward(store, uses) if torch.is_grad_enabled() else nullcontext(), collecting(extra):
            value = self._run_layers(value, batch, microbatch)
            if self._loss_fn is not None:
                value = self._loss(value, batch, microbatch)
        if uses is not None and torch.is_grad_enabled():
            self._split = describe(self.index, self._named_parameters(), store.deferred, uses)
        sent, outputs = pack(value)
        if self._loss_fn is not None:
            extra += outputs
            outputs = []
        if torch.is_grad_enabled():
            edges = [get_gradient_edge(output) for output in (*outputs, *extra)]
            weights = [torch.full_like(loss, batch.weights[microbatch]) for loss in extra]
            self._saved[microbatch] = _Saved(inlets, edges, weights, store)
        return sent if self._loss_fn is None else None

    def backward_input(self, microbatch: int, parcel: Parcel | None, loss_scale: float = 1.0) -> Parcel:
        """B: the gradients of the stage's inputs, given those of its outputs; leaves the weights' for W."""
        inlets, edges, weights, store = self._saved.pop(microbatch)
        if loss_scale != 1.0:
            weights = [weight * loss_scale for weight in weights]
        if edges:
            with self._of_a_backward():
                backward(edges, [*(parcel.tensors if parcel else ()), *weights], store)
        self._stores[microbatch] = store
        return pack_gradients(inlet.take() for inlet in inlets)

    def backward_weight(self, microbatch: int) -> None:
        """W: add the gradients of the weights to `.grad`. Legal with nothing left to add."""
        with self._of_a_backward():
            self._stores.pop(microbatch).run()

    def _of_a_backward(self) -> AbstractContextManager[object]:
        """Context of B and W; as under plain PyTorch, they run in the precision of what the forward saved."""
        if not self._shared and not torch.is_autocast_enabled(self._device.type):
            return _NOTHING
        contexts = ExitStack()
        contexts.enter_context(self._own_gradients())
        contexts.enter_context(torch.autocast(self._device.type, enabled=False))
        return contexts

    def backward_last_weights(self, microbatches: Sequence[int], done: Callable[[nn.Parameter], None]) -> None:
        """The last W of a step, of these microbatches: parameter by parameter, the last layer's first.

        The sums are bit for bit those of one W after the other. Calls `done` with each parameter of the stage as soon
        as the stage has all of its gradient (which may be none).
        """
        with self._of_a_backward():
            parts = [self._stores.pop(microbatch).by_parameter() for microbatch in microbatches]
            for parameter in reversed(list(self.parameters())):
                for part in parts:
                    part.pop(parameter, WeightStore()).run()
                done(parameter)
            for store in chain.from_iterable(part.values() for part in parts):  # parameters of none of the layers
                store.run()

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Context: `.grad` of the shared parameters is what this stage has found for them in this step."""
        others = {parameter: parameter.grad for parameter in self._shared}
        for parameter, own in self._shared.items():
            parameter.grad = own
        try:
            yield
        finally:
            for parameter, grad in others.items():
                self._shared[parameter], parameter.grad = parameter.grad, grad

    def clear(self) -> None:
        """Forget everything of a step that is broken off, or starts again."""
        self._saved.clear()
        self._stores.clear()
        self._shared = dict.fromkeys(self._shared, None)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, layer, _ in self._layers:
            for name, parameter in layer.named_parameters():
                yield f"{number}.{name}", parameter

    def _run_layers(self, value: Any, batch: Batch, microbatch: int) -> Any:
        keywords = batch.keywords[microbatch]
        for number, layer, names in self._layers:
            seed = seed_for(self._seed, batch.step, microbatch, number)
            for generator in self._generators:
                generator.manual_seed(seed)
            taken = keywords if names is None else {name: keywords[name] for name in names if name in keywords}
            value = call_layer(layer, value, taken)
        return value

    def _loss(self, value: Any, batch: Batch, microbatch: int) -> Tensor:
        assert self._loss_fn is not None
        loss = self._loss_fn(value, batch.targets[microbatch])
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise PipelineError(f"loss_fn must return a 0-dimensional tensor, the loss of one microbatch; got {got}")
        batch.losses[microbatch] = loss.detach()
        return loss


def call_layer(layer: nn.Module, value: Any, keywords: Mapping[str, Any]) -> Any:
    """Call `layer` with what the layer before it returned: a tuple is spread out, so is a dict."""
    if type(value) is tuple:
        return layer(*value, **keywords)
    if type(value) is dict:
        return layer(**value, **keywords)
    return layer(value, **keywords)


def keyword_names(layer: nn.Module) -> frozenset[str] | None:
    """The names under which `layer.forward` takes keyword arguments, without its first parameter; None for any name.

    Wrappers of torch (compiled and checkpointed modules) are looked through.
    """
    for wrapped in ("_orig_mod", "_checkpoint_wrapped_module"):
        if isinstance(inner := getattr(layer, wrapped, None), nn.Module):
            return keyword_names(inner)
    parameters = list(signature(layer.forward).parameters.values())
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return None
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return frozenset(p.name for i, p in enumerate(parameters) if p.kind in named and (i > 0 or p.kind is named[1]))
