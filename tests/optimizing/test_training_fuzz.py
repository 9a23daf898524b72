"""Random training loops beside the plain one: how blocks are managed, how the model trains, what happens between steps.

Each feature has tests of its own; here they meet. The same few programs run in every test run, and

    TORCHREMAT_FUZZ=500 pytest tests/optimizing/test_training_fuzz.py

runs more of them.
"""

import copy
import gc
import os
import pickle
import random
from contextlib import ExitStack

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from optimizing.loops import equal
from probes.regions import dispatch_modes, top_saved_tensor_hooks
from regions.comparing import live_regions
from torchremat import (
    BudgetError,
    Compressed,
    Disk,
    Host,
    Tiers,
    offload_optimizer,
    offload_parameters,
    plan,
    policies,
    release_gradients,
    unwrap,
    wrap,
)

COUNT = int(os.environ.get("TORCHREMAT_FUZZ", "16"))
WIDTH, STEPS = 16, 3
X = torch.randint(11, (STEPS, 4, 6), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Computes `use` of itself, and raises in the middle if it is told to."""

    def __init__(self, use, **layers):
        super().__init__()
        self.use, self.raises, self.calls = use, None, 0
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        self.calls += 1
        x = x + self.use(self, x)
        if self.raises is not None:
            raise self.raises
        return x


def convolved(own, x):
    return F.relu_(own.norm(own.layer(x.transpose(1, 2)))).transpose(1, 2)


def attended(own, x):
    return own.layer(x, x, x, need_weights=False)[0]


def counted(own, x):
    return own.layer(x).mul_(2).tanh_() / own.calls


def widened(own, x):
    return own.drop(own.back(F.gelu(own.layer(x))))


BLOCKS = {
    "convolution": lambda: Block(convolved, layer=nn.Conv1d(WIDTH, WIDTH, 3, padding=1), norm=nn.BatchNorm1d(WIDTH)),
    "attention": lambda: Block(attended, layer=nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)),
    "counter": lambda: Block(counted, layer=nn.Linear(WIDTH, WIDTH)),
    "wide": lambda: Block(widened, layer=nn.Linear(WIDTH, 64), back=nn.Linear(64, WIDTH), drop=nn.Dropout(0.1)),
}


class Net(nn.Module):
    def __init__(self, blocks, *, is_tied):
        super().__init__()
        self.inp, self.out = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.blocks = nn.ModuleList(BLOCKS[one]() for one in blocks)
        if is_tied:
            self.out.weight = self.inp.weight

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def loss_of(model, x=X[0]):
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


STORES = {
    "host": Host,
    "disk": Disk,
    "compressed": lambda: Compressed(Host()),
    "tiers": lambda: Tiers(Host("4KiB"), Disk()),
}


def planned(model, optimizer, store):
    made = plan(model, loss_of, budget="min", cost="flops", optimizer=optimizer, stores=[store()])
    made.apply(model)


MANAGED = {
    "plain": lambda *_: None,
    "regions": lambda model, *_: wrap(model, "blocks.*", check="values"),
    "nested": lambda model, *_: wrap(wrap(model, "blocks.*"), ""),
    "policy": lambda model, *_: wrap(model, "blocks.*", policy=policies.save_matmuls | policies.save_attention),
    "stored outputs": lambda model, _, store: wrap(
        model, "blocks.0", policy=policies.save_larger_than(512).into(store())
    ),
    "stored": lambda model, _, store: wrap(model, "blocks.*", store=store()),
    "planned": planned,
}


def evaluated(model, x, **_):
    model.eval()
    with torch.no_grad():
        found = model(x)
    model.train()
    return [found]


def inferred(model, x, **_):
    model.eval()
    with torch.inference_mode():
        found = model(x).clone()
    model.train()
    return [found]


def copied(model, x, copying=copy.deepcopy, **_):
    other = copying(model)
    loss_of(other, x).backward()
    return [one.grad for one in other.parameters()]


def loaded(model, optimizer, **_):
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return []


def raised(model, x, error=ValueError, **_):
    block = model.blocks[-1]
    block.raises = error
    with pytest.raises(error):
        loss_of(model, x)
    block.raises = None
    return []


def substituted(model, x, **_):
    halves = {name: (0.5 * one.detach()).requires_grad_() for name, one in model.named_parameters()}
    return torch.autograd.grad(
        loss_of(lambda x: torch.func.functional_call(model, halves, (x,)), x), [*halves.values()]
    )


EVENTS = {
    "evaluated": evaluated,
    "inferred": inferred,
    "copied": copied,
    "pickled": lambda model, x, **_: copied(model, x, lambda one: pickle.loads(pickle.dumps(one))),
    "loaded": loaded,
    "raised": raised,
    "interrupted": lambda model, x, **_: raised(model, x, KeyboardInterrupt),
    "substituted": substituted,
}


class Program:
    def __init__(self, seed):
        draw = random.Random(seed)
        self.blocks = draw.choices([*BLOCKS], k=draw.randint(1, 3))
        self.is_tied = draw.random() < 0.3
        self.trains = {one for one in ("released", "state", "parameters") if draw.random() < 0.4}
        kinds = [one for one in MANAGED if one != "planned" or "parameters" not in self.trains]  # which is refused
        self.managed, self.store = draw.choice(kinds), draw.choice([*STORES])
        # What is pickled brings no store on a disk along.
        can_be_pickled = self.managed not in ("stored", "stored outputs", "planned")
        events = [one for one in EVENTS if one != "pickled" or can_be_pickled]
        self.events = draw.choices(events, k=STEPS)
        self.optimizer = draw.choice([optim.AdamW, optim.RMSprop])

    def __repr__(self):
        return str(vars(self))

    def run(self, *, ours):
        """Return all that is found on the way, and the state at the end."""
        torch.manual_seed(0)
        model = Net(self.blocks, is_tied=self.is_tied)
        optimizer, store, found = self.optimizer(model.parameters(), 1e-2), STORES[self.store], []
        with ExitStack() as stack:
            if ours:
                if "released" in self.trains:
                    stack.enter_context(release_gradients(model, optimizer))
                if "state" in self.trains:
                    stack.callback(offload_optimizer(optimizer, store(), min_bytes=256).remove)
                if "parameters" in self.trains:
                    stack.enter_context(offload_parameters(model, optimizer, store(), min_bytes=256))
                MANAGED[self.managed](model, optimizer, store)
            for number, event in enumerate(self.events):
                torch.manual_seed(number)
                found += EVENTS[event](model=model, x=X[number], optimizer=optimizer)
                optimizer.zero_grad()
                loss = loss_of(model, X[number])
                loss.backward()
                optimizer.step()
                found += [loss.detach(), torch.get_rng_state()]
            unwrap(model)
        found += [*model.state_dict().values(), *(torch.tensor(one.calls) for one in model.blocks)]
        state = optimizer.state_dict()["state"].values()
        return found + [one for entries in state for one in entries.values() if isinstance(one, torch.Tensor)]


def test_random_training_loops_are_the_plain_one():
    for seed in range(COUNT):
        program = Program(seed)
        expected = program.run(ours=False)

        try:
            found = program.run(ours=True)
        except BudgetError:
            continue

        assert equal(found, expected), (seed, program)
        assert top_saved_tensor_hooks(True) is None and dispatch_modes() == [], (seed, program)
        gc.collect()
        assert live_regions() == [], (seed, program)
