"""`Pipeline`: a model cut into stages, trained with any schedule."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from zerobubble.errors import OptionError, PipelineError, ZeroBubbleError
from zerobubble.lower import finishing, lower, tails_by_stage
from zerobubble.runtime.auto import auto_of, choose, free_bytes
from zerobubble.runtime.batch import samples, split
from zerobubble.runtime.clock import Record, clock_for, offsets
from zerobubble.runtime.executor import Executor
from zerobubble.runtime.grad_norm import check_clipping, clip_coefficient, gradient_norms, total_norm
from zerobubble.runtime.layout import (
    build_layer,
    checked_layers,
    refuse_ties_between_ranks,
    stage_bounds,
    used_by_several,
)
from zerobubble.runtime.profile import MemoryTrace, measured_profile, timeline_of
from zerobubble.runtime.randomness import own_randomness, seed_for
from zerobubble.runtime.reactive import Reactor
from zerobubble.runtime.reducer import Reducer, Reduction, on_axis
from zerobubble.runtime.replicas import Replicas, place_in
from zerobubble.runtime.split_report import SplitReport
from zerobubble.runtime.stage import Batch, Stage, keyword_names
from zerobubble.runtime.validation import Validation
from zerobubble.runtime.world import DistributedWorld, LocalWorld
from zerobubble.schedule import Schedule
from zerobubble.validate import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from zerobubble.costs import Costs
    from zerobubble.lower import Program
    from zerobubble.planner import Plan
    from zerobubble.runtime.auto import Auto
    from zerobubble.runtime.late import LateValue
    from zerobubble.runtime.layout import Layer
    from zerobubble.runtime.profile import Profile
    from zerobubble.runtime.reducer import Reduced
    from zerobubble.runtime.replicas import MeshPlace
    from zerobubble.runtime.split_report import ParameterSplit
    from zerobubble.runtime.stage import LossFunction
    from zerobubble.runtime.transport import Transport
    from zerobubble.runtime.world import World
    from zerobubble.timeline import Timeline

T = TypeVar("T")
_log = logging.getLogger("zerobubble")

_RECORDED_STEPS = 256
_EVALUATION_STEP = -1

_alive: WeakSet[Pipeline] = WeakSet()
"""The pipelines of this process: an optimizer finds its own by its parameters."""


class Pipeline:
    """Trains a model, cut into stages, with any schedule.

    With `torch.distributed` initialised, this process runs one rank of the pipeline, and every process makes the same
    calls. Without it, all ranks run in this process, in turns: the same numbers, for tests and notebooks.

    Args:
        layers: the model as a list. Each entry gets what the one before it returned (a tuple is spread out as
            arguments). An entry is a module, or a function that makes one: functions are called only where their
            layer lives, each with randomness of its own, so that the initial weights do not depend on the layout.
        loss_fn: (output of the last layer, targets) -> 0-dimensional loss of one microbatch.
        schedule: from a generator, a file, or the planner. With `"auto"` and `num_microbatches`, or an `Auto`, a safe
            schedule at first, then the best one found for what that was measured to take.
        partition: number of layers per stage, in data-flow order; by default as even as possible.
        seed: base of all randomness: initial weights of functions in `layers`, and dropout, whose masks depend on
            (seed, step, microbatch, layer) only.
        device: where the stages live; by default the current CUDA device under NCCL, else the CPU.
        group: the processes of this pipeline, one per rank, in order; by default all. Others need not make the call.
        mesh: instead of `group`, a `DeviceMesh` of the pipeline's ranks, or of (replicas, ranks of the pipeline). Each
            replica is given its own part of every batch. They start with the weights and buffers of replica 0, draw
            different dropout, and average their gradients within `step` (see docs/replicas.md).
        bucket_cap_mb: gradients travel between replicas in buckets of about this many MiB.
        timeout: seconds after which a wait for another rank is given up with an error.
        dynamic_shapes: whether tensors between stages may change shape from step to step (costs a header per message).
        num_microbatches: with `schedule="auto"`.
        memory_limit: with `schedule="auto"`: bytes of activations per rank.
        reactive: what ops and hops take on a calm day, as `profile` measures it. With these costs, a rank that is late
            against the schedule runs the W's that it has instead of waiting, and puts them off when the next op can
            run. Gradients stay the same bit for bit. For what stays slow, plan anew: see `replan`.
        wrap_transport: applied to every rank's transport, to emulate slow links or observe messages.

    Attributes:
        module: the layers that live here, as `nn.ModuleDict` keyed by their number in the model.
        step_count: training steps taken; set it when you resume a run.
        schedule: the schedule; `use` and `replan` change it. With replicas, the W at a rank's end are sorted by stage.
        plan: what the last planning found, and why (`plan.notes[0]`); None before any.
        validation: where optimizers that step ahead report.
        replicas: what this process exchanges with its counterparts in other replicas; None where there are none.

    Raises:
        ScheduleError: the schedule cannot run.
        OptionError: partition, mesh or number of processes do not fit.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss_fn: LossFunction,
        schedule: Schedule | Auto | str,
        *,
        partition: Sequence[int] | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        bucket_cap_mb: float = 25.0,
        timeout: float = 600.0,
        dynamic_shapes: bool = False,
        num_microbatches: int | None = None,
        memory_limit: float | None = None,
        reactive: Costs | None = None,
        wrap_transport: Callable[[Transport], Transport] | None = None,
    ) -> None:
        self._auto = auto_of(schedule, num_microbatches, memory_limit)
        if self._auto is not None:
            schedule = self._auto.safe_schedule(_num_ranks(self._auto, group, mesh))
        if not isinstance(schedule, Schedule):
            raise OptionError(
                f"schedule must be a Schedule, such as zerobubble.zb_h1(num_ranks=2, ...); got {schedule!r}"
            )
        if mesh is not None and group is not None:
            raise OptionError(
                "give either mesh or group: the mesh's last dimension is the group of the pipeline's ranks"
            )
        place = None if mesh is None else place_in(mesh, schedule.num_ranks)
        has_replicas = place is not None and len(place.pipelines) > 1
        schedule, programs = _lowered(schedule, has_replicas)
        if has_replicas and reactive is not None:
            raise OptionError("reactive W goes with a single pipeline; leave out either reactive or the replicas")
        layers = checked_layers(layers)
        bounds = stage_bounds(len(layers), schedule, partition)
        self.schedule = schedule
        self.plan: Plan | None = None
        self.step_count = 0
        self._device = torch.device(device) if device is not None else _default_device()
        self._wrap_transport = wrap_transport
        self._timeout = timeout
        self._reactive = reactive
        self._world = _world(schedule.num_ranks, self._device, timeout, place.group if place else group)
        if dist.is_initialized():
            refuse_ties_between_ranks(layers, bounds, schedule)
        self.module = nn.ModuleDict()
        own_seed = seed_for(seed, place.replica) if place and place.replica else seed
        self._stages = self._build_stages(layers, bounds, loss_fn, seed, own_seed)
        tied = used_by_several(self._stages.values())
        for stage in self._stages.values():
            stage.share(tied)
        told = self._world.gather(
            {rank: (self._own_keywords(), self._num_parameters(rank), _digest(schedule)) for rank in self._world.ranks}
        )
        _refuse_different({digest for *_, digest in told})
        self._keywords = _union(keywords for keywords, *_ in told)
        self.validation = Validation(self.module, self._stages.values(), self._world, [size for _, size, _ in told])
        self._clock = clock_for(self._device)
        self._dynamic_shapes = dynamic_shapes
        self.replicas = self._meet_replicas(place, timeout, bucket_cap_mb) if place and has_replicas else None
        shared = [p for p in self.parameters() if p in tied]
        self._reducer = Reducer(self.replicas, bucket_cap_mb * 2**20, shared) if self.replicas else None
        self._synchronises = True
        self._load(programs)
        self._broken: str | None = None
        self._recorded: deque[dict[int, Record]] = deque(maxlen=_RECORDED_STEPS)
        self._reduced: deque[list[Reduced]] = deque(maxlen=_RECORDED_STEPS)
        self._taken = 0
        self._memory: MemoryTrace | None = None
        _alive.add(self)

    # ------------------------------------------------------------------------------------------------ training

    def step(
        self, inputs: Any = None, targets: Any = None, *, token_count: float | None = None, **keywords: Any
    ) -> LateValue:
        """Forward and backward of one batch; gradients are added to `.grad`, as by `loss.backward()`.

        Every tensor is cut along dimension 0 into the schedule's microbatches (uneven sizes are legal); wrap what
        each of them needs whole in `Shared`. Returns at once on ranks that are done.

        Args:
            inputs: for the first layer: one value, or a tuple of positional arguments, or a dict of keyword arguments.
                Only the rank of the first stage looks at it.
            targets: for `loss_fn`. Only the rank of the last stage looks at it.
            token_count: if given, the loss is the sum over microbatches divided by it (`loss_fn` then returns a sum).
                By default it is the mean over microbatches, weighted by their samples.
            **keywords: go, cut likewise, to every layer whose `forward` names them (masks, positions, ...).

        With replicas the gradients are averaged over them: exactly what is in `.grad` at the end of the step, also
        what was there before. A `token_count` is then that of all replicas together.

        Returns:
            The loss of the batch, on every rank, on its way: `float(loss)` waits for it. With replicas it is that of
            the own one; their mean is the loss of the whole batch.

        Raises:
            OptionError: the batch cannot be cut, or no layer takes a keyword.
            PeerError: another rank failed, died or let the timeout pass.
        """
        if not torch.is_grad_enabled():
            raise PipelineError("step needs gradients, but they are switched off here; use evaluate for forwards alone")
        if self._auto is not None and self._taken == self._auto.steps:
            auto, self._auto = self._auto, None
            self.replan(auto.memory_limit, steps=auto.profile_steps, effort=auto.effort)
        if token_count is not None and self.replicas:
            token_count = (
                float(token_count) / self.replicas.count
            )  # gradients are averaged, so each replica counts for as many as they are
        batch = self._batch(self.step_count, inputs, targets, token_count, keywords)
        measures_memory = self._auto is not None and self._auto.measures_memory(self._taken)
        if measures_memory:
            self.validation.finish()  # so that an amended step makes nothing that would be counted
        self.validation.begin()
        runs = {r: e.run_measuring_memory if measures_memory else e.run for r, e in self._executors.items()}
        loss = self._run(runs, batch, self._reducer if self._synchronises else None)
        self.step_count += 1
        self._taken += 1
        self._recorded.append({rank: Record(e.starts, e.ends, e.groups) for rank, e in self._executors.items()})
        self._reduced.append(self._reducer.recorded if self._reducer and self._synchronises else [])
        if measures_memory:
            self._memory = self._gathered_memory()
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context: steps inside add to this replica's gradients only; the next one outside averages the sums.

        Every replica must do the same. Without replicas it changes nothing.
        """
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def evaluate(
        self, inputs: Any = None, targets: Any = None, *, token_count: float | None = None, **keywords: Any
    ) -> LateValue:
        """The loss of one batch, in evaluation mode and without gradients. Arguments as in `step`.

        Collective: every rank must call it. Shapes may differ from those of training, and from call to call.
        """
        self.validation.finish()
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            batch = self._batch(_EVALUATION_STEP, inputs, targets, token_count, keywords)
            with torch.no_grad():
                return self._run({rank: executor.run for rank, executor in self._evaluators.items()}, batch)
        finally:
            for module, training in modes.items():
                module.training = training

    def _batch(
        self, step: int, inputs: Any, targets: Any, token_count: float | None, keywords: Mapping[str, Any]
    ) -> Batch:
        if token_count is not None and not token_count > 0:
            raise OptionError(f"token_count must be a positive number; got {token_count!r}")
        names = self._keywords
        if names is not None and (unknown := sorted(set(keywords) - names)):
            raise OptionError(f"no layer takes a keyword argument {unknown[0]!r}; layers take {sorted(names)}")
        count = self.schedule.num_microbatches
        input_sizes, target_sizes = samples(inputs, count, "inputs"), samples(targets, count, "targets")
        if input_sizes and target_sizes and input_sizes != target_sizes:
            raise OptionError(
                f"inputs have a batch size of {sum(input_sizes)}, targets of {sum(target_sizes)}; they are cut "
                "together, so they must agree (wrap what every microbatch needs whole in zerobubble.Shared)"
            )
        keyword_sizes = samples(dict(keywords), count, "keyword arguments")
        sizes = target_sizes or input_sizes or keyword_sizes or [1] * count
        owners = self.schedule.placement.ranks
        input_parts = split(inputs if owners[0] in self._world.ranks else None, count)
        target_parts = split(targets if owners[-1] in self._world.ranks else None, count)
        keyword_parts = split(dict(keywords), count)
        weights = [1 / token_count] * count if token_count else [size / sum(sizes) for size in sizes]
        return Batch(step, input_parts, target_parts, keyword_parts, weights)

    def _run(
        self, runs: Mapping[int, Callable[[Batch], None]], batch: Batch, reducer: Reducer | None = None
    ) -> LateValue:
        """Run the ranks that live here; with `reducer`, average the gradients. Returns the loss."""
        if self._broken:
            raise PipelineError(
                f"an earlier step failed ({self._broken}), so the ranks are no longer in step; start them again"
            )
        loss, give_loss = self._world.number_from(self.schedule.placement.ranks[-1])
        try:
            with own_randomness(self._device), reducer.reducing() if reducer else nullcontext():
                self._world.run({rank: partial(run, batch) for rank, run in runs.items()})
                for stage in self._stages.values():
                    stage.add_shared_gradients()
                if batch.losses:
                    give_loss(batch.total_loss())
        except BaseException as error:
            for stage in self._stages.values():
                stage.clear()
            if not self._world.survives:
                self._broken = f"{type(error).__name__}: {error}"
            raise
        return loss

    # ------------------------------------------------------------------------------------------------ model

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that live here, for an optimizer."""
        self.validation.finish()
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that live here; names start with the number of the layer in the model."""
        self.validation.finish()
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """State of the layers that live here. The union over all ranks is complete and independent of the layout."""
        self.validation.finish()
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of `state`, which may be that of the whole model, saved under any layout.

        Raises:
            OptionError: an entry of a layer that lives here is missing or has another shape.
        """
        self.validation.finish()
        own = self.module.state_dict()
        missing = [name for name in own if name not in state]
        if missing:
            raise OptionError(
                f"state_dict has no entry {missing[0]!r} ({len(missing)} missing); was a rank's part left out?"
            )
        try:
            self.module.load_state_dict({name: state[name] for name in own})
        except RuntimeError as error:
            raise OptionError(f"state_dict does not fit the layers: {error}") from None

    def train(self, mode: bool = True) -> Pipeline:
        """Set the layers that live here to training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set the layers that live here to evaluation mode."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters that live here."""
        self.module.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale all gradients so that their norm over ALL ranks is at most `max_norm`. Collective; waits.

        The norms of all parameters are summed with one rounding, so that norm and coefficient are the same bit for bit
        under every schedule and rank count.

        Returns:
            The norm before clipping; where it is not finite, nothing is scaled.

        Raises:
            OptionError: `max_norm` or `norm_type` is not positive.
        """
        check_clipping(max_norm, norm_type)
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norms = gradient_norms(gradients, norm_type).tolist()
        gathered = self._world.gather(
            {rank: norms if rank == self._world.ranks[0] else [] for rank in self._world.ranks}
        )
        total = total_norm(chain.from_iterable(gathered), norm_type)
        coefficient = clip_coefficient(total, max_norm)
        if coefficient != 1.0:
            for gradient in gradients:
                gradient.mul_(coefficient)
        return total

    # ------------------------------------------------------------------------------------------------ measuring

    def timelines(self, last: int = 1) -> list[Timeline]:
        """The measured timelines of the last steps (256 are kept), oldest first, in ms. Collective.

        On CUDA the times are those of the device (this has not run on a GPU yet). Between machines, clocks are compared
        by exchanging messages, to about the time that one takes.
        """
        recorded, ranks = list(self._recorded)[-last:], self._world.ranks
        own = {rank: [step[rank].read(self._clock) for step in recorded] for rank in ranks}
        gathered, ahead = self._world.gather(own), offsets(self._world.gather, ranks)
        return [timeline_of(self.schedule, rows, ahead) for rows in zip(*gathered, strict=True)]

    def profile(self, steps: int = 5) -> Profile:
        """What the stages took in the last `steps` training steps, and M_B and M_W as last measured. Collective.

        Needs a step more than it looks at, since `schedule` was set: the first step warms up. Memory is measured by
        `measure_memory`, or by `schedule="auto"`; without that it is 0.

        Raises:
            OptionError: `steps` is below 1.
            PipelineError: too few steps were taken.
        """
        if steps < 1:
            raise OptionError(f"profile needs at least one step; got steps={steps}")
        if len(self._recorded) <= min(steps, _RECORDED_STEPS - 1):
            raise PipelineError(
                f"a profile of {steps} steps needs {steps + 1} training steps with this schedule (the first warms up); "
                f"{len(self._recorded)} were taken"
            )
        return measured_profile(self.timelines(steps), self._memory)

    def replan(self, memory_limit: float | None = None, *, steps: int = 5, effort: str = "default") -> Plan:
        """Profile, plan on rank 0, and go on with the best schedule found for these stages where they are. Collective.

        Parameters do not move, and where the new schedule runs W in the order of microbatches, as every plan does, the
        numbers stay the same bit for bit. What was chosen and why is logged, and in `plan.notes[0]`.

        Args:
            memory_limit: bytes of activations per rank; by default 0.9 of what is free on the GPU, on a CPU what the
                current schedule takes.
            steps: to profile, as for `profile`.
            effort: of the planner: `quick`, `default` or `exact`.

        Raises:
            OptionError: no schedule can run within the memory limit.
            PipelineError: there is nothing to plan by: too few steps, memory not measured, or B and W not apart.
        """
        profile = self.profile(steps)
        free = self._world.gather(dict.fromkeys(self._world.ranks, free_bytes(self._device)))
        if memory_limit is None:
            memory_limit = min((bytes_ for bytes_ in free if bytes_ is not None), default=None)
        found = self._on_first_rank(partial(choose, profile, self.schedule, memory_limit, effort, self._timeout / 2))
        self._auto = None
        if self._reactive is not None:
            self._reactive = profile.costs
        if found.schedule != self.schedule or self._reactive is not None:
            self.use(found.schedule)
        self.plan = found
        if 0 in self._world.ranks:
            _log.info("step %d: %s", self.step_count, found.notes[0])
        return found

    def use(self, schedule: Schedule) -> None:
        """Go on with another schedule over the same stages, in any number of microbatches. Collective.

        Raises:
            ScheduleError: it cannot run.
            OptionError: its placement is another one, or the ranks give different schedules.
        """
        schedule, programs = _lowered(schedule, self.replicas is not None)
        if schedule.placement != self.schedule.placement:
            raise OptionError(
                f"the stages lie on ranks {list(self.schedule.placement.ranks)} and cannot move; the new schedule "
                f"wants {list(schedule.placement.ranks)}"
            )
        digest = _digest(schedule)
        _refuse_different(set(self._world.gather(dict.fromkeys(self._world.ranks, digest))))
        if self.replicas is not None:
            self.replicas.refuse_different("schedule", digest)
        self.validation.finish()
        self._auto = None
        self.schedule = schedule
        self._load(programs)
        self._recorded.clear()
        self._reduced.clear()

    def _on_first_rank(self, compute: Callable[[], T]) -> T:
        """What `compute` gives on rank 0 (of replica 0), everywhere; an error of ours is raised everywhere, too."""
        own: Any = None
        if 0 in self._world.ranks and (self.replicas is None or self.replicas.index == 0):
            try:
                own = compute()
            except Exception as error:  # the others wait for what comes, and must be told
                own = error if isinstance(error, ZeroBubbleError) else PipelineError(f"on rank 0: {error!r}")
                own.__cause__ = error.__cause__
        found: Any = self._world.gather({rank: own if rank == 0 else None for rank in self._world.ranks})[0]
        if self.replicas is not None:
            found = self.replicas.gather(found)[0]
        if isinstance(found, ZeroBubbleError):
            raise found
        return found  # type: ignore[no-any-return]

    def reductions(self, last: int = 1) -> list[list[Reduction]]:
        """What was averaged over the replicas in the last steps, on the axis of their `timelines`. Collective.

        Empty for steps under `no_sync`, and where there are no replicas.
        """
        steps = list(zip(self._recorded, self._reduced, strict=True))[-last:]
        ranks, clock = self._world.ranks, self._clock
        own = {rank: [(times[rank].read(clock)[0][0], buckets) for times, buckets in steps] for rank in ranks}
        gathered, ahead = self._world.gather(own), offsets(self._world.gather, ranks)
        return [on_axis(rows, ahead) for rows in zip(*gathered, strict=True)]

    def split_report(self) -> SplitReport:
        """Which parameters' gradients wait for W, per stage, and why others do not. Collective; after a training step.

        Raises:
            PipelineError: no training step was taken yet.
        """
        own: dict[int, list[ParameterSplit]] = {rank: [] for rank in self._world.ranks}
        for index, stage in self._stages.items():
            own[self.schedule.placement.ranks[index]] += stage.split_report()
        lines = sorted(chain.from_iterable(self._world.gather(own)), key=lambda line: line.stage)
        return SplitReport(tuple(lines))

    def measure_memory(self, inputs: Any = None, targets: Any = None, **keywords: Any) -> MemoryTrace:
        """Measure the bytes of activations that every rank holds after each op of one step. Collective; slow.

        Runs a forward and backward as `step` does but counts no training step; gradients are cleared afterwards.
        Meaningful where every rank has a process of its own.
        """
        batch = self._batch(self.step_count, inputs, targets, None, keywords)
        self.validation.begin()
        for parameter in self.parameters():  # so that no gradient is allocated while activations are counted
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self._run({rank: executor.run_measuring_memory for rank, executor in self._executors.items()}, batch)
        self.zero_grad()
        self._memory = self._gathered_memory()
        return self._memory

    def _gathered_memory(self) -> MemoryTrace:
        live = self._world.gather({rank: self._executors[rank].live_bytes for rank in self._world.ranks})
        return MemoryTrace(self.schedule, tuple(map(tuple, live)))

    # ------------------------------------------------------------------------------------------------ building

    def _meet_replicas(self, place: MeshPlace, timeout: float, bucket_cap_mb: float) -> Replicas:
        """Connect with the counterparts, and take over the weights and buffers of replica 0."""
        assert isinstance(self._world, DistributedWorld)
        replicas = Replicas(place, self._device, timeout, self._world.number, self._world.status)
        replicas.refuse_different("schedule, or another bucket_cap_mb", (_digest(self.schedule), bucket_cap_mb))
        replicas.start_equal(self.module)
        return replicas

    def _build_stages(
        self,
        layers: Sequence[Layer],
        bounds: Sequence[range],
        loss_fn: LossFunction,
        seed: int,
        own_seed: int,
    ) -> dict[int, Stage]:
        stages: dict[int, Stage] = {}
        for index, (numbers, rank) in enumerate(zip(bounds, self.schedule.placement.ranks, strict=True)):
            if rank not in self._world.ranks:
                continue
            own = [(number, build_layer(layers[number], number, seed, self._device)) for number in numbers]
            self.module.update({str(number): layer for number, layer in own})
            is_last = index + 1 == self.schedule.num_stages
            stages[index] = Stage(index, own, own_seed, self._device, loss_fn if is_last else None)
        return stages

    def _load(self, programs: Sequence[Program]) -> None:
        """Get ready to train by `programs`, and to evaluate by the forwards of the schedule."""
        self._executors = self._make_executors(programs, self._dynamic_shapes, self._reactive)
        self._evaluators = self._make_executors(lower(self.schedule, forward_only=True), dynamic_shapes=True)

    def _make_executors(
        self, programs: Sequence[Program], dynamic_shapes: bool, reactive: Costs | None = None
    ) -> dict[int, Executor]:
        links = {link for program in programs for link in program.links}
        executors = {}
        for rank in self._world.ranks:
            transport = self._world.transport(rank, links, dynamic_shapes, watches=reactive is not None)
            if self._wrap_transport is not None:
                transport = self._wrap_transport(transport)
            executors[rank] = Executor(
                programs[rank],
                self._stages,
                self.schedule.num_stages,
                transport,
                self.validation.check,
                self._clock,
                Reactor(rank, self.schedule, reactive) if reactive is not None else None,
                self._reducer,
            )
        return executors

    def _num_parameters(self, rank: int) -> int:
        """All parameters that live here count for the first rank that does."""
        return len(list(self.module.parameters())) if rank == self._world.ranks[0] else 0

    def _own_keywords(self) -> frozenset[str] | None:
        return _union(keyword_names(layer) for layer in self.module.values())


def pipeline_of(parameters: Iterable[nn.Parameter]) -> Pipeline:
    """The pipeline of this process that all `parameters` belong to.

    Raises:
        OptionError: there is none, or more than one.
    """
    wanted = set(parameters)
    owners = [pipeline for pipeline in _alive if wanted <= set(pipeline.module.parameters())]
    if len(owners) != 1:
        trouble = "belong to several pipelines" if owners else "are not those of one pipeline"
        raise OptionError(
            f"the optimizer's parameters {trouble}: build the optimizer from pipeline.parameters(), or say which one "
            "is meant with pipeline=..."
        )
    return owners[0]


def _union(names: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """All names together; None, which stands for any name, wins."""
    listed = list(names)
    return None if None in listed else frozenset().union(*(part for part in listed if part is not None))


def _lowered(schedule: Schedule, has_replicas: bool) -> tuple[Schedule, tuple[Program, ...]]:
    """The schedule as it will run, and its programs."""
    if not has_replicas:
        return schedule, lower(schedule)
    validate(schedule)  # as it was given
    schedule = tails_by_stage(schedule)
    return schedule, tuple(map(finishing, lower(schedule)))


def _digest(schedule: Schedule) -> str:
    return sha256(str(schedule).encode()).hexdigest()


def _refuse_different(digests: set[str]) -> None:
    if len(digests) > 1:
        raise OptionError("every rank must be given the same schedule; they got different ones")


def _num_ranks(auto: Auto, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> int:
    if mesh is not None:
        return mesh.size(mesh.ndim - 1)
    if dist.is_initialized():
        return dist.get_world_size(group)
    if auto.num_ranks is None:
        raise OptionError("without torch.distributed a pipeline that plans itself needs Auto(..., num_ranks=...)")
    return auto.num_ranks


def _default_device() -> torch.device:
    if dist.is_initialized() and torch.cuda.is_available():
        backend = dist.get_backend()
        if "nccl" in backend or backend == "undefined":  # undefined: init_process_group() chose by device
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _world(num_ranks: int, device: torch.device, timeout: float, group: dist.ProcessGroup | None) -> World:
    if dist.is_initialized():
        return DistributedWorld(num_ranks, device, timeout, group)
    return LocalWorld(num_ranks, device, timeout)
