"""Draws the pictures of the README and of docs/schedules.md: 4 ranks, 8 microbatches, T_F = T_B = T_W.

python docs/images/make.py
"""

from __future__ import annotations

from pathlib import Path

import zerobubble as zb
from zerobubble.plot import save

RANKS, MICROBATCHES = 4, 8
COMPARED = ("one_f_one_b", "zb_h1", "zb_h2", "zb_v")
FOLDER = Path(__file__).parent


def titled_timeline(name: str) -> tuple[str, zb.Timeline]:
    """Title and timeline of a schedule whose ranks all have the same work, in however many chunks."""
    schedule = zb.generate(name, RANKS, MICROBATCHES)
    costs = zb.Costs().split(schedule.num_stages // RANKS)
    return zb.GENERATORS[name].title, zb.simulate(schedule, costs)


def main() -> None:
    """Draw one picture per schedule, and one of four schedules over the same time axis."""
    for name in zb.GENERATORS:
        save([titled_timeline(name)], FOLDER / f"{name}.svg")
    save([titled_timeline(name) for name in COMPARED], FOLDER / "schedules.svg")


if __name__ == "__main__":
    main()
