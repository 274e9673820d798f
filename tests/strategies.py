"""Hypothesis strategies shared by the tests: placements, schedules that can run, and costs that fit them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from zerobubble import Costs, Kind, Op, Placement
from zerobubble.dependencies import needs, result
from zerobubble.schedule import make_schedule

if TYPE_CHECKING:
    from zerobubble import Schedule

WHOLE_TIMES = st.integers(0, 20)
"""Times whose sums are exact, so that figures can be compared with `==`."""


@st.composite
def placements(draw: st.DrawFn, max_ranks: int = 4, max_chunks: int = 2) -> Placement:
    """Any placement: the named styles, and stages on ranks in any order, not as many on each."""
    num_ranks = draw(st.integers(1, max_ranks))
    chunks = draw(st.integers(1, max_chunks))
    further = st.lists(st.integers(0, num_ranks - 1), max_size=num_ranks * (chunks - 1))
    return draw(
        st.sampled_from([Placement.loop(num_ranks, chunks), Placement.wave(num_ranks, chunks)])
        | further.flatmap(lambda more: st.permutations([*range(num_ranks), *more])).map(lambda r: Placement(tuple(r)))
    )


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 4, max_chunks: int = 2, max_microbatches: int = 4) -> Schedule:
    """Any schedule that can run, B and W mixed with BW: a list scheduler that takes any op whose needs are there."""
    placement = draw(placements(max_ranks, max_chunks))
    num_microbatches = draw(st.integers(1, max_microbatches))
    return random_schedule(placement, num_microbatches, Random(draw(st.integers(0, 2**32))))


def random_schedule(placement: Placement, num_microbatches: int, random: Random) -> Schedule:
    """Every schedule of these sizes that can run comes out of this for some `random`."""
    pending = {}
    split_share = random.choice([0, 0.5, 1])
    for stage in range(placement.num_stages):
        for microbatch in range(num_microbatches):
            kinds = [Kind.F, Kind.B, Kind.W] if random.random() < split_share else [Kind.F, Kind.BW]
            for op in (Op(stage, kind, microbatch) for kind in kinds):
                pending[op] = needs(op, placement.num_stages)
    done: set[Op] = set()
    orders: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    while pending:
        op = random.choice([op for op, need in pending.items() if done.issuperset(need)])
        del pending[op]
        done.add(result(op))
        orders[placement.ranks[op.stage]].append(op)
    return make_schedule("random", placement, num_microbatches, orders)


@st.composite
def costs(draw: st.DrawFn, placement: Placement, times: st.SearchStrategy[float] = WHOLE_TIMES) -> Costs:
    """Costs that fit `placement`: each value one number, or one per stage; hops may differ from each other."""
    stages = placement.num_stages

    def per(count: int) -> st.SearchStrategy[float | tuple[float, ...]]:
        return times | st.tuples(*[times] * count)

    return Costs(
        forward=draw(per(stages)),
        backward_input=draw(per(stages)),
        backward_weight=draw(per(stages)),
        communication=draw(per(stages - 1)),
        activation_memory=draw(per(stages)),
        weight_memory=draw(per(stages)),
        backward_full=draw(st.none() | per(stages)),
        unit=draw(st.sampled_from(["", "ms"])),
    )


@st.composite
def schedules_with_costs(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    schedule = draw(schedules())
    return schedule, draw(costs(schedule.placement))
