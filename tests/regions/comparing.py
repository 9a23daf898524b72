"""What the tests of regions share: a run beside its plain run, calls that are counted, storages that are watched."""

import gc
import threading
from weakref import WeakSet

import torch
from torch import nn

from logs import Count
from probes.regions import Region


class Counted:
    """A function that counts its calls."""

    def __init__(self, function):
        self.function = function
        self._ran = Count()

    @property
    def calls(self):
        return self._ran.value

    def __call__(self, *args, **kwargs):
        self._ran.up()
        return self.function(*args, **kwargs)


def three(x):
    return x.exp().sin().tanh()


class Twice(torch.autograd.Function):
    """Reads what it saved twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        (b,) = ctx.saved_tensors
        return grad * (a + b)


class Tied(nn.Module):
    """Uses a weight before and after what has none."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 4)

    def forward(self, x):
        return (x @ self.weight).sin().exp() @ self.weight


def leaf(*shape, dtype=None):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def result(run, leaves, modules=()):
    """Seed, run, go backward; return the output, all gradients and all buffers."""
    leaves = [*leaves, *(parameter for module in modules for parameter in module.parameters())]
    for one in leaves:
        one.grad = None
    torch.manual_seed(1)
    output = run()
    output.sum().backward()
    after = torch.rand(1)
    buffers = [buffer.clone() for module in modules for buffer in module.buffers()]
    return [output.detach(), after, *(one.grad for one in leaves), *buffers]


def equal(ours, plain):
    """Whether two results are equal bit for bit."""
    return len(ours) == len(plain) and all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(ours, plain, strict=True)
    )


def same(ours, plain, leaves, modules=()):
    """Whether `ours` has the output, gradients, buffers and random numbers of `plain`; the buffers start the same."""
    state = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    expected = result(plain, leaves, modules)
    for module, one in zip(modules, state, strict=True):
        module.load_state_dict(one)
    return equal(result(ours, leaves, modules), expected)


def backward_at_once(outputs):
    """Go backward through each output in a thread of its own, all of which begin together."""
    start = threading.Barrier(len(outputs))

    def work(output):
        start.wait()
        output.backward()

    threads = [threading.Thread(target=work, args=(output,)) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def live_regions():
    # By type: `isinstance` asks objects for their class, and some of them warn.
    return [item for item in gc.get_objects() if type(item) is Region]


class Watched(nn.Module):
    """Passes a tensor on that saves itself, and knows which of these are alive."""

    def __init__(self):
        super().__init__()
        self.alive = WeakSet()
        self._ran = Count()

    @property
    def calls(self):
        return self._ran.value

    def forward(self, x):
        self._ran.up()
        y = x.exp()
        self.alive.add(y.untyped_storage())
        return y * y.detach().clone()
