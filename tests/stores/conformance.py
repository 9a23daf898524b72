"""What every store has to do, whichever it is; `test_conformance.py` asks all of them.

A store of one's own joins with a line in `STORES`:

    "mine": Maker(lambda limit, strict: Mine(limit=limit, strict=strict))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchremat import Compressed, Disk, Host, Keep, Tiers

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
