"""V-Half: half of 1F1B's activation memory."""

from __future__ import annotations

from zerobubble.generators.building_block import repeat_block
from zerobubble.generators.common import check_sizes
from zerobubble.schedule import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half (Qi et al. 2024): V placement, about p/2 of M_B per rank, about half of 1F1B's bubble.

        rank 0 | 0F0 .   .   .   3F0 .   3B0 3W0 0F1 ...
        rank 1 | .   .   1F0 2F0 .   2B0 ...

    A microbatch advances two slots per rank on its first and third pass, one on the others.

    Raises:
        OptionError: a size is below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return repeat_block("v_half", num_ranks, num_microbatches, pace=(2, 1, 2, 1))
