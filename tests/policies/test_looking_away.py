"""Policies of plans, which are asked about the first operators of a call: after the last of them nobody looks.

An operator that passes through a mode takes longer than the operator, and a plan that holds the first product of a
block paid for all that come after it, in the forward and in the recompute.
"""

import warnings
from itertools import combinations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from logs import Log
from policies.counting import Counted, gradients
from probes.regions import dispatch_modes, op_info_of, save_ordinals, windows_of
from torchremat import CheckpointError, PolicyError, checkpoint, checkpointed
from torchremat.extend import RECOMPUTE, SAVE, Window
from torchremat.policies import Policy

CHAIN = ("aten.sin.default", "aten.exp.default", "aten.cos.default", "aten.exp.default", "aten.sin.default")


def leaf():
    return torch.linspace(0.1, 1.0, 6, dtype=torch.float64).requires_grad_()


def holding(*held, operators=CHAIN):
    return save_ordinals(operators, frozenset(held))


def chain(x, seen=None):
    """Five operators, each of which saves a tensor; notes the number of modes before each of them."""
    for name in CHAIN:
        if seen is not None:
            seen.append(len(dispatch_modes()))
        x = getattr(x, name.split(".")[1])()
    return x


@pytest.mark.parametrize(
    ("held", "forward", "recompute"),
    [
        # `exp` saves its result, and nobody looks from then on; `sin` has saved its input, so for it that is later.
        ((0,), [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]),
        ((1,), [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]),
        ((0, 3), [1, 1, 1, 1, 0], [1, 1, 1]),
        ((4,), [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
    ],
)
def test_nobody_looks_after_the_last_operator_that_is_held(held, forward, recompute):
    seen = Log()
    x = leaf()

    loss = checkpointed(lambda x: chain(x, seen), policy=holding(*held))(x).sum()
    assert (seen, dispatch_modes()) == (forward, [])
    seen.clear()
    found = torch.autograd.grad(loss, x)[0]

    assert (seen, dispatch_modes()) == (recompute, [])
    assert torch.equal(found, torch.autograd.grad(chain(x).sum(), x)[0])


def test_what_is_held_does_not_run_again():
    x = leaf()

    with Counted() as counted:
        gradients(checkpointed(chain, policy=holding(1)), x)

    # Each runs once, and again in the recompute, but for the `exp` that is held; the last one is behind the last save.
    # Backward takes one `sin` for `cos`, and a `cos` for each `sin`.
    counts = {name: counted.counts[name] for name in ("sin", "exp", "cos")}
    assert counts == {"sin": 3 + 1, "exp": 3, "cos": 2 + 2}


def test_a_write_after_the_last_one_that_is_held_is_seen():
    # What is held is copied before it is written, so that nothing runs again for it.
    operators = ("aten.sin.default", "aten.cos.default", "aten.mul_.Tensor", "aten.sin.default")

    def function(x):
        hidden = x.sin().cos()
        return hidden.mul_(2.0).sin()

    with Counted() as counted:
        found = gradients(checkpointed(function, policy=holding(1, operators=operators)), leaf())

    assert found == gradients(function, leaf())
    assert windows_of(operators, (1,), ()) == (Window(last=2),)
    assert counted.counts["cos"] == 1 + 2  # and two backwards of `sin`


def test_which_operators_matter():
    first = (Window(last=0),)
    assert windows_of(CHAIN, (), ()) == ()
    assert windows_of(CHAIN, (0, 2), ()) == (Window(last=2),)
    assert windows_of(("aten.relu_.default", *CHAIN), (), ()) == first
    assert windows_of(("aten._foreach_add_.Scalar", "aten.mm.default"), (), ()) == first
    assert windows_of(("mine.write_.default", "a_higher_order_one", "aten.__and__.Tensor"), (0,), ()) == first
    assert windows_of(("aten.mm.default", "c10d.broadcast_.default"), (1,), ()) is None


def test_other_operators_after_the_last_one_that_matters_are_no_error():
    # Nothing is given to them: as in a region without any policy.
    runs = Log()

    def function(x):
        runs.append(None)
        hidden = x.sin().exp().cos()
        return hidden.exp() if len(runs) > 1 else (hidden * 1.0).exp()

    x = leaf()
    loss = checkpointed(function, policy=holding(1), check="none")(x).sum()

    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(chain_of_four(x).sum(), x)[0])


def chain_of_four(x):
    return x.sin().exp().cos().exp()


def test_other_operators_before_it_are_an_error():
    runs = Log()

    def function(x):
        runs.append(None)
        hidden = x.sin() if len(runs) == 1 else x.cos()
        return hidden.exp().cos().sin()

    loss = checkpointed(function, policy=holding(1))(leaf()).sum()

    with pytest.raises(CheckpointError, match=r"operator 0 of the recompute is aten\.cos"):
        loss.backward()


def test_an_error_after_it_leaves_no_mode_behind():
    def function(x):
        chain(x)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        checkpointed(function, policy=holding(0))(leaf())

    assert dispatch_modes() == []


class Doubled(TorchDispatchMode):
    """Acts: whatever is multiplied is multiplied twice."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return func(output, *args[1:], **(kwargs or {})) if func is torch.ops.aten.mul.Tensor else output


def test_under_a_mode_of_the_user_and_around_one():
    def inside(x):
        hidden = x.sin().exp()
        with Doubled():
            hidden = hidden.cos() * 3.0
            assert isinstance(dispatch_modes()[-1], Doubled)
            hidden = hidden.exp()
        return hidden.sin()

    for policy in (holding(0), holding(1)):
        x = leaf()
        assert gradients(checkpointed(inside, policy=policy), x) == gradients(inside, x)
        with Doubled() as mode:
            found = gradients(checkpointed(inside, policy=policy), x)
            assert dispatch_modes() == [mode]
            assert found == gradients(inside, x)
        assert dispatch_modes() == []


def test_regions_inside_and_around():
    seen = Log()

    def inner(x):
        return chain(x, seen)

    def outer(x):
        hidden = x.sin().exp().cos()  # nobody looks any more
        seen.append(len(dispatch_modes()))
        hidden = checkpoint(inner, hidden)
        seen.append(len(dispatch_modes()))
        return hidden.sin()

    x = leaf()
    operators = ("aten.sin.default", "aten.exp.default")
    loss = checkpointed(outer, policy=holding(0, operators=operators))(x).sum()

    # The region inside has the policy of the one around it, and looks for itself.
    assert seen == [0, 1, 1, 0, 0, 0, 0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(outer(x).sum(), x)[0])
    assert dispatch_modes() == []


class First(Policy):
    """Keeps the first operator, and says so."""

    asks_in = (Window(last=0),)

    def __init__(self):
        self.asked = []

    def __call__(self, ctx, op, /, *args, **kwargs):
        self.asked.append(str(op))
        return SAVE if ctx.ordinal == 0 else RECOMPUTE


def test_a_policy_of_ones_own_may_say_it_too():
    policy = First()

    assert gradients(checkpointed(chain, policy=policy), leaf()) == gradients(chain, leaf())
    assert policy.asked == ["aten.sin.default"]


@pytest.mark.parametrize(
    "windows",
    [
        1,
        ["all"],
        [Window(last=-1)],
        [Window(last=True)],
        [Window(last=1, first=2)],
        [Window(last=1, on=2, sees=2)],
        [Window(last=3), Window(last=2)],
    ],
)
def test_what_is_no_window(windows):
    policy = First()
    policy.asks_in = windows

    with pytest.raises(PolicyError, match="its asks_in is "):
        checkpointed(chain, policy=policy)


def test_together_with_another_one_it_is_asked_about_all():
    policy = First()

    gradients(checkpointed(chain, policy=policy | (lambda *_, **__: False)), leaf())

    assert policy.asked == list(CHAIN)


def test_twice_through_a_graph_that_is_retained():
    x = leaf()

    assert gradients(checkpointed(chain, policy=holding(1)), x, times=3) == gradients(chain, x)


SAVED = (0, 2, 2, 4, 4)  # `sin` and `cos` save what they are given, `exp` what it returns


@pytest.mark.parametrize(
    ("held", "windows", "forward", "recompute"),
    [
        # On at the save of the first `sin`, whose kernel is not done then, and seen from that of `cos`.
        ((3,), (Window(last=3, first=2, on=1, sees=3),), [0, 1, 1, 1, 0], [0, 1, 1]),
        ((4,), (Window(last=4, first=4, on=3, sees=5),), [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]),
        ((0, 4), (Window(last=0), Window(last=4, first=4, on=3, sees=5)), [1, 1, 0, 1, 1], [1, 1, 0, 1, 1]),
        ((0, 3), (Window(last=3),), [1, 1, 1, 1, 0], [1, 1, 1]),  # the mode would be on again at once
    ],
)
def test_somebody_looks_only_around_what_is_held(held, windows, forward, recompute):
    seen = Log()
    x = leaf()
    policy = save_ordinals(CHAIN, frozenset(held), SAVED)

    loss = checkpointed(lambda x: chain(x, seen), policy=policy)(x).sum()
    assert (policy.asks_in, seen, dispatch_modes()) == (windows, forward, [])
    seen.clear()
    found = torch.autograd.grad(loss, x)[0]

    assert (seen, dispatch_modes()) == (recompute, [])
    assert torch.equal(found, torch.autograd.grad(chain(x).sum(), x)[0])


def mlp(x, weight):
    return functional.gelu(functional.layer_norm(x @ weight, (4,)) @ weight.T) @ weight


def attention(x, weight):
    heads = (x @ weight)[None]
    return functional.dropout(functional.scaled_dot_product_attention(heads, heads, heads), 0.5).softmax(-1) * x


def recurrent(x, weight):
    both = torch.cat([weight, weight])
    return torch.gru_cell(x, x.sin(), torch.cat([weight, both]), torch.cat([both, weight]))


def in_place(x, weight):
    hidden = (x @ weight).exp()
    return (hidden.cos() * 2.0).add_(x.sin()).relu_().cos() * (hidden + 1.0).mul_(2.0).tanh_()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return x.exp() * 2.0

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad * 2.0


def with_a_function_of_the_users(x, weight):
    return Twice.apply((x @ weight).sin()).cos() @ weight


class Noted(TorchDispatchMode):
    """Notes what a function runs, as policies count it, and how much of it has begun before each save."""

    def __init__(self):
        self.operators, self.saves = Log(), Log()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if op_info_of(func).is_counted:
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))

    def saved(self, tensor):
        self.saves.append(len(self.operators))
        return tensor


def written_where_it_was_copied(x, weight):
    # Autograd copies what is multiplied in place, in the middle of the operator's saves.
    hidden = (x @ weight).sin()
    return ((hidden + 1.0).mul_(hidden.cos()) @ weight).tanh_().exp().cos().mul_(2.0).sin()


@pytest.mark.parametrize(
    "function",
    [mlp, attention, recurrent, in_place, with_a_function_of_the_users, written_where_it_was_copied],
)
def test_what_is_held_in_windows_is_what_is_held_in_full_sight(function):
    x, weight = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    note = Noted()
    with note, saved_tensors_hooks(note.saved, lambda tensor: tensor):
        function(x, weight)
    operators, saves = tuple(note.operators), tuple(note.saves)

    def run(policy):
        counted = Counted()
        torch.manual_seed(0)
        with counted:
            loss = (function(x, weight) if policy is None else checkpointed(function, policy=policy)(x, weight)).sum()
            found = torch.autograd.grad(loss, (x, weight))
        # What the region runs for itself: once for a dtype, and for each unsafe view that it is shown.
        del counted.counts["empty"], counted.counts["_has_compatible_shallow_copy_type"]
        return [one.tolist() for one in found], counted.forwards()

    plain = run(None)[0]
    shorter = 0
    for held in [*combinations(range(len(operators)), 1), *combinations(range(len(operators)), 2)]:
        sighted, windowed = save_ordinals(operators, frozenset(held)), save_ordinals(operators, frozenset(held), saves)
        shorter += windowed.asks_in != sighted.asks_in
        counts = run(sighted)[1]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of operators that are not the planned ones
            assert (held, *run(windowed)) == (held, plain, counts)
    assert shorter > len(operators) // 3


def test_a_write_to_an_unsafe_view_of_what_is_held_last():
    # It has a version of its own, and shows nothing in that of the product.
    x, weight = torch.rand(2, 3, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)

    def function(x):
        product = x.sin() @ weight
        return product, product.exp()

    def run(call):
        product, output = call(x)
        product.detach().mul_(2.0)
        return torch.autograd.grad(output.sum(), (x, weight))

    operators = ("aten.sin.default", "aten.mm.default", "aten.exp.default")
    for saves in ((), (0, 1, 1, 3)):
        found = run(checkpointed(function, policy=save_ordinals(operators, frozenset({1}), saves)))
        assert all(map(torch.equal, found, run(function)))
