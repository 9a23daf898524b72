"""A block whose activations are larger than its input, and that counts its calls."""

from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Counts its calls."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(functional.gelu(self.up(x)))
