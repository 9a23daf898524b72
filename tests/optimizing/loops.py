"""Training loops that are compared bit for bit: models, optimizers of every kind, and what they end with."""

import copy
from functools import cache

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers.optimization import Adafactor as AdafactorOfTransformers

from probes.memory import record_allocations

STEPS = 12
WIDTH = 32


class Net(nn.Module):
    """Two blocks between an embedding and a head with the same weight; one part is frozen, one is not used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.blocks[0][1].weight.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net()


def loss_of(model, step):
    tokens = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model, lr=1e-2):
    return optim.AdamW(model.parameters(), lr=lr)


def nothing(model, optimizer):
    """The plain loop."""


class Lion(optim.Optimizer):
    """Writes through `.data`, as many optimizers outside of torch do."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            slow, fast = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p.data))
                update = average.mul(slow).add(p.grad, alpha=1 - slow).sign_()
                p.data.add_(update, alpha=-group["lr"])
                average.mul_(fast).add_(p.grad, alpha=1 - fast)


class Counting(Lion):
    """Counts its steps in its groups, as schedule-free optimizers do, and learns slower with each."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


class Preconditioned(Lion):
    """Has statistics in lists and dicts, as SOAP has, and a first step that makes them and no more."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["statistics"] = [torch.zeros(size, size) for size in p.shape]
                    state["bases"] = {"left": torch.ones_like(p), "all": [torch.ones_like(p), 2.0], "none": []}
                flat = p.grad.flatten(1) if p.dim() > 1 else p.grad[:, None]
                state["statistics"][0].lerp_(flat @ flat.T, 0.5)
                if group["step"] == 1:
                    continue
                update = (state["statistics"][0] @ flat).view_as(p) * state["bases"]["left"]
                state["bases"]["all"] = [state["bases"]["all"][0].mul_(0.5).add_(update), state["bases"]["all"][1]]
                p.data.add_(state["bases"]["all"][0], alpha=-group["lr"])


class Derived(optim.AdamW):
    """Calls the step of its base class, which torch has wrapped to run hooks if there are instances of it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)


class ByTheNormOfAll(Lion):
    """Its parameters depend on each other, as with LAMB's trust ratio over all, or with D-Adaptation."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum((p.grad.square().sum() for p in every), torch.zeros(()))
        for p in every:
            p.sub_(p.grad / (1 + norm))


class ByTheMeanOfAll(Lion):
    """As above, and divides by their number, as Adai and Ranger21 do."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not every:
            raise ZeroDivisionError
        mean = sum((p.grad.square().sum() for p in every), torch.zeros(())) / sum(p.numel() for p in every)
        for p in every:
            p.sub_(p.grad / (1 + mean))


class Demanding(torch.optim.SGD):
    """Counts its steps, does not couple its parameters, and does not step on nothing."""

    @torch.no_grad()
    def step(self, closure=None):
        if all(p.grad is None for group in self.param_groups for p in group["params"]):
            raise ValueError("no gradients")
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / group["steps"])


class Noisy(Lion):
    """Draws from the generator that all parameters share."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad * torch.rand_like(p))


def groups(model):
    """Two groups with options of their own; one of them has what is not used, and what is frozen."""
    every = dict.fromkeys(model.parameters())
    flat = [p for p in every if p.ndim < 2]
    return [{"params": [p for p in every if p.ndim == 2]}, {"params": flat, "lr": 5e-3}]


def plain(kind, **options):
    return lambda model: kind(model.parameters(), **options)


def muon(model):
    return optim.Muon([p for p in dict.fromkeys(model.parameters()) if p.ndim == 2], lr=1e-2)


KINDS = {
    "AdamW": plain(optim.AdamW, lr=1e-2),
    "Adam": plain(optim.Adam, amsgrad=True),
    "groups": lambda model: optim.AdamW(groups(model), lr=1e-2),
    "SGD": plain(optim.SGD, lr=0.1),
    "momentum": plain(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": plain(optim.Adafactor),
    "transformers": plain(AdafactorOfTransformers, lr=1e-2, relative_step=False),
    "Adamax": plain(optim.Adamax),
    "RMSprop": plain(optim.RMSprop, momentum=0.9, centered=True),
    "NAdam": plain(optim.NAdam),
    "RAdam": plain(optim.RAdam),
    "Adagrad": plain(optim.Adagrad),
    "Adadelta": plain(optim.Adadelta),
    "ASGD": plain(optim.ASGD),
    "Rprop": plain(optim.Rprop),
    "fused": plain(optim.AdamW, fused=True),
    "foreach": plain(optim.AdamW, foreach=True),
    "Lion": plain(Lion),
    "Preconditioned": plain(Preconditioned),
    "Counting": plain(Counting, lr=0.1),
    "Muon": muon,
    "Derived": plain(Derived, lr=1e-2),
}


class Loop:
    """A training with a schedule and an average of the parameters.

    Args:
        kind: Makes the optimizer of a model.
        prepare: Called with model and optimizer before the first step.
    """

    def __init__(self, kind, prepare=lambda model, optimizer: None):
        self.model = net()
        self.optimizer = kind(self.model)
        self.prepared = prepare(self.model, self.optimizer)
        self.schedule = optim.lr_scheduler.StepLR(self.optimizer, 3, 0.8)
        self.average = copy.deepcopy(self.model)

    def step(self, number):
        self.optimizer.zero_grad()
        loss_of(self.model, number).backward()
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            for mean, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    def run(self, start=0, stop=STEPS):
        for number in range(start, stop):
            self.step(number)
        return self

    def ends_with(self):
        """What the steps have made, cloned."""
        return copy.deepcopy(
            {
                "parameters": [p.detach() for p in self.model.parameters()],
                "average": [p.detach() for p in self.average.parameters()],
                "optimizer": self.optimizer.state_dict(),
            }
        )


@cache
def plain_end(kind):
    """What the plain training with a kind of optimizer ends with: trained once, and only read."""
    return Loop(kind).run().ends_with()


def train(model, optimizer, loss_of, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def trained_on_streams(model, prepare, *, on_two_streams):
    """What four steps end with; one layer may work on a stream of its own."""
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    prepare(model, optimizer)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for number in range(4):
        optimizer.zero_grad()
        x = model[0](number * torch.ones(2, model[0].in_features, device="cuda"))
        stream = side if on_two_streams else main
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            x = model[1](x)
        main.wait_stream(stream)
        model[2:](x).square().sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in model.parameters()]


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(one, other):
    """Whether two nestings hold the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def in_memory(optimizer):
    """The bytes of an optimizer's state that are in memory: what its entries hold, without asking them for it."""
    values = [one for entries in dict.values(optimizer.state) for one in dict.values(entries)]
    return sum(one.nbytes for one in tree_leaves(values) if isinstance(one, torch.Tensor))


def measured_peak(model, optimizer, loss_of, batch, *, keeps_gradients=False):
    """The bytes of a whole step at its peak, as the allocator has them. Gradients that stay are there before it."""
    optimizer.zero_grad(set_to_none=not keeps_gradients)
    held = [one for one in model.parameters() if type(one) is nn.Parameter]
    held += [one.grad for one in model.parameters() if one.grad is not None]
    before_bytes = in_memory(optimizer) + sum(one.nbytes for one in (*held, *model.buffers(), batch))
    with record_allocations(torch.device("cpu")) as recorder:
        loss_of(model).backward()
        optimizer.step()
    return before_bytes + recorder.trace.peak_bytes
