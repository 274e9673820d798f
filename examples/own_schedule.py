"""A schedule of your own: written by hand, checked, simulated, drawn and run.

python examples/own_schedule.py
"""

import torch
from torch import nn

import zerobubble as zb
from zerobubble import notation, plot

# one line per rank; an op is <stage><kind><microbatch>
schedule = notation.from_grid(
    """
    rank 0 | 0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2
    rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2
    """,
    name="by hand",
)
zb.validate(schedule)

timeline = zb.simulate(schedule)
print(f"cost {timeline.cost:g}, bubble rate {timeline.bubble_rate:.3f}, peak memory {timeline.peak_memory}")
print(plot.text([("by hand", timeline)], width=70).plain)

# what a mistake looks like: rank 0 waits for a B of rank 1 that waits for a later F of rank 0
try:
    zb.validate(notation.from_grid("0F0 0B0 0F1 0B1 0W0 0W1\n1F0 1F1 1B0 1B1 1W0 1W1"))
except zb.ZeroBubbleError as error:
    print(error)

torch.manual_seed(0)
pipeline = zb.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss, schedule)
pipeline.step(torch.ones(6, 4), torch.zeros(6, 4))
gradient = pipeline.module["0"].weight.grad

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
nn.functional.mse_loss(model(torch.ones(6, 4)), torch.zeros(6, 4)).backward()
print(f"gradients are those of the whole model: {torch.allclose(gradient, model[0].weight.grad)}")
