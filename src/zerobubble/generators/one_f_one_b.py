"""1F1B: one forward, one backward, with as few forwards in flight as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobubble.generators.common import check_sizes
from zerobubble.op import BW, F
from zerobubble.schedule import Placement, Schedule, make_schedule

if TYPE_CHECKING:
    from zerobubble.op import Op


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2019; the paper's baseline). Rank i holds (p-i)*M_B.

    With 4 ranks, 4 microbatches and T_F = T_B = T_W, `-` for the second half of a BW:

        rank 0 | 0F0  0F1  0F2  0F3  .    .    .    .    .    .    0BW0 -    .    0BW1 -    .    0BW2 -    .    0BW3 -
        rank 1 | .    1F0  1F1  1F2  .    .    .    .    1BW0 -    1F3  1BW1 -    .    1BW2 -    .    1BW3 -
        rank 2 | .    .    2F0  2F1  .    .    2BW0 -    2F2  2BW1 -    2F3  2BW2 -    .    2BW3 -
        rank 3 | .    .    .    3F0  3BW0 -    3F1  3BW1 -    3F2  3BW2 -    3F3  3BW3 -

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    orders = [_order(rank, num_ranks - rank - 1, num_microbatches) for rank in range(num_ranks)]
    return make_schedule("one_f_one_b", Placement.linear(num_ranks), num_microbatches, orders)


def _order(rank: int, warm_up: int, num_microbatches: int) -> list[Op]:
    warm_up = min(warm_up, num_microbatches)
    steady = num_microbatches - warm_up
    order = [F(rank, mb) for mb in range(warm_up)]
    for mb in range(steady):
        order += [F(rank, warm_up + mb), BW(rank, mb)]
    return order + [BW(rank, mb) for mb in range(steady, num_microbatches)]
