"""Random small models with random collectives at random places, on two processes: equal to plain, or refused.

    PYTHONPATH=src:tests python -m distributed.communicating.fuzz 300

tries that many, each with a seed of its own, and prints those that are neither. With `--first 17` the first seed is 17,
and `--show` prints each program.
"""

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from distributed.communicating.crews import Crew
from distributed.communicating.functions import (
    Averaged,
    Copied,
    Exchanged,
    Gathered,
    Rotated,
    Scaled,
    Scattered,
    Spread,
    Summed,
    summed,
)
from distributed.communicating.parts import WIDTH, Program, Working, group_of, mesh, reduced_by_hooks
from distributed.communicating.trials import Load, faults, tried
from torchremat import RepeatWarning

WORLD = 2
FINE = ("equal", "equal, nothing recomputed", "refused")


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What is done at one place, and in which group."""

    kind: str
    group: str

    def __call__(self, x):
        return KINDS[self.kind](x, GROUPS[self.group]())

    def __str__(self):
        return self.kind if self.group == "world" else f"{self.kind} of {self.group}"


# --------------------------------------------------------------------------------- what may be done with a tensor


def _in_place(x, group):
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return x - 0.1 * total


def _statistics(x, group):
    total = x.detach().mean((0, 1))
    dist.all_reduce(total, group=group)
    return x - 0.1 * total


def _statistics_later(x, group):
    total = x.detach().mean((0, 1))
    work = dist.all_reduce(total, group=group, async_op=True)
    x = x.sin()
    work.wait()
    return x - 0.1 * total


def _largest(x, group):
    most = x.detach().abs().amax()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return x / (1 + most)


def _parts(x, group):
    size = dist.get_world_size(group)
    return Gathered.apply(x, group).unflatten(1, (size, x.shape[1])).mean(1)


def _there_and_back(x, group):
    return Scattered.apply(Gathered.apply(x, group).tanh(), group) / dist.get_world_size(group)


def _list(x, group):
    found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, x.detach().contiguous(), group=group)
    return x + 0.1 * sum(found)


def _rows(x, group):
    size = dist.get_world_size(group)
    shares = [x.shape[0] // size] * size
    return Exchanged.apply(x, shares, shares, group)


def _functional_sum(x, group):
    return functional_collectives.all_reduce(x, "sum", group) / dist.get_world_size(group)


def _functional_rows(x, group):
    return functional_collectives.all_to_all_single_autograd(x.contiguous(), None, None, group)


def _functional_parts(x, group):
    whole = functional_collectives.all_gather_tensor_autograd(x.contiguous(), 1, group)
    return functional_collectives.reduce_scatter_tensor_autograd(whole.sin(), "sum", 1, group) / 2


def _coalesced(x, group):
    first, second = functional_collectives.all_reduce_coalesced([x.mean(0), x.mean(1)], "sum", group)
    return x - 0.1 * first - 0.1 * second[:, None]


def _objects(x, group):
    told = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, {"sum": float(x.detach().sum())}, group=group)
    return x / (1 + abs(sum(one["sum"] for one in told)) / 1000)


def _hook(x, group):
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda gradient: summed(gradient, group) / dist.get_world_size(group))
    return x


def _passed(x, group):
    """From the first process to the second, and nothing back."""
    if dist.get_world_size(group) == 1:
        return x.cos()
    given = x.detach().mean((0, 1))
    if dist.get_rank(group) == 0:
        dist.send(given, dist.get_global_rank(group, 1), group=group)
        return x
    dist.recv(given, dist.get_global_rank(group, 0), group=group)
    return x + given


def _barrier(x, group):
    dist.barrier(group=group)
    return x.sin()


def _mesh_of(group):
    return mesh(1, WORLD)["inner"] if dist.get_world_size(group) > 1 else mesh(WORLD, 1)["inner"]


def _dtensor(x, group):
    on = _mesh_of(group)
    return DTensor.from_local(x, on, [Partial()]).redistribute(on, [Replicate()]).to_local() / on.size()


def _dtensor_parts(x, group):
    on = _mesh_of(group)
    whole = DTensor.from_local(x, on, [Shard(1)]).sin()
    return (whole * whole.redistribute(on, [Replicate()]).mean()).to_local()


def _more_in_one(x, group):
    return x.sin().cos() if dist.get_rank() else x


# Those that need no tensor to be of one size in all processes.
ANY_SIZE = {
    "statistics": _statistics,
    "statistics later": _statistics_later,
    "largest": _largest,
    "objects": _objects,
    "scaled gradients": Scaled.apply,
    "point to point": _passed,
    "barrier": _barrier,
    "more in one": _more_in_one,
}
# Those after which processes do not run the same, so that there may be no plan for both.
LOPSIDED = {"point to point", "more in one"}
KINDS = ANY_SIZE | {
    "averaged": Averaged.apply,
    "summed": lambda x, group: Summed.apply(x, group) / dist.get_world_size(group),
    "copied": Copied.apply,
    "spread": Spread.apply,
    "rotated": lambda x, group: Rotated.apply(group, x)[0],
    "in place": _in_place,
    "parts": _parts,
    "there and back": _there_and_back,
    "list": _list,
    "rows": _rows,
    "functional sum": _functional_sum,
    "functional rows": _functional_rows,
    "functional parts": _functional_parts,
    "coalesced": _coalesced,
    "hook": _hook,
    "dtensor": _dtensor,
    "dtensor parts": _dtensor_parts,
}
GROUPS = {
    "world": lambda: dist.group.WORLD,
    "a second group": lambda: group_of(*range(WORLD)),
    "itself": lambda: [group_of(rank) for rank in range(WORLD)][dist.get_rank()],
    "a mesh": lambda: mesh(1, WORLD).get_group("inner"),
}


# --------------------------------------------------------------------------------------------------- random models


class Places:
    """Draws what is done at places, and notes it."""

    def __init__(self, rng, kinds, rate):
        self.rng, self.kinds, self.rate, self.drawn = rng, sorted(kinds), rate, []

    def draw(self, where):
        """What to do at a place: nothing mostly."""
        if self.rng.random() > self.rate:
            return ()
        groups = ["world"] * 5 + sorted(GROUPS)
        kinds, group = self.rng.sample(self.kinds, self.rng.choice((1, 1, 1, 2))), self.rng.choice(groups)
        found = tuple(Communication(kind=kind, group=group) for kind in kinds)
        self.drawn.append(f"{where}: {', '.join(map(str, found))}")
        return found


def done(communications, x):
    for one in communications:
        x = one(x)
    return x


class Layer(Working):
    def __init__(self, places, name):
        super().__init__()
        rng = places.rng
        hidden = rng.choice((1, 2, 4)) * WIDTH
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.drop = nn.Dropout(0.1) if rng.random() < 0.3 else nn.Identity()
        self.before, self.between, self.after = (places.draw(f"{name} {x}") for x in ("before", "between", "after"))

    def forward(self, x):
        self.work()
        h = done(self.before, self.norm(x))
        h = self.down(done(self.between, functional.gelu(self.up(h))))
        return x + self.drop(done(self.after, h))


class Nest(nn.Module):
    """Calls what is in it one after the other, some of it twice, and communicates between."""

    def __init__(self, places, name, depth):
        super().__init__()
        rng = places.rng
        inside = [
            Nest(places, f"{name}.{place}", depth - 1)
            if depth and rng.random() < 0.3
            else Layer(places, f"{name}.{place}")
            for place in range(rng.randint(2, 3) + (depth == 2))
        ]
        self.inside = nn.ModuleList(inside)
        self.twice = [rng.random() < 0.15 for _ in inside]
        self.glue = [places.draw(f"{name} after {place}") if rng.random() < 0.4 else () for place in range(len(inside))]

    def forward(self, x):
        for one, twice, glue in zip(self.inside, self.twice, self.glue, strict=True):
            x = one(x)
            if twice:
                x = one(x.tanh())
            x = done(glue, x)
        return x


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How a random program is made.

    Attributes:
        seed: Its seed.
        budget: The budget to plan it for.
        load: What slows one of its processes.
        operators: Whether its plan may keep parts of modules.
    """

    seed: int
    budget: str
    load: Load
    operators: bool

    @classmethod
    def of(cls, seed):
        rng = random.Random(f"spec {seed}")
        budget = rng.choice(("min", "min", "85% of activations", "70% of activations", "55% of activations"))
        load = Load(rank=rng.choice((None, 0, 1)))
        return cls(seed=seed, budget=budget, load=load, operators=rng.random() < 0.5)

    @property
    def options(self):
        """The options of `tried`."""
        return {"seed": self.seed, "load": self.load, "budgets": (self.budget,), "operators": self.operators}


def built(seed, told=None):
    """Build the program of a seed, the same in all processes; what was drawn is added to `told`."""
    rng = random.Random(seed)
    is_uneven, is_lopsided = rng.random() < 0.2, rng.random() < 0.2
    kinds = {*(ANY_SIZE if is_uneven else KINDS)} - (set() if is_lopsided else LOPSIDED)
    places = Places(rng, kinds, rng.choice((0.1, 0.2, 0.4)))
    model = Nest(places, "root", 2)
    of_batch, of_output = places.draw("batch"), places.draw("output")
    of_loss = Communication(kind=rng.choice(("averaged", "functional sum", "dtensor", "hook")), group="world")
    has_loss, wrapping = rng.random() < 0.3, rng.random()
    if told is not None:
        kind = "hooks" if wrapping < 0.3 else "replicas" if wrapping < 0.4 else "own"
        last = [f"loss: {of_loss}"] * has_loss
        told += [*places.drawn, *last, f"gradients: {kind}", f"{'other' if is_uneven else 'same'} sizes"]
    if wrapping < 0.3:
        reduced_by_hooks(model, dist.group.WORLD)
    elif wrapping < 0.4:
        model = DistributedDataParallel(model, bucket_cap_mb=0.02)

    def loss(model, x):
        x = x[: 2 + 2 * dist.get_rank()] if is_uneven else x
        found = done(of_output, model(done(of_batch, x))).square().mean()
        return of_loss(found) if has_loss else found

    return Program(model=model, loss=loss, known_for=(RepeatWarning,) if is_lopsided else ())


def described(seed, rank):
    """What the program of a seed is made of."""
    told = []
    torch.manual_seed(seed)
    built(seed, told)
    return told


def verdict(crew, seed):
    """Return "equal", "refused" or what is wrong in a few words, and what there is to say of it."""
    ended = crew.run(partial(tried, partial(built, seed), **Spec.of(seed).options))
    if ended.how != "done":
        return ended.how, "\n".join(f"process {rank}: {words}" for rank, words in enumerate(ended.words))
    if all(one.refused for one in ended.told):
        return "refused", ended.told[0].refused
    wrong = faults(ended.told, may_be_refused=True, are_alike=False)
    if not wrong:
        return ("equal" if any(one.recomputes for one in ended.told[0].plans) else "equal, nothing recomputed"), ""
    plans = [one for own in ended.told for one in own.plans]
    is_above = any(one.is_above for one in plans) and not any(one.differs or one.is_exact is False for one in plans)
    return ("equal, above the budget" if is_above else "wrong"), wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS")
    options = parser.parse_args()
    counts = Counter()
    with Crew(WORLD, options.patience) as crew:
        for seed in range(options.first, options.first + options.programs):
            how, words = verdict(crew, seed)
            counts[how] += 1
            if options.show or how not in FINE:
                lines = [str(Spec.of(seed)), *crew.run(partial(described, seed)).told[0]]
                print(f"{seed}: {how}\n  " + "\n  ".join([*lines, *words.splitlines()]), flush=True)
    print(dict(counts))
    return sum(count for how, count in counts.items() if how not in FINE)


if __name__ == "__main__":
    sys.exit(bool(main()))
