"""Seven billion parameters, planned on a laptop.

Will it fit, and what will it cost?
With `on="meta"` nothing runs and nothing is allocated: bytes follow from shapes, seconds from published figures.
The model has the sizes of Llama 2 7B, and all of it is trained in bfloat16 with AdamW on one H100.
The plain step does not fit into its 80 GB; the plan does, and leaves some room for what CUDA takes by itself.
"""

import torch
from torch import nn
from torch.nn import functional as F

import torchremat

WIDTH, HEADS, HIDDEN, BLOCKS, WORDS, CONTEXT = 4096, 32, 11008, 32, 32000, 4096


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens))))


with torch.device("meta"):
    model = Llama().bfloat16()
    tokens = torch.zeros(2, CONTEXT, dtype=torch.long)


def step(model):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


optimizer = torch.optim.AdamW(model.parameters())
parameters = sum(parameter.numel() for parameter in model.parameters())
planner = torchremat.Planner(model, step, optimizer=optimizer, on="meta", device="h100", operators=False)
plan = planner.plan("70GiB")

print(f"{parameters / 1e9:.2f} billion parameters, {tokens.numel()} tokens in a step")
print(f"plain  {plan.plain_peak_bytes / 2**30:.1f} GiB")
print(f"plan   {plan.peak_bytes / 2**30:.1f} GiB, {plan.slowdown - 1:.1%} slower on {plan.device}")
print(f"floor  {plan.floor_bytes / 2**30:.1f} GiB, the smallest budget that works")
