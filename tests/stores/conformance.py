"""What every store has to do, whichever it is; `test_conformance.py` asks all of them.

A store of one's own joins with a line in `STORES`:

    "mine": Maker(lambda limit, strict: Mine(limit=limit, strict=strict))

What is asked of every store in a region, where it keeps what operators return and code writes in place, is in
`PROGRAMS`: there a store need not have a limit, statistics, or handles that are told of writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torchremat import Compressed, Disk, Host, Keep, MutationError, Tiers

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
# No dimensions, one element, bytes that are no multiple of 8, and a tensor of several pages.
SHAPES = [(), (1,), (1, 1, 1), (3,), (5, 7), (2, 3, 11), (64, 64), (100_003,)]


@dataclass(frozen=True)
class Maker:
    """How a store is made, and what it is known for.

    Attributes:
        make: Makes one, given a limit in bytes or None, and whether it is strict.
        copies: Whether what it gives back lies in memory of its own.
        has_limit: Whether it can be full.
        exact_bytes: Whether it holds as many bytes as the tensor has.
    """

    make: Callable[[int | None, bool], object]
    copies: bool = True
    has_limit: bool = True
    exact_bytes: bool = True

    def __call__(self, limit=None, strict=False):
        return self.make(limit, strict)


STORES: dict[str, Maker] = {
    "keep": Maker(lambda limit, strict: Keep(), copies=False, has_limit=False),
    "host": Maker(lambda limit, strict: Host(limit, strict=strict)),
    "disk": Maker(lambda limit, strict: Disk(limit=limit, strict=strict)),
    "disk, nothing pending": Maker(lambda limit, strict: Disk(limit=limit, strict=strict, pending=1, threads=1)),
    "tiers of one": Maker(lambda limit, strict: Tiers(Host(limit), strict=strict)),
    "tiers of two": Maker(lambda limit, strict: Tiers(Host(3000), Disk(), strict=strict), has_limit=False),
    "compressed": Maker(lambda limit, strict: Compressed(Host(limit, strict=strict)), exact_bytes=False),
    "compressed in place": Maker(lambda limit, strict: Compressed(), copies=False, has_limit=False, exact_bytes=False),
}


class Plainest:
    """A store as simple as can be: it keeps the tensor, and its handles have no method more than they must."""

    class Handle:
        def __init__(self, tensor):
            self.tensor, self.version = tensor, tensor._version
            self.stored_bytes = tensor.nbytes

        def get(self):
            if self.tensor._version != self.version:
                raise MutationError("written")
            return self.tensor.detach()

        def prefetch(self):
            pass

    def put(self, tensor):
        return Plainest.Handle(tensor)


# Where what is kept by a policy may wait. Most tensors of `PROGRAMS` have no room in what is full.
PLACES = {
    **{name: maker.__call__ for name, maker in STORES.items()},
    "a disk that is slow": lambda: Disk(threads=1, pending="1GiB"),
    "a host that is full": lambda: Host(100),
    "tiers that are full": lambda: Tiers(Host(100), Host(200)),
    "tiers that keep the rest": lambda: Tiers(Host(100), Keep()),
    "the plainest": Plainest,
}


class Program(nn.Module):
    """Code that writes in place to what its operators have returned, on a batch of 8 x 16; plain autograd is right."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, x):
        return self.function(*self.parts, x)


def _chunks(linear, x):
    # The chunks count their writes apart, and that of the whole does not move.
    first, second = torch.unsafe_chunk(linear(x), 2, 1)
    return first.sigmoid_() * second.add_(first).tanh_()


def _parts_of_a_list(linear, x):
    first, second = torch.unsafe_split(linear(x), 8, 1)
    torch._foreach_mul_([first.detach(), second.detach()], 2.0)
    return first.sin() * second.cos()


def _view(linear, x):
    hidden = linear(x)
    left = hidden[:, :8]
    seen = left.tanh()
    left.mul_(2.0)
    return torch.cat([seen, hidden[:, 8:].sin()], 1) * hidden.cos()


def _twice(linear, x):
    hidden = linear(x)
    return (hidden.mul_(2.0) + 1).relu_().sin() * hidden.t().contiguous().add_(1.0).t()


PROGRAMS = {
    "relu": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16)),
    "GRUCell": lambda: Program(lambda cell, x: cell(x, x), nn.GRUCell(16, 16)),
    "LSTMCell": lambda: Program(lambda cell, x: cell(x, (x, x))[0] * cell(x)[1], nn.LSTMCell(16, 16)),
    "RNNCell": lambda: Program(lambda cell, x: cell(x, cell(x, x)), nn.RNNCell(16, 16)),
    "GRU": lambda: Program(lambda layer, x: layer(x.view(2, 4, 16))[0], nn.GRU(16, 16)),
    "LSTM": lambda: Program(lambda layer, x: layer(x.view(2, 4, 16))[0], nn.LSTM(16, 16)),
    "RNN": lambda: Program(lambda layer, x: layer(x.view(2, 4, 16))[0], nn.RNN(16, 16)),
    "chunks": lambda: Program(_chunks, nn.Linear(16, 16)),
    "parts of a list": lambda: Program(_parts_of_a_list, nn.Linear(16, 16)),
    "view": lambda: Program(_view, nn.Linear(16, 16)),
    "twice": lambda: Program(_twice, nn.Linear(16, 16)),
}


def filled(shape, dtype, seed=0):
    """A tensor of random bytes, so that every bit pattern occurs, NaNs as well; of zeros and ones if it is bool."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).nbytes
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).to(torch.bool)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def same(got, expected):
    """Whether two tensors are alike bit for bit: `torch.equal` calls no NaN equal to itself."""
    return (
        got.shape == expected.shape
        and got.dtype == expected.dtype
        and got.device == expected.device
        and got.is_contiguous()
        and not got.requires_grad
        and torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    )
