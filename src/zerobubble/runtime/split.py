"""The B/W split for eager PyTorch: a function mode that sees every functional call with a parameter.

While a stage's forward runs under `SplitBackward(store)`, calls such as `F.linear` that take a `Parameter` become
autograd functions whose backward gives the input gradient and leaves the weight gradient in `store` (design by rule:
`zerobubble.runtime.deferred`). It works on any `nn.Module` with no surgery. A parameter used in any other way gets its
gradient in B, as under plain autograd: right, only not deferred. Norm weights are among these on purpose: their
gradient is a cheap by-product of the fused backward, and leaving it for W would keep two more activations alive.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerobubble.errors import PipelineError
from zerobubble.runtime.deferred import CONVOLUTION, EINSUM, EMBEDDING, LINEAR, MATMUL, PRODUCT, apply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.autograd.graph import GradientEdge

    from zerobubble.runtime.weight_store import WeightStore

    Handler = Callable[..., Any]
    Uses = dict[Tensor, dict[str, None]]
    """Parameter -> names of functions, in order."""


class SplitBackward(TorchFunctionMode):
    """Context: forwards that run inside leave their weight gradients for W in `store`.

    With `uses`, it also writes down which functions took which parameter without leaving its gradient for W.
    """

    def __init__(self, store: WeightStore, uses: Uses | None = None) -> None:
        super().__init__()
        self.store = store
        self._uses = uses
        self._open: FunctionType | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, deferred where a handler takes it."""
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
                output = handler(self.store, *args, **kwargs)
                if output is not NotImplemented:
                    return output
        elif type(func) is FunctionType and func not in _FUSED and self._can_open(func, args, kwargs):
            return self._inside(func, args, kwargs)
        if self._uses is not None:
            self._note_use(func, (*args, *kwargs.values()))
        return func(*args, **kwargs)

    def _note_use(self, func: Any, arguments: Sequence[Any]) -> None:
        """Write down that `func` takes trained parameters and leaves nothing of their gradient for W."""
        assert self._uses is not None
        name = getattr(func, "__name__", str(func))
        for value in arguments:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if _trains(item) and name not in _LOOKS:
                    self._uses.setdefault(item, {})[name] = None

    def _can_open(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether calls inside a Python function may take a parameter that trains."""
        return func is not self._open and torch.is_grad_enabled() and any(map(_trains, (*args, *kwargs.values())))

    def _inside(self, func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a Python function so that the calls inside it reach the mode. One that comes back is run plainly."""
        before, self._open = self._open, func
        try:
            with self:
                return _opened(func)(*args, **kwargs)
        finally:
            self._open = before


@contextmanager
def unsplit() -> Iterator[None]:
    """Context: what runs inside is differentiated by plain autograd; nothing of it waits for W.

    For layers and losses that call `torch.autograd.grad` themselves, say for a gradient penalty.
    """
    with torch._C.DisableTorchFunction():
        yield


def backward(outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], store: WeightStore) -> None:
    """B of a graph that was recorded under `SplitBackward(store)`.

    A checkpointed block runs its forward again in here, and must then record the same graph: under the same mode.
    """
    with store.collecting():
        if store.recomputes:
            with SplitBackward(store):
                _opened(torch.autograd.backward)(outputs, gradients)
        else:
            torch.autograd.backward(outputs, gradients)


_LOOKS = frozenset(
    {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "stride", "data_ptr", "__len__"}
)
"""Calls that only look at a parameter."""

_FUSED: frozenset[Any] = frozenset({F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm})
"""Python functions that make one native call with their parameters: nothing inside them can be deferred."""


def register(func: Callable[..., Any], handler: Handler) -> None:
    """Teach the split another function, which must honour `__torch_function__`.

    `handler(store, *args, **kwargs)` returns the output, as a rule by `zerobubble.runtime.deferred.apply`, or
    `NotImplemented` for a call that it leaves to plain autograd.
    """
    _HANDLERS[func] = handler


def _trains(value: object) -> bool:
    # asked last for its type: on anything but a plain parameter that check runs Python
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf and isinstance(value, torch.nn.Parameter)


def _defers(value: object) -> bool:
    """Whether a gradient of this parameter may wait for W (the rules are for real numbers)."""
    return _trains(value) and not value.is_complex()  # type: ignore[attr-defined]


@cache
def _opened(func: FunctionType) -> FunctionType:
    """`func` without its own override check: the calls inside it (as in attention) then reach the mode one by one."""
    no = {
        name: lambda *_: False
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    }
    opened = FunctionType(func.__code__, {**func.__globals__, **no}, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _linear(store: WeightStore, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not _defers(weight) or not _leaf(bias):
        return NotImplemented
    return apply(LINEAR, store, input, (weight, bias))


def _leaf(bias: Tensor | None) -> bool:
    """Whether nothing needs the gradient of `bias` but the parameter itself."""
    return bias is None or not bias.requires_grad or isinstance(bias, torch.nn.Parameter)


def _matmul(store: WeightStore, input: Tensor, other: Tensor | None = None, **rest: Any) -> Any:
    if other is None or rest or _defers(input) == _defers(other) or min(input.dim(), other.dim()) < 2:
        return NotImplemented
    if _defers(input):
        return apply(PRODUCT, store, other, (input,), (True,))
    if other.dim() == 2:
        return apply(MATMUL, store, input, (other, None))
    return apply(PRODUCT, store, input, (other,), (False,))


def _einsum(store: WeightStore, equation: Any, *operands: Any) -> Any:
    if not isinstance(equation, str) or len(operands) != 2 or _defers(operands[0]) == _defers(operands[1]):
        return NotImplemented
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    subscripts = inputs.split(",")
    weight_first = _defers(operands[0])
    of_weight, of_x = subscripts if weight_first else subscripts[::-1]
    weight, x = operands if weight_first else operands[::-1]
    if not arrow or "." in equation or not _linear_in_each(of_x, of_weight, output):
        return NotImplemented
    return apply(EINSUM, store, x, (weight,), (of_x, of_weight, output, weight_first))


def _linear_in_each(*subscripts: str) -> bool:
    """Whether no index is repeated within a term or stands in one term alone: then gradients are einsums themselves."""
    terms = [set(term) for term in subscripts]
    others = [set().union(*(t for t in terms if t is not term)) for term in terms]
    return all(len(set(term)) == len(term) for term in subscripts) and all(
        term <= rest for term, rest in zip(terms, others)
    )


def _addmm(
    store: WeightStore, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> Any:
    if not _defers(mat2) or not _leaf(input) or _defers(mat1) or (beta, alpha, out) != (1, 1, None):
        return NotImplemented
    return apply(MATMUL, store, mat1, (mat2, input))


def _embedding(
    store: WeightStore,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not _defers(weight) or max_norm is not None:
        return NotImplemented
    if sparse:
        raise PipelineError(
            f"an embedding of {list(weight.shape)} asks for sparse gradients, which cannot be accumulated over "
            "microbatches in place; make it with sparse=False"
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return apply(EMBEDDING, store, input, (weight,), (padding, scale_grad_by_freq))


def _convolution(
    dims: int,
    transposed: bool,
    store: WeightStore,
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    *rest: Any,
    **named: Any,
) -> Any:
    order = ("stride", "padding", *(("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")))
    given = {**_CONVOLUTION_DEFAULTS, **dict(zip(order, rest)), **named}
    groups = given.pop("groups")
    if not _defers(weight) or not _leaf(bias) or isinstance(given["padding"], str) or input.dim() != dims + 2:
        return NotImplemented
    sizes = {name: _each(value, dims) for name, value in given.items()}
    options = (sizes["stride"], sizes["padding"], sizes["dilation"], transposed, sizes["output_padding"], groups)
    return apply(CONVOLUTION, store, input, (weight, bias), options)


_CONVOLUTION_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1}


def _each(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


_HANDLERS: dict[Any, Handler] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.einsum: _einsum,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.mm, Tensor.mm, torch.bmm, Tensor.bmm), _matmul),
    F.conv1d: partial(_convolution, 1, False),
    F.conv2d: partial(_convolution, 2, False),
    F.conv3d: partial(_convolution, 3, False),
    F.conv_transpose1d: partial(_convolution, 1, True),
    F.conv_transpose2d: partial(_convolution, 2, True),
    F.conv_transpose3d: partial(_convolution, 3, True),
}
