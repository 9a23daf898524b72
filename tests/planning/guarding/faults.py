"""Memory that runs out where a test wants it to, and all that a step leaves behind, to be compared."""

import contextlib

import torch
from torch import nn

import torchremat
from probes.memory import StorageTracker
from probes.regions import hidden
from torchremat.extend import only_watches

WORDS = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes."
PUTTING_BACK = torch.ops.aten.copy_.default, torch.ops.aten.detach.default


@only_watches
class Faults(StorageTracker):
    """Fails operators by their number, or when live bytes pass a limit, once `armed`; what is made then is dropped.

    Only what takes memory fails, and before anything is written, as in an allocator: what puts values back takes none,
    so that the next operator fails.
    """

    def __init__(self, at=(), limit_bytes=None):
        super().__init__(torch.device("cpu"))
        self.at, self.limit_bytes = set(at), limit_bytes
        self.count, self.armed, self.due = 0, False, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        armed = self.armed and not hidden.now
        self.count += armed
        self.due |= armed and self.count in self.at
        if armed and self.due and func not in PUTTING_BACK:
            self.due = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        before = self.live_bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if armed and self.limit_bytes is not None and self.live_bytes > max(before, self.limit_bytes):
            raise RuntimeError(WORDS.format(self.live_bytes - before))
        return result


class Normed(nn.Module):
    """Blocks with BatchNorm and dropout, as `Sequential` calls them."""

    def __init__(self, blocks=3, width=32):
        super().__init__()
        linear = lambda: nn.Linear(width, width)  # noqa: E731
        make = lambda: nn.Sequential(linear(), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1), linear())  # noqa: E731
        self.blocks = nn.Sequential(*[make() for _ in range(blocks)])
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return self.blocks(x)


def normed(**sizes):
    torch.manual_seed(1)
    return Normed(**sizes)


def batch(rows=64, width=32, seed=3):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def state(model, result):
    """All that a step leaves behind, by name."""
    found = {"result": result.detach().clone(), "generator": torch.get_rng_state()}
    found |= {f"gradient {name}": one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    found |= {f"buffer {name}": one.clone() for name, one in model.named_buffers()}
    found |= {f"parameter {name}": one.detach().clone() for name, one in model.named_parameters()}
    return found


def differing(found, expected):
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    ]


@contextlib.contextmanager
def guarded(model, step, at=(), *, limit_bytes=None, batches=(), **options):
    """A guarded step under faults that are armed when the step begins; `batches` are run before without."""
    faults = Faults(at, limit_bytes)

    def armed_step(model, *args, **kwargs):
        faults.armed = faults.armed or ready[0]
        return step(model, *args, **kwargs)

    ready = [False]
    with torchremat.guard(model, armed_step, **options) as run:
        for one in batches:
            run(*one) if isinstance(one, tuple) else run(one)
        ready[0] = True
        with faults:
            yield run, faults
