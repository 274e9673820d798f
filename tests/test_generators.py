"""The handcrafted schedules. Every test goes through `GENERATORS`, so a new row of the table is tested at once."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import pytest
import rendezvous

from zerobubble import GENERATORS, Costs, Kind, Placement, generate, lower, simulate
from zerobubble.errors import OptionError
from zerobubble.generators import find_generator
from zerobubble.notation import from_grid, to_grid
from zerobubble.validate import find_faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerobubble import Schedule, Timeline
    from zerobubble.generators import Generator

EVERYDAY = [(p, m) for p in range(1, 9) for m in range(1, 25)]
LARGE = [(16, 64), (32, 64)]

every_generator = pytest.mark.parametrize("generator", [pytest.param(g, id=g.name) for g in GENERATORS.values()])


def equal_stages(schedule: Schedule) -> Costs:
    """T_F = T_B = T_W = 1, M_B = 1 and M_W = 1/2 per rank, whatever the number of chunks."""
    return Costs().split(schedule.num_stages // schedule.num_ranks)


def simulated(generator: Generator, num_ranks: int, num_microbatches: int) -> Timeline:
    schedule = generator.make(num_ranks, num_microbatches)
    return simulate(schedule, equal_stages(schedule))


def variants(generator: Generator, sizes: list[tuple[int, int]]) -> Iterator[Schedule]:
    """The generator's schedules for all `sizes`, and for 1 to 4 chunks where these can be chosen."""
    for p, m in sizes:
        if generator.takes_chunks:
            yield from (generator.make(p, m, chunks=chunks) for chunks in range(1, 5))
        else:
            yield generator.make(p, m)


def label(schedule: Schedule) -> str:
    return f"{schedule.name}, p={schedule.num_ranks}, m={schedule.num_microbatches}, S={schedule.num_stages}"


# ------------------------------------------------------------------------------------------------ they can run


@every_generator
@pytest.mark.parametrize("sizes", [pytest.param(EVERYDAY, id="p<=8,m<=24"), pytest.param(LARGE, id="p=16,32")])
def test_each_is_valid_and_runs_to_its_end_even_when_sends_block(generator, sizes):
    for schedule in variants(generator, sizes):
        assert find_faults(schedule) == [], label(schedule)
        assert len(rendezvous.run(lower(schedule))) == schedule.num_ops, label(schedule)


@every_generator
def test_placement_is_the_one_in_the_table(generator):
    for p in range(2, 9):
        assert generator.make(p, 4).placement.style == generator.placement


@every_generator
def test_name_is_the_one_in_the_table(generator):
    assert generator.make(3, 4).name == generator.name


@every_generator
def test_weight_gradients_run_in_microbatch_order_on_every_stage(generator):
    """The runtime's gradients are bit-identical between schedules because of this."""
    for schedule in variants(generator, EVERYDAY):
        for stage in range(schedule.num_stages):
            order = schedule.orders[schedule.placement.ranks[stage]]
            weights = [op.microbatch for op in order if op.stage == stage and op.kind in (Kind.W, Kind.BW)]
            assert weights == sorted(weights), label(schedule)


# ------------------------------------------------------------------------------------------------ memory


def group(p: int, m: int) -> int:
    """Microbatches in the largest group of the interleaved schedule."""
    return -(-m // max(1, m // p))


PEAK_MEMORY: dict[str, Callable[[int, int], float]] = {
    "gpipe": lambda p, m: m,
    "one_f_one_b": min,
    "interleaved": lambda p, m: min(m, (group(p, m) + 2 * p - 1) / 2),
    "zb_h1": min,
    "zb_h2": lambda p, m: min(2 * p - 1, m),
    "zb_v": min,
    "v_half": lambda p, m: min(m, p / 2 + 1),
    "v_min": lambda p, m: min(m, p / 3 + 1),
}
"""The largest peak of a rank, in M_B of a rank; the last two are bounds, the others are met exactly."""


@every_generator
def test_peak_memory_is_as_published(generator):
    for p, m in EVERYDAY + LARGE:
        peak, published = max(simulated(generator, p, m).peak_memory), PEAK_MEMORY[generator.name](p, m)
        if generator.name in ("v_half", "v_min"):
            assert peak <= published + 1e-9, (p, m)
        else:
            assert peak == pytest.approx(published), (p, m)


@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_memory_bound_is_tight(name):
    for p in (6, 12, 18):
        assert max(simulated(GENERATORS[name], p, 3 * p).peak_memory) == pytest.approx(PEAK_MEMORY[name](p, 3 * p))


@pytest.mark.parametrize("chunks", range(1, 5))
def test_interleaved_holds_two_groups_less_one_whatever_the_chunks(chunks):
    """(v-1) groups ahead and 2p-1 forwards of 1/v M_B; one chunk is 1F1B."""
    for p, m in EVERYDAY:
        schedule = generate("interleaved", p, m, chunks)
        held = ((chunks - 1) * group(p, m) + 2 * p - 1) / chunks if chunks > 1 else p
        assert max(simulate(schedule, equal_stages(schedule)).peak_memory) == pytest.approx(min(m, held)), (p, m)


def test_interleaved_with_one_chunk_is_1f1b():
    for p, m in EVERYDAY:
        assert generate("interleaved", p, m, chunks=1).orders == generate("1F1B", p, m).orders


def test_zb_v_holds_the_same_on_every_rank():
    for p, m in EVERYDAY:
        if m >= 2 * p - 1:
            assert set(simulated(GENERATORS["zb_v"], p, m).peak_memory) == {p}


# ------------------------------------------------------------------------------------------------ bubbles


@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_no_bubble_at_equal_times(name):
    for p in range(1, 33):
        for m in (2 * p - 1, 3 * p):
            assert simulated(GENERATORS[name], p, m).bubble_rate == 0, (p, m)


def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_at_equal_times():
    for p, m in EVERYDAY:
        if m >= p:
            ours, baseline = (simulated(GENERATORS[name], p, m) for name in ("zb_h1", "one_f_one_b"))
            assert 3 * (ours.cost - ours.work) == baseline.cost - baseline.work


@pytest.mark.parametrize(
    ("name", "share", "tolerance", "tolerance_from_p_8"),
    [("v_half", 1 / 2, 0.084, 0.036), ("v_min", 2 / 3, 0.167, 0.024)],
)
def test_share_of_the_bubble_of_1f1b_at_equal_times(name, share, tolerance, tolerance_from_p_8):
    """V-Half: 0.417 to 0.536 of 1F1B's bubble; V-Min: 0.500 to 0.750, from p = 8 on 0.643 to 0.688."""
    for p in (*range(2, 17), 24, 29, 32):
        for m in (2 * p - 1, 3 * p):
            ours, baseline = simulated(GENERATORS[name], p, m), simulated(GENERATORS["one_f_one_b"], p, m)
            ratio = (ours.cost - ours.work) / (baseline.cost - baseline.work)
            assert ratio == pytest.approx(share, abs=tolerance_from_p_8 if p >= 8 else tolerance), (p, m)


@every_generator
def test_more_microbatches_never_make_the_bubble_rate_worse(generator):
    for p in (2, 4, 7):
        rates = [simulated(generator, p, m).bubble_rate for m in (2 * p, 4 * p, 8 * p)]
        assert rates == sorted(rates, reverse=True), p


# ------------------------------------------------------------------------------------------------ pictures


def picture(schedule: Schedule) -> str:
    """The schedule at T_F = T_B = T_W = 1 on every stage, one column per unit."""
    timeline = simulate(schedule)
    starts, ends = ([[int(time) for time in row] for row in times] for times in (timeline.starts, timeline.ends))
    return to_grid(schedule, starts, ends)


@every_generator
def test_picture_of_four_ranks_and_eight_microbatches(generator, golden):
    schedule = generator.make(4, 8)
    golden(f"{generator.name}.txt", picture(schedule))
    assert from_grid(picture(schedule)) == schedule


@every_generator
def test_picture_in_the_docstring_is_what_the_generator_makes(generator):
    doc = inspect.getdoc(generator.make)
    p, m = map(int, re.search(r"With (\d+) ranks, (\d+) microbatches", doc).groups())
    drawn = re.findall(r"^ *rank \d+ \|.*$", doc, re.MULTILINE)
    real = picture(generator.make(p, m)).splitlines()
    assert len(drawn) == p
    for line, row in zip(drawn, real, strict=True):
        cells = line.split()
        if cells[-1] == "...":
            assert cells[:-1] == row.split()[: len(cells) - 1]
        else:
            assert cells == row.split()


# ------------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize("size", [0, -1, 1.0, "4", True, None])
@every_generator
def test_a_size_that_is_no_whole_number_of_at_least_1_is_refused(generator, size):
    with pytest.raises(OptionError, match=rf"num_ranks must be .* got {size!r}"):
        generator.make(size, 4)
    with pytest.raises(OptionError, match=rf"num_microbatches must be .* got {size!r}"):
        generator.make(4, size)
    if generator.takes_chunks:
        with pytest.raises(OptionError, match=rf"chunks must be .* got {size!r}"):
            generator.make(4, 4, chunks=size)


@pytest.mark.parametrize("name", ["zb_h1", "ZB-H1", "zb-h1", "ZB_H1"])
def test_names_and_titles_are_found_in_any_case_and_with_dashes(name):
    assert find_generator(name) is GENERATORS["zb_h1"]


def test_no_two_rows_answer_to_the_same_name():
    for generator in GENERATORS.values():
        assert find_generator(generator.name) is find_generator(generator.title) is generator


def test_an_unknown_name_is_answered_with_the_names_there_are():
    with pytest.raises(OptionError, match=r"no schedule is called 'zb_h3'; the names are gpipe, one_f_one_b, "):
        generate("zb_h3", 4, 8)


def test_chunks_are_passed_on_where_they_can_be_chosen():
    assert generate("interleaved", 2, 4, chunks=3).placement == Placement.loop(2, 3)


def test_chunks_are_refused_where_their_number_is_fixed():
    with pytest.raises(OptionError, match=r"zb_v has a fixed number of chunks per rank; leave chunks out \(got 2\)"):
        generate("zb_v", 2, 4, chunks=2)
