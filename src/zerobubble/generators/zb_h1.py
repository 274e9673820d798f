"""ZB-H1: 1F1B with the weight gradients moved into its bubble, at no more memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobubble.generators.common import check_sizes
from zerobubble.op import B, F, W
from zerobubble.schedule import Placement, Schedule, make_schedule

if TYPE_CHECKING:
    from zerobubble.op import Op


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 (paper, section 2.3.1): 1F1B's warm-up, and rank i keeps i W in hand to fill its cool-down.

    With 4 ranks, 6 microbatches and T_F = T_B = T_W:

        rank 0 | 0F0 0F1 0F2 0F3 .   .   .   0B0 0W0 0F4 0B1 0W1 0F5 0B2 0W2 0B3 0W3 0B4 0W4 0B5 0W5
        rank 1 | .   1F0 1F1 1F2 .   .   1B0 1F3 1B1 1W0 1F4 1B2 1W1 1F5 1B3 1W2 1B4 1W3 1B5 1W4 1W5
        rank 2 | .   .   2F0 2F1 .   2B0 2F2 2B1 2F3 2B2 2W0 2F4 2B3 2W1 2F5 2B4 2W2 2B5 2W3 2W4 2W5
        rank 3 | .   .   .   3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3W0 3F4 3B4 3W1 3F5 3B5 3W2 3W3 3W4 3W5

    Bubble (p-1)*(T_F+T_B-T_W), a third of 1F1B's for equal times; peak memory p*M_B on rank 0, and
    (p-i)*M_B + i*M_W on rank i.

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    orders = [one_f_one_b_split(rank, num_ranks - rank - 1, rank, num_microbatches) for rank in range(num_ranks)]
    return make_schedule("zb_h1", Placement.linear(num_ranks), num_microbatches, orders)


def one_f_one_b_split(rank: int, warm_up: int, held_back: int, num_microbatches: int) -> list[Op]:
    """1F1B on `rank` after `warm_up` forwards, each B followed by the W of the B that lies `held_back` before it."""
    warm_up = min(warm_up, num_microbatches)
    order = [F(rank, mb) for mb in range(warm_up)]
    for mb in range(num_microbatches):
        if warm_up + mb < num_microbatches:
            order.append(F(rank, warm_up + mb))
        order.append(B(rank, mb))
        if mb >= held_back:
            order.append(W(rank, mb - held_back))
    return order + [W(rank, mb) for mb in range(max(num_microbatches - held_back, 0), num_microbatches)]
