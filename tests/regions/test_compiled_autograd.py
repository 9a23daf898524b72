"""Regions whose backward is compiled: recomputed in the graph, when a node needs it."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef

import compiled
from compiled import FAST, INDUCTOR, fresh, gradients, graph_breaks, graphs, peak_tensors
from logs import Hidden, Log
from probes.regions import Region, Slot
from regions.comparing import Counted, Twice, leaf
from torchremat import CheckpointError, MutationError, UnsupportedError, checkpoint, checkpointed, session

pytestmark = compiled.MARKS


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    fresh()
    yield
    fresh()


def layer(x, weight):
    return (x @ weight) * 2


def waiting():
    """The recomputed tensors that nobody has asked for yet."""
    return [slot for slot in objects(Slot) if slot.task is not None or slot.others]


def equal(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def objects(kind):
    return [one for one in gc.get_objects() if type(one) is kind]


# ------------------------------------------------------------------------------------------------ programs, compared

x, w = torch.randn(8, 8), torch.randn(8, 8) / 3


def in_place(call, x, w):
    def body(x):
        h = x @ w
        h.mul_(2)
        return h.relu() @ w

    return call(body, x)


def nested(call, x, w):
    return call(lambda a: call(lambda b: call(lambda c: (c @ w).relu() * 2, b) @ w, a) @ w, x)


def under_autocast(call, x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call(lambda a: (a @ w).relu() @ w, x)


def backward_inside(call, x, w):
    def body(a):
        b = a.detach().requires_grad_()
        (slope,) = torch.autograd.grad((b * b * w.detach()).sum(), b, create_graph=True)
        return (a @ w) * slope

    return call(body, x)


def nested_backward_inside(call, x, w):
    """A region whose recompute goes backward, with a graph, through a region."""

    def body(a):
        b = a.detach().requires_grad_()
        (slope,) = torch.autograd.grad(call(lambda c: (c * c * w.detach()).exp(), b).sum(), b, create_graph=True)
        return (a @ w) * slope

    return call(body, x)


PROGRAMS = {
    "matmul": lambda call, x, w: call(layer, call(layer, x, w), w),
    "dropout": lambda call, x, w: call(lambda a: torch.dropout(a @ w, 0.5, True).relu(), x),
    "nested": nested,
    "aliases": lambda call, x, w: call(lambda a: (a * a).exp().sin() + a.exp() * a.exp(), x) * w,
    "views": lambda call, x, w: call(
        lambda a: (a.t()[2:5] @ w).unsqueeze(0).expand(3, 3, 8).exp() * w[:, 1:4].t().exp(), x
    ),
    "conjugates": lambda call, x, w: call(
        lambda a: torch.complex(a, a * w).conj().mul(torch.complex(w, a)).conj().abs(), x
    ),
    "in place": in_place,
    "read twice": lambda call, x, w: call(lambda a: Twice.apply(a @ w), x),
    "autocast": under_autocast,
    "backward inside": backward_inside,
    "nested backward inside": nested_backward_inside,
}


# What aot_eager is given is what eager would run, and it traces it once more.
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in PROGRAMS), *((name, "eager") for name in ("nested", "in place", "read twice"))],
)
def test_gradients_are_those_of_the_plain_run(name, backend):
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    program = PROGRAMS[name]
    plain = gradients(lambda: program(lambda body, *args: body(*args), *leaves), leaves)

    first = gradients(lambda: program(checkpoint, *leaves), leaves, backend)
    traced = graphs()
    second = gradients(lambda: program(checkpoint, *leaves), leaves, backend)

    assert equal(first, plain)
    assert equal(second, plain)
    assert graph_breaks() == 0
    assert graphs() == traced == 1


@pytest.mark.parametrize("backend", [INDUCTOR])
@pytest.mark.parametrize("name", ["nested", "views"])
def test_gradients_of_inductor_are_those_that_it_has_without_regions(name, backend):
    # Inductor has kernels of its own for exp and the like. It also writes to what operators have returned: it once did
    # so to the weights.
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    program = PROGRAMS[name]
    plain = gradients(lambda: program(lambda body, *args: body(*args), *leaves), leaves, backend)
    fresh()

    first = gradients(lambda: program(checkpoint, *leaves), leaves, backend)
    second = gradients(lambda: program(checkpoint, *leaves), leaves, backend)

    assert equal(first, plain)
    assert equal(second, plain)
    assert torch.equal(leaves[0], x) and torch.equal(leaves[1], w)
    assert graph_breaks() == 0
    assert graphs() == 1


def test_modules_and_their_buffers():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    data, leaves = leaf(4, 8), list(model.parameters())
    plain = gradients(lambda: model(data), leaves)
    buffers = [one.clone() for one in model.buffers()]
    for buffer in model.buffers():
        buffer.zero_()
    model[1].running_var.fill_(1)

    found = gradients(lambda: checkpoint(model, data), leaves, "aot_eager")

    assert equal(found, plain)
    assert equal(model.buffers(), buffers)


def test_values_are_checked():
    calls = Log()

    def drifting(a):
        calls.append(1)
        return (a * len(calls)).exp()

    one = leaf(4)
    loss = checkpointed(drifting, check="values")(one).sum()

    with compiled.compiled("aot_eager"), pytest.raises(CheckpointError):
        loss.backward()


# ------------------------------------------------------------------------------------------------ when, and how often


@pytest.mark.parametrize("backend", FAST)
def test_each_region_is_recomputed_once_when_those_after_it_have_gone(backend):
    # Hooks of Python that unpack break the graph each time, and its pieces keep all that was unpacked.
    events, made = Log(), Log()

    def body(number, a):
        events.append((number, sum(not one.expired() for one in made), len(waiting())))
        h = a.exp()
        made.append(StorageWeakRef(h.untyped_storage()))
        return h.sin()

    y = leaf(4)
    for number in range(4):
        y = checkpoint(partial(body, number), y)
    loss = y.sum()
    del y
    events.clear()
    made.clear()

    with compiled.compiled(backend):
        loss.backward()

    # Of the tensors of regions that were recomputed earlier, none is there, and none waits.
    assert events == [(3, 0, 0), (2, 0, 0), (1, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize("backend", FAST)
def test_the_peak_is_that_of_the_engine(backend):
    size = 64
    weights = [(torch.randn(size, size) / 8).requires_grad_() for _ in range(6)]
    start = leaf(size, size)

    def run(call):
        for one in [start, *weights]:
            one.grad = None
        y = start
        for weight in weights:
            y = call(lambda a, b: (a @ b).exp().sin().tanh(), y, weight)
        return y

    def peak(call, backend=None):
        if backend is not None:
            with compiled.compiled(backend):
                run(call).sum().backward()
        return peak_tensors(lambda: run(call), 4 * size * size, backend)

    engine = peak(checkpoint)
    plain = peak(lambda body, *args: body(*args))

    assert peak(checkpoint, backend) < engine + 1.01
    # 6 inputs of regions, or 6 gradients in their place, and what one region needs; plainly each layer keeps 2.
    assert 6 < engine < 12
    assert plain > 12


def test_one_recompute_serves_a_session():
    f, one = Counted(lambda a: a.exp().sin()), leaf(4)
    loss = checkpoint(f, one).sum()

    with compiled.compiled("aot_eager"), session(passes=2):
        first = torch.autograd.grad(loss, one, retain_graph=True)
        second = torch.autograd.grad(loss, one)

    assert f.calls == 2
    assert equal(first, second)


# ------------------------------------------------------------------------------------------------------- whose, until


@pytest.mark.parametrize("backend", FAST)
def test_a_graph_that_is_retained_is_recomputed_again(backend):
    f, one = Counted(lambda a: a.exp().sin()), leaf(4)
    (plain,) = gradients(lambda: f.function(one), [one])
    loss = checkpoint(f, one).sum()

    with compiled.compiled(backend):
        found = [torch.autograd.grad(loss, one, retain_graph=True)[0] for _ in range(3)]

    assert equal(found, [plain] * 3)
    assert f.calls == 4
    assert graph_breaks() == 0
    # Whether it is retained is asked when the graph runs.
    with compiled.compiled(backend):
        assert torch.equal(torch.autograd.grad(loss, one)[0], plain)
    assert graphs() == 1


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_nothing_outlives_its_graph(backend, retain_graph):
    # The compiled graph itself keeps what it was traced with: it once kept the inputs of the first step's regions.
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            one = leaf(4)
            loss = checkpoint(torch.exp, checkpoint(torch.exp, one)).sum()
            with compiled.compiled(backend):
                loss.backward(retain_graph=retain_graph)
            assert len(objects(Region)) == (2 if retain_graph else 0)
            del loss
            assert objects(Region) == []
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", FAST)
def test_what_a_partial_backward_did_not_need_is_dropped_at_its_end(backend):
    # Compiled autograd calls nothing at the end of a backward.
    a, b = leaf(4), leaf(4)
    loss = checkpoint(lambda a: checkpoint(lambda c: (c.exp() * b.exp()).sin(), a.sin()), a).sum()

    with compiled.compiled(backend):
        torch.autograd.grad(loss, b, retain_graph=True)

    alive = objects(Region)
    assert alive
    assert [key for region in alive for key in region.owners] == []
    assert waiting() == []


def test_a_second_backward_says_that_the_graph_was_not_retained():
    one = leaf(4)
    loss = checkpoint(torch.exp, one).sum()

    with compiled.compiled("eager"):
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@pytest.mark.parametrize("backend", FAST)
def test_an_error_in_a_recompute_is_raised_and_can_be_mended(backend):
    broken = Hidden({"now": False})

    def body(a):
        if broken["now"]:
            raise ValueError("no luck")
        return a.exp()

    one = leaf(4)
    (plain,) = gradients(lambda: body(one), [one])
    loss = checkpoint(body, one).sum()

    broken["now"] = True
    with compiled.compiled(backend), pytest.raises(ValueError, match="no luck"):
        torch.autograd.grad(loss, one, retain_graph=True)
    broken["now"] = False
    with compiled.compiled(backend):
        assert torch.equal(torch.autograd.grad(loss, one)[0], plain)


@pytest.mark.parametrize("backend", FAST)
def test_a_change_of_an_input_is_an_error(backend):
    one, other = leaf(4), torch.randn(4)
    loss = checkpoint(lambda a, b: (a * b).exp(), one, other).sum()
    other.add_(1)

    with compiled.compiled(backend), pytest.raises(MutationError, match="version 0 then, 1 now"):
        loss.backward()


@pytest.mark.parametrize("backend", FAST)
def test_another_shape_is_another_graph(backend):
    for size in (4, 5, 4):
        one = leaf(size)
        (plain,) = gradients(lambda one=one: one.exp(), [one])

        (found,) = gradients(lambda one=one: checkpoint(torch.exp, one), [one], backend)

        assert torch.equal(found, plain)
    assert graphs() == 2


@torch._dynamo.config.patch(recompile_limit=1)
def test_a_graph_that_dynamo_gives_up_is_right():
    for size in (4, 5, 6):
        one = leaf(size)
        (plain,) = gradients(lambda one=one: one.exp().sin(), [one])

        (found,) = gradients(lambda one=one: checkpoint(lambda a: a.exp().sin(), one), [one], "aot_eager")

        assert torch.equal(found, plain)
    assert counters["stats"]["unique_graphs"] == 1
    loss = checkpoint(lambda a: a.exp().sin(), one).sum()
    with compiled.compiled("aot_eager"), pytest.raises(UnsupportedError, match="create_graph=True"):
        torch.autograd.grad(loss, one, create_graph=True)


@pytest.mark.parametrize("backend", FAST)
def test_second_derivatives_are_refused(backend):
    # Compiled autograd drops what flows through unpack hooks: a gradient penalty would vanish without a word.
    one = leaf(4)
    loss = checkpoint(torch.exp, one).sum()

    with compiled.compiled(backend), pytest.raises(UnsupportedError, match=r"create_graph=True .*\._disable\(\)"):
        torch.autograd.grad(loss, one, create_graph=True)

    with compiled.compiled(backend), torch._dynamo.compiled_autograd._disable():
        (slope,) = torch.autograd.grad(loss, one, create_graph=True)
        assert torch.equal(torch.autograd.grad(slope.sum(), one)[0], one.exp())


def test_a_sparse_tensor_is_refused():
    one = leaf(4, 4)
    loss = checkpoint(lambda a: torch.sparse.mm(torch.eye(4).to_sparse(), a).exp(), one).sum()

    with compiled.compiled("aot_eager"), pytest.raises(UnsupportedError, match=r"layout torch\.sparse_coo"):
        loss.backward()


@torch._dynamo.config.patch(compiled_autograd=True)
def test_a_step_that_is_compiled_with_its_backward():
    f, one = Counted(lambda a: a.exp().sin()), leaf(4)
    (plain,) = gradients(lambda: f.function(one), [one])

    @torch.compile(backend="aot_eager")
    def step():
        loss = checkpoint(f, one).sum()
        loss.backward()

    step()

    assert torch.equal(one.grad, plain)
    assert f.calls >= 2
