"""Each kind of fault is found, with its place drawn and what would mend it; what can run is never refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import costs, schedules

from zerobubble import Costs, Op, Placement, one_f_one_b, simulate, validate, zb_h1, zb_v
from zerobubble.dependencies import needs, result
from zerobubble.errors import CostsError, OptionError, ScheduleError
from zerobubble.notation import from_grid, parse_op
from zerobubble.schedule import Schedule, make_schedule
from zerobubble.validate import Fault, draw, find_faults

if TYPE_CHECKING:
    from random import Random


def faults_of(grid: str, placement: tuple[int, ...] = (0, 1), num_microbatches: int = 2) -> list[Fault]:
    orders = from_grid(grid).orders
    return find_faults(make_schedule("mine", Placement(placement), num_microbatches, orders))


def only_fault_of(grid: str, **sizes: object) -> tuple[str, int | None, int | None, list[str]]:
    """Rule, rank, position and text of the fault, which must be the only one."""
    (fault,) = faults_of(grid, **sizes)
    return fault.rule, fault.rank, fault.position, str(fault).splitlines()


# ------------------------------------------------------------------------------------------------ what can run


@given(schedules(max_ranks=5, max_chunks=3))
def test_whatever_a_list_scheduler_makes_is_accepted(schedule):
    assert find_faults(schedule) == []
    validate(schedule)


def test_bw_and_b_with_w_may_be_mixed_within_a_stage():
    assert faults_of("0F0 0F1 0BW0 0B1 0W1\n1F0 1B0 1F1 1BW1 1W0") == []


# ------------------------------------------------------------------------------------------------ one fault per rule

VALID = """
    rank 0 | 0F0 0F1 .   .   0B0 0W0 0B1 0W1
    rank 1 | .   1F0 1B0 1F1 1B1 1W0 1W1
"""


def test_the_schedule_that_the_tests_below_spoil_is_valid():
    assert faults_of(VALID) == []


def test_a_dropped_op_is_missed():
    assert only_fault_of(VALID.replace("1W0", "")) == ("complete", 1, None, ["rank 1 lacks 1W0; add it"])


def test_dropped_ops_of_a_stage_and_microbatch_are_one_fault():
    assert only_fault_of(VALID.replace("1B0", "").replace("1W0", "")) == (
        "complete", 1, None, ["rank 1 lacks 1B0 and 1W0; add them"],
    )  # fmt: skip


def test_with_bw_only_the_forward_can_be_missing():
    assert only_fault_of("0F0 0BW0\n1BW0", num_microbatches=1) == ("complete", 1, None, ["rank 1 lacks 1F0; add it"])


def test_microbatches_without_any_op_are_summed_up_as_ranges():
    grid = "0F0 0BW0 0F3 0BW3\n1F0 1BW0 1F3 1BW3"
    assert [(fault.rule, fault.rank, str(fault)) for fault in faults_of(grid, num_microbatches=10**9)] == [
        (
            "complete",
            rank,
            f"rank {rank} lacks every op of stage {rank} for microbatches {gap}; add F, B and W (or F and BW)",
        )
        for rank in (0, 1)
        for gap in ("1..2", "4..999999999")
    ]


def test_a_doubled_op_is_shown_at_its_second_place():
    assert only_fault_of(VALID.replace("0B1", "0B1 0W0")) == (
        "once", 0, 5, [
            "0W0 is there twice (first at rank 0, position 3); remove one",
            "  rank 0 | ... 0B0 0W0 0B1 [0W0] 0W1",
        ],
    )  # fmt: skip


def test_an_op_on_another_rank_is_sent_home():
    assert only_fault_of(f"{VALID.replace('0W1', '').strip()} 0W1") == (
        "placement", 1, 6, [
            "0W1 is on rank 1, but stage 0 lies on rank 0; move it there",
            "  rank 1 | ... 1B1 1W0 1W1 [0W1]",
        ],
    )  # fmt: skip


def test_an_op_before_one_that_it_needs_is_moved_behind_it():
    assert only_fault_of("0F0 0F1 0B0 0W0 0W1 0B1\n1F0 1B0 1F1 1B1 1W0 1W1") == (
        "order", 0, 4, [
            "0W1 stands before 0B1 (position 5), which it needs; move it behind",
            "  rank 0 | ... 0F1 0B0 0W0 [0W1] 0B1",
        ],
    )  # fmt: skip


@pytest.mark.parametrize("others", [["0B0"], ["0W0"], ["0B0", "0W0"]], ids=" ".join)
def test_bw_beside_b_or_w_would_count_a_gradient_twice(others):
    grid = VALID.replace("0B0 0W0", " ".join(["0BW0", *others]))
    assert only_fault_of(grid) == (
        "once", 0, 2, [
            "stage 0, microbatch 0 has BW beside B or W: its gradient would count twice; keep either BW, or B and W",
            f"  rank 0 | 0F0 0F1 [0BW0] {' '.join([*others, '0B1', '0W1'][:3])}{' ...' * (len(others) > 1)}",
        ],
    )  # fmt: skip


@pytest.mark.parametrize("op", ["2F0", "0F2"])
def test_an_op_out_of_range_is_refused(op):
    assert only_fault_of(VALID.replace("0W1", f"0W1 {op}")) == (
        "range", 0, 6, [
            f"{op} is out of range: stages are 0..1 and microbatches 0..1; remove it or raise the counts",
            f"  rank 0 | ... 0W0 0B1 0W1 [{op}]",
        ],
    )  # fmt: skip


def test_a_deadlock_draws_what_each_rank_waits_for():
    grid = """
        rank 0 | 0F0 0BW0 0F1 0BW1 0F2 0BW2
        rank 1 | 1F1 1BW1 1F0 1BW0 1F2 1BW2
    """
    assert only_fault_of(grid, num_microbatches=3) == (
        "deadlock", 0, 1, [
            "Deadlock: no rank can make progress; on one of these ranks, run the awaited op earlier",
            "  rank 0 | 0F0 [0BW0] 0F1 0BW1 ...   waits for 1B0 on rank 1",
            "  rank 1 | [1F1] 1BW1 1F0 ...   waits for 0F1 on rank 0",
        ],
    )  # fmt: skip


def test_a_deadlock_leaves_out_the_ranks_that_get_done():
    grid = """
        rank 0 | 0F0 0F1 2F0 2F1 2BW0 0BW0 2BW1 0BW1
        rank 1 | 1F0 1F1 1BW1 1BW0
        rank 2 | 3F0 3F1 3BW0 3BW1
    """
    rule, _, _, lines = only_fault_of(grid, placement=(0, 1, 0, 2))
    assert rule == "deadlock"
    assert lines[1:] == [
        "  rank 0 | ... 2F1 2BW0 [0BW0] 2BW1 0BW1   waits for 1B0 on rank 1",
        "  rank 1 | 1F0 1F1 [1BW1] 1BW0   waits for 2B1 on rank 0",
    ]


def test_memory_over_the_limit_is_shown_where_it_first_happens():
    (fault,) = find_faults(zb_h1(2, 4), memory_limit=1.5)
    assert (fault.rule, fault.rank, fault.position) == ("memory", 0, 1)
    assert str(fault).splitlines() == [
        "0F1 needs 2 of activation memory on rank 0, over the limit of 1.5; run a B or W before it, or raise the limit",
        "  rank 0 | 0F0 [0F1] 0B0 0W0 0F2 ...",
    ]


@pytest.mark.parametrize(
    ("placement", "num_microbatches", "message"),
    [
        ((0, 1, 2), 2, "the placement has 3 ranks, but there are 2 orders of ops; give one order per rank"),
        ((0, 1), 0, "a schedule needs at least one microbatch; got 0"),
    ],
)
def test_counts_that_do_not_fit_the_orders_are_refused(placement, num_microbatches, message):
    first = faults_of(VALID, placement, num_microbatches)[0]
    assert (first.rule, first.message) == ("shape", message)


# ------------------------------------------------------------------------------------------------ any spoiled schedule


def places(schedule: Schedule) -> list[tuple[int, int]]:
    return [(rank, i) for rank, order in enumerate(schedule.orders) for i in range(len(order))]


def changed(schedule: Schedule, rank: int, order: list[Op]) -> Schedule:
    orders = [order if r == rank else old for r, old in enumerate(schedule.orders)]
    return make_schedule("changed", schedule.placement, schedule.num_microbatches, orders)


def rules(schedule: Schedule) -> set[str]:
    return {fault.rule for fault in find_faults(schedule)}


@given(schedules(), st.randoms(use_true_random=False))
def test_dropping_any_op_is_refused(schedule, random: Random):
    rank, i = random.choice(places(schedule))
    order = list(schedule.orders[rank])
    del order[i]
    assert rules(changed(schedule, rank, order)) == {"complete"}


@given(schedules(), st.randoms(use_true_random=False))
def test_doubling_any_op_anywhere_is_refused(schedule, random: Random):
    op = random.choice(list(schedule.ops()))
    rank = random.randrange(schedule.num_ranks)
    order = list(schedule.orders[rank])
    order.insert(random.randint(0, len(order)), op)
    assert "once" in rules(changed(schedule, rank, order))


@given(schedules(), st.randoms(use_true_random=False))
def test_moving_any_op_to_another_rank_is_refused(schedule, random: Random):
    assume(schedule.num_ranks > 1)
    rank, i = random.choice(places(schedule))
    order = list(schedule.orders[rank])
    op = order.pop(i)
    other = random.choice([r for r in range(schedule.num_ranks) if r != rank])
    longer = list(schedule.orders[other])
    longer.insert(random.randint(0, len(longer)), op)
    (fault,) = find_faults(changed(changed(schedule, rank, order), other, longer))
    assert (fault.rule, fault.rank) == ("placement", other)
    assert f"[{op}]" in fault.drawing


@given(schedules(), st.randoms(use_true_random=False))
def test_moving_any_op_before_one_that_it_needs_on_its_rank_is_refused(schedule, random: Random):
    rank, i = random.choice(places(schedule))
    order = list(schedule.orders[rank])
    op = order[i]
    earlier = [j for j in range(i) if result(order[j]) in needs(op, schedule.num_stages)]
    assume(earlier)
    order.insert(random.randint(0, earlier[-1]), order.pop(i))
    faults = find_faults(changed(schedule, rank, order))
    assert {fault.rule for fault in faults} == {"order"}
    assert any(fault.message.startswith(f"{op} stands before") for fault in faults)


@given(schedules(), st.randoms(use_true_random=False))
def test_any_shuffled_order_either_runs_or_is_said_to_hang(schedule, random: Random):
    """An oracle of its own: run one op at a time, on any rank whose next op has what it needs."""
    orders = [random.sample(order, len(order)) for order in schedule.orders]
    shuffled = make_schedule("shuffled", schedule.placement, schedule.num_microbatches, orders)
    done: set[Op] = set()
    heads = [0] * len(orders)
    while True:
        movable = [
            r for r, order in enumerate(orders)
            if heads[r] < len(order) and done.issuperset(needs(order[heads[r]], schedule.num_stages))
        ]  # fmt: skip
        if not movable:
            break
        done.add(result(orders[movable[0]][heads[movable[0]]]))
        heads[movable[0]] += 1
    hangs = sum(heads) < schedule.num_ops
    assert bool(find_faults(shuffled)) == hangs
    if hangs:
        assert rules(shuffled) in ({"order"}, {"deadlock"})


# ------------------------------------------------------------------------------------------------ memory


@given(schedules(), st.data())
def test_the_memory_limit_is_the_peak_of_the_simulator(schedule, data):
    stage_costs = data.draw(costs(schedule.placement))
    assume(max(simulate(schedule, stage_costs).peak_memory) > 0)
    peak = max(simulate(schedule, stage_costs).peak_memory)
    assert find_faults(schedule, memory_limit=peak, costs=stage_costs) == []
    assert {fault.rule for fault in find_faults(schedule, peak - 0.5, stage_costs)} == {"memory"}


def test_rounding_does_not_make_a_limit_too_small():
    assert 0.1 + 0.1 + 0.1 > 0.3
    validate(one_f_one_b(3, 6), memory_limit=0.3, costs=Costs(activation_memory=0.1, weight_memory=0.05))


def test_memory_is_m_b_and_half_of_it_where_costs_are_not_given():
    validate(zb_h1(4, 8), memory_limit=4)
    with pytest.raises(ScheduleError, match=r"over the limit of 3\.9"):
        validate(zb_h1(4, 8), memory_limit=3.9)


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_that_is_no_amount_is_refused(limit):
    with pytest.raises(OptionError, match=f"the memory limit must be a number that is not negative; got {limit}"):
        validate(zb_h1(2, 2), memory_limit=limit)


def test_memory_is_only_judged_where_the_schedule_can_run():
    wrong = make_schedule("wrong", Placement.linear(1), 1, [map(parse_op, ["0F0", "0BW0", "7F0"])])
    stuck = make_schedule("stuck", Placement.linear(1), 1, [map(parse_op, ["0BW0", "0F0"])])
    assert [fault.rule for fault in find_faults(wrong, memory_limit=0)] == ["range"]
    assert [fault.rule for fault in find_faults(stuck, memory_limit=0)] == ["order"]


def test_costs_that_do_not_fit_the_stages_are_refused():
    with pytest.raises(CostsError, match="the lists have 3 entries, but the schedule has 4 stages"):
        validate(zb_v(2, 3), memory_limit=4, costs=Costs(forward=[1, 1, 1]))


# ------------------------------------------------------------------------------------------------ the error as a whole


def test_one_fault_is_told_without_a_number():
    with pytest.raises(ScheduleError) as caught:
        validate(make_schedule("mine", Placement.linear(1), 1, [map(parse_op, ["0F0", "0B0"])]))
    assert str(caught.value) == "schedule 'mine' cannot run: 1 fault\nrank 0 lacks 0W0; add it"


def test_many_faults_are_numbered_and_all_but_the_first_twelve_only_counted():
    schedule = zb_h1(4, 8)
    without_w = make_schedule(
        "mine", schedule.placement, 8, [[op for op in order if op.kind != "W"] for order in schedule.orders]
    )
    with pytest.raises(ScheduleError) as caught:
        validate(without_w)
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["schedule 'mine' cannot run: 32 faults", "1. rank 0 lacks 0W0; add it"]
    assert lines[12:] == ["12. rank 1 lacks 1W3; add it", "... and 20 more faults"]
    assert len(caught.value.faults) == 32


def test_all_faults_are_reported_together():
    grid = VALID.replace("0W0", "0W0 0W0").replace("1W1", "2F0")
    assert [fault.rule for fault in faults_of(grid)] == ["range", "once", "complete"]


@given(schedules(), st.integers(0, 30), st.integers(0, 4))
def test_a_drawing_marks_the_place_and_shows_its_neighbours(schedule, position, around):
    order = schedule.orders[0]
    assume(position < len(order))
    _, _, cells = draw(order, 0, position, around).partition(" | ")
    words = [word for word in cells.split() if word != "..."]
    assert words.count(f"[{order[position]}]") == 1
    assert [word.strip("[]") for word in words] == list(
        map(str, order[max(position - around, 0) : position + around + 1])
    )
    assert cells.startswith("...") == (position > around)
    assert cells.endswith("...") == (position + around + 1 < len(order))
