"""Where to cut a model into stages, given what each of its layers costs: embedding and head make the ends heavy.

A partition is the number of layers of each stage, in data-flow order, as `Pipeline` takes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import accumulate, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from zerobubble.costs import PER_STAGE_KEYS
from zerobubble.errors import CostsError, OptionError
from zerobubble.planner.placements import make_placement
from zerobubble.schedule import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zerobubble.costs import Costs, PerStage
    from zerobubble.planner import Plan

Partition: TypeAlias = tuple[int, ...]
"""Layers per stage, in data-flow order."""

_HALVINGS = 30
_RESTARTS = 12
"""Disturbed and improved again so often, a partition of several chunks per rank gets better."""


def stage_costs_for(layers: Costs, partition: Sequence[int]) -> Costs:
    """The costs per stage of a model cut by `partition`: each stage has the sum of its layers' times and memory.

    Args:
        layers: costs with one entry per layer. `communication` is one number; or one per layer boundary, of which those
            at the cuts remain; or one per pair of neighbouring ranks.
        partition: layers per stage.

    Raises:
        CostsError: `layers` has no list, so that the number of layers is not known.
        OptionError: the partition has a stage without layers or does not add up to the number of layers.
    """
    count = _num_layers(layers)
    if sum(partition) != count or min(partition, default=0) < 1:
        raise OptionError(
            f"{count} layers cannot be cut into stages of {list(partition)} layers: "
            "every stage needs at least one, and all together must be as many as there are"
        )
    ends = list(accumulate(partition))
    summed: dict[str, Any] = {key: _summed(getattr(layers, key), partition) for key in PER_STAGE_KEYS}
    hops = layers.communication
    if isinstance(hops, tuple) and len(hops) == count - 1:
        summed["communication"] = tuple(hops[end - 1] for end in ends[:-1])
    return replace(layers, **summed)


def _num_layers(layers: Costs) -> int:
    if layers.num_stages is None:
        raise CostsError(
            "costs per layer need a list with one entry per layer, at least for one key; all values are single numbers"
        )
    return layers.num_stages


def _summed(value: PerStage | None, partition: Sequence[int]) -> PerStage | None:
    if value is None:
        return None
    if not isinstance(value, tuple):
        return tuple(value * size for size in partition)
    ends = list(accumulate(partition, initial=0))
    return tuple(sum(value[a:b]) for a, b in pairwise(ends))


def best_partitions(layers: Costs, placement: Placement, count: int = 1) -> list[Partition]:
    """The `count` best ways to cut the model for `placement`, best first.

    Partitions are judged by the work of the busiest rank, then by the largest stage, then by how even the stages are.
    For one stage per rank, and for the V placement, the first has the least work of the busiest rank that is possible;
    for others it is a local optimum. Those after it differ from it by a layer that another stage has.

    Raises:
        CostsError: as `stage_costs_for`.
        OptionError: there are fewer layers than stages.
    """
    work = _layer_work(layers)
    if len(work) < placement.num_stages:
        raise OptionError(
            f"{len(work)} layers cannot fill {placement.num_stages} stages; give fewer ranks or chunks, or finer layers"
        )
    search = _Search(work, placement)
    seeds = [_smallest_largest_stage(work, placement.num_stages)]
    if placement == Placement.v(placement.num_ranks):
        seeds.append(_smallest_largest_rank_of_v(work, placement.num_ranks))
    best = search.restarted(min((search.improved(seed) for seed in seeds), key=search.badness))
    return nsmallest(count, {best, *_transfers(best)}, key=lambda partition: (search.badness(partition), partition))


def _layer_work(layers: Costs) -> list[float]:
    """F, B and W of each layer together."""
    count = _num_layers(layers)
    whole = stage_costs_for(layers, (1,) * count)
    columns = (whole.forward, whole.backward_input, whole.backward_weight)
    return [sum(times) for times in zip(*(column for column in columns if isinstance(column, tuple)), strict=True)]


def _transfers(partition: Partition, givers: Sequence[int] | None = None) -> Iterator[Partition]:
    """All partitions in which one stage (of `givers`) has a layer less and another one more; those between shift."""
    stages = range(len(partition))
    for giver in stages if givers is None else givers:
        for taker in stages:
            if giver != taker and partition[giver] > 1:
                sizes = list(partition)
                sizes[giver] -= 1
                sizes[taker] += 1
                yield tuple(sizes)


class _Search:
    """Local search: stages hand layers to each other as long as it helps."""

    def __init__(self, work: Sequence[float], placement: Placement) -> None:
        self._sums = list(accumulate(work, initial=0.0))
        self._placement = placement

    def _loads(self, partition: Partition) -> tuple[list[float], list[float]]:
        """Work per stage and per rank."""
        ends = [self._sums[end] for end in accumulate(partition, initial=0)]
        stages = [b - a for a, b in pairwise(ends)]
        ranks = [0.0] * self._placement.num_ranks
        for rank, load in zip(self._placement.ranks, stages, strict=True):
            ranks[rank] += load
        return stages, ranks

    def badness(self, partition: Partition) -> tuple[float, float, float]:
        """Work of the busiest rank, the largest stage, and the sum of squares of the stages: the less, the better."""
        stages, ranks = self._loads(partition)
        return round(max(ranks), 9), round(max(stages), 9), round(sum(load * load for load in stages), 9)

    def improved(self, partition: Partition) -> Partition:
        """`partition` after as many transfers as help, from the busiest rank and the largest stage."""
        while True:
            stages, ranks = self._loads(partition)
            givers = {*self._placement.stages_of(ranks.index(max(ranks))), stages.index(max(stages))}
            better = min(_transfers(partition, sorted(givers)), key=self.badness, default=partition)
            if self.badness(better) >= self.badness(partition):
                return partition
            partition = better

    def restarted(self, partition: Partition) -> Partition:
        """`partition`, or what comes out when it is disturbed at random and improved again. Always the same."""
        random = Random(0)
        for _ in range(_RESTARTS if self._placement.num_stages > self._placement.num_ranks else 0):
            other = partition
            for _ in range(3):
                other = random.choice(list(_transfers(other, [random.randrange(len(other))])) or [other])
            partition = min(partition, self.improved(other), key=self.badness)
        return partition


def _smallest_largest_stage(work: Sequence[float], num_stages: int) -> Partition:
    """The cut whose largest stage is smallest: dynamic program over (stages, layers)."""
    sums = list(accumulate(work, initial=0.0))
    count = len(work)
    largest: list[float] = [sums[end] for end in range(count + 1)]  # with one stage
    choices: list[list[int]] = []
    for stages in range(2, num_stages + 1):
        row, choice = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stages, count + 1):
            cuts = range(stages - 1, end)
            choice[end] = min(cuts, key=lambda cut, end=end: max(largest[cut], sums[end] - sums[cut]))  # type: ignore[misc]
            row[end] = max(largest[choice[end]], sums[end] - sums[choice[end]])
        largest, choices = row, [*choices, choice]
    ends = [count]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    return tuple(b - a for a, b in pairwise([0, *ends[::-1]]))


def _smallest_largest_rank_of_v(work: Sequence[float], num_ranks: int) -> Partition:
    """The cut for the V placement whose busiest rank has least to do: halve the interval of what may be allowed."""
    low, high = max(sum(work) / num_ranks, max(work)), sum(work)
    best = _v_within(work, num_ranks, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _v_within(work, num_ranks, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    if best is None:
        raise OptionError(f"{len(work)} layers cannot fill {2 * num_ranks} stages")
    return best


def _v_within(work: Sequence[float], num_ranks: int, allowed: float) -> Partition | None:
    """A V partition in which no rank has more than `allowed`, or None when there is none.

    Rank by rank from the outside in: for each number of layers that the first stages took from the front, the last
    stages take as many from the back as they can. Having taken more never hurts, as long as each stage still to come
    can have a layer.
    """
    sums = list(accumulate(work, initial=0.0))
    allowed *= 1 + 1e-12
    taken: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {0: (len(work), ())}  # front -> least back, and how
    for rank in range(num_ranks):
        inner = 2 * (num_ranks - rank - 1)
        further: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
        for front, (back, path) in taken.items():
            cut = back - 1
            for end in range(front + 1, back - inner):
                load = sums[end] - sums[front]
                if load + sums[back] - sums[back - 1] > allowed:
                    break
                least = _reach(sums, back, allowed - load, end + inner)
                cut = least if inner else end
                if not inner and load + sums[back] - sums[end] > allowed:
                    continue
                if end not in further or cut < further[end][0]:
                    further[end] = cut, (*path, (end, cut))
        taken = further
    if not taken:
        return None
    _, path = next(iter(taken.values()))
    ends = [end for end, _ in path] + [cut for _, cut in path[-2::-1]] + [len(work)]
    return tuple(b - a for a, b in pairwise([0, *ends]))


def _reach(sums: Sequence[float], back: int, allowed: float, least: int) -> int:
    """The smallest start, not below `least`, of a run of layers that ends at `back` and takes at most `allowed`."""
    start = back - 1
    while start > least and sums[back] - sums[start - 1] <= allowed:
        start -= 1
    return start


def plan_layers(
    layers: Costs,
    num_ranks: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    placement: str = "auto",
    chunks: int | None = None,
    effort: str = "default",
    time_limit: float | None = None,
    progress: Callable[..., None] | None = None,
    candidates: int = 3,
) -> tuple[Partition, Plan]:
    """Cut the model into stages together with its schedule.

    The `candidates` best partitions of each placement are planned quickly, the one with the least cost with `effort`.

    Args:
        layers: costs with one entry per layer.
        num_ranks: p.
        num_microbatches: m.
        memory_limit: as for `plan`.
        placement: as for `plan`.
        chunks: as for `plan`.
        effort: as for `plan`.
        time_limit: seconds, half of them for the candidates.
        progress: as for `plan`.
        candidates: partitions per placement.

    Raises:
        CostsError: as `stage_costs_for`.
        OptionError: as `plan`, or there are fewer layers than stages.
    """

    def attempt(cut: _Cut, effort: str, seconds: float | None) -> Plan:
        return _plan_cut(
            layers, cut, num_ranks, num_microbatches, memory_limit=memory_limit, effort=effort, time_limit=seconds,
            progress=progress,
        )  # fmt: skip

    cuts = _cuts(layers, num_ranks, placement, chunks, candidates)
    half = None if time_limit is None else time_limit / 2
    cut, quick = _quickest(cuts, lambda cut: attempt(cut, "quick", half and half / len(cuts)))
    if effort == "quick":
        return cut.partition, quick
    thorough = attempt(cut, effort, half)
    return cut.partition, thorough if thorough.timeline.cost <= quick.timeline.cost else quick


@dataclass(frozen=True)
class _Cut:
    """A partition for a placement, by its name and number of chunks."""

    partition: Partition
    style: str
    chunks: int | None


def _plan_cut(layers: Costs, cut: _Cut, num_ranks: int, num_microbatches: int, **options: Any) -> Plan:
    from zerobubble.planner import plan

    costs = stage_costs_for(layers, cut.partition)
    return plan(costs, num_ranks, num_microbatches, placement=cut.style, chunks=cut.chunks, **options)


def _quickest(cuts: Sequence[_Cut], attempt: Callable[[_Cut], Plan]) -> tuple[_Cut, Plan]:
    """The cut whose plan costs least, with the plan. A cut or placement that has too little memory is passed over."""
    tried: list[tuple[_Cut, Plan]] = []
    refused: OptionError | None = None
    for cut in cuts:
        try:
            tried.append((cut, attempt(cut)))
        except OptionError as error:
            refused = refused or error
    if not tried:
        raise refused or OptionError("no placement was given")
    return min(tried, key=lambda one: one[1].timeline.cost)


def _cuts(layers: Costs, num_ranks: int, placement: str, chunks: int | None, count: int) -> list[_Cut]:
    """The best partitions of each placement that is to be tried."""
    return [
        _Cut(partition, style, number)
        for style, number in _styles(placement, chunks)
        for partition in _candidates(layers, make_placement(style, num_ranks, number), count, placement == "auto")
    ]


def _candidates(layers: Costs, placement: Placement, count: int, optional: bool) -> list[Partition]:
    """The best partitions for `placement`; none where it is optional and has more chunks than the layers fill."""
    too_many = placement.num_stages > _num_layers(layers)
    if optional and too_many and placement.num_stages > placement.num_ranks:
        return []
    return best_partitions(layers, placement, count)


def _styles(placement: str, chunks: int | None) -> list[tuple[str, int | None]]:
    """The placements to try, with the number of chunks where it can be chosen."""
    if placement != "auto":
        return [(placement, chunks)]
    if chunks is None:
        return [("linear", None), ("v", None), ("wave", 4)]
    if chunks == 1:
        return [("linear", None)]
    loop: list[tuple[str, int | None]] = [("loop", chunks)]
    return [*loop, ("v", None)] if chunks == 2 else [*loop, ("wave", chunks)] if chunks % 2 == 0 else loop
