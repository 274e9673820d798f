"""ZB-H2: a deeper warm-up closes the bubble before the first B, so that nothing is left of it."""

from __future__ import annotations

from zerobubble.generators.common import check_sizes
from zerobubble.generators.zb_h1 import one_f_one_b_split
from zerobubble.schedule import Placement, Schedule, make_schedule


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2 (paper, section 2.3.2): 2(p-i)-1 warm-up forwards on rank i, and W lags B by 2i: a parallelogram.

    With 4 ranks, 7 microbatches and T_F = T_B = T_W:

        rank 0 | 0F0 0F1 0F2 0F3 0F4 0F5 0F6 0B0 0W0 0B1 0W1 0B2 0W2 0B3 0W3 0B4 0W4 0B5 0W5 0B6 0W6
        rank 1 | .   1F0 1F1 1F2 1F3 1F4 1B0 1F5 1B1 1F6 1B2 1W0 1B3 1W1 1B4 1W2 1B5 1W3 1B6 1W4 1W5 1W6
        rank 2 | .   .   2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2F6 2B4 2W0 2B5 2W1 2B6 2W2 2W3 2W4 2W5 2W6
        rank 3 | .   .   .   3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3W0 3W1 3W2 3W3 3W4 3W5 3W6

    Bubble (p-1)*(T_F+T_B-2*T_W), none for equal times; peak memory (2p-1)*M_B on rank 0, and
    (2p-2i-1)*M_B + 2i*M_W on rank i.

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    orders = [
        one_f_one_b_split(rank, 2 * (num_ranks - rank - 1), 2 * rank, num_microbatches) for rank in range(num_ranks)
    ]
    return make_schedule("zb_h2", Placement.linear(num_ranks), num_microbatches, orders)
