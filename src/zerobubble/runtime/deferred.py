"""Functions of an input and parameters whose backward gives the input gradient and leaves the rest for W.

Each `Rule` is one kind of function: how to run it, its input gradient, and how each parameter's gradient is added.
`apply` runs a function under its rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from zerobubble.errors import PipelineError
from zerobubble.runtime.inlet import anchor
from zerobubble.runtime.weight_store import accumulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerobubble.runtime.weight_store import WeightStore

Options: TypeAlias = "tuple[Any, ...]"


@dataclass(frozen=True)
class Rule:
    """How one kind of function is run and differentiated.

    Attributes:
        forward: (input, parameters, options) -> output. Absent parameters are None.
        input_gradient: (output gradient, input, parameters, options) -> input gradient; None when there is none.
        contributions: per parameter, (accumulator or None, input, output gradient, parameter's shape, options) ->
            accumulator with this gradient added.
        autocasts: whether autocast runs this kind in lower precision.
        needs_input: per parameter, whether its gradient needs the input (a bias needs the output gradient alone).
    """

    forward: Callable[[Tensor, Sequence[Tensor | None], Options], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Sequence[Tensor | None], Options], Tensor] | None
    contributions: tuple[Callable[[Tensor | None, Tensor | None, Tensor, torch.Size, Options], Tensor], ...]
    needs_input: tuple[bool, ...]
    autocasts: bool = True


def apply(
    rule: Rule, store: WeightStore, x: Tensor, parameters: Sequence[Tensor | None], options: Options = ()
) -> Tensor:
    """Run a function under `rule`; its backward leaves the gradients of those `parameters` that need one in `store`."""
    dtype = _autocast_dtype(x) if rule.autocasts and torch._C._is_any_autocast_enabled() else None
    if dtype is not None:
        x = x.to(dtype)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        store.recomputes = True
    store.announce(parameters)
    output: Tensor = _Deferred.apply(  # type: ignore[no-untyped-call]
        x, None if x.requires_grad else anchor(x.device), rule, store, (*parameters,), dtype, options
    )
    return output


_AUTOCAST = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""What autocast casts: neither integers nor doubles."""


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of an input: None where it leaves it alone."""
    if x.dtype in _AUTOCAST and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return None


def _cast(parameters: Sequence[Tensor | None], dtype: torch.dtype | None) -> Sequence[Tensor | None]:
    return parameters if dtype is None else [None if p is None else p.detach().to(dtype) for p in parameters]


class _Deferred(torch.autograd.Function):
    """Parameters are passed inside tuples, so that autograd sees none of them and their hooks stay silent in B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _anchor: Tensor | None,
        rule: Rule,
        store: WeightStore,
        parameters: tuple[Tensor | None, ...],
        dtype: torch.dtype | None,
        options: Options,
    ) -> Tensor:
        ctx.rule, ctx.store, ctx.parameters, ctx.dtype, ctx.options = rule, store, parameters, dtype, options
        ctx.save_for_backward(x, *parameters)  # the parameters themselves: copies that autocast makes would pile up
        return rule.forward(x, _cast(parameters, dtype), options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        rule: Rule = ctx.rule
        if not ctx.store.in_backward or torch.is_grad_enabled():
            raise PipelineError(
                "a layer or loss calls autograd.grad (or backward) within its forward, through functions whose weight "
                "gradients would wait for W; put what it differentiates in `with zerobubble.unsplit():`"
            )
        bare = x.detach()  # W must not keep the graph alive that made the input
        for parameter, contribution, needs_input in zip(ctx.parameters, rule.contributions, rule.needs_input):
            if parameter is not None and parameter.requires_grad:
                kept = bare if needs_input else None
                ctx.store.add(parameter, contribution, kept, grad, parameter.shape, ctx.options)
        grad_x = None
        if rule.input_gradient is not None and ctx.needs_input_grad[0]:
            grad_x = rule.input_gradient(grad, x, _cast(parameters, ctx.dtype), ctx.options)
        return grad_x, None, None, None, None, None, None


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _add_product(accumulator: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Accumulator + left @ right, in place where there is an accumulator of the same dtype."""
    if accumulator is None:
        return left @ right
    if accumulator.dtype == left.dtype:
        return accumulator.addmm_(left, right)
    return accumulator.add_(left @ right)


def _add_row_sum(
    accumulator: Tensor | None, _x: Tensor | None, grad: Tensor, shape: torch.Size, _options: Options
) -> Tensor:
    if accumulator is None and grad.shape == shape:
        return grad.clone()  # others may hold the output gradient, and later ones are added in place
    rows = _matrix(grad) if len(shape) == 1 else grad  # a sum over one dimension is twice as fast
    return accumulate(accumulator, rows.sum_to_size(shape))


# linear: x [..., in], weight [out, in], bias [out] -> [..., out]
def _linear_weight(
    accumulator: Tensor | None, x: Tensor | None, grad: Tensor, _shape: torch.Size, _options: Options
) -> Tensor:
    assert x is not None
    return _add_product(accumulator, _matrix(grad).t(), _matrix(x))


def _linear_forward(x: Tensor, parameters: Sequence[Tensor | None], _options: Options) -> Tensor:
    weight, bias = parameters
    assert weight is not None
    return torch.nn.functional.linear(x, weight, bias)


def _linear_input(grad: Tensor, _x: Tensor, parameters: Sequence[Tensor | None], _options: Options) -> Tensor:
    weight = parameters[0]
    assert weight is not None
    return grad @ weight


LINEAR = Rule(_linear_forward, _linear_input, (_linear_weight, _add_row_sum), (True, False))


# matrix product: x [..., in], weight [in, out] (, bias, broadcast) -> [..., out]
def _matmul_forward(x: Tensor, parameters: Sequence[Tensor | None], _options: Options) -> Tensor:
    weight, bias = parameters
    assert weight is not None
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _matmul_weight(
    accumulator: Tensor | None, x: Tensor | None, grad: Tensor, _shape: torch.Size, _options: Options
) -> Tensor:
    assert x is not None
    return _add_product(accumulator, _matrix(x).t(), _matrix(grad))


def _matmul_input(grad: Tensor, _x: Tensor, parameters: Sequence[Tensor | None], _options: Options) -> Tensor:
    weight = parameters[0]
    assert weight is not None
    return grad @ weight.t()


MATMUL = Rule(_matmul_forward, _matmul_input, (_matmul_weight, _add_row_sum), (True, False))


# product of batches of matrices: x and weight of any number of dimensions from 2 on, broadcast against each other
def _product_forward(x: Tensor, parameters: Sequence[Tensor | None], options: Options) -> Tensor:
    weight = parameters[0]
    assert weight is not None
    return weight @ x if options[0] else x @ weight


def _product_input(grad: Tensor, x: Tensor, parameters: Sequence[Tensor | None], options: Options) -> Tensor:
    weight = parameters[0]
    assert weight is not None
    return (weight.mT @ grad if options[0] else grad @ weight.mT).sum_to_size(x.shape)


def _product_weight(
    accumulator: Tensor | None, x: Tensor | None, grad: Tensor, shape: torch.Size, options: Options
) -> Tensor:
    assert x is not None
    return accumulate(accumulator, (grad @ x.mT if options[0] else x.mT @ grad).sum_to_size(shape))


PRODUCT = Rule(_product_forward, _product_input, (_product_weight,), (True,))
"""Options: whether the weight stands on the left."""


# einsum of an input and a weight; options: the subscripts of input, weight and output, and which of the two comes first
def _einsum_forward(x: Tensor, parameters: Sequence[Tensor | None], options: Options) -> Tensor:
    of_x, of_weight, of_output, weight_first = options
    operands = ((of_weight, parameters[0]), (of_x, x)) if weight_first else ((of_x, x), (of_weight, parameters[0]))
    (first, a), (second, b) = operands
    return torch.einsum(f"{first},{second}->{of_output}", a, b)


def _einsum_input(grad: Tensor, _x: Tensor, parameters: Sequence[Tensor | None], options: Options) -> Tensor:
    of_x, of_weight, of_output, _ = options
    return torch.einsum(f"{of_output},{of_weight}->{of_x}", grad, parameters[0])


def _einsum_weight(
    accumulator: Tensor | None, x: Tensor | None, grad: Tensor, _shape: torch.Size, options: Options
) -> Tensor:
    of_x, of_weight, of_output, _ = options
    return accumulate(accumulator, torch.einsum(f"{of_output},{of_x}->{of_weight}", grad, x))


EINSUM = Rule(_einsum_forward, _einsum_input, (_einsum_weight,), (True,))


# embedding: x [...] of indices, weight [rows, width] -> [..., width]; options (padding_idx, scale_grad_by_freq)
def _embedding_forward(x: Tensor, parameters: Sequence[Tensor | None], options: Options) -> Tensor:
    weight = parameters[0]
    assert weight is not None
    padding, by_frequency = options
    return torch.embedding(weight, x, padding, by_frequency, False)


def _embedding_weight(
    accumulator: Tensor | None, x: Tensor | None, grad: Tensor, shape: torch.Size, options: Options
) -> Tensor:
    padding, by_frequency = options
    return accumulate(accumulator, torch.ops.aten.embedding_dense_backward(grad, x, shape[0], padding, by_frequency))


EMBEDDING = Rule(_embedding_forward, None, (_embedding_weight,), (True,))


# convolution: options as torch.convolution takes them: stride, padding, dilation, transposed, output_padding, groups
def _convolution_forward(x: Tensor, parameters: Sequence[Tensor | None], options: Options) -> Tensor:
    weight, bias = parameters
    assert weight is not None
    return torch.convolution(x, weight, bias, *options)


def _convolution_input(grad: Tensor, x: Tensor, parameters: Sequence[Tensor | None], options: Options) -> Tensor:
    wanted = [True, False, False]
    gradients = torch.ops.aten.convolution_backward(grad, x, parameters[0], None, *options, wanted)
    return gradients[0]  # type: ignore[no-any-return]


def _convolution_weight(
    accumulator: Tensor | None, x: Tensor | None, grad: Tensor, shape: torch.Size, options: Options
) -> Tensor:
    wanted = [False, True, False]
    like = grad.new_empty(()).expand(shape)  # only its shape is used
    return accumulate(accumulator, torch.ops.aten.convolution_backward(grad, x, like, None, *options, wanted)[1])


def _convolution_bias(
    accumulator: Tensor | None, _x: Tensor | None, grad: Tensor, shape: torch.Size, _options: Options
) -> Tensor:
    return accumulate(accumulator, grad.sum([0, *range(2, grad.dim())]).reshape(shape))


CONVOLUTION = Rule(_convolution_forward, _convolution_input, (_convolution_weight, _convolution_bias), (True, False))
