"""The derivative of a region is a region: what the graph of a gradient saves is recomputed as well."""

import gc
import threading
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from regions.comparing import Counted, backward_at_once, equal, leaf, live_regions
from regions.derivative_programs import OPERATIONS, Block, Program, agree
from torchremat import (
    CheckpointError,
    Host,
    MutationError,
    UnsupportedError,
    checkpoint,
    checkpointed,
    is_recomputing,
    measure,
    offload,
    wrap,
)
from torchremat.policies import save_matmuls

LAYERS, WIDTH = 6, 32


def four(x):
    for _ in range(4):
        x = (x * 1.1).tanh()
    return x


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh().sin())


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(LAYERS)))


def points():
    return torch.linspace(-1, 1, 64 * WIDTH).sin().view(64, WIDTH).requires_grad_()


def energy_and_forces(model):
    x = points()
    energy = model(x).square().sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy * 1e-3 + forces.square().mean()


def second_derivative(model):
    x = points()
    (first,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (first[:, 1] - second[:, 0]).square().mean()


def gradients(model, step):
    step(model).backward()
    found = [one.grad for one in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize(("step", "share"), [(energy_and_forces, 0.52), (second_derivative, 0.48)])
def test_the_graph_of_a_gradient_keeps_the_inputs_of_regions_alone(step, share):
    # A thread of a device numbers the nodes that it makes by itself: see docs/limits.md.
    with torch.device("cpu"):
        model = net()
        plain, plain_bytes = gradients(model, step), measure(model, step).peak_bytes
        wrap(model, Residual)

        assert equal(gradients(model, step), plain)
        fixed = sum(one.nbytes for one in model.parameters())
        assert measure(model, step).peak_bytes - fixed < share * (plain_bytes - fixed)


def alive_after_the_gradient(run):
    """Return how many tensors of four calls are alive when the graph of the gradient is there."""
    alive = WeakSet()

    def body(x):
        for _ in range(4):
            x = (x * x).sin()
            alive.add(x.untyped_storage())
        return x

    x = torch.linspace(-1, 1, 8).requires_grad_()
    y = run(body, run(body, x))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return len(alive), grad


def test_what_a_region_recomputes_for_a_gradient_does_not_stay():
    plain, grad = alive_after_the_gradient(lambda f, x: f(x))
    ours, grad_of_ours = alive_after_the_gradient(checkpoint)

    assert (plain, ours) == (8, 2)  # the outputs of the regions: of one the next one's input, of the other the test's
    assert torch.equal(grad, grad_of_ours)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_each_order_is_recomputed_once_in_each_backward_that_asks(order):
    body, x = Counted(four), leaf(8)

    def run(f):
        value = f(x).sum()
        for _ in range(order):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.sum()
        return torch.autograd.grad(value, x)

    assert agree(run(checkpointed(body)), run(four))
    # Each backward asks all graphs before it, and a region of each of them runs the forward again. What a device's
    # thread has made of the graph of a gradient has no derivative.
    on_a_device = torch.get_default_device().type != "cpu"
    assert body.calls == ({1: 4, 2: 7, 3: 11} if on_a_device else {1: 4, 2: 8, 3: 14})[order]


def test_a_plain_backward_recomputes_once_as_ever():
    body, x = Counted(four), leaf(8)

    checkpointed(body)(x).sum().backward()

    assert body.calls == 2


def test_regions_inside_have_derivatives_also_where_a_derivative_runs_them_again():
    # Else what their gradients save stays while the derivative around them runs, and the peak is that without them.
    with torch.device("cpu"):  # a device's thread makes the graph of the gradient, and has no derivatives of it
        layers, x = nn.ModuleList(Residual() for _ in range(9)), torch.randn(256, WIDTH)

    def peak(inside):
        def three(part, h):
            for layer in part:
                h = inside(layer, h.sin()).tanh()
            return h

        def step(layers):
            h = own = x.clone().requires_grad_()
            for first in range(0, 9, 3):
                h = checkpoint(three, layers[first : first + 3], h)
            for _ in range(2):
                (h,) = torch.autograd.grad(h.square().mean(), own, create_graph=True)
            return h.square().mean()

        return measure(layers, step).peak_bytes

    assert peak(checkpoint) < peak(lambda layer, h: layer(h))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation(name):
    for returns in (1, 2):
        for wrt in ("input", "leaves", "weight", "middle"):
            program = Program((Block(((name, 0), ("tanh", 0)), returns, False),), 2, wrt, *[False] * 7)
            assert agree(program.run(checkpoint), program.run(lambda f, *args: f(*args)))


WAYS = {
    "checkpoint": checkpoint,
    "values": lambda f, *args: checkpointed(f, check="values")(*args),
    "late stop": lambda f, *args: checkpointed(f, early_stop=False)(*args),
    "debug": lambda f, *args: checkpointed(f, debug=True)(*args),
    "policy": lambda f, *args: checkpointed(f, policy=save_matmuls)(*args),
    "unchecked": lambda f, *args: checkpointed(f, check="none")(*args),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("way", WAYS)
def test_programs(way):
    compared = 0
    for seed in range(20):
        program = Program.random(f"{way} {seed}")
        try:
            plain = program.run(lambda f, *args: f(*args))
        except RuntimeError:
            continue  # one that autograd refuses
        assert agree(program.run(WAYS[way]), plain), program
        compared += 1
    assert compared > 10


def test_a_tensor_that_other_code_has_kept_brings_its_gradient():
    def run(region):
        kept = []

        def body(x):
            h = x.sin()
            kept.append(h)
            return h.exp().tanh()

        x = torch.linspace(-1, 1, 8).requires_grad_()
        value = region(body, x).sum() + kept[0].pow(3).sum()
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        return [grad, *torch.autograd.grad(grad.square().sum(), x)]

    assert equal(run(checkpoint), run(lambda f, x: f(x)))


def test_a_backward_under_autocast_runs_again_under_autocast():
    def run(region):
        model = nn.Linear(8, 8)
        nn.init.eye_(model.weight)
        x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
        y = region(lambda x: model(x).tanh(), x)
        with torch.autocast("cpu", torch.bfloat16):
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            value = (grad @ grad).sum()
        return [grad, *torch.autograd.grad(value, [x, model.weight])]

    torch.manual_seed(0)
    plain = run(lambda f, x: f(x))
    torch.manual_seed(0)
    assert equal(run(checkpoint), plain)


def test_a_gradient_that_was_written_since_is_named():
    x = leaf(8)
    y = checkpoint(four, x)
    seed = torch.ones(8)
    (grad,) = torch.autograd.grad(y, x, seed, create_graph=True)

    seed.mul_(2)

    with pytest.raises(MutationError, match=r"derivative of region.*its input kwargs\['gradients'\]"):
        grad.sum().backward()


def test_an_input_that_was_written_since_is_named():
    x = leaf(8)
    h = x * 1.0
    (grad,) = torch.autograd.grad(checkpoint(four, h).sum(), x, create_graph=True)

    h.detach().mul_(2)

    with pytest.raises(MutationError, match=r"derivative of region.*its input args\[0\]"):
        grad.sum().backward()


def test_a_backward_reads_again_what_it_has_read():
    class Scaled(torch.autograd.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return (grad * Scaled.factor) * x.sin()

    def run(region):
        Scaled.factor = 1.0
        x = torch.linspace(-1, 1, 8).requires_grad_()
        (grad,) = torch.autograd.grad(region(lambda x: Scaled.apply(x.sin()).exp(), x).sum(), x, create_graph=True)
        Scaled.factor = 2.0
        return torch.autograd.grad(grad.sum(), x)

    # Of its second run alone: what autograd calls itself is autograd's, and reads what is there.
    (plain,), (ours,) = run(lambda f, x: f(x)), run(checkpoint)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("ends", ["dropped", "backward", "raises", "outer raises"])
def test_all_is_freed_without_the_cycle_collector(ends):
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no")

    def step():
        x = leaf(8)
        h = x * 1.0
        if ends == "raises":
            h = Raises.apply(h)
        y = checkpoint(four, checkpoint(four, h))
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        if ends == "outer raises":
            grad = Raises.apply(grad)
        if ends != "dropped":
            grad.sum().backward()

    gc.collect()
    before = len(live_regions())
    gc.disable()
    try:
        for _ in range(3):
            if "raises" in ends:
                with pytest.raises(ValueError, match="no"):
                    step()
            else:
                step()
        torch.ones((), requires_grad=True).backward()  # frees the nodes that a failed backward has left
        assert len(live_regions()) == before
    finally:
        gc.enable()


def test_two_threads_differentiate_gradients_of_their_own():
    weight, x = leaf(8), leaf(8)

    def value():
        (grad,) = torch.autograd.grad(checkpoint(lambda x: four(x * weight), x).sum(), x, create_graph=True)
        return grad.sum()

    values: list = []
    threads = [threading.Thread(target=lambda: values.append(value())) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    backward_at_once(values)
    ours, weight.grad = weight.grad, None
    value().backward()

    assert torch.allclose(ours, 2 * weight.grad)


@pytest.mark.parametrize("before", [0, 4, 8, 12])
@pytest.mark.parametrize("way", ["argument", "captured"])
def test_nodes_of_another_thread_are_not_those_of_the_region(way, before):
    # Each thread numbers its nodes from nought: those before the region have the same numbers as those in it.
    def run(region):
        x, made, values = torch.linspace(-1, 1, 8).requires_grad_(), [], []

        def prepare():
            h = x
            for _ in range(before):
                h = h * 1.25
            made.append(h)

        def forward():
            h = made[0]
            if way == "argument":
                values.append(region(four, h).sum())
            else:
                values.append(region(lambda first: four(first * h), x).sum())

        for target in (prepare, forward):
            one = threading.Thread(target=target)
            one.start()
            one.join()
        (grad,) = torch.autograd.grad(values[0], x, create_graph=True)
        return [grad, *torch.autograd.grad(grad.square().sum(), x)]

    assert equal(run(checkpoint), run(lambda f, x: f(x)))


def test_a_graph_that_a_recompute_reaches_and_did_not_make_is_refused():
    reached = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    x, other = leaf(8), leaf(8)
    hidden = {"made": None}

    def prepare():
        h = other
        for _ in range(5):
            h = h * 1.25
        hidden["made"] = h

    def forward():
        # A tensor that no search finds: it comes from a generator.
        source = (hidden[name] for name in ["made", "made", "made"])
        reached.append(checkpoint(lambda x: four(Reads.apply(x) * next(source)), x).sum())

    for target in (prepare, forward):
        one = threading.Thread(target=target)
        one.start()
        one.join()
    (grad,) = torch.autograd.grad(reached[0], x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"another thread has made. Pass that tensor to the region"):
        grad.square().sum().backward()


def test_a_recompute_with_another_graph_is_named():
    def body(x):
        y = x.sin()
        return (y if is_recomputing() else y.view_as(y)).exp()

    x = leaf(8)
    (grad,) = torch.autograd.grad(checkpoint(body, x).sum(), x, create_graph=True)

    with pytest.raises(CheckpointError, match=r"3 with 2 edges, not 3 with 3. Does its code ask whether it runs again"):
        grad.sum().backward()


def test_a_store_takes_what_derivatives_keep():
    model = net()
    plain = gradients(model, energy_and_forces)
    wrap(model, Residual)

    store = Host()
    with offload(store, min_bytes=0):
        ours = gradients(model, energy_and_forces)

    assert agree(ours, plain)
    assert store.statistics.peak_stored_bytes > 0


def test_the_drop_in_and_torchs_own_give_the_same():
    x = leaf(8)

    def run(region):
        (grad,) = torch.autograd.grad(region(four, x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)

    assert equal(run(checkpoint), run(lambda f, x: torch_checkpoint(f, x, use_reentrant=False)))
