"""Rules 1-9 and 12 of a region, each with a test that fails where the rule is broken."""

import gc
import threading
from contextlib import nullcontext
from functools import partial
from weakref import WeakSet, ref

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from logs import Hidden, Log
from policies.counting import Counted as Operators
from regions.comparing import Counted, Twice, Watched, backward_at_once, leaf, live_regions, same, three
from torchremat import CheckpointError, MutationError, checkpoint, checkpointed, session

# ------------------------------------------------------------------------------------ rule 1: the innermost alone


def test_what_is_saved_in_a_region_is_not_kept():
    alive = WeakSet()

    def body(x):
        for _ in range(3):
            x = x.exp()
            alive.add(x.untyped_storage())
        return x.sum()

    x = leaf(4)
    checkpoint(body, x)
    assert len(alive) == 0

    kept = body(x)
    assert len(alive) == 3
    del kept


def test_outer_hooks_see_the_inputs_of_a_region_and_nothing_else():
    packed = Log()
    x = leaf(4)

    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        y = checkpoint(lambda a, b, more: three(a) * b * more["c"][0], x, x * 2, more={"c": (x * 3,)})
    y.sum().backward()

    assert [torch.equal(tensor, x * factor) for tensor, factor in zip(packed, (1, 2, 3), strict=True)] == [True] * 3


def test_hooks_inside_a_region_are_respected():
    events = Log()

    def body(x):
        with saved_tensors_hooks(
            lambda tensor: events.append("pack") or tensor, lambda tensor: events.append("unpack") or tensor
        ):
            y = x.sin()
        return y.exp()

    x = leaf(4)

    checkpoint(body, x).sum().backward()

    # They hold their tensor themselves, as they do without the region; the recompute packs once more.
    assert events == ["pack", "pack", "unpack"]
    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])


# ------------------------------------------------------------------------------------ rule 2: inputs of the parent


def test_regions_inside_a_region_keep_nothing_outside_of_a_recompute():
    alive = WeakSet()

    def inner(x):
        y = x.exp()
        alive.add(y.untyped_storage())
        return y.sin()

    def outer(x):
        for _ in range(4):
            x = checkpoint(inner, x)
            alive.add(x.untyped_storage())
        return x

    x = leaf(4)
    y = checkpoint(outer, x)
    assert [storage.data_ptr() for storage in alive] == [y.untyped_storage().data_ptr()]

    grad = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(grad, torch.autograd.grad(outer(x).sum(), x)[0])


def test_nested_three_deep_each_level_is_recomputed_once():
    c, b, a = Counted(three), Counted(lambda x: checkpoint(c, x).sin()), Counted(lambda x: checkpoint(b, x).exp())
    x = leaf(4)

    y = checkpoint(a, x)
    assert (a.calls, b.calls, c.calls) == (1, 1, 1)

    y.sum().backward()
    # `exp` of a is needed first, so a runs to its end, and with it b and c. Then `sin` of b: b, and with it c. Then c.
    assert (a.calls, b.calls, c.calls) == (2, 3, 4)


@pytest.mark.parametrize("place", ["args", "kwargs", "list", "dict", "nested", "tuple"])
def test_tensors_anywhere_in_the_arguments_are_inputs(place):
    x, h = leaf(4), leaf(4)

    def arguments(t):
        return {
            "args": ((t,), {}),
            "kwargs": ((), {"a": t}),
            "list": (([t],), {}),
            "dict": (({"k": t},), {}),
            "nested": (([{"k": (1, [t])}],), {}),
            "tuple": (((t, t),), {}),
        }[place]

    def find(item):
        if isinstance(item, torch.Tensor):
            return item
        items = item.values() if isinstance(item, dict) else item
        return next(found for one in items if not isinstance(one, int) and (found := find(one)) is not None)

    def body(*args, **kwargs):
        return three(find(args or kwargs)) * h

    def run(call):
        args, kwargs = arguments(x * 2)
        return call(body, *args, **kwargs)

    packed = Log()
    with saved_tensors_hooks(lambda tensor: packed.append(tensor.detach()) or tensor, lambda tensor: tensor):
        run(checkpoint)

    assert any(torch.equal(tensor, x * 2) for tensor in packed)
    assert same(lambda: run(checkpoint), lambda: run(lambda f, *a, **k: f(*a, **k)), [x, h])


def test_an_input_that_is_given_twice_is_one_tensor_in_the_recompute():
    seen = Log()

    def body(a, b):
        seen.append(a is b)
        return a * b

    x = leaf(3)
    checkpoint(body, x, x).sum().backward()

    assert seen == [True, True]


# --------------------------------------------------------------------------------------------------------- rule 3


def test_a_recompute_is_called_with_leaves_as_if_no_region_were_active():
    seen = Log()

    def inner(x):
        seen.append(x.grad_fn is None)
        return three(x)

    x = leaf(3)
    checkpoint(lambda x: checkpoint(inner, x.sin()), x).sum().backward()

    # The forward and the parent's recompute give it a result of `sin`, its own recompute a leaf.
    assert seen[0] is False and seen[-1] is True


# --------------------------------------------------------------------------------------------------- rule 4: who owns


@pytest.mark.parametrize("retain_graph", [False, True])
def test_recomputed_tensors_go_as_backward_passes_by(retain_graph):
    layers = [Watched() for _ in range(4)]
    alive = []

    def body(x):
        for layer in layers:
            x = layer(x) * 0.1
        return x

    x = leaf(1000)
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: alive.append([len(one.alive) for one in layers]))
    checkpoint(body, x).sum().backward(retain_graph=retain_graph)

    # A hook runs when the gradients of its layer are there: its own tensors, and those of the layers before, are alive.
    assert [row[i + 1 :] for i, row in zip((3, 2, 1, 0), alive, strict=True)] == [[], [0], [0, 0], [0, 0, 0]]
    assert [len(one.alive) for one in layers] == [0, 0, 0, 0]


@pytest.mark.parametrize("retain_graph", [False, True])
def test_nothing_recomputed_is_left_after_backward(retain_graph):
    layer, x = Watched(), leaf(10)
    y = checkpoint(layer, x).sum()

    y.backward(retain_graph=retain_graph)

    assert layer.calls == 2
    assert len(layer.alive) == 0


def test_each_backward_recomputes_once():
    layer, x = Watched(), leaf(10)
    y = checkpoint(layer, x).sum()
    grads = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(3)]

    assert layer.calls == 4
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_what_a_partial_backward_leaves_goes_with_it():
    layer, x, w = Watched(), leaf(10), leaf(10)
    y = checkpoint(lambda x, w: layer(x) * w, x, w).sum()

    (grad,) = torch.autograd.grad(y, w, retain_graph=True)

    assert layer.calls == 2 and len(layer.alive) == 0
    assert torch.equal(grad, layer(x).detach())


def test_the_tensor_that_is_unpacked_first_goes_as_well():
    alive, left = WeakSet(), []

    def body(x):
        y = x.sin().exp()
        alive.add(y.untyped_storage())
        return y

    x = leaf(4)
    h = x * 1
    h.register_hook(lambda _: left.append(len(alive)))
    y = checkpoint(body, h).sum()
    del body
    y.backward(retain_graph=True)

    assert left == [0]


def test_a_recomputed_tensor_goes_with_the_last_that_could_ask_for_it():
    alive = WeakSet()

    def body(x):
        y = x.exp()
        alive.add(y.untyped_storage())
        return y.sin(), x.cos()

    x = leaf(4)
    first, second = checkpoint(body, x)
    with session():
        second.sum().backward()
        assert len(alive) == 1
        del first
        assert len(alive) == 0


def test_saved_tensors_read_twice_cost_one_recompute():
    body = Counted(lambda x: Twice.apply(x.exp()))
    x = leaf(4)

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])
    assert body.calls == 3


def test_what_a_python_node_has_unpacked_goes_when_it_has_run():
    alive = WeakSet()
    left = []

    def body(x):
        y = x.exp()
        alive.add(y.untyped_storage())
        return Twice.apply(y)

    x = leaf(4)
    h = x * 1
    h.register_hook(lambda _: left.append(len(alive)))
    y = checkpoint(body, h).sum()
    y.backward(retain_graph=True)

    assert left == [0]


def test_a_second_reading_in_the_next_backward_recomputes():
    body = Counted(lambda x: Twice.apply(x.exp()))
    x = leaf(4)
    y = checkpoint(body, x).sum()
    y.backward(retain_graph=True)
    y.backward()

    assert body.calls == 3


# ------------------------------------------------------------------------------------------- rule 5: early stop


def test_a_recompute_stops_at_the_last_tensor_needed():
    ran = Log()

    def body(x):
        y = x.exp()
        ran.append("exp")
        y = y * 2
        ran.append("times 2")
        y = y.sin()  # saves its input before it runs
        ran.append("sin")
        return y + 1

    x = leaf(4)
    checkpoint(body, x).sum().backward()
    assert ran == ["exp", "times 2", "sin", "exp", "times 2"]

    ran.clear()
    checkpointed(body, early_stop=False)(x).sum().backward()
    assert ran == ["exp", "times 2", "sin"] * 2


def test_a_recompute_stops_at_the_last_tensor_alive():
    ran = Log()

    def body(x):
        y = x.exp()
        ran.append("exp")
        z = y.sin()
        ran.append("sin")
        return y.cos(), z.sin()

    x = leaf(4)
    first, second = checkpoint(body, x)
    del second
    first.sum().backward()

    assert ran == ["exp", "sin", "exp", "sin"]

    ran.clear()
    _, _ = checkpoint(lambda x: (x.sin(), body(x)), x)[0].sum().backward(), None
    assert ran == ["exp", "sin"]


def test_user_code_may_swallow_the_stop():
    def body(x):
        y = x.exp()
        try:
            return y.sin()
        except BaseException:  # noqa: BLE001
            return y.exp().exp()

    x = leaf(4)

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])


def test_user_code_may_make_another_error_of_the_stop():
    def body(x):
        try:
            return x.exp().sin()
        except BaseException as error:
            raise ValueError from error

    x = leaf(4)

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("tail", [lambda y: y, lambda y: y + 1, lambda y: y.sin()], ids=["last", "glue", "sin"])
def test_rrelu_is_right_though_it_fills_what_it_has_saved(inplace, tail):
    # It saves its noise before it draws it, without a new version: a recompute that stops there hands out what
    # happened to lie in memory.
    def body(x):
        return tail(F.rrelu(x * 1, training=True, inplace=inplace))

    x = leaf(64)

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])


def test_rrelu_is_right_when_only_its_noise_is_needed():
    def body(x, y):
        h = F.rrelu(x * 1, training=True)
        return h, F.rrelu(y, training=True)

    x, y = leaf(64), leaf(64)

    assert same(lambda: checkpoint(body, x, y)[0], lambda: body(x, y)[0], [x])


def test_a_mask_does_not_keep_a_recompute_from_stopping():
    ran = Log()

    def body(x):
        y = F.dropout(x.exp(), 0.5)
        ran.append("dropout")
        return y + 1

    x = leaf(64)
    checkpoint(body, x).sum().backward()

    assert ran == ["dropout"]


def test_an_input_that_needs_no_gradient_does_not_keep_a_recompute_from_stopping():
    # It is as large as the input of the region inside, and was taken for something that its operation fills later: the
    # region inside ran in the recompute of the one around it, and once more in its own.
    ran = Log()

    def inside(h):
        ran.append("inside")
        return h.exp().sin()

    def body(x, weight):
        h = x * weight
        return checkpoint(inside, h)

    x, weight = torch.rand(64), leaf(64)

    def run():
        return checkpoint(body, x, weight)

    assert same(run, lambda: (x * weight).exp().sin(), [weight])
    ran.clear()
    run().sum().backward()
    assert ran == ["inside"] * 2  # in the forward, and in its own recompute


@pytest.mark.parametrize("around", [nullcontext, save_on_cpu], ids=["kept", "hooked"])
@pytest.mark.parametrize(
    ("body", "operators"),
    [
        (lambda x, mask: (x.sin() * mask).tanh().sum(), {"sin": 1, "mul": 1, "tanh": 1}),
        (lambda x, mask: (x.sin() * mask).sum(), {"sin": 1}),
        (lambda x, mask: (x.sin() * mask.view(2, 4, 8).view(8, 8)).sum(), {"sin": 1, "view": 2}),
        (lambda x, mask: (x.sin() * mask).cos() * mask, {"sin": 1, "mul": 1, "cos": 1}),
    ],
    ids=["before", "last", "viewed", "twice"],
)
def test_what_an_operation_saves_of_an_input_is_filled_already(body, operators, around):
    # A mask has the shape of what is saved beside it, and needs no gradient: it was taken for what the operation fills
    # after it was saved, so the recompute ran one operator more.
    x, mask = leaf(8, 8), torch.rand(8, 8)

    def run():
        with around():
            return checkpoint(body, x, mask)

    assert same(run, lambda: body(x, mask), [x])
    counts = []
    for function in (run, partial(body, x, mask)):
        y = function().sum()
        with Operators() as ran:
            y.backward()
        counts.append(ran.counts)
    assert {name: count for name, count in (counts[0] - counts[1]).items() if name != "detach"} == operators


def test_what_is_filled_late_is_right_ahead_of_a_region_inside():
    def body(x):
        h = F.rrelu(x * 1, training=True)
        return checkpoint(lambda h: h.exp().sin(), h)

    x = leaf(64)

    assert same(lambda: checkpoint(body, x), lambda: F.rrelu(x * 1, training=True).exp().sin(), [x])


# ----------------------------------------------------------------------------------------- rule 6: backward in a region


def test_backward_inside_a_region():
    def body(x):
        y = three(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y * grad).sin()

    x = leaf(4)

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])


@pytest.mark.parametrize("early_stop", [True, False])
def test_backward_inside_after_which_nothing_is_saved(early_stop):
    # The recompute for the backward inside went past the last save, as its noise could be filled later, met no other,
    # and took the number of saves of a call that was still running for too few.
    def body(x):
        (grad,) = torch.autograd.grad((x * x * x.detach()).sum(), x)
        return grad

    counted = Counted(body)
    x = leaf(4)
    y = checkpointed(counted, early_stop=early_stop)(x * 1)

    assert torch.equal(y, body(x)) and not y.requires_grad
    assert counted.calls == 2


def test_backward_inside_nested_regions():
    def body(x):
        y = checkpoint(three, x).sin()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y * grad).sin()

    x = leaf(4)

    assert same(lambda: checkpoint(lambda x: checkpoint(body, x.sin()), x), lambda: body(x.sin()), [x])


def test_gradients_that_a_backward_inside_leaves_at_what_is_closed_over_are_left_once():
    # Those at parameters of modules were, and those at tensors of the closure were left by the recompute as well.
    def grads(call):
        scale = torch.tensor(0.7, requires_grad=True)
        parameter = nn.Parameter(torch.tensor(0.3))

        def body(x):
            y = (x * scale * parameter).exp()
            y.sum().backward(retain_graph=True)
            return y.sin()

        x = torch.ones(2, requires_grad=True)
        call(body, x).sum().backward()
        return x.grad, scale.grad, parameter.grad

    assert all(map(torch.equal, grads(checkpoint), grads(lambda f, x: f(x))))


def test_gradients_that_a_backward_inside_leaves_are_left_once():
    layer = nn.Linear(4, 4)
    x = leaf(2, 4)

    def body(x):
        (layer(x.detach()).tanh() ** 2).sum().backward()
        return layer(x).tanh()

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x], [layer])


# --------------------------------------------------------------------------------- rule 7: unpacked at any time


def test_outside_of_backward_nothing_is_kept():
    layer, x = Watched(), leaf(4)
    y = checkpoint(lambda x: layer(x).sin(), x)

    first, second = y.grad_fn._saved_self, y.grad_fn._saved_self
    assert torch.equal(first, second) and layer.calls == 3
    del first, second

    assert len(layer.alive) == 0
    with torch.no_grad():
        assert y.grad_fn._saved_self is not None and not torch.is_grad_enabled()
    assert layer.calls == 4
    y.sum().backward()
    assert layer.calls == 5


# -------------------------------------------------------------------------------------------- rule 12: lifetimes


@pytest.mark.parametrize("end", ["backward", "dropped", "forward raises", "recompute raises", "backward raises"])
def test_no_region_outlives_its_graph(end):
    layer = nn.Linear(4, 4)
    fail = Hidden({"on": -1})

    def body(x):
        fail["on"] -= 1
        y = layer(x).exp()
        if fail["on"] == 0:
            raise ValueError
        return y.sin()

    def explode(grad):
        raise ValueError

    def step():
        x = leaf(2, 4)
        fail["on"] = {"forward raises": 1, "recompute raises": 2}.get(end, -1)
        y = checkpoint(lambda x: checkpoint(body, x.sin()), x)
        if end == "backward raises":
            y.register_hook(explode)
        if end != "dropped":
            y.sum().backward()

    gc.collect()
    before = len(live_regions())
    gc.disable()
    try:
        for _ in range(200):
            try:
                step()
            except ValueError:
                assert "raises" in end
        assert len(live_regions()) == before
    finally:
        gc.enable()


def test_an_in_place_operation_on_an_input_makes_no_cycle():
    gc.collect()
    before = len(live_regions())
    gc.disable()
    try:
        for _ in range(20):
            h = leaf(3) * 2
            checkpoint(lambda h: h.mul_(h.detach().clone()).sin(), h)
            del h
        assert len(live_regions()) == before
    finally:
        gc.enable()


def test_a_region_goes_as_soon_as_its_nodes_have_run():
    x = h = leaf(4)
    # `save_on_cpu` on the CPU makes cycles of operations that save their outputs; other tests leave some behind.
    others = set(map(id, live_regions()))
    for _ in range(3):
        h = checkpoint(three, h)
    regions = [ref(one) for one in live_regions() if id(one) not in others]
    left = []
    x.register_hook(lambda _: left.append(sum(region() is not None for region in regions)))

    h.sum().backward(retain_graph=False)

    assert len(regions) == 3 and left == [0]


# ------------------------------------------------------------------------------------------------------- the rest


def test_double_backward():
    def grads(call):
        x = torch.linspace(0.1, 1, 5, requires_grad=True)
        y = call(three, x).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        return first, second

    ours, plain = grads(checkpoint), grads(lambda f, x: f(x))

    assert torch.equal(ours[0], plain[0]) and torch.equal(ours[1], plain[1])


def test_backward_from_one_of_several_outputs():
    x = leaf(4)

    def run(call):
        return call(lambda x: (x.exp(), x.sin().cos(), [x.tanh()]), x)[1]

    assert same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [x])


def test_gradients_over_microbatches_add_up():
    layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))
    batches = torch.randn(3, 2, 4)

    def run(call):
        return sum(call(layer, batch).sum() for batch in batches)

    assert same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [], [layer])

    plain = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    torch.manual_seed(1)
    outputs = [checkpoint(layer, batch).sum() for batch in batches]
    for output in reversed(outputs):
        output.backward()
    assert all(torch.equal(p.grad, q) for p, q in zip(layer.parameters(), plain, strict=True))


def test_grad_scaler():
    def train(call):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(lambda x: layer(x).tanh(), torch.ones(2, 4)).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return layer.weight

    assert torch.equal(train(checkpoint), train(lambda f, x: f(x)))


def test_backward_in_several_threads():
    norm = nn.BatchNorm1d(4)
    xs = [leaf(8, 4) for _ in range(4)]
    plain = [torch.autograd.grad(three(norm(x)).sum(), x)[0] for x in xs]
    norm.reset_running_stats()
    outputs = [checkpoint(lambda x: three(norm(x)), x).sum() for x in xs]
    after = norm.running_mean.clone()
    backward_at_once(outputs)

    assert all(torch.equal(x.grad, grad) for x, grad in zip(xs, plain, strict=True))
    assert torch.equal(norm.running_mean, after) and norm.num_batches_tracked == 4


def test_several_threads_through_one_region():
    body = Counted(lambda x: three(x))
    x = leaf(4)
    y = checkpoint(body, x).sum()
    (plain,) = torch.autograd.grad(three(x).sum(), x)
    found = Log()

    def work():
        for _ in range(10):
            found.append(torch.autograd.grad(y, x, retain_graph=True)[0])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 30 and all(torch.equal(grad, plain) for grad in found)
    assert body.calls == 31


def test_regions_of_worker_threads():
    found = {}

    def work(number):
        x = torch.full((3,), float(number), requires_grad=True)
        y = checkpoint(three, x).sum()
        found[number] = (x, y)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, y in found.values():
        y.backward()

    for x, _ in found.values():
        assert torch.equal(x.grad, torch.autograd.grad(three(x).sum(), x)[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_runtime_a_checkpoint_of_torch(use_reentrant):
    x = leaf(4)

    def body(x):
        return checkpoint(three, x.sin()).cos()

    assert same(lambda: torch_checkpoint(body, x, use_reentrant=use_reentrant), lambda: body(x), [x])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_torch_inside(use_reentrant):
    x = leaf(4)

    def body(x):
        return torch_checkpoint(three, x.sin(), use_reentrant=use_reentrant).cos()

    assert same(lambda: checkpoint(body, x), lambda: three(x.sin()).cos(), [x])


def test_save_on_cpu_outside_and_inside():
    x = leaf(4)

    def offloaded(x):
        with save_on_cpu():
            return checkpoint(three, x.sin()).cos()

    def inside(x):
        with save_on_cpu():
            return three(x.sin()).cos()

    plain = lambda: three(x.sin()).cos()  # noqa: E731
    assert same(lambda: offloaded(x), plain, [x])
    assert same(lambda: checkpoint(inside, x), plain, [x])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_with_compiled_blocks():
    layer = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: layer(x).tanh().exp(), backend="aot_eager")
    around = torch.compile(lambda x: checkpoint(three, x * 2) + 1, backend="eager")
    x = leaf(2, 4)

    assert same(lambda: checkpoint(compiled, x), lambda: layer(x).tanh().exp(), [x], [layer])
    assert same(lambda: around(x), lambda: three(x * 2) + 1, [x])
    torch.compiler.reset()


def test_in_place_operations_inside():
    def body(x):
        h = x * 2
        h.add_(1)
        h = h.sin()
        h[0].mul_(2)
        return h

    x = leaf(4)

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_write_to_what_was_saved_is_refused_as_plain_autograd_does(early_stop):
    def body(x):
        h = x.sin()
        y = h.cos()
        h.add_(1)
        return y.exp() + h

    x = leaf(4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        body(x).sum().backward()
    with pytest.raises(MutationError, match=r"number 1, .*make the operation out of place"):
        checkpointed(body, early_stop=early_stop)(x).sum().backward()


def test_forward_that_saves_nothing_and_no_tensors():
    x = leaf(4)

    assert same(lambda: checkpoint(lambda x: x + 1, x), lambda: x + 1, [x])
    assert checkpoint(lambda: 7) == 7
    assert checkpoint(lambda x: None, x) is None


def test_a_tensor_that_escapes_from_a_forward_which_raises():
    kept = []

    def body(x):
        kept.append(x.exp())
        raise ValueError

    x = leaf(4)
    with pytest.raises(ValueError):  # noqa: PT011
        checkpoint(body, x)

    with pytest.raises(CheckpointError, match="a forward which raised"):
        kept[0].sum().backward()


def test_what_user_code_raises_in_a_recompute_says_so():
    # A TypeError came bare out of `backward`, with a traceback through the engine and no word of a region.
    state = Hidden({"scale": 2.0})

    def inner(x):
        return (x * state["scale"]).exp()

    def outer(x):
        return checkpoint(inner, x).sin()

    loss = checkpoint(outer, leaf(4)).sum()
    del state["scale"]

    with pytest.raises(KeyError) as caught:
        loss.backward()

    (note,) = caught.value.__notes__
    assert note.startswith("This was raised in the recompute of region of ")
    assert note.endswith(".outer, whose forward had not raised.")


def test_hooks_are_gone_after_errors():
    x = leaf(4)

    def interrupt(x):
        x = x.exp()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint(interrupt, x)

    y = x.exp()
    assert y.grad_fn._saved_result is not None
    assert torch.is_grad_enabled()


def test_an_interrupted_recompute_leaves_nothing_behind():
    stop = Hidden({"now": False})
    layer = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))

    def body(x):
        y = layer(x.exp())
        if stop["now"]:
            raise KeyboardInterrupt
        return y.sin()

    x = leaf(8, 4)
    torch.manual_seed(3)
    y = checkpoint(body, x).sum()
    buffers, state = [b.clone() for b in layer.buffers()], torch.get_rng_state()

    stop["now"] = True
    with pytest.raises(KeyboardInterrupt):
        y.backward(retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), state)

    stop["now"] = False
    y.backward()
    torch.manual_seed(3)
    assert torch.equal(x.grad, torch.autograd.grad(body(x).sum(), x)[0])
