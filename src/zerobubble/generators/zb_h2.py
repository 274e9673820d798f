"""ZB-H2: a deeper warm-up closes the bubble before the first B, so that nothing is left of it."""

from __future__ import annotations

from zerobubble.generators.common import check_sizes
from zerobubble.generators.zb_h1 import one_f_one_b_split
from zerobubble.schedule import Placement, Schedule, make_schedule


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2 (paper, section 2.3.2): 2(p-i)-1 warm-up forwards on rank i, and W lags B by 2i: a parallelogram.

        rank 0 | 0F0 0F1 0F2 .   0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
        rank 1 | .   1F0 1B0 1F1 1B1 1F2 1B2 1W0 1F3 1B3 1W1 1W2 1W3

    Bubble (p-1)*(T_F+T_B-2*T_W), none for equal times; peak memory (2p-1)*M_B on rank 0, and
    (2p-2i-1)*M_B + 2i*M_W on rank i.

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    orders = [one_f_one_b_split(rank, 2 * (num_ranks - rank - 1), 2 * rank, num_microbatches) for rank in range(num_ranks)]
    return make_schedule("zb_h2", Placement.linear(num_ranks), num_microbatches, orders)
