"""How a schedule holds up when ops do not take exactly their times: many simulations with times drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from zerobubble.costs import Costs
from zerobubble.dependencies import needs, result
from zerobubble.errors import OptionError
from zerobubble.validate import validate

if TYPE_CHECKING:
    from zerobubble.costs import StageCosts
    from zerobubble.op import Op
    from zerobubble.schedule import Schedule

_SHARE = 0.95


@dataclass(frozen=True)
class JitterResult:
    """Costs (largest span of a rank) of a schedule under jitter.

    Attributes:
        mean: their mean.
        p95: the least cost that 95% of the samples do not exceed.
        costs: one per sample, in the order in which they were drawn.
    """

    mean: float
    p95: float
    costs: tuple[float, ...]


def simulate_jitter(
    schedule: Schedule, costs: Costs | None = None, jitter: float = 0.1, samples: int = 200, seed: int = 0
) -> JitterResult:
    """Run `schedule` on paper `samples` times, each op's time drawn anew around its mean.

    Times are log-normal with the mean that `costs` says and a standard deviation of `jitter` times the mean, every op
    for itself; never negative, now and then much too long, as stragglers are. Latencies stay what they are. The draws
    depend on `seed`, sample and op alone, so that schedules of the same ops meet the same bad luck and can be compared.

    Raises:
        OptionError: `jitter` is negative or not finite, or there are no samples.
        ScheduleError: the schedule is invalid.
        CostsError: the costs do not fit the schedule's stages.
    """
    if not 0 <= jitter < math.inf:
        raise OptionError(f"the jitter must be a share that is not negative, such as 0.1; got {jitter:g}")
    if samples < 1:
        raise OptionError(f"jitter needs at least one sample; got {samples}")
    stage_costs = (costs or Costs()).resolve(schedule.placement)
    validate(schedule)
    steps, first, last = _steps(schedule, stage_costs)
    spread = math.sqrt(math.log1p(jitter * jitter))
    found = tuple(
        _cost(steps, first, last, _factors(Random(f"{seed} {k}"), spread, len(steps))) for k in range(samples)
    )
    return JitterResult(fmean(found), sorted(found)[math.ceil(_SHARE * samples) - 1], found)


class _Step(NamedTuple):
    """An op, in an order in which each stands behind all that it waits for. Places count from 1; 0 is the beginning.

    Attributes:
        number: which of the random factors is its own.
        duration: its mean.
        before: place of the op before it on its rank. What it needs of its own rank has ended by then.
        source: place of the op of another rank whose result it needs.
        latency: of the hop from there.
    """

    number: int
    duration: float
    before: int
    source: int
    latency: float


def _steps(schedule: Schedule, costs: StageCosts) -> tuple[list[_Step], list[int], list[int]]:
    """The steps of all ops, and the places of each rank's first and last op."""
    numbers = {op: i for i, op in enumerate(sorted(schedule.ops()))}
    steps: list[_Step] = []
    places: dict[Op, int] = {}
    latest, first = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    for rank, position in schedule.progress.sequence:
        op = schedule.orders[rank][position]
        source, latency = 0, 0.0
        for need in needs(op, schedule.num_stages):
            if schedule.placement.ranks[need.stage] != rank:
                source, latency = places[need], costs.hop[min(need.stage, op.stage)]
        steps.append(_Step(numbers[op], costs.duration(op), latest[rank], source, latency))
        places[result(op)] = latest[rank] = len(steps)
        first[rank] = first[rank] or len(steps)
    return steps, first, latest


def _factors(random: Random, spread: float, count: int) -> list[float]:
    """Log-normal with mean 1."""
    gauss, exp, shift = random.gauss, math.exp, -spread * spread / 2
    return [exp(gauss(shift, spread)) for _ in range(count)]


def _cost(steps: list[_Step], first: list[int], last: list[int], factors: list[float]) -> float:
    ends, durations = [0.0], [0.0]
    for number, mean, before, source, latency in steps:
        start, arrival = ends[before], ends[source] + latency
        durations.append(mean * factors[number])
        ends.append((start if start > arrival else arrival) + durations[-1])
    return max(ends[z] - ends[a] + durations[a] for a, z in zip(first, last, strict=True))
