"""Which budget?

How much time does each byte cost?
`frontier` plans for all budgets at once, after one profile: here for a small U-Net, whose skips cross levels.
At the knee the time begins to rise faster than the memory falls, and the last bytes are the dearest.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

import torchremat


def block(channels_in, channels):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.SiLU(),
        nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, widths=(8, 16)):
        super().__init__()
        self.down = nn.ModuleList(block(a, b) for a, b in pairwise((3, *widths)))
        self.up = nn.ModuleList(block(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x):
        skips = []
        for level, down in enumerate(self.down):
            x = down(x if level == 0 else F.avg_pool2d(x, 2))
            skips.append(x)
        for up, skip in zip(reversed(self.up), reversed(skips[:-1]), strict=True):
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.head(x)


torch.manual_seed(0)
model = UNet()
noisy, clean = torch.randn(2, 4, 3, 48, 48)


def step(model):
    return F.mse_loss(model(noisy), clean)


frontier = torchremat.frontier(model, step, cost="flops", points=8)
for point in frontier.points:
    share = point.peak_bytes / frontier.points[0].peak_bytes
    again = point.recomputed_flops / 1e6
    print(f"budget {point.budget_bytes / 2**20:.2f} MiB, {share:4.0%} of plain: {again:4.1f} MFLOP recomputed")

plan = frontier.plan("70%")
plan.apply(model)
report = torchremat.verify(model, step)
print(f"70%: a peak of {plan.peak_bytes:,} bytes predicted, {report.peak_bytes:,} measured, exact: {report.is_exact}")
frontier.plot("choose_a_budget.png")
