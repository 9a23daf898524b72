"""A block whose activations are larger than its input, and that counts its calls; a long one; two with a skip."""

from torch import nn
from torch.nn import functional

from logs import Count
from torchremat.pipeline.skip import pop, skippable, stash


class Block(nn.Module):
    """Counts its calls."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.ran = Count()

    @property
    def calls(self):
        return self.ran.value

    def forward(self, x):
        self.ran.up()
        return x + self.down(functional.gelu(self.up(x)))


class Long(Block):
    """Saves one tensor after the other, so that a recompute in parts has fewer of them in memory."""

    def forward(self, x):
        self.ran.up()
        x = self.up(x)
        for _ in range(8):
            x = x.tanh()
        return self.down(x)


@skippable(stash=["skip"])
class Stash(Block):
    """Stashes a tensor of its own."""

    def forward(self, x):
        yield stash("skip", x * 2)
        return Block.forward(self, x)


@skippable(pop=["skip"])
class Pop(Block):
    """Adds what `Stash` has stashed."""

    def forward(self, x):
        skip = yield pop("skip")
        return Block.forward(self, x) + skip
