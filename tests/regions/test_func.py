"""Regions under torch.func, forward-mode differentiation and the other ways to ask autograd for derivatives."""

import gc

import pytest
import torch
from torch import func, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from logs import Count, Log
from regions.comparing import Counted, Twice, Watched, leaf, live_regions, three
from torchremat import MutationError, UnsupportedError, checkpoint, checkpointed, session, wrap

# Torch itself scripts the formulas of forward mode when one is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def plainly(function, *args):
    return function(*args)


def all_equal(ours, plain):
    ours, plain = tree_leaves(ours), tree_leaves(plain)
    return len(ours) == len(plain) and all(map(torch.equal, ours, plain))


def summed(function):
    return lambda x: function(x).sum()


# What is asked for, as a function of a function of one vector, and how often the body of the region runs for it.
TRANSFORMS = {
    "grad": (lambda f, x: func.grad(summed(f))(x), 2),
    "grad_and_value": (lambda f, x: func.grad_and_value(summed(f))(x), 2),
    "vjp": (lambda f, x: func.vjp(f, x)[1](x), 2),
    "two vjps": (lambda f, x: [g(x) for _, g in [func.vjp(f, x)] for _ in range(2)], 3),
    "jacrev": (lambda f, x: func.jacrev(f)(x), 2),
    "jacrev in chunks": (lambda f, x: func.jacrev(f, chunk_size=2)(x), 3),
    "jacfwd": (lambda f, x: func.jacfwd(f)(x), 1),
    "hessian": (lambda f, x: func.hessian(summed(f))(x), 2),
    "jacfwd of jacfwd": (lambda f, x: func.jacfwd(func.jacfwd(f))(x), 1),
    "jvp": (lambda f, x: func.jvp(f, (x,), (x.cos(),)), 1),
    "jvp of grad": (lambda f, x: func.jvp(func.grad(summed(f)), (x,), (x.cos(),)), 2),
    "vmap": (lambda f, x: func.vmap(f)(torch.stack([x, x.cos()])), 1),
    "vmap of grad": (lambda f, x: func.vmap(func.grad(summed(f)))(torch.stack([x, x.cos()])), 2),
    "vmap of jacrev": (lambda f, x: func.vmap(func.jacrev(f))(torch.stack([x, x.cos()])), 2),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_a_region(name):
    transform, calls = TRANSFORMS[name]
    body, x = Counted(three), torch.randn(4)

    ours = transform(checkpointed(body), x)

    assert all_equal(ours, transform(three, x))
    assert body.calls == calls


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_nested_regions(name):
    transform, calls = TRANSFORMS[name]
    inner, x = Counted(three), torch.randn(4)
    outer = Counted(lambda x: checkpoint(inner, x.sin()).cos())

    ours = transform(checkpointed(outer), x)

    assert all_equal(ours, transform(lambda x: three(x.sin()).cos(), x))
    # Each recompute of the outer one runs the inner one, which is recomputed in its own right.
    assert outer.calls == calls and inner.calls == 2 * calls - 1


@pytest.mark.parametrize("name", ["grad", "vjp", "jacrev", "hessian", "vmap of grad"])
def test_what_torch_checks_and_restores_is_so_here_too(name):
    transform, _ = TRANSFORMS[name]
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4).eval(), nn.Linear(4, 4)).requires_grad_(False)
    x = torch.randn(4)

    ours = transform(lambda x: checkpoint(layers, x[None])[0], x)

    assert all_equal(ours, transform(lambda x: layers(x[None])[0], x))


def test_random_numbers_are_drawn_again():
    x = torch.randn(64)

    def run(call):
        torch.manual_seed(3)
        return func.grad(lambda x: call(lambda x: torch.dropout(x.exp(), 0.5, True).sin(), x).sum())(x), torch.rand(1)

    assert all_equal(run(checkpoint), run(plainly))


def test_a_python_node_under_a_transform():
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.exp()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            (again,) = ctx.saved_tensors
            return grad * (y + again) / 2

    def function(x):
        return Exp.apply(x.sin()).cos()

    body, x = Counted(function), torch.randn(4)

    ours = func.grad(summed(checkpointed(body)))(x)

    assert torch.equal(ours, func.grad(summed(function))(x)) and body.calls == 2


# ------------------------------------------------------------------------------------------- parameters as inputs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.calls = Count()

    def block(self, x, layer):
        self.calls.up()
        return layer(x).exp().tanh()

    def forward(self, x):
        for layer in self.layers:
            x = self.call(self.block, x, layer)
        return x.sum()


def net(call):
    torch.manual_seed(1)
    model = Net()
    model.call = call
    return model, {name: value.detach() for name, value in model.named_parameters()}


PER_PARAMETER = {
    "grad": lambda f: func.grad(f),
    "jacrev": lambda f: func.jacrev(f),
    "hessian": lambda f: func.hessian(f),
}


@pytest.mark.parametrize("name", PER_PARAMETER)
def test_functional_call(name):
    x = torch.randn(3, 4)

    def run(call):
        model, parameters = net(call)
        return PER_PARAMETER[name](lambda p: func.functional_call(model, p, (x,)))(parameters), model.calls.value

    (ours, calls), (plain, plain_calls) = run(checkpoint), run(plainly)

    assert all_equal(ours, plain)
    assert (plain_calls, calls) == (2, 4)


def test_per_sample_gradients():
    x = torch.randn(3, 4)

    def run(call):
        model, parameters = net(call)
        per_sample = func.vmap(func.grad(lambda p, x: func.functional_call(model, p, (x,))), in_dims=(None, 0))
        return per_sample(parameters, x), model.calls.value

    (ours, calls), (plain, plain_calls) = run(checkpoint), run(plainly)

    assert all_equal(ours, plain)
    assert (plain_calls, calls) == (2, 4)


def test_per_sample_gradients_of_a_wrapped_model():
    x = torch.randn(3, 4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    per_sample = func.vmap(func.grad(lambda p, x: func.functional_call(model, p, (x,)).sum()), in_dims=(None, 0))
    plain = per_sample(parameters, x)
    calls = Log()
    model[1][0].register_forward_hook(lambda *_: calls.append(1))

    wrap(model, "[0-9]")
    ours = per_sample(parameters, x)

    assert all_equal(ours, plain) and len(calls) == 2


def test_a_closure_over_what_is_differentiated():
    x, w = torch.randn(3, 4), torch.randn(4, 4)

    def run(call, transform):
        return transform(lambda w: call(lambda x: (x @ w).tanh(), x).sum())(w)

    for transform in (func.grad, func.jacrev):  # the recompute of the latter runs when the transform is over
        assert torch.equal(run(checkpoint, transform), run(plainly, transform))


def test_parameters_that_require_grad_beside_a_transform():
    model, x = nn.Linear(4, 4), torch.randn(4)
    (plain,) = torch.autograd.grad(model(x).exp().sum(), model.weight)
    transformed = func.grad(lambda x: model(x).exp().sum())(x)

    ours = func.grad(lambda x: checkpoint(lambda x: model(x).exp(), x).sum())(x)
    (after,) = torch.autograd.grad(checkpoint(lambda x: model(x).exp(), x).sum(), model.weight)

    assert torch.equal(ours, transformed) and torch.equal(after, plain)


# --------------------------------------------------------------------------------------------- bytes and lifetimes


class Wrapped(Watched):
    """Watches the storages below the wrappers of a transform."""

    def forward(self, x):
        self._ran.up()
        y = inner = x.exp()
        while is_functorch_wrapped_tensor(inner):
            inner = get_unwrapped(inner)
        self.alive.add(inner.untyped_storage())
        return (y * y.detach().clone()).sin()


@pytest.mark.parametrize("transform", [func.grad, func.jacrev, func.hessian], ids=lambda one: one.__name__)
def test_what_a_region_saves_is_dropped_and_goes_with_the_transform(transform):
    layer = Wrapped()
    gc.collect()
    before = len(live_regions())
    alive = []

    def function(x, call):
        y = call(layer, x)
        alive.append(len(layer.alive))
        return y.sum()

    transform(lambda x: function(x, plainly))(torch.randn(4))
    transform(lambda x: function(x, checkpoint))(torch.randn(4))

    # The plain call keeps it for the backward, the region does not.
    assert alive == [1, 0] and layer.calls == 3
    assert len(layer.alive) == 0 and len(live_regions()) == before


def test_a_session_serves_two_vjps():
    body, x = Counted(three), torch.randn(4)
    with session():
        _, vjp = func.vjp(checkpointed(body), x)
        ours = [vjp(x), vjp(x.cos())]

    _, vjp = func.vjp(three, x)
    assert all_equal(ours, [vjp(x), vjp(x.cos())]) and body.calls == 2


def test_hooks_are_as_forbidden_after_a_region_as_before():
    def function(x):
        y = checkpoint(three, x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return y.sum()

    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        func.grad(function)(torch.randn(4))


def test_an_input_written_in_place_is_named():
    def function(x):
        h = x * 1
        y = checkpoint(three, h)
        h.add_(1)
        return y.sum()

    with pytest.raises(MutationError, match=r"its input args\[0\] was changed in place"):
        func.grad(function)(torch.randn(4))


# ------------------------------------------------------------------------------------------------- what is refused


def second(outer, inner):
    return lambda f, x: outer(lambda x: inner(f)(x).sum())(x)


OVER = {
    "grad of grad": second(func.grad, lambda f: func.grad(summed(f))),
    "jacrev of jacrev": lambda f, x: func.jacrev(func.jacrev(f))(x),
    "grad of jacfwd": second(func.grad, func.jacfwd),
    "grad of vmap": lambda f, x: func.grad(lambda x: func.vmap(f)(x).sum())(torch.stack([x, x])),
    "backward of vmap": lambda f, x: func.vmap(f)(leaf(2, 4)).sum().backward(),
    "backward of jvp": lambda f, x: func.jvp(f, (leaf(4),), (x,))[1].sum().backward(),
    "backward of grad": lambda f, x: func.grad(summed(f))(leaf(4)).sum().backward(),
}


@pytest.mark.parametrize("name", OVER)
def test_a_gradient_after_the_transform_is_refused(name):
    with pytest.raises(UnsupportedError, match=r"the innermost transform is over.*Put the region around the transform"):
        OVER[name](checkpointed(three), torch.randn(4))


def test_what_the_refusal_recommends():
    x, body = leaf(3, 4), Counted(lambda x: func.vmap(three)(x))
    (plain,) = torch.autograd.grad(func.vmap(three)(x).sum(), x)

    (ours,) = torch.autograd.grad(checkpoint(body, x).sum(), x)

    assert torch.equal(ours, plain) and body.calls == 2
    (again,) = torch.autograd.grad(checkpoint(lambda x: func.jvp(three, (x,), (x,))[1], x).sum(), x)
    assert torch.equal(again, torch.autograd.grad(func.jvp(three, (x,), (x,))[1].sum(), x)[0])


@pytest.mark.parametrize("transform", [func.grad, func.jacrev, func.hessian], ids=lambda one: one.__name__)
def test_reverse_mode_inside_a_region_is_refused(transform):
    with pytest.raises(
        UnsupportedError, match=r"torch\.func\.grad, vjp, jacrev and hessian do not run inside a region"
    ):
        checkpoint(lambda x: transform(summed(three))(x), leaf(4))


# ---------------------------------------------------------------------------------------------------- without func


def dual(f, x, tangent):
    with forward_ad.dual_level():
        y = f(forward_ad.make_dual(x, tangent))
        primal, tangent = forward_ad.unpack_dual(y)
        return torch.autograd.grad((primal * 3 + tangent).sum(), x)


def dual_later(f, x, tangent):
    with forward_ad.dual_level():
        primal = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).primal
    return torch.autograd.grad(primal.sum(), x)


def double(f, x, _):
    (grad,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)


def penalty(f, x, _):
    loss = f(x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(loss + (grad.norm() - 1) ** 2, x)


def batched(f, x, _):
    return torch.autograd.grad(f(x), x, torch.eye(4), is_grads_batched=True)


def batched_twice(f, x, _):
    (rows,) = torch.autograd.grad(f(x), x, torch.eye(4), is_grads_batched=True, create_graph=True)
    return [rows, *torch.autograd.grad(rows.square().sum(), x)]


def graph_with_tangents(f, x, tangent):
    y = f(x)
    with forward_ad.dual_level():
        (grad,) = torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones(4), tangent), create_graph=True)
        primal, dual = forward_ad.unpack_dual(grad)
        return [primal.detach(), dual.detach(), *torch.autograd.grad(dual.square().sum(), x)]


def tangent_requires_grad(f, x, tangent):
    tangent = tangent.requires_grad_()
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent
        return torch.autograd.grad(y.sum(), [x, tangent])


def of_the_middle(f, x, _):
    h = x.sin()
    return torch.autograd.grad(f(h).sum(), [h])


def functional_forward(f, x, _):
    return torch.autograd.functional.jacobian(f, x.detach(), vectorize=True, strategy="forward-mode")


WAYS = {
    "dual": (dual, 2),
    "dual, backward later": (dual_later, 2),
    "dual, a tangent that requires grad": (tangent_requires_grad, 2),
    "double backward": (double, 4),  # the graph of the gradient is recomputed as well
    "gradient penalty": (penalty, 4),
    "is_grads_batched": (batched, 2),
    "is_grads_batched, double backward": (batched_twice, 3),
    "double backward with tangents": (graph_with_tangents, 3),
    "gradient of an intermediate": (of_the_middle, 2),
    "functional.jacobian": (lambda f, x, _: torch.autograd.functional.jacobian(f, x.detach()), 5),
    "functional.jacobian, vectorized": (
        lambda f, x, _: torch.autograd.functional.jacobian(f, x.detach(), vectorize=True),
        2,
    ),
    "functional.jacobian, forward mode": (functional_forward, 1),
    "functional.hvp": (lambda f, x, v: torch.autograd.functional.hvp(summed(f), x.detach(), v), 6),
}


@pytest.mark.parametrize("name", WAYS)
def test_other_ways_to_differentiate(name):
    way, calls = WAYS[name]
    body, x, tangent = Counted(three), leaf(4), torch.randn(4)

    ours = way(checkpointed(body), x, tangent)

    assert all_equal(ours, way(three, x, tangent))
    # What a device's thread has made of the graph of a gradient has no derivative.
    assert body.calls == (5 if name == "functional.hvp" and torch.get_default_device().type != "cpu" else calls)


def test_gradients_in_batches_leave_random_numbers_alone():
    def function(x):
        return torch.dropout(x.exp(), 0.5, True).sin()

    body, x = Counted(function), leaf(4)

    def run(f):
        torch.manual_seed(2)
        return batched(f, x, None)

    assert all_equal(run(checkpointed(body)), run(function)) and body.calls == 2


def test_torch_checks_our_gradients():
    x = leaf(4, dtype=torch.double)
    region = checkpointed(lambda x: Twice.apply(x.sin()).cos())

    assert torch.autograd.gradcheck(checkpointed(three), (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(checkpointed(three), (x,))
    assert torch.autograd.gradcheck(region, (x,))
