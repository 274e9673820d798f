"""ZB-V: two chunks per rank in a V, zero bubble at 1F1B's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobubble.generators.common import check_sizes
from zerobubble.op import B, F, Op, W
from zerobubble.schedule import Placement, Schedule, make_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V (paper, section 6): p*M_B on every rank and no bubble when T_F = T_B = T_W.

    With 4 ranks, 8 microbatches and T_F = T_B = T_W:

        rank 0 | 0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7B0 7W0 7F1 7B1 7W1 7F2 7B2 7W2 7F3 7B3 7W3 0F7 0B0 0W0 7F4 7B4 ...
        rank 1 | .   1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6B0 6W0 6F2 6B1 6W1 6F3 6B2 6W2 1F6 1B0 1W0 6F4 6B3 6W3 1F7 ...
        rank 2 | .   .   2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5B0 5W0 5F3 5B1 5W1 2F5 2B0 2W0 5F4 5B2 5W2 2F6 2B1 2W1 ...
        rank 3 | .   .   .   3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4B0 4W0 3F4 3B0 3W0 4F4 4B1 4W1 3F5 3B1 3W1 4F5 4B2 ...

    First and last stage share rank 0, so the last stage's forward is followed by its backward at once.

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    planned = max(num_microbatches, 2 * num_ranks - 1)  # fewer microbatches: the same order without the others
    orders = [_order(num_ranks, rank, planned) for rank in range(num_ranks)]
    return make_schedule("zb_v", Placement.v(num_ranks), planned, orders).first_microbatches(num_microbatches)


def _order(num_ranks: int, rank: int, num_microbatches: int) -> Iterator[Op]:
    down, up = rank, 2 * num_ranks - 1 - rank
    # counters of what has run: forwards and backwards of the chunk on the way down, and of the one on the way up
    f_down = f_up = b_down = b_up = w_down = w_up = 0

    # warm-up: 2p-1 forwards
    for f_down in range(2 * (num_ranks - rank) - 1):
        yield F(down, f_down)
    f_down = 2 * (num_ranks - rank) - 1
    for _ in range(rank):
        yield F(up, f_up)
        yield F(down, f_down)
        f_up, f_down = f_up + 1, f_down + 1
    # then the way up catches up
    for _ in range(num_ranks - rank):
        yield F(up, f_up)
        yield B(up, b_up)
        yield W(up, w_up)
        f_up, b_up, w_up = f_up + 1, b_up + 1, w_up + 1

    # steady: a group of each chunk in turn
    while f_up < num_microbatches:
        if f_down < num_microbatches:
            yield F(down, f_down)
            f_down += 1
        yield B(down, b_down)
        yield W(down, w_down)
        b_down, w_down = b_down + 1, w_down + 1
        yield F(up, f_up)
        yield B(up, b_up)
        yield W(up, w_up)
        f_up, b_up, w_up = f_up + 1, b_up + 1, w_up + 1

    # cool-down: B first, W into the gaps
    for _ in range(rank):
        yield B(down, b_down)
        yield B(up, b_up)
        b_down, b_up = b_down + 1, b_up + 1
    for _ in range(num_ranks - rank):
        yield B(down, b_down)
        yield W(down, w_down)
        b_down, w_down = b_down + 1, w_down + 1
    yield from (W(up, mb) for mb in range(w_up, num_microbatches))
    yield from (W(down, mb) for mb in range(w_down, num_microbatches))
