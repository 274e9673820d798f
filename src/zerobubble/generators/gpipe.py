"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from zerobubble.generators.common import check_sizes
from zerobubble.op import BW, F
from zerobubble.schedule import Placement, Schedule, make_schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, in microbatch order (Huang et al. 2019). Holds m*M_B on every rank.

        rank 0 | 0F0 0F1 0F2 .    .    .    .    .    .    0BW0 0BW1 0BW2
        rank 1 | .   1F0 1F1 1F2  .    .    .    1BW0 1BW1 1BW2 ...

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    orders = [
        [F(rank, mb) for mb in microbatches] + [BW(rank, mb) for mb in microbatches] for rank in range(num_ranks)
    ]
    return make_schedule("gpipe", Placement.linear(num_ranks), num_microbatches, orders)
