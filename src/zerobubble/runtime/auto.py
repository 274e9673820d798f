"""`schedule="auto"`: a safe schedule to start with, and from what it was measured to take the one to go on with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from zerobubble.costs import Costs
from zerobubble.errors import OptionError, PipelineError
from zerobubble.generators import GENERATORS
from zerobubble.jitter import simulate_jitter
from zerobubble.planner import placements_for, plan
from zerobubble.planner.advice import advice, handcrafted
from zerobubble.planner.rivals import rivals
from zerobubble.runtime.profile import listed
from zerobubble.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerobubble.planner import Plan
    from zerobubble.runtime.profile import Profile
    from zerobubble.schedule import Placement, Schedule
    from zerobubble.timeline import Timeline

_LEAST_SECONDS = 0.1
_SECONDS = 60.0
"""To plan; all ranks wait for it."""
_WORTH = 0.002
"""A plan that saves no more than this share is not worth a switch."""
_SHARE_OF_FREE = 0.9
"""Of a GPU's free memory that activations may take: the rest is for what fragments."""
_ROUNDING = 1e-9
_LARGE = 5_000
"""Ops above which it takes too long to try schedules under jitter."""
_SAMPLES = 50
_MIB = 2**20
_SAFE = ("one_f_one_b", "interleaved", "zb_v")


@dataclass(frozen=True)
class Auto:
    """How `Pipeline` chooses its own schedule: `Pipeline(layers, loss_fn, schedule=Auto(num_microbatches=8))`.

    It trains `warmup_steps` and `profile_steps` with a safe schedule of the placement, one with 1F1B's memory, measures
    what the stages take, plans, and goes on with the plan. Parameters stay where they are, and the numbers are those
    of a run that never switched, bit for bit.

    Attributes:
        num_microbatches: per step.
        memory_limit: bytes of activations per rank; by default 0.9 of what is free on the GPU, on a CPU the peak of the
            safe schedule.
        placement: `linear`, `loop`, `v`, `wave`, or a `Placement`.
        chunks: stages per rank, for `loop` and `wave`.
        warmup_steps: that are not measured, at least 2; in the last of them memory is (which makes it slow).
        profile_steps: that are measured.
        effort: how much to try: `quick`, `default` or `exact`.
        num_ranks: needed without `torch.distributed` only.
    """

    num_microbatches: int
    memory_limit: float | None = None
    placement: str | Placement = "linear"
    chunks: int | None = None
    warmup_steps: int = 2
    profile_steps: int = 5
    effort: str = "default"
    num_ranks: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_microbatches", 1), ("warmup_steps", 2), ("profile_steps", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise OptionError(f"auto: {name} must be a whole number of at least {least}; got {value!r}")
        if self.placement == "auto":
            raise OptionError(
                "auto: the placement must be fixed, so that no parameters move; give linear, loop, v, wave"
            )
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise OptionError(f"auto: memory_limit must be a positive number of bytes; got {self.memory_limit!r}")

    @property
    def steps(self) -> int:
        """Steps with the safe schedule."""
        return self.warmup_steps + self.profile_steps

    def measures_memory(self, step: int) -> bool:
        """Whether it is in this step, counted from the first of the run, that memory is measured."""
        return step == self.warmup_steps - 1

    def safe_schedule(self, num_ranks: int) -> Schedule:
        """What to start with: 1F1B, or its likes on other placements, with B and W apart so that both can be measured.

        Raises:
            OptionError: placement or chunks are not possible.
        """
        count = self.num_microbatches
        placement = placements_for(self.placement, num_ranks, self.chunks)[0]
        chunks = placement.num_stages // num_ranks
        for name in _SAFE:
            generator = GENERATORS[name]
            schedule = generator.make(num_ranks, count, **{"chunks": chunks} if generator.takes_chunks else {})
            if schedule.placement == placement:
                return schedule.divided()
        costs, limit = Costs(weight_memory=1.0), placement.num_stages  # as much as the activations of p microbatches
        return plan(costs, num_ranks, count, memory_limit=limit, placement=placement, effort="quick").schedule


def auto_of(schedule: Any, num_microbatches: int | None, memory_limit: float | None) -> Auto | None:
    """What a pipeline's arguments say about choosing its own schedule; None where they give a schedule.

    Raises:
        OptionError: arguments for `auto` without it, or not those that it needs.
    """
    if schedule == "auto":
        if num_microbatches is None:
            raise OptionError('schedule="auto" needs the number of microbatches per step: num_microbatches=8, say')
        return Auto(num_microbatches, memory_limit)
    if num_microbatches is not None or memory_limit is not None:
        raise OptionError('num_microbatches and memory_limit go with schedule="auto"; a schedule has its own')
    return schedule if isinstance(schedule, Auto) else None


def choose(
    profile: Profile,
    current: Schedule,
    memory_limit: float | None,
    effort: str = "default",
    seconds: float = _SECONDS,
) -> Plan:
    """The best schedule found with the placement and microbatches of `current`; its first note says why.

    That may be `current` itself or a handcrafted one: what is cheapest when times vary as they were measured to.
    Without a limit it may use as much memory as `current`. All planning ends within about `seconds`.

    Raises:
        OptionError: no schedule can run within the memory limit.
        PipelineError: `profile` does not say enough to plan.
    """
    _refuse_incomplete(profile)
    costs, placement = profile.costs, current.placement
    before = simulate(current, costs)
    limit = max(before.peak_memory) if memory_limit is None else memory_limit
    sizes = current.num_ranks, current.num_microbatches

    deadline = monotonic() + min(seconds, _SECONDS)

    def planned(costs: Costs, effort: str, share: float = 1.0) -> Plan:
        left = max(deadline - monotonic(), _LEAST_SECONDS) * share
        return plan(costs, *sizes, memory_limit=limit, placement=placement, effort=effort, time_limit=left)

    found = planned(costs, effort, share=0.5)
    candidates = [found.schedule, *rivals(found.schedule, costs, limit, profile.jitter, partial(_quickly, planned))]
    best = _steadiest(candidates, current if max(before.peak_memory) <= limit * (1 + _ROUNDING) else None, profile)
    if best is not found.schedule:
        timeline = simulate(best, costs)
        gap = max(timeline.cost - found.lower_bound, 0.0) / timeline.cost if timeline.cost else 0.0
        found = replace(found, schedule=best, timeline=timeline, gap=gap)
    rows = handcrafted(partial(_in_mib, costs, placement), *sizes, limit / _MIB)
    sentence = advice(found.timeline, found.lower_bound, rows, limit / _MIB, tried="this placement")
    return replace(found, notes=(f"{_said(found.timeline, before, limit, profile.jitter)} {sentence}", *found.notes))


def _quickly(planned: Callable[[Costs, str], Plan], costs: Costs) -> Schedule | None:
    """A quick plan, for schedules small enough to be tried under jitter."""
    found = planned(costs, "quick").schedule
    return None if found.num_ops > _LARGE else found


def _steadiest(candidates: Sequence[Schedule], current: Schedule | None, profile: Profile) -> Schedule:
    """The cheapest under times that vary as measured: `current`, where it may stay, unless another saves something."""

    def cost(schedule: Schedule) -> float:
        if schedule.num_ops > _LARGE or not profile.jitter:
            return simulate(schedule, profile.costs).cost
        return simulate_jitter(schedule, profile.costs, profile.jitter, _SAMPLES).mean

    best = min(candidates, key=cost)
    return best if current is None or cost(best) < cost(current) * (1 - _WORTH) else current


def _in_mib(costs: Costs, placement: Placement, other: Placement) -> Costs:
    """The costs with memory in MiB, for schedules that leave the stages where they are."""
    if other != placement:
        raise OptionError("the stages cannot move")
    kept, left = (
        tuple(size / _MIB for size in listed(sizes)) for sizes in (costs.activation_memory, costs.weight_memory)
    )
    return replace(costs, activation_memory=kept, weight_memory=left)


def _said(best: Timeline, before: Timeline, limit: float, jitter: float) -> str:
    """What was chosen, in words."""
    verb = "staying with" if best.schedule == before.schedule else "going on with"
    return (
        f"{verb} {best.schedule.name}: simulated, a step takes {best.cost:.4g} {best.unit} (bubble "
        f"{best.bubble_rate:.1%}), that of {before.schedule.name} so far {before.cost:.4g} {before.unit} (bubble "
        f"{before.bubble_rate:.1%}), within {limit / _MIB:.4g} MiB of activations per rank; times vary by {jitter:.1%}."
    )


def _refuse_incomplete(profile: Profile) -> None:
    if not profile.divided:
        raise PipelineError(
            "cannot plan: the schedule runs B and W as one op, so their times are not known; "
            "take some steps with `pipeline.use(pipeline.schedule.divided())`, then plan"
        )
    if not any(listed(profile.costs.activation_memory)):
        raise PipelineError("cannot plan: memory was not measured; call pipeline.measure_memory with a batch first")


def free_bytes(device: torch.device) -> float | None:
    """What activations may take on a GPU: a share of what no tensor takes now. None on a CPU. Not run on a GPU yet."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _SHARE_OF_FREE * (free + cached)
