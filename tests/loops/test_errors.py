"""A body that a loop cannot run, and options that it cannot honour: each by name, before anything is half done."""

from importlib import import_module

import pytest
import torch

from logs import Count
from torchremat import BudgetError, CheckpointError, Host, MutationError, UnsupportedError, loop

w = torch.ones(3, requires_grad=True)
h0 = torch.ones(3)


def good(h, x):
    return (h * w).sin(), h


def written(h, x):
    return h.add_(1) * w, None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda h, x: ((h, h), None), r"step 0: .* another structure: carry\[0\], carry\[1\], .* given carry"),
        (lambda h, x: (torch.cat([h * w, h]), None), r"step 0: the body changed `carry`: shape \(6,\)"),
        (lambda h, x: ((h * w).double(), None), r"step 0: the body changed `carry`: .* torch.float64"),
        (lambda h, x: h * w, r"step 0: the body has to return the next carry and an output .* returned Tensor"),
        (lambda h, x: (h * w, 5), r"output is 5; the output of a step has tensors, or None"),
        ("body", r"the body has to be a function, got str"),
    ],
)
@pytest.mark.parametrize("options", [{"slots": 2}, {"budget": "1MB"}])
def test_what_a_body_returns(body, message, options):
    with pytest.raises(UnsupportedError, match=message):
        loop(body, h0, length=5, **options)


def test_outputs_of_other_shapes():
    sizes = iter(range(1, 9))

    with pytest.raises(UnsupportedError, match=r"an output of step 1 has the shape \(2,\), and that of step 0 \(1,\)"):
        loop(lambda h, x: (h * w, torch.zeros(next(sizes))), h0, length=5, slots=2)


def test_outputs_of_another_structure():
    some = iter([None, h0, None])

    with pytest.raises(UnsupportedError, match="the output of step 1 has another structure than that of step 0"):
        loop(lambda h, x: (h * w, next(some)), h0, length=3, slots=2)


@pytest.mark.parametrize(
    ("carry", "message"),
    [
        ((h0, 1), r"carry\[1\] is 1; a carry has tensors, or None"),
        ({"h": h0, "name": "x"}, r"carry\['name'\] is 'x'"),
        ((), "the carry has no tensor"),
    ],
)
def test_carries(carry, message):
    with pytest.raises(UnsupportedError, match=message):
        loop(good, carry, length=5, slots=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0, "slots": 2}, "length=0: expected an int of at least 1"),
        ({"length": True, "slots": 2}, "length=True: expected an int of at least 1"),
        ({"length": 3, "slots": 0}, "slots=0: expected an int of at least 1"),
        ({"length": 3}, "either slots=, a number of carries, or budget="),
        ({"length": 3, "slots": 2, "budget": 100}, "either slots=, a number of carries, or budget="),
        ({"slots": 2}, "pass xs, length= or condition="),
        ({"xs": torch.zeros(0, 3), "slots": 2}, "xs has no slice"),
        ({"xs": torch.zeros(()), "slots": 2}, r"xs has the shape \(\)"),
        ({"xs": (torch.zeros(3), torch.zeros(4)), "slots": 2}, r"xs\[1\] has the shape \(4,\).* 3 here"),
        ({"xs": (torch.zeros(3), 7), "slots": 2}, r"xs\[1\] is 7; tensors, or None, are scanned"),
        ({"xs": torch.zeros(3), "length": 4, "slots": 2}, "length=4, but xs has 3 slices"),
        ({"xs": torch.zeros(3), "condition": bool, "slots": 2}, "xs and condition= contradict"),
        ({"length": 3, "condition": bool, "slots": 2}, "length= and condition= contradict"),
        ({"length": 3, "max_length": 3, "slots": 2}, "max_length= is for a loop with a condition="),
        ({"condition": bool, "stores": [object()], "slots": 2}, "stores= need a length"),
        ({"length": 3, "slots": 2, "transfer_steps": [1, 2]}, "has 2 times, and stores= 0 stores"),
        ({"length": 3, "slots": 2, "transfer_steps": -1}, "transfer_steps=-1"),
        ({"length": 3, "slots": 2, "check": "all"}, "check='all'"),
        ({"length": 3, "slots": 2, "step_costs": [1, 2]}, "step_costs= has 2 times for 3 steps"),
        ({"length": 3, "slots": 2, "step_costs": [1, 2, -1]}, "numbers from 0 on"),
        ({"condition": bool, "slots": 2, "step_costs": [1, 2]}, "Leave out step_costs=, or pass length= in place"),
        ({"length": 1, "slots": 2, "stores": [object()], "step_costs": [1]}, "step_costs= and stores= together"),
    ],
)
def test_options(options, message):
    with pytest.raises(UnsupportedError, match=message):
        loop(good, h0, **options)


def test_a_loop_that_does_not_end():
    with pytest.raises(UnsupportedError, match="still holds after max_length=10 steps"):
        loop(good, h0, condition=lambda h: True, max_length=10, slots=2)


def test_a_loop_that_never_begins_returns_its_carry():
    last, outputs = loop(good, h0, condition=lambda h: False, slots=2)

    assert last is h0
    assert outputs is None


@pytest.mark.parametrize("options", [{"length": 5}, {"condition": lambda h: True}])
def test_a_budget_below_one_step(options):
    # The first carry; the carry of a recorded step and its product.
    with pytest.raises(BudgetError, match=r"a budget of 35 B is below one step .* Smallest budget that works: 36 B"):
        loop(good, h0, budget=35, **options)

    assert loop(good, h0, length=5, budget=36)[0].requires_grad
    assert loop(good, h0, length=1, budget=24)[0].requires_grad


def test_a_body_that_writes_its_carry():
    with pytest.raises(MutationError, match="step 0: the body wrote `carry` in place"):
        loop(written, h0.clone(), length=5, slots=2)


def test_a_body_that_reads_what_it_writes():
    large = torch.zeros(3, 400_000)  # a small one is copied before each step

    def body(carry, x):
        h, index = carry
        large[:, int(index)] = h.detach()
        return ((h * w).sin() + large[:, 0] * h, index + 1), None

    (last, _), _ = loop(body, (h0, torch.zeros((), dtype=torch.long)), length=5, slots=2)

    with pytest.raises(MutationError, match="its forward wrote `large` in place"):
        last.sum().backward()


@pytest.mark.parametrize("options", [{}, {"check": "values"}])
def test_a_body_that_draws_out_of_sight_from_a_generator_that_is_not_registered(options):
    def body(h, _):
        return (h * w * import_module("random").random()).sin(), None

    last, _ = loop(body, h0, length=5, slots=2, **options)

    with pytest.raises(CheckpointError, match="Python's `random`"):
        last.sum().backward()


def test_what_was_written_after_the_loop():
    first, xs = torch.ones(3), torch.ones(5, 3)
    last, _ = loop(good, first, xs, slots=2)
    first.add_(1)

    with pytest.raises(MutationError, match="was changed in place between forward and recompute"):
        last.sum().backward()

    last, _ = loop(lambda h, x: ((h * w).sin() + x * (h * w).detach(), None), torch.ones(3), xs, slots=2)
    xs.add_(1)

    with pytest.raises(MutationError, match="was changed in place between forward and recompute"):
        last.sum().backward()


@pytest.mark.parametrize("store", [None, Host])
@pytest.mark.parametrize("options", [{"slots": 2}, {"budget": 8 * 1600}, {"budget": 5 * 1600}])
def test_after_an_error_in_a_recompute_the_loop_is_as_it_was(options, store):
    wide, fails = torch.full((400,), 0.9, requires_grad=True), Count()

    def body(h, x):
        if fails.value == 1 and x == 1:
            raise ValueError("now")
        return (h * wide).sin(), None

    def run(**more):
        return loop(body, torch.ones(400), torch.arange(9.0), **more)[0].sum()

    stores = () if store is None else (store(),)
    (plain,) = torch.autograd.grad(run(slots=9), wide)
    last = run(**options, stores=stores, transfer_steps=0)

    fails.up()
    with pytest.raises(ValueError, match="now"):
        torch.autograd.grad(last, wide, retain_graph=True)
    fails.up()

    assert torch.equal(torch.autograd.grad(last, wide)[0], plain)
    del last
    assert [one.statistics.stored_bytes for one in stores] == [0] * len(stores)


def test_an_error_of_the_body_leaves_nothing():
    def body(h, x):
        if x == 3:
            raise ValueError("three")
        return h * w, None

    with pytest.raises(ValueError, match="three"):
        loop(body, h0, torch.arange(5.0), slots=2)

    assert loop(good, h0, length=5, slots=2)[0].shape == (3,)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("transform", [torch.func.jacrev, lambda step: torch.func.hessian(lambda x: step(x).sum())])
def test_what_a_body_closes_over_goes_into_the_carry_under_jacrev(transform):
    weight, x = torch.randn(3, 3), torch.randn(3)

    def plain(x):
        h = x
        for _ in range(4):
            h = torch.tanh(h @ weight * x.sum())
        return h

    def closing(x):
        return loop(lambda h, _: (torch.tanh(h @ weight * x.sum()), None), x, length=4, slots=2)[0]

    def carrying(x):
        def body(carry, _):
            h, x = carry
            return (torch.tanh(h @ weight * x.sum()), x), None

        return loop(body, (x, x), length=4, slots=2)[0][0]

    with pytest.raises(UnsupportedError, match=r"Pass them as arguments \(of a `torchremat.loop`: in its carry\)"):
        transform(closing)(x)
    assert torch.equal(transform(carrying)(x), transform(plain)(x))
