"""Runs the program of one rank, op by op. It decides nothing: order and messages are all in the program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from zerobubble.dependencies import needs, result
from zerobubble.errors import PeerError
from zerobubble.lower import Finish, Receive, Run, Validate
from zerobubble.op import Kind, Op
from zerobubble.runtime.clock import HOST_CLOCK, Clock
from zerobubble.runtime.live_memory import LiveMemory
from zerobubble.runtime.reducer import LastOps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerobubble.lower import Message, Program, Send
    from zerobubble.runtime.parcel import Parcel
    from zerobubble.runtime.reactive import Reactor
    from zerobubble.runtime.reducer import Reducer
    from zerobubble.runtime.stage import Batch, Stage
    from zerobubble.runtime.transport import Transport


@dataclass(slots=True)
class _Task:
    """A `Run` with all that can be looked up before the step."""

    op: Op
    stage: Stage | LastOps
    awaits: tuple[Message, ...]
    source: Op | None  # the other stage's result that the op takes in
    makes: Op | None  # the result that another stage takes in


@dataclass(slots=True)
class _Group:
    """A `Finish`: its last op's task, which does the work of all of its ops."""

    task: _Task
    size: int


class Executor:
    """Runs one rank's program.

    Args:
        program: what to do, from `zerobubble.lower.lower`.
        stages: this rank's stages by number.
        num_stages: of the whole pipeline.
        transport: carries the messages.
        validate: asked at the program's `Validate`: whether the optimizer's last step was amended, so that the batch
            starts again.
        clock: tells when ops start and end.
        reactor: if given, says before each op which W's run first; otherwise they run where the program has them.
        reducer: reduces gradients over replicas, where the program has a `Finish`.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        num_stages: int,
        transport: Transport,
        validate: Callable[[Batch], bool] = lambda _: False,
        clock: Clock = HOST_CLOCK,
        reactor: Reactor | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        self.rank = program.rank
        self.discarded: list[tuple[list[Any], list[Any]]] = []
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        self.groups: list[tuple[int, int]] = []
        self.live_bytes: list[int] = []
        self._memory: LiveMemory | None = None
        self._transport = transport
        self._now = clock.now
        self._results: dict[Op, Parcel] = {}
        self._validate = validate
        self._reactor = reactor
        self._ran: list[Op] = []
        self._plan: list[_Task | _Group | Receive | Send | Validate] = []
        for i in program.instructions:
            if isinstance(i, Finish):
                assert reducer is not None
                op = i.ops[-1]
                last = LastOps(stages[op.stage], i.ops, reducer)
                self._plan.append(_Group(self._task(Run(op, i.awaits), {op.stage: last}, num_stages), len(i.ops)))
            else:
                self._plan.append(self._task(i, stages, num_stages) if isinstance(i, Run) else i)
        self._tasks = {item.op: item for item in self._plan if isinstance(item, _Task)}

    @staticmethod
    def _task(run: Run, stages: Mapping[int, Stage | LastOps], num_stages: int) -> _Task:
        op = run.op
        source = next((need for need in needs(op, num_stages) if need.stage != op.stage), None)
        feeds_another = op.stage + 1 < num_stages if op.kind is Kind.F else op.stage > 0 and op.kind is not Kind.W
        return _Task(op, stages[op.stage], run.awaits, source, result(op) if feeds_another else None)

    def run(self, batch: Batch) -> None:
        """Run the program. `starts` and `ends` then hold the clock's marks of every op, in order, and
        `groups` (position, number) of ops that ran as one and have the same marks.

        Where the optimizer's last step was amended, `discarded` holds those of the ops that had to run again.

        Raises:
            PeerError: another rank failed, died or let the timeout pass.
            Exception: whatever an op raised.
        """
        self.discarded = []
        while not self._run_once(batch):
            self.discarded.append((self.starts, self.ends))

    def _run_once(self, batch: Batch) -> bool:
        """Run the program to its end; or return False at its `Validate`, ready to start again."""
        self.starts, self.ends, self.groups, self.live_bytes, self._ran = [], [], [], [], []
        self._results.clear()
        transport, results = self._transport, self._results
        reacts = self._reactor is not None and self._memory is None
        run_op = self._react if reacts else self._run_op
        item = None
        try:
            for item in self._plan:
                if isinstance(item, _Task):
                    run_op(item, batch)
                elif isinstance(item, _Group):
                    self._run_op(item.task, batch)
                    self._share_out(item.size)
                elif isinstance(item, Receive):
                    transport.post(item.message)
                elif not isinstance(item, Validate):
                    transport.send(item.message, results.pop(item.message.producer))
                elif self._validate(batch):
                    for message in item.stale:
                        transport.receive(message)
                    return False
            if reacts:
                self._run_weights(None, batch)
                self._sort_record()
        except BaseException as error:
            item = item.task if isinstance(item, _Group) else item
            where = f"{item.op} of step {batch.step}" if isinstance(item, _Task) else f"step {batch.step}"
            if not isinstance(error, PeerError) and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"This happened on rank {self.rank}, in {where}.")
            transport.failed(error, where)
            raise
        return True

    def run_measuring_memory(self, batch: Batch) -> None:
        """As `run`, slower: `live_bytes` then holds the bytes alive after every op, of tensors made since the start."""
        try:
            with LiveMemory() as self._memory:
                self.run(batch)
        finally:
            self._memory = None

    def _react(self, task: _Task, batch: Batch) -> None:
        """Run the op after such W's as the reactor says; those of the program wait for their turn."""
        if task.op.kind is not Kind.W:
            self._run_weights(task, batch)
            self._run_noted(task, batch)

    def _run_weights(self, before: _Task | None, batch: Batch) -> None:
        """Run the W's that should run before this op, or all that are left."""
        assert self._reactor is not None
        op, awaits = (before.op, before.awaits) if before else (None, ())
        arrived = partial(self._transport_has, awaits)
        while (weight := self._reactor.weight_before(op, perf_counter_ns(), arrived)) is not None:
            self._run_noted(self._tasks[weight], batch)

    def _transport_has(self, messages: tuple[Message, ...], patience: float) -> bool:
        return all(self._transport.arrived(message, patience) for message in messages)

    def _run_noted(self, task: _Task, batch: Batch) -> None:
        assert self._reactor is not None
        if not self._ran:
            self._reactor.begin()
        self._run_op(task, batch)
        self._reactor.ran(task.op, perf_counter_ns())
        self._ran.append(task.op)

    def _sort_record(self) -> None:
        """Put what was recorded in the order of the program."""
        places = {op: place for place, op in enumerate(self._ran)}
        order = [places[op] for op in self._tasks]
        self.starts, self.ends = ([marks[place] for place in order] for marks in (self.starts, self.ends))

    def _run_op(self, task: _Task, batch: Batch) -> None:
        op, results, transport = task.op, self._results, self._transport
        for message in task.awaits:
            results[message.producer] = transport.receive(message)
        parcel = results.pop(task.source) if task.source else None
        with transport.turn:
            self.starts.append(self._now())
            made = _compute(task.stage, op, batch, parcel)
            self.ends.append(self._now())
        del parcel
        if task.makes is not None and made is not None:
            results[task.makes] = made
        del made
        if self._memory is not None:
            self.live_bytes.append(self._memory.bytes)
        transport.finished(op, batch.step)

    def _share_out(self, size: int) -> None:
        """Record the last op for all `size` ops that ran as one."""
        self.groups.append((len(self.starts) - 1, size))
        for marks in (self.starts, self.ends):
            marks += marks[-1:] * (size - 1)
        if self._memory is not None:
            self.live_bytes += self.live_bytes[-1:] * (size - 1)


def _compute(stage: Stage | LastOps, op: Op, batch: Batch, parcel: Parcel | None) -> Parcel | None:
    kind, microbatch = op.kind, op.microbatch
    if kind is Kind.F:
        return stage.forward(batch, microbatch, parcel)
    if kind is Kind.W:
        stage.backward_weight(microbatch)
        return None
    gradients = stage.backward_input(microbatch, parcel, batch.loss_scale)
    if kind is Kind.BW:
        stage.backward_weight(microbatch)
    return gradients
