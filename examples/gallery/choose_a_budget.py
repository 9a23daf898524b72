"""Which budget, for a GPU that is not here?

How much time does each byte cost?
`frontier` plans for all budgets at once; with `on="meta"` nothing runs and nothing is allocated, so it needs no GPU:
bytes follow from shapes, and seconds from the published figures of the device.
The model has the sizes of Llama 3.2 1B, and all of it is trained in bfloat16 with AdamW, on an L4 with 24 GB.
At the knee the time begins to rise faster than the memory falls, and the last bytes are the dearest.
"""

import torch
from torch import nn
from torch.nn import functional as F

import torchremat

WIDTH, HEADS, HIDDEN, BLOCKS, WORDS, CONTEXT = 2048, 32, 8192, 16, 128_256, 4096


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        h = self.norms[0](x)
        q = self.q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, HEADS // 4, -1)).permute(2, 0, 3, 1, 4).repeat_interleave(4, 2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens):
        return F.linear(self.norm(self.blocks(self.embed(tokens))), self.embed.weight)


with torch.device("meta"):
    model, tokens = Llama().bfloat16(), torch.zeros(2, CONTEXT, dtype=torch.long)
optimizer = torch.optim.AdamW(model.parameters())


def step(model):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


frontier = torchremat.frontier(
    model, step, optimizer=optimizer, on="meta", device="l4", operators=False, points=12, progress=False
)
print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.2f} billion parameters")
print(frontier)
frontier.plot("choose_a_budget.png")
