"""Gradients averaged over the replicas of a pipeline, in buckets, while the W after them still run."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch.distributed as dist
    from torch import Tensor, nn

    from zerobubble.op import Op
    from zerobubble.runtime.replicas import Replicas
    from zerobubble.runtime.stage import Stage

    Add = Callable[[nn.Parameter], None]
    """Called with a parameter whose gradient is done."""

Reduced: TypeAlias = "tuple[int | None, int, int, int]"
"""A bucket's stage and bytes, and the clock (ns) when its reduction began and ended."""


@dataclass(frozen=True)
class Reduction:
    """One bucket of gradients on its way through the replicas.

    Attributes:
        rank: of the pipeline.
        stage: whose gradients; None for those of parameters that several stages share.
        nbytes: size of the bucket.
        start: when its last gradient was done, in the unit and on the axis of the step's timeline.
        end: when it was reduced.
    """

    rank: int
    stage: int | None
    nbytes: int
    start: float
    end: float


def on_axis(rows: Sequence[tuple[int, Sequence[Reduced]]], ahead: Sequence[int]) -> list[Reduction]:
    """Per rank, the clock when its step began, and what it reduced: on the axis of the step's timeline, in ms.

    `ahead` is by how much (ns) each rank's clock is.
    """
    begin = min(first - by for (first, _), by in zip(rows, ahead, strict=True))
    return [
        Reduction(rank, stage, nbytes, (start - by - begin) / 1e6, (end - by - begin) / 1e6)
        for rank, ((_, reduced), by) in enumerate(zip(rows, ahead, strict=True))
        for stage, nbytes, start, end in reduced
    ]


@dataclass
class _Bucket:
    """Gradients that travel together, then one element per parameter that says whether it has a gradient at all.

    So a parameter without a gradient here still gets that of the replicas that have one, and one that has none
    anywhere stays without, as the optimizer may treat zero and none differently.
    """

    stage: int | None
    parameters: list[nn.Parameter] = field(default_factory=list)
    nbytes: int = 0
    start: int = 0
    ends: list[int] = field(default_factory=list)
    flat: Tensor | None = None
    work: dist.Work | None = None

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self.nbytes += parameter.nbytes

    @torch.no_grad()
    def pack(self, replicas: int) -> Tensor:
        """This replica's part of the mean, in one piece [all elements + number of parameters]."""
        present = self.parameters[0].new_ones(len(self.parameters))
        pieces = []
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                present[number] = 0
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pieces.append(gradient.reshape(-1))
        return torch.cat([*pieces, present]).div_(replicas)

    @torch.no_grad()
    def unpack(self) -> None:
        """The means become the gradients."""
        assert self.flat is not None
        *pieces, present = torch.split(self.flat, [*(p.numel() for p in self.parameters), len(self.parameters)])
        for number, (parameter, piece) in enumerate(zip(self.parameters, pieces, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(piece.view(parameter.shape))
            elif present[number] != 0:  # asked only here: on a GPU it waits
                parameter.grad = piece.view(parameter.shape).clone()


class Reducer:
    """Averages the gradients of one rank over the replicas.

    Every replica reduces the same buckets in the same order: which parameters make a bucket follows from their order
    and `requires_grad` alone, and stages finish in the order of the program.

    Args:
        replicas: whom to average with.
        bucket_bytes: a bucket is sent off as soon as it has that many.
        tied: parameters that several stages share: done only when the step is.

    Attributes:
        recorded: what the last step reduced.
    """

    def __init__(self, replicas: Replicas, bucket_bytes: float, tied: Iterable[nn.Parameter] = ()) -> None:
        self.recorded: list[Reduced] = []
        self._replicas = replicas
        self._bucket_bytes = bucket_bytes
        self._tied = dict.fromkeys(tied)
        self._active = False
        self._launched: list[_Bucket] = []

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Context of one step: what is `collecting` inside is reduced, and all of it is there at the end.

        Raises:
            PeerError: a counterpart failed, died or let the timeout pass.
        """
        self._active = True
        try:
            yield
            with self._filling(None) as add:
                for parameter in self._tied:
                    add(parameter)
            for bucket in self._launched:
                self._settle(bucket)
            self.recorded = [(b.stage, b.nbytes, b.start, b.ends[0]) for b in self._launched]
        except BaseException:
            self._replicas.abandon((bucket.work, bucket.flat) for bucket in self._launched)
            raise
        finally:
            self._active = False
            self._launched = []

    @contextmanager
    def collecting(self, stage: int) -> Iterator[Add]:
        """Context for the last W of `stage`: calling what it gives sends gradients on their way, the rest at the end.

        Does nothing where the step is not `reducing`.
        """
        with self._filling(stage) as add:
            yield lambda parameter: add(parameter) if self._active and parameter not in self._tied else None

    @contextmanager
    def _filling(self, stage: int | None) -> Iterator[Add]:
        open_buckets: dict[tuple[torch.dtype, torch.device], _Bucket] = {}

        def add(parameter: nn.Parameter) -> None:
            if not parameter.requires_grad:
                return
            kind = parameter.dtype, parameter.device
            bucket = open_buckets.setdefault(kind, _Bucket(stage))
            bucket.add(parameter)
            if bucket.nbytes >= self._bucket_bytes:
                self._launch(open_buckets.pop(kind))

        yield add
        for bucket in open_buckets.values():
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        bucket.start = perf_counter_ns()
        bucket.flat = bucket.pack(self._replicas.count)
        bucket.work = self._replicas.start_sum(bucket.flat)
        self._launched.append(bucket)
        ends = bucket.ends
        bucket.work.get_future().add_done_callback(lambda _: ends.append(perf_counter_ns()))

    def _settle(self, bucket: _Bucket) -> None:
        assert bucket.work is not None
        what = "parameters shared by stages" if bucket.stage is None else f"stage {bucket.stage}"
        self._replicas.wait(bucket.work, f"the gradients of {what}", bucket.start / 1e9)
        bucket.ends.append(perf_counter_ns())  # the callback may come a little later than the end of the wait
        bucket.unpack()


class LastOps:
    """Stands for a stage in its last ops of a step: whichever is run, its W is that of all, and reduced on the way.

    Args:
        stage: the stage.
        ops: its last ops, some W or one BW.
        reducer: where the gradients go.
    """

    def __init__(self, stage: Stage, ops: Sequence[Op], reducer: Reducer) -> None:
        self.forward, self.backward_input = stage.forward, stage.backward_input
        self._stage = stage
        self._microbatches = [op.microbatch for op in ops]
        self._reducer = reducer

    def backward_weight(self, microbatch: int) -> None:
        """All W that are left of the stage."""
        with self._reducer.collecting(self._stage.index) as done:
            self._stage.backward_last_weights(self._microbatches, done)
