"""Sentences of different lengths.

A plan for the longest sentence would recompute for the short ones too.
`Adaptive` has a plan for each length, which it makes from three short batches that it has seen.
The sentences are the Zen of Python, four at a time, from the shortest to the longest.
Short ones run as they are, and long ones recompute as much as they have to.
"""

import codecs
import contextlib
import io

import torch
from torch import nn
from torch.nn import functional as F

import torchremat

with contextlib.redirect_stdout(io.StringIO()):  # it prints itself
    import this

SENTENCES = sorted(filter(None, codecs.decode(this.s, "rot13").splitlines()), key=len)


def batch_of(sentences):
    longest = max(map(len, sentences))
    return torch.tensor([list(sentence.ljust(longest).encode()) for sentence in sentences])


class Block(nn.Module):
    """Mixes what was read so far, by its mean."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        places = torch.arange(1, x.shape[1] + 1).view(-1, 1)
        return x + self.down(F.gelu(self.up(self.norm(x.cumsum(1) / places))))


def step(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(128, 32), *(Block(32) for _ in range(4)), nn.Linear(32, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
adaptive = torchremat.Adaptive(model, step, budget="2MiB", optimizer=optimizer, cost="flops")
adaptive.learn(*(torch.zeros(4, length, dtype=torch.long) for length in (8, 16, 24)))

for _ in range(2):
    for first in range(0, len(SENTENCES) - 3, 4):
        adaptive(batch_of(SENTENCES[first : first + 4]))
        optimizer.step()
        optimizer.zero_grad()

for plan in sorted(adaptive.plans, key=lambda plan: plan.shape):
    batch, length = plan.shape
    print(
        f"{batch} x {length} letters: {plan.steps} steps, peak at most {plan.peak_bytes / 2**20:.2f} MiB, "
        f"{plan.recomputed_calls} calls recomputed"
    )
