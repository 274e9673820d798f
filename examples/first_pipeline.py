"""A first pipeline: a tiny model on two ranks, all in this process.

python examples/first_pipeline.py
"""

import torch
from torch import nn

import zerobubble as zb


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)]


def train(schedule: zb.Schedule, steps: int = 100) -> list[float]:
    """The loss of every step."""
    pipeline = zb.Pipeline(layers(), nn.functional.mse_loss, schedule)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        losses.append(pipeline.step(points, products))
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


# to learn: x, y -> x * y
points = torch.cartesian_prod(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8))
products = points.prod(dim=1, keepdim=True)

zero_bubble = train(zb.zb_h1(num_ranks=2, num_microbatches=4))
for step in (0, 9, 99):
    print(f"step {step:2}: loss {zero_bubble[step]:.3f}")

same = zero_bubble == train(zb.one_f_one_b(num_ranks=2, num_microbatches=4))
print(f"1F1B gives the same losses, to the last bit: {same}")
