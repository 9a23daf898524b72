"""Three small models and a training step for each: used by the demo, the tests and the benchmarks.

They are written as a user would write them, with what makes memory planning hard left in: loops over a ModuleList,
skips across levels, a shared in-place ReLU, buffers that change.

Shapes: b batch, t time, d width, h heads, c channels, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[nn.Module], Tensor]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_btd: Tensor) -> Tensor:
        x_btd = x_btd + self.attend(self.norm1(x_btd))
        hidden = self.down(F.gelu(self.up(self.norm2(x_btd))))
        return x_btd + F.dropout(hidden, self.dropout, self.training)

    def attend(self, x_btd: Tensor) -> Tensor:
        b, t, d = x_btd.shape
        qkv_3bhtd = self.qkv(x_btd).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv_3bhtd.unbind(0)
        p = self.dropout if self.training else 0.0
        mixed_bhtd = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return F.dropout(self.out(mixed_bhtd.transpose(1, 2).reshape(b, t, d)), self.dropout, self.training)


class GPT(nn.Module):
    """A causal language model; over bytes unless `vocabulary` says otherwise."""

    def __init__(
        self,
        *,
        blocks: int = 8,
        width: int = 256,
        heads: int = 4,
        context: int = 256,
        dropout: float = 0.0,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        places = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        x_btd = self.embed(tokens_bt) + self.position(places)
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.head(self.norm(x_btd))


def gpt_step(*, batch: int = 4, context: int = 256, seed: int = 0, **sizes: float) -> tuple[GPT, Step]:
    """A GPT with random weights, and the loss of predicting random bytes."""
    torch.manual_seed(seed)
    model = GPT(context=context, **sizes)
    vocabulary = model.embed.num_embeddings
    tokens_bt = torch.randint(vocabulary, (batch, context + 1))

    def step(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(tokens_bt[:, :-1]).flatten(0, 1), tokens_bt[:, 1:].flatten())

    return model, step


class ResidualBlock(nn.Module):
    """GroupNorm, SiLU and a convolution, twice, beside a shortcut."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.shortcut = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return self.shortcut(x) + hidden


class UNet(nn.Module):
    """Three levels, ten residual blocks, and two skips that jump over the levels below."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = nn.ModuleList([ResidualBlock(width, width), ResidualBlock(width, width)])
        self.shrink1 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.down2 = nn.ModuleList([ResidualBlock(2 * width, 2 * width), ResidualBlock(2 * width, 2 * width)])
        self.shrink2 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.middle = nn.ModuleList([ResidualBlock(4 * width, 4 * width), ResidualBlock(4 * width, 4 * width)])
        self.grow2 = nn.Conv2d(4 * width, 2 * width, 3, padding=1)
        self.up2 = nn.ModuleList([ResidualBlock(4 * width, 2 * width), ResidualBlock(2 * width, 2 * width)])
        self.grow1 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up1 = nn.ModuleList([ResidualBlock(2 * width, width), ResidualBlock(width, width)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h1 = self.first(x)
        for block in self.down1:
            h1 = block(h1)
        h2 = self.shrink1(h1)
        for block in self.down2:
            h2 = block(h2)
        m = self.shrink2(h2)
        for block in self.middle:
            m = block(m)
        m = torch.cat([self.grow2(F.interpolate(m, scale_factor=2.0)), h2], dim=1)
        for block in self.up2:
            m = block(m)
        m = torch.cat([self.grow1(F.interpolate(m, scale_factor=2.0)), h1], dim=1)
        for block in self.up1:
            m = block(m)
        return self.last(m)


def unet_step(*, batch: int = 8, size: int = 64, width: int = 16, seed: int = 0) -> tuple[UNet, Step]:
    """A U-Net with random weights, and the loss of removing noise from random images."""
    torch.manual_seed(seed)
    model = UNet(width)
    clean = torch.randn(batch, 3, size, size)
    noise = torch.randn_like(clean)

    def step(model: nn.Module) -> Tensor:
        return F.mse_loss(model(clean + noise), noise)

    return model, step


class BasicBlock(nn.Module):
    """Convolution, BatchNorm and one in-place ReLU that is called twice."""

    def __init__(self, c_in: int, c_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        same = c_in == c_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(c_in, c_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.norm1(self.conv1(x)))
        hidden = self.norm2(self.conv2(hidden))
        return self.relu(hidden + self.shortcut(x))


class ResNet(nn.Module):
    """Nine basic blocks in three stages, for images of 32 x 32."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        widths = 4 * [width] + 3 * [2 * width] + 3 * [4 * width]
        self.blocks = nn.Sequential(*(BasicBlock(a, b, stride=1 if a == b else 2) for a, b in pairwise(widths)))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.norm(self.first(x))))
        return self.head(x.mean(dim=(2, 3)))


def resnet_step(*, batch: int = 32, size: int = 32, width: int = 16, seed: int = 0) -> tuple[ResNet, Step]:
    """A ResNet with random weights, and the loss of classifying random images."""
    torch.manual_seed(seed)
    model = ResNet(width)
    images = torch.randn(batch, 3, size, size)
    classes = torch.randint(model.head.out_features, (batch,))

    def step(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), classes)

    return model, step
