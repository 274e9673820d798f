"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from zerobubble.generators.common import check_sizes
from zerobubble.op import BW, F
from zerobubble.schedule import Placement, Schedule, make_schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, in microbatch order (Huang et al. 2019). Holds m*M_B on every rank.

    With 4 ranks, 4 microbatches and T_F = T_B = T_W, `-` for the second half of a BW:

        rank 0 | 0F0  0F1  0F2  0F3  .    .    .    .    .    .    .    .    .    0BW0 -    0BW1 -    0BW2 -    0BW3 -
        rank 1 | .    1F0  1F1  1F2  1F3  .    .    .    .    .    .    1BW0 -    1BW1 -    1BW2 -    1BW3 -
        rank 2 | .    .    2F0  2F1  2F2  2F3  .    .    .    2BW0 -    2BW1 -    2BW2 -    2BW3 -
        rank 3 | .    .    .    3F0  3F1  3F2  3F3  3BW0 -    3BW1 -    3BW2 -    3BW3 -

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    orders = [[F(rank, mb) for mb in microbatches] + [BW(rank, mb) for mb in microbatches] for rank in range(num_ranks)]
    return make_schedule("gpipe", Placement.linear(num_ranks), num_microbatches, orders)
