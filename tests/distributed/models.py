"""Models of the distributed tests. Small, of one dtype, and with what data parallelism trips over."""

import torch
from torch import nn

from logs import Count

WIDTH = 8


class Block(nn.Module):
    """A residual block that saves several tensors, draws random numbers and counts its calls."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self._ran = Count()

    @property
    def calls(self):
        return self._ran.value

    def forward(self, x):
        self._ran.up()
        # No view: FSDP warns of outputs that are views.
        return x + self.drop(self.down(self.up(x).tanh().exp()))


class Net(nn.Module):
    """Blocks between two linear layers, each block called by `call`."""

    def __init__(self, blocks=3):
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.call = plainly
        self.used = blocks

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers[: self.used]:
            h = self.call(layer, h)
        return self.head(h)


def plainly(layer, h):
    return layer(h)


def net():
    torch.manual_seed(0)
    return Net()


def tied():
    """Parameters shared between blocks, and between the two ends."""
    model = net()
    model.layers[2].up.weight = model.layers[0].up.weight
    model.head.weight = model.inp.weight
    return model


def tied_inside():
    """A parameter shared within each block, as FSDP can shard it."""
    model = net()
    for layer in model.layers:
        layer.drop = nn.Linear(WIDTH, WIDTH)
        layer.again = nn.Linear(WIDTH, WIDTH)
        layer.again.weight = layer.drop.weight
        layer.drop.register_forward_hook(lambda module, args, output, layer=layer: layer.again(output.tanh()))
    return model


def looped():
    """One block called three times."""
    model = net()
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    return model


def some():
    """A model that calls two of its three blocks."""
    model = net()
    model.used = 2
    return model


def partly_frozen():
    model = net()
    for layer in model.layers:
        layer.up.requires_grad_(False)
    return model


def siamese():
    """A model that calls each block twice on different tensors."""
    model = net()
    model.call = twice(plainly)
    return model


def twice(call):
    return lambda layer, h: call(layer, h) + call(layer, h.sin())


def batch(rank, number):
    """The batch of a process in its `number`-th backward."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
