"""Emulated compute: layers that sleep their times and hold their memory, so that real processes rehearse a schedule."""

from __future__ import annotations

import time
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from zerobubble.op import Kind
from zerobubble.runtime.deferred import Rule, apply
from zerobubble.runtime.parcel import Parcel, form_of
from zerobubble.runtime.split import register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerobubble.costs import Costs
    from zerobubble.lower import Message
    from zerobubble.op import Op
    from zerobubble.runtime.transport import Transport
    from zerobubble.runtime.weight_store import WeightStore
    from zerobubble.schedule import Schedule

_SPIN_NS = 250_000
"""`time.sleep` wakes some 60 to 200 us late: the last part of a wait is spent looking at the clock."""

_BYTES = 2**18
"""Of the stage and state with most memory."""


@dataclass(frozen=True)
class Times:
    """What a layer takes: seconds in F, B and W, bytes from F until B, and bytes from B until W."""

    forward: float
    backward_input: float
    backward_weight: float
    activation_bytes: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class Emulation:
    """A pipeline's stages as `costs` say, in real time and real bytes.

    Attributes:
        times: per stage.
        latency: T_comm per stage boundary, in seconds.
        seconds: that one unit of time of the costs takes.
        bytes: that stand for one unit of memory of the costs.
    """

    times: tuple[Times, ...]
    latency: tuple[float, ...]
    seconds: float
    bytes: float

    def layers(self) -> list[nn.Module]:
        """One layer per stage."""
        return [EmulatedLayer(times) for times in self.times]

    def delayed(self, transport: Transport) -> Transport:
        """`transport` with the latencies, for `Pipeline(..., wrap_transport=)`."""
        return DelayedTransport(transport, self.latency)


def emulation(costs: Costs, schedule: Schedule, stretch: float = 1.0) -> Emulation:
    """The stages of `schedule` as `costs` say, all times multiplied by `stretch`; without a unit they are in ms.

    A stage that runs BW only takes T_BW for it, in the proportion of T_B and T_W.

    Raises:
        CostsError: the costs do not fit the placement, or their unit is no unit of time.
    """
    found = costs.resolve(schedule.placement)
    seconds = costs.seconds * stretch
    memory = max(*found.activation_memory, *found.weight_memory)
    scale = _BYTES / memory if memory else 0.0
    divided = {op.stage for op in schedule.ops() if op.kind is Kind.B}
    times = []
    for stage in range(schedule.num_stages):
        b, w = found.backward_input[stage], found.backward_weight[stage]
        share = 1.0 if stage in divided or not b + w else found.backward_full[stage] / (b + w)
        kept, left = found.activation_memory[stage], found.weight_memory[stage]
        f, b, w = found.forward[stage] * seconds, b * share * seconds, w * share * seconds
        times.append(Times(f, b, w, round(kept * scale), round(left * scale)))
    return Emulation(tuple(times), tuple(hop * seconds for hop in found.hop), seconds, scale)


def sleep_until(deadline: int) -> None:
    """Sleep until the monotonic clock (ns) reads `deadline`, to within a few microseconds."""
    rest = deadline - perf_counter_ns()
    if rest > _SPIN_NS:
        time.sleep((rest - _SPIN_NS) / 1e9)
    while perf_counter_ns() < deadline:
        pass


def work(seconds: float) -> None:
    """Take `seconds`, asleep."""
    sleep_until(perf_counter_ns() + int(seconds * 1e9))


# ---------------------------------------------------------------------------------------------------- latency


class DelayedTransport:
    """A transport on which a message takes at least its hop's latency, and nobody is occupied by it.

    A message carries the time at which it was sent; whoever asks for it before that time and the latency have passed
    waits until then. Senders and receivers must read one clock: it is for processes of one machine.

    Args:
        inner: what carries the messages.
        latency: seconds per stage boundary.
    """

    def __init__(self, inner: Transport, latency: Sequence[float]) -> None:
        self.turn = inner.turn
        self.post: Callable[[Message], None] = inner.post
        self.finished: Callable[[Op, int], None] = inner.finished
        self.failed: Callable[[BaseException, str], None] = inner.failed
        self._inner = inner
        self._latency_ns = [int(seconds * 1e9) for seconds in latency]
        self._early: dict[Message, tuple[Parcel, int]] = {}

    def send(self, message: Message, parcel: Parcel) -> None:
        """Send `parcel` with the time."""
        stamp = torch.tensor(perf_counter_ns())
        self._inner.send(message, Parcel((parcel.skeleton, form_of(stamp)), (*parcel.tensors, stamp)))

    def receive(self, message: Message) -> Parcel:
        """Wait for `message`, and until its latency has passed."""
        parcel, due = self._early.pop(message) if message in self._early else self._received(message)
        sleep_until(due)
        return parcel

    def arrived(self, message: Message, patience: float) -> bool:
        """Whether it is here and its latency has passed."""
        deadline = perf_counter_ns() + int(patience * 1e9)
        if message not in self._early:
            if not self._inner.arrived(message, patience):
                return False
            self._early[message] = self._received(message)
        due = self._early[message][1]
        sleep_until(min(due, deadline))
        return due <= perf_counter_ns()

    def _received(self, message: Message) -> tuple[Parcel, int]:
        """The parcel, and when it may be used."""
        parcel = self._inner.receive(message)
        *tensors, stamp = parcel.tensors
        due = int(stamp) + self._latency_ns[min(message.producer.stage, message.consumer_stage)]
        return Parcel(parcel.skeleton[0], tuple(tensors)), due


# ---------------------------------------------------------------------------------------------------- layers


class EmulatedLayer(nn.Module):
    """Passes its input [...] on unchanged, after sleeping. F, B and W take their own times under any schedule."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep T_F."""
        if not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # the first stage takes T_B, too
        return emulated(x, self.weight, self.times)


class _Held:
    """The memory of one microbatch: M_B from F on, M_W from B on."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def hold(self, count: int) -> None:
        """Let go of what is held, then hold `count` bytes."""
        self.tensor = None
        if count:
            self.tensor = torch.empty(count, dtype=torch.uint8)


def emulated(x: Tensor, weight: Tensor, times: Times) -> Tensor:
    """Sleep T_F; under the split, B sleeps T_B and W sleeps T_W. Returns a copy of `x`."""
    if has_torch_function((x, weight)):
        output: Tensor = handle_torch_function(emulated, (x, weight), x, weight, times)
        return output
    work(times.forward)
    return x.clone()


def emulated_loss(output: Tensor, _targets: Any) -> Tensor:
    """A loss that costs nothing: the sum."""
    return output.sum()


def _forward(x: Tensor, _parameters: Sequence[Tensor | None], options: tuple[Any, ...]) -> Tensor:
    times, held = options
    held.hold(times.activation_bytes)
    work(times.forward)
    return x.clone()


def _input_gradient(grad: Tensor, _x: Tensor, _parameters: Sequence[Tensor | None], options: tuple[Any, ...]) -> Tensor:
    times, held = options
    work(times.backward_input)
    held.hold(times.weight_bytes)
    return grad.clone()


def _weight_gradient(
    accumulator: Tensor | None, _x: Tensor | None, grad: Tensor, shape: torch.Size, options: tuple[Any, ...]
) -> Tensor:
    times, held = options
    work(times.backward_weight)
    held.hold(0)
    return grad.new_zeros(shape) if accumulator is None else accumulator


_RULE = Rule(_forward, _input_gradient, (_weight_gradient,), (False,), autocasts=False)


def _deferred(store: WeightStore, x: Tensor, weight: Tensor, times: Times) -> Tensor:
    return apply(_RULE, store, x, (weight,), (times, _Held()))


register(emulated, _deferred)
