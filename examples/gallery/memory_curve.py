"""The memory curve of a ResNet.

What does a step hold, and when?
`measure` follows the allocator through a step: here a plain one, one with each block as a region, and one with a plan.
The plan peaks lower than the regions and recomputes less: it knows where the peak is, and takes blocks apart.
All three go into one picture, and `html` writes a page with the operator and the line behind each point.
"""

import torch
from torch import nn
from torch.nn import functional as F

import torchremat
from torchremat.reports.plots import plot_measurements


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        h = F.relu(self.norms[0](self.convolutions[0](x)))
        return F.relu(x + self.norms[1](self.convolutions[1](h)))


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual(16) for _ in range(8)))
model.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)))
images, labels = torch.randn(8, 3, 40, 40), torch.randint(10, (8,))


def step(model):
    return F.cross_entropy(model(images), labels)


measured = {"plain": torchremat.measure(model, step)}
torchremat.wrap(model, Residual)
measured["regions"] = torchremat.measure(model, step)
torchremat.unwrap(model)
plan = torchremat.plan(model, step, budget="40%", cost="flops")
plan.apply(model)
measured["40%"] = torchremat.measure(model, step)

for name, found in measured.items():
    print(f"{name:8} peak {found.peak_bytes / 2**20:5.2f} MiB, {found.recomputed_flops / 1e6:5.1f} MFLOP recomputed")
plot_measurements(measured, "memory_curve.png", budgets={"40%": plan.budget_bytes})
measured["40%"].html("memory_curve.html")
