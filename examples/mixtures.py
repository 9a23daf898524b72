"""A decoder with experts, as Mixtral's: a router sends each token through two of eight SwiGLU layers.

How many tokens an expert gets depends on what the tokens are, so what its call takes in memory is known only once it
has run.

    odds      over the experts, for each token
    picks     the experts with the best odds; their weights add up to one
    expert    takes the rows that picked it, however many, none too; what it makes of them is added to where they were

The losses of balance travel beside the activations, from block to block: a router that prefers a few experts would
leave the others untrained.

Shapes: b batch, t time, n tokens of a batch, d width, e experts, k picks, m tokens of one expert, v vocabulary.

Source: A. Q. Jiang, A. Sablayrolles, A. Roux et al., "Mixtral of Experts", arXiv 2401.04088, section 2; the balance is
that of W. Fedus, B. Zoph, N. Shazeer, "Switch Transformers", JMLR 23, 2022, equation 4, for k picks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decoders import Attention, Config, Norm, Step, SwiGLU


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(Config):
    """Sizes of a decoder with experts, `hidden` being that of one expert; the defaults are those of Mixtral 8x7B."""

    experts: int = 8
    picks: int = 2


class Experts(nn.Module):
    """SwiGLU layers, of which each token goes through those that a router picks for it."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.picks = config.picks
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(config.experts))

    def forward(self, x_btd: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the experts make of the tokens, and how unequally they were picked: 1 if all are alike."""
        x_nd = x_btd.flatten(0, 1)
        odds_ne = self.router(x_nd).softmax(-1)
        best_nk, picks_nk = odds_ne.topk(self.picks)
        weights_nk = best_nk / best_nk.sum(-1, keepdim=True)
        y_nd = torch.zeros_like(x_nd)
        for number, expert in enumerate(self.experts):
            rows_m, places_m = torch.where(picks_nk == number)
            y_nd.index_add_(0, rows_m, expert(x_nd[rows_m]) * weights_nk[rows_m, places_m, None])
        picked_nke = picks_nk[:, :, None] == torch.arange(len(self.experts), device=x_btd.device)
        shares_e = picked_nke.to(odds_ne.dtype).mean((0, 1))
        balance = len(self.experts) * (shares_e * odds_ne.mean(0)).sum()
        return y_nd.view_as(x_btd), balance


class MixtureBlock(nn.Module):
    """Attention and experts, each after a norm and beside a shortcut."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(config.width), Attention(config)
        self.norm2, self.mlp = Norm(config.width), Experts(config)

    def forward(self, x_btd: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        x_btd = x_btd + self.attention(self.norm1(x_btd))
        y_btd, own = self.mlp(self.norm2(x_btd))
        return x_btd + y_btd, balance + own


class Mixture(nn.Module):
    """A causal language model; returns logits, and the balance of all blocks."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(MixtureBlock(config) for _ in range(config.blocks))
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_bt: Tensor) -> tuple[Tensor, Tensor]:
        x_btd = self.embed(tokens_bt)
        balance = x_btd.new_zeros(())
        for block in self.blocks:
            x_btd, balance = block(x_btd, balance)
        return self.head(self.norm(x_btd)), balance


BALANCE = 0.01  # what the balance counts beside the loss of a token


def mixture_loss(model: nn.Module, tokens_bt: Tensor) -> Tensor:
    """The loss of predicting each token from those before it."""
    logits_btv, balance = model(tokens_bt[:, :-1])
    return F.cross_entropy(logits_btv.flatten(0, 1).float(), tokens_bt[:, 1:].flatten()) + BALANCE * balance


def mixture_step(
    config: MixtureConfig | None = None, *, batch: int = 1, context: int = 2048, dtype: torch.dtype = torch.bfloat16
) -> tuple[Mixture, Step]:
    """A decoder with experts, and the loss of predicting random tokens."""
    config = config or MixtureConfig()
    model = Mixture(config).to(dtype)
    tokens_bt = torch.randint(config.vocabulary, (batch, context + 1))

    def step(model: nn.Module) -> Tensor:
        return mixture_loss(model, tokens_bt)

    return model, step
