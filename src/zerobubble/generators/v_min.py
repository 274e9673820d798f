"""V-Min: a third of 1F1B's activation memory, the least that a V placement reaches."""

from __future__ import annotations

from zerobubble.generators.building_block import repeat_block
from zerobubble.generators.common import check_sizes
from zerobubble.schedule import Schedule


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min (Qi et al. 2024): V placement, about p/3 of M_B per rank, about two thirds of 1F1B's bubble.

        rank 0 | 0F0 .   .   3F0 ...
        rank 1 | .   1F0 2F0 ...

    A microbatch advances one slot per rank on every pass. The bubble grows when T_F, T_B and T_W differ.

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return repeat_block("v_min", num_ranks, num_microbatches, pace=(1, 1, 1, 1))
