"""V-Min: a third of 1F1B's activation memory, the least that a V placement reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobubble.generators.building_block import repeat_block
from zerobubble.generators.common import check_sizes

if TYPE_CHECKING:
    from zerobubble.schedule import Schedule


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min (Qi et al. 2024): V placement, about p/3 of M_B per rank, about two thirds of 1F1B's bubble.

    With 4 ranks, 8 microbatches and T_F = T_B = T_W:

        rank 0 | 0F0 0F1 .   .   .   .   .   7F0 7B0 7W0 0F2 .   .   7F1 7B1 0B0 7W1 0W0 0F3 7F2 7B2 0B1 7W2 0W1 ...
        rank 1 | .   1F0 .   .   .   .   6F0 1F1 .   6B0 6W0 .   6F1 1F2 1B0 6B1 6W1 1W0 6F2 1F3 1B1 6B2 6W2 1W1 ...
        rank 2 | .   .   2F0 .   .   5F0 .   .   2F1 .   5B0 5F1 5W0 2B0 2F2 2W0 5B1 5F2 5W1 2B1 2F3 2W1 5B2 5F3 ...
        rank 3 | .   .   .   3F0 4F0 .   .   .   .   3F1 4F1 4B0 3B0 4W0 3W0 3F2 4F2 4B1 3B1 4W1 3W1 3F3 4F3 4B2 ...

    A microbatch advances one slot per rank on every pass. The bubble grows when T_F, T_B and T_W differ.

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return repeat_block("v_min", num_ranks, num_microbatches, pace=(1, 1, 1, 1))
