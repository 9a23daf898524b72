"""Train a recurrent model on a long sequence.

Plain autograd keeps every step of a loop until the backward, so memory grows with the length of the sequence.
`torchremat.loop` is `jax.lax.scan` with a budget: carries are kept where it costs least, and the other steps run again.
Here a language model reads 500 characters at a stretch within a twentieth of the memory, with the same gradients.
"""

from itertools import pairwise

import torch
from torch import nn

import torchremat

STEPS, BATCH, WIDTH, CHARACTERS = 500, 4, 48, 40

torch.manual_seed(0)
embed, cell, head = nn.Embedding(CHARACTERS, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, CHARACTERS)
model = nn.ModuleList([embed, cell, head])
text = torch.randint(CHARACTERS, (STEPS + 1, BATCH))


def read(carry, characters):
    state, loss = carry
    here, following = characters
    state = cell(embed(here), state)
    return (state, loss + nn.functional.cross_entropy(head(state), following)), None


start = torch.zeros(BATCH, WIDTH), torch.zeros(())


def plain(model):
    carry = start
    for characters in pairwise(text):
        carry, _ = read(carry, characters)
    return carry[1] / STEPS


def within(model, **options):
    (_, loss), _ = torchremat.loop(read, start, (text[:-1], text[1:]), **options)
    return loss / STEPS


def gradients(step):
    model.zero_grad()
    step(model).backward()
    return [parameter.grad for parameter in model.parameters()]


saved = torchremat.saved(model, plain)
print(f"plain: autograd saves {saved.saved_bytes:,} bytes")

expected = gradients(plain)
found = gradients(lambda model: within(model, budget=saved.saved_bytes // 20, on_schedule=print))
print("gradients equal, bit for bit:", all(map(torch.equal, expected, found)))
