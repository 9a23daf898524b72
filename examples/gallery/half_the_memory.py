"""A GPT in half of its memory.

A byte-level GPT learns the source of the Python standard library, once plainly and once within half of the memory.
One line is new in the second run, the call of `fit`: it plans, applies the plan, and confirms it by a real step.
Every loss and every parameter of the two runs is equal, bit for bit.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import torchremat

CONTEXT, WIDTH, STEPS = 64, 64, 8
TEXT = torch.tensor(list(Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embed(tokens) + self.place(torch.arange(length))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(x)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(TEXT) - CONTEXT, (8,), generator=generator)
    return torch.stack([TEXT[start : start + CONTEXT + 1] for start in starts])


FIRST = batch(0)


def step(model, rows=FIRST):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(budget=None):
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        torchremat.fit(model, step, budget=budget, optimizer=optimizer, cost="flops")
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = step(model, batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses, torchremat.measure(model, step, optimizer=optimizer)


plain, plain_losses, before = train()
model, losses, after = train(budget="50%")

print(f"loss {losses[0]:.2f} in the first step, loss {losses[-1]:.2f} in the last")
print(f"plain   peak {before.peak_bytes / 2**20:6.2f} MiB")
print(f"fitted  peak {after.peak_bytes / 2**20:6.2f} MiB, {after.recomputed_flops / before.flops:.0%} more flops")
equal = sum(map(torch.equal, plain.parameters(), model.parameters()))
print(f"{sum(a == b for a, b in zip(plain_losses, losses, strict=True))} of {STEPS} losses are equal bit for bit")
print(f"{equal} of {len(list(model.parameters()))} parameters are equal bit for bit")
