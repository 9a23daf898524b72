"""Train through all steps of a sampler.

To tune a diffusion model by what it makes, the gradient has to go through every step of its sampler.
Each step is a call of a whole network, and autograd keeps all of them.
A budget below what two calls save is enough: the loop keeps images, which are small, and calls the network again.
"""

import torch
from torch import nn

import torchremat

STEPS = 50

torch.manual_seed(0)


class Net(nn.Module):
    """A U-Net with one level below."""

    def __init__(self, width=8):
        super().__init__()
        self.enter, self.down = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.up, self.leave = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, image, time):
        skip = torch.relu(self.enter(torch.cat([image, time.expand(len(image), 1, *image.shape[2:])], 1)))
        deep = torch.relu(self.down(skip))
        return self.leave(torch.cat([skip, torch.relu(self.up(deep))], 1))


net = Net()
noise, times = torch.randn(2, 3, 32, 32), torch.linspace(1, 0, STEPS)


def denoise(image, time):
    return image - net(image, time) / STEPS + 0.01 * torch.randn_like(image), None


def plain(_):
    image = noise
    for time in times:
        image, _ = denoise(image, time)
    return image.square().mean()


def within(budget):
    image, _ = torchremat.loop(denoise, noise, times, budget=budget, on_schedule=print)
    return image.square().mean()


def gradients(loss):
    torch.manual_seed(1)
    net.zero_grad()
    loss().backward()
    return [parameter.grad for parameter in net.parameters()]


saved = torchremat.saved(net, plain).saved_bytes
print(f"plain: autograd saves {saved:,} bytes")
expected = gradients(lambda: plain(net))
found = gradients(lambda: within(saved // 20))
print("gradients equal, bit for bit:", all(map(torch.equal, expected, found)))
