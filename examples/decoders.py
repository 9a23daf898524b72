"""A decoder as Llama's: RMSNorm, SwiGLU, rotary positions, and fewer heads for keys and values than for queries.

Shapes: b batch, t time, d width, h heads, k heads of keys and values, e width of a head, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[nn.Module], Tensor]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a decoder; the defaults are those of a model of 7B with a quarter of the heads for keys and values."""

    blocks: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 32000


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_btd: Tensor) -> Tensor:
        wide = x_btd.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x_btd.dtype) * self.weight


def rotate(x_bhte: Tensor) -> Tensor:
    """Turn pairs of channels by an angle that grows with the position."""
    t, e = x_bhte.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, e, 2, device=x_bhte.device) / e)
    angles_te = (torch.arange(t, device=x_bhte.device)[:, None] * rates).repeat(1, 2)
    first, second = x_bhte.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_bhte * angles_te.cos().to(x_bhte.dtype) + turned * angles_te.sin().to(x_bhte.dtype)


class Attention(nn.Module):
    """Causal attention in which several heads of queries share one of keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.key_heads * self.width, bias=False)
        self.value = nn.Linear(config.width, config.key_heads * self.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        q, k, v = (one(x_btd).unflatten(-1, (-1, self.width)).transpose(1, 2) for one in self.inputs())
        y_bhte = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.out(y_bhte.transpose(1, 2).flatten(2))

    def inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value


class SwiGLU(nn.Module):
    """A linear layer gated by the SiLU of another."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_btd)) * self.up(x_btd))


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and beside a shortcut."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(config.width), Attention(config)
        self.norm2, self.mlp = Norm(config.width), SwiGLU(config)

    def forward(self, x_btd: Tensor) -> Tensor:
        x_btd = x_btd + self.attention(self.norm1(x_btd))
        return x_btd + self.mlp(self.norm2(x_btd))


class Decoder(nn.Module):
    """A causal language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd = self.embed(tokens_bt)
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.head(self.norm(x_btd))


def decoder_step(
    config: Config | None = None, *, batch: int = 1, context: int = 2048, dtype: torch.dtype = torch.bfloat16
) -> tuple[Decoder, Step]:
    """A decoder, and the loss of predicting random tokens; on the meta device under `torch.device("meta")`."""
    config = config or Config()
    model = Decoder(config).to(dtype)
    tokens_bt = torch.randint(config.vocabulary, (batch, context + 1))

    def step(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(tokens_bt[:, :-1]).flatten(0, 1).float(), tokens_bt[:, 1:].flatten())

    return model, step


def tiny_step() -> tuple[Decoder, Step]:
    """A decoder of three blocks that runs anywhere."""
    torch.manual_seed(0)
    config = Config(blocks=3, width=64, hidden=96, heads=4, key_heads=2, vocabulary=128)
    return decoder_step(config, batch=2, context=64, dtype=torch.float32)
