"""A U-Net over two devices.

`Pipe` cuts an `nn.Sequential` into stages, and each batch into microbatches that the stages work on at the same time.
Skips go straight from the stage that stashes them to the one that pops them.
`plan_stages` gives each device a budget. Here both devices are the CPU; with GPUs, leave `devices` away.
"""

import torch
from torch import nn

from torchremat import Pipe
from torchremat.pipeline import plan_stages
from torchremat.pipeline.balance import balance_by_size
from torchremat.pipeline.skip import Namespace, pop, skippable, stash


def convolution(channels_in, channels):
    return nn.Sequential(nn.Conv2d(channels_in, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.SiLU())


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = nn.Sequential(convolution(width, width), convolution(width, width))
        self.shrink = nn.Conv2d(width, 2 * width, 2, stride=2)

    def forward(self, x):
        x = self.block(x)
        yield stash("skip", x)
        return self.shrink(x)


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.block = nn.Sequential(convolution(2 * width, width), convolution(width, width))

    def forward(self, x):
        skip = yield pop("skip")
        return self.block(torch.cat([self.grow(x), skip], 1))


torch.manual_seed(0)
outer, inner = Namespace(), Namespace()
model = nn.Sequential(
    convolution(3, 8),
    Down(8).isolate(outer), Down(16).isolate(inner),
    convolution(32, 32),
    Up(16).isolate(inner), Up(8).isolate(outer),
    nn.Conv2d(8, 3, 1),
)  # fmt: skip
noisy, clean = torch.randn(2, 8, 3, 32, 32)


def step(pipe):
    return nn.functional.mse_loss(pipe(noisy), clean)


def gradients(model):
    model.zero_grad()
    step(model).backward()
    return [parameter.grad for parameter in model.parameters()]


counts = balance_by_size(2, model, noisy, chunks=4, device="cpu")
print("layers of each stage:", list(counts))
devices = ["cpu", "cpu"]
pipe = Pipe(model, counts, devices=devices, chunks=4, checkpoint="never")
kept = gradients(pipe)
plans = plan_stages(pipe, step, budget="60%", cost="flops")
plans.apply(pipe)
print(plans)
print("gradients equal bit for bit:", all(map(torch.equal, kept, gradients(pipe))))
