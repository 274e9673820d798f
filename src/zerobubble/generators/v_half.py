"""V-Half: half of 1F1B's activation memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobubble.generators.building_block import repeat_block
from zerobubble.generators.common import check_sizes

if TYPE_CHECKING:
    from zerobubble.schedule import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half (Qi et al. 2024): V placement, about p/2 of M_B per rank, about half of 1F1B's bubble.

    With 4 ranks, 8 microbatches and T_F = T_B = T_W:

        rank 0 | 0F0 0F1 .   .   .   .   .   7F0 7B0 0F2 7W0 .   7F1 7B1 0F3 7W1 .   7F2 7B2 0F4 0B0 7W2 0W0 7F3 ...
        rank 1 | .   1F0 1F1 .   .   .   6F0 .   .   6B0 1F2 6F1 6W0 .   6B1 1F3 6F2 6W1 1B0 6B2 1F4 6F3 6W2 1W0 ...
        rank 2 | .   .   2F0 .   .   5F0 2F1 .   .   5F1 5B0 2F2 5W0 .   5F2 5B1 2F3 2B0 5W1 2W0 5F3 5B2 2F4 2B1 ...
        rank 3 | .   .   .   3F0 4F0 .   .   3F1 4F1 .   .   4B0 3F2 4F2 4W0 3B0 4B1 3F3 4F3 4W1 3W0 3B1 4B2 3F4 ...

    A microbatch advances two slots per rank on its first and third pass, one on the others.

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return repeat_block("v_half", num_ranks, num_microbatches, pace=(2, 1, 2, 1))
