"""Random functions in regions whose gradients are differentiated, up to three times."""

import random
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

WIDTH = 4


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 * 0.1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * x * 0.3


@dataclass
class State:
    """What the blocks of a program read besides their arguments, and what they leave outside."""

    weights: list
    scales: list
    captured: torch.Tensor
    constant: torch.Tensor
    made: torch.Tensor  # from a leaf, outside of all blocks
    left: list = field(default_factory=list)

    @property
    def leaves(self):
        return [*self.weights, *self.scales, self.captured]


def left(own, h):
    own.left.append(h)
    return h * h


def written(h, first):
    h = h * 1.1
    h.add_(first.sin())
    return h.mul_(0.5)


def hooked(h):
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 1.25)
    return h


def swapped(h):
    a, b = h.split(2, -1)
    return torch.cat([b.sin(), a * b], -1)


def with_a_gradient_inside(h, scale):
    with torch.enable_grad():
        inner = h.detach().requires_grad_()
        (grad,) = torch.autograd.grad((inner * inner * scale).sin().sum(), inner, create_graph=True)
    return h + grad * scale


# By name: from the state, the value so far, the block's inputs and a number.
OPERATIONS = {
    "tanh": lambda own, h, x, skip, k: h.tanh(),
    "sin": lambda own, h, x, skip, k: h.sin(),
    "exp": lambda own, h, x, skip, k: torch.exp(-h * h),
    "softmax": lambda own, h, x, skip, k: h.softmax(-1),
    "cube": lambda own, h, x, skip, k: Cube.apply(h),
    "squared": lambda own, h, x, skip, k: h * h,
    "where": lambda own, h, x, skip, k: torch.where(h > 0, h, h.sin()),
    "matmul": lambda own, h, x, skip, k: h @ own.weights[k],
    "scaled": lambda own, h, x, skip, k: h * own.scales[k],
    "norm": lambda own, h, x, skip, k: F.layer_norm(h, (WIDTH,), own.scales[0], own.scales[1]),
    "dropout": lambda own, h, x, skip, k: F.dropout(h, 0.3),
    "times input": lambda own, h, x, skip, k: h * x,
    "skip": lambda own, h, x, skip, k: h + skip * 0.5,
    "captured": lambda own, h, x, skip, k: h * own.captured,
    "captured with a graph": lambda own, h, x, skip, k: h * own.made,
    "constant": lambda own, h, x, skip, k: h * own.constant,
    "without grad": lambda own, h, x, skip, k: h + h.detach().sum(),
    "in place": lambda own, h, x, skip, k: written(h, x),
    "view": lambda own, h, x, skip, k: h.reshape(-1).view(WIDTH, 3).t().tanh(),
    "cat": lambda own, h, x, skip, k: torch.cat([h, h.sin()])[:3],
    "split": lambda own, h, x, skip, k: swapped(h),
    "index": lambda own, h, x, skip, k: h[torch.tensor([2, 0, 1])] * h,
    "hook": lambda own, h, x, skip, k: hooked(h),
    "left outside": lambda own, h, x, skip, k: left(own, h.sin()),
    "a result left outside": lambda own, h, x, skip, k: (left(own, h.cos() * h), h)[1],
    "gradient inside": lambda own, h, x, skip, k: with_a_gradient_inside(h, own.scales[k]),
}


@dataclass(frozen=True)
class Block:
    """A block: its operations, how many tensors it returns, and whether a region begins in its middle."""

    operations: tuple
    returns: int
    is_nested: bool


@dataclass(frozen=True)
class Program:
    """A program: its blocks, and the gradients that it takes.

    Attributes:
        order: How often a gradient is differentiated.
        wrt: Of what the gradients are.
        is_repeated: Whether the first block runs twice.
        drops: Whether the second output of the last block is used by nothing.
        goes_back: Whether the first gradient is taken by `backward`.
        hooks: Whether hooks change the gradients of outputs.
        writes: Whether outputs are written in place.
        retains: Whether the last backward runs twice.
        packs: Whether a hook for saved tensors is around all of it.
    """

    blocks: tuple
    order: int
    wrt: str
    is_repeated: bool
    drops: bool
    goes_back: bool
    hooks: bool
    writes: bool
    retains: bool
    packs: bool

    @staticmethod
    def random(seed):
        rng = random.Random(seed)
        blocks = tuple(
            Block(
                tuple((rng.choice([*OPERATIONS]), rng.randint(0, 2)) for _ in range(rng.randint(1, 6))),
                rng.randint(1, 2),
                rng.random() < 0.25,
            )
            for _ in range(rng.randint(1, 5))
        )
        chance = lambda share: rng.random() < share  # noqa: E731
        packs = chance(0.15)
        return Program(
            blocks, rng.choice([1, 1, 2, 2, 3]), rng.choice(["input", "leaves", "weight", "middle"]), chance(0.3),
            chance(0.3), chance(0.3), chance(0.2), not packs and chance(0.2), chance(0.3), packs,
        )  # fmt: skip

    def run(self, region):
        """Return all gradients, with the blocks in calls of `region`, and a random number drawn afterwards."""
        torch.manual_seed(3)
        rows = lambda *shape: torch.randn(*shape) * 0.5  # noqa: E731
        captured = rows(3, WIDTH).requires_grad_()
        own = State(
            [rows(WIDTH, WIDTH).requires_grad_() for _ in range(3)],
            [rows(WIDTH).requires_grad_() for _ in range(3)],
            captured,
            rows(3, WIDTH),
            (captured * 1.5).tanh(),
        )
        x = rows(3, WIDTH).requires_grad_()
        if not self.packs:
            return self._gradients(own, x, region)
        with save_on_cpu():
            return self._gradients(own, x, region)

    def _gradients(self, own, x, region):
        h, skip, middle = x, x * 0.3, None
        for block in (*self.blocks[: self.is_repeated], *self.blocks):
            h, skip = region(lambda h, skip, block=block: self._call(own, block, h, skip, region), h, skip)
            middle = h if middle is None else middle
            if self.hooks and h.requires_grad:
                h.register_hook(lambda grad: grad * 1.1)
            if self.writes and h.grad_fn is not None:
                h.mul_(0.9)
        value = h.square().sum() + sum(one.square().sum() for one in own.left if one.requires_grad)
        if not self.drops and skip.requires_grad:
            value = value + skip.sum()
        found = [value.detach()]
        wanted = {"input": [x], "leaves": [x, own.weights[0], own.scales[0]], "weight": [own.weights[0]]}
        for order in range(self.order if value.requires_grad else 0):
            if self.goes_back and not order:
                value.backward(create_graph=True)
                grads = [one.grad for one in (x, *own.weights) if one.grad is not None]
                for one in (x, *own.leaves):
                    one.grad = None
            else:
                of = wanted.get(self.wrt, [middle])
                grads = torch.autograd.grad(value, of, create_graph=True, allow_unused=True)
                grads = [one for one in grads if one is not None]
            found += [one.detach() for one in grads]
            value = value * 0.5 + sum(one.square().sum() for one in grads)
        for retains in (True, False)[not self.retains :]:
            if value.requires_grad:
                found += torch.autograd.grad(value, [x, *own.leaves], retain_graph=retains, allow_unused=True)
        return [*found, torch.rand(2)]

    @staticmethod
    def _call(own, block, h, skip, region):
        def run(operations, h, skip):
            first = h
            for name, number in operations:
                h = OPERATIONS[name](own, h, first, skip, number)
            return h

        count = len(block.operations) // 2 if block.is_nested else 0
        if count:
            h = region(lambda h, skip: run(block.operations[:count], h, skip), h, skip)
        h = run(block.operations[count:], h, skip)
        return (h, h.sin() * skip) if block.returns == 2 else (h, skip)


def agree(ours, plain):
    """Whether two results are equal bit for bit; on a device up to rounding, as two plain runs may be."""
    return len(ours) == len(plain) and all(
        a is b if a is None or b is None else _equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(ours, plain, strict=True)
    )


def _equal(a, b):
    return torch.equal(a, b) if a.is_cpu else torch.allclose(a, b, rtol=1e-3, atol=1e-4)
