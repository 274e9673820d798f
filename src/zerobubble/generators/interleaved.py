"""Interleaved 1F1B: several chunks per rank make the bubble smaller, at more communication and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobubble.generators.common import check_sizes
from zerobubble.op import BW, F
from zerobubble.schedule import Placement, Schedule, make_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence


def interleaved(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021; 1F1B-I in the paper) on a loop placement with `chunks` chunks per rank.

    With 4 ranks, 4 microbatches and T_F = T_B = T_W, `-` for the second half of a BW:

        rank 0 | 0F0  0F1  0F2  0F3  4F0  4F1  4F2  4F3  .    .    .    .    .    .    4BW0 -    .    4BW1 -    ...
        rank 1 | .    1F0  1F1  1F2  1F3  5F0  5F1  5F2  5F3  .    .    .    5BW0 -    .    5BW1 -    .    5BW2 ...
        rank 2 | .    .    2F0  2F1  2F2  2F3  6F0  6F1  6F2  .    6BW0 -    6F3  6BW1 -    .    6BW2 -    .    ...
        rank 3 | .    .    .    3F0  3F1  3F2  3F3  7F0  7BW0 -    7F1  7BW1 -    7F2  7BW2 -    7F3  7BW3 -    ...

    Microbatches go in groups of at least p, each group through one chunk after the other. Unlike the usual rule,
    m need not be a multiple of p: the rest is spread over the groups.

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches, chunks=chunks)
    groups = _groups(num_ranks, num_microbatches)
    forwards = _in_groups(groups, range(chunks))
    backwards = _in_groups(groups, range(chunks)[::-1])
    orders = []
    for rank in range(num_ranks):
        to_last_rank = num_ranks - rank - 1
        warm_up = (chunks - 1) * len(groups[0]) + 2 * to_last_rank if chunks > 1 else to_last_rank
        warm_up = min(warm_up, len(forwards))
        steady = len(forwards) - warm_up
        fs = [F(chunk * num_ranks + rank, mb) for chunk, mb in forwards]
        bs = [BW(chunk * num_ranks + rank, mb) for chunk, mb in backwards]
        order = fs[:warm_up]
        for f, b in zip(fs[warm_up:], bs):
            order += [f, b]
        orders.append(order + bs[steady:])
    return make_schedule("interleaved", Placement.loop(num_ranks, chunks), num_microbatches, orders)


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Consecutive microbatches in groups of nearly equal size, none smaller than p (one group if m < p)."""
    count = max(1, num_microbatches // num_ranks)
    size, rest = divmod(num_microbatches, count)
    ends = [size * (i + 1) + min(i + 1, rest) for i in range(count)]
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _in_groups(groups: Sequence[range], chunks: Sequence[int]) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the order of a rank: group by group, each through all `chunks`."""
    return [(chunk, mb) for group in groups for chunk in chunks for mb in group]
