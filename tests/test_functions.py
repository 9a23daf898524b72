"""Which custom Function saves: told where it has no frame of its own."""

import threading

import torch
from torch.autograd.graph import saved_tensors_hooks

from torchremat._compat.autograd import noted_functions, saving_function


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, also=None):
        ctx.save_for_backward(x, also)
        if also is not None:
            with torch.enable_grad():
                also.exp()  # saves, but is not this Function
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


class Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, None, x)
        with torch.enable_grad():
            Doubled.apply(x.detach().requires_grad_())
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def savers_in(step):
    """Who saves, in order; None for what is no custom Function."""
    found = []

    def pack(tensor):
        found.append(saving_function())
        return tensor

    with noted_functions(), saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return found


def x():
    return torch.ones(2, requires_grad=True)


def test_alias_of_apply():
    # `apply` is taken once, as modules often do: whoever would exchange it meanwhile sees nothing.
    apply = Doubled.apply

    assert savers_in(lambda: apply(x().exp()).sin()) == [None, "Doubled", None]


def test_operators_in_a_forward_are_not_the_function():
    assert savers_in(lambda: Doubled.apply(x(), x())) == [None, "Doubled", "Doubled"]


def test_functions_in_functions():
    assert savers_in(lambda: Outer.apply(x()).exp()) == ["Doubled", "Outer", "Outer", None]


def test_a_function_without_grad_saves_nothing():
    def step():
        with torch.no_grad():
            Doubled.apply(x())
        Doubled.apply(torch.ones(2))
        x().exp()

    assert savers_in(step) == [None]


def test_a_forward_that_raises_saves_nothing():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            raise ZeroDivisionError

    def step():
        try:
            Broken.apply(x())
        except ZeroDivisionError:
            x().exp()

    assert savers_in(step) == [None]


def test_other_threads_have_calls_of_their_own():
    found = []

    def pack(tensor):
        thread = threading.Thread(target=lambda: found.append(saving_function()))
        thread.start()
        thread.join()
        found.append(saving_function())

    with noted_functions(), saved_tensors_hooks(pack, lambda packed: packed):
        Doubled.apply(x())

    assert found == [None, "Doubled"]


def test_the_method_is_torchs_own_again():
    before = torch.autograd.function.FunctionCtx.save_for_backward

    with noted_functions():
        with noted_functions():
            pass
        assert torch.autograd.function.FunctionCtx.save_for_backward is not before

    assert torch.autograd.function.FunctionCtx.save_for_backward is before
