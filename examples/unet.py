"""The U-Net of the torchgpipe paper, twice: as a module, and as one flat list of layers that a pipeline can cut.

Its skips are what a pipeline has trouble with: the first level's is used by the last layers alone, so it has to get
from the first stage to the last past all that lie between.

    level 0   convs ── skip 0 ─────────────────────────── cat, convs, head
    level 1     └─ pool, convs ── skip 1 ───── cat, convs ─┘ grow
    below               └─ pool, middle ────────┘ grow

Source: C. Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", arXiv:2004.09910, 2020,
section 4.1; sizes are its (depth, convolutions per level, channels of the first level).
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import pairwise

import torch
from torch import Tensor, nn

from torchremat.pipeline.skip import Namespace, pop, skippable, stash


class UNet(nn.Module):
    """Levels of convolutions down, as many up, and a skip from each to its other side."""

    def __init__(
        self,
        depth: int = 5,
        num_convs: int = 5,
        base_channels: int = 64,
        *,
        input_channels: int = 3,
        output_channels: int = 1,
    ) -> None:
        super().__init__()
        widths = [base_channels << level for level in range(depth + 1)]
        self.down = nn.ModuleList(convs(a, b, num_convs) for a, b in pairwise([input_channels, *widths[:-1]]))
        self.pools = nn.ModuleList(nn.MaxPool2d(2) for _ in range(depth))
        self.middle = convs(*widths[-2:], num_convs)
        self.grow = nn.ModuleList(nn.Upsample(scale_factor=2) for _ in range(depth))
        self.up = nn.ModuleList(convs(a + b, b, num_convs) for a, b in pairwise(reversed(widths)))
        self.head = nn.Conv2d(base_channels, output_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, pool in zip(self.down, self.pools, strict=True):
            x = level(x)
            skips.append(x)
            x = pool(x)
        x = self.middle(x)
        for grow, level in zip(self.grow, self.up, strict=True):
            x = level(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)

    def layers(self) -> nn.Sequential:
        """The same modules in one flat list, their skips stashed and popped."""
        flat: list[nn.Module] = []
        namespaces = [Namespace() for _ in self.down]
        for level, pool, namespace in zip(self.down, self.pools, namespaces, strict=True):
            flat += [*level, StashSkip().isolate(namespace), pool]
        flat += self.middle
        for grow, level, namespace in zip(self.grow, self.up, reversed(namespaces), strict=True):
            flat += [grow, PopSkip().isolate(namespace), *level]
        return nn.Sequential(*flat, self.head)


@skippable(stash=["skip"])
class StashSkip(nn.Module):
    """Puts its input away and passes it on."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class PopSkip(nn.Module):
    """Takes the skip and puts its channels before those of the input."""

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return torch.cat([skip, x], dim=1)


def convs(c_in: int, c_out: int, count: int) -> nn.Sequential:
    """A level: `count` convolutions, each with its norm and its activation."""
    return nn.Sequential(*(conv(a, b) for a, b in pairwise([c_in, *count * [c_out]])))


def conv(c_in: int, c_out: int) -> nn.Sequential:
    """Norms of single images, so that it does not matter how a batch is cut."""
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1), nn.InstanceNorm2d(c_out), nn.LeakyReLU())
