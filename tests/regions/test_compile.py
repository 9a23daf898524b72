"""Regions and torch.compile: calls in compiled functions, and compiled functions in regions."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import torchremat
from compiled import FAST, INDUCTOR
from logs import Log
from regions.comparing import Counted, leaf
from torchremat import UnsupportedError, checkpoint, checkpointed, unwrap, wrap

BACKENDS = [*FAST, INDUCTOR]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    # Of torch's own, when inductor is imported or autograd functions are traced.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    # Of dynamo, which looks at every input of a graph.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that runs the graphs as they are, and knows their calls."""

    def __init__(self):
        self.calls = Log()

    def __call__(self, graph, _):
        self.calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    @property
    def checkpoints(self):
        """The number of torch's checkpoint operators in each graph."""
        return [calls.count("tag_activation_checkpoint") for calls in self.calls]


def measured(run, leaves):
    """Return the output, the gradients, and the bytes that autograd keeps beside the leaves."""
    kept = {one.data_ptr(): 0 for one in leaves}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    grads = torch.autograd.grad(output.sum(), leaves)
    return [output.detach(), *grads], sum(kept.values())


def all_equal(ours, plain):
    return len(ours) == len(plain) and all(map(torch.equal, ours, plain))


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, scale=1.0):
        return x + self.down(self.up(x).exp().sin().tanh()) * scale


class Stack(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stack():
    torch.manual_seed(2)
    model = Stack()
    return model, torch.randn(16, 4, requires_grad=True)


# ------------------------------------------------------------------------------------------ calls in a compiled one


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_become_checkpoints_of_the_graph(backend):
    block, x = Block(), leaf(16, 4)
    leaves = [x, *block.parameters()]

    def function(call, x):
        for _ in range(3):
            x = call(block, x, scale=0.5)
        return x.sin()

    def compiled(call):
        torch.compiler.reset()
        run = torch.compile(lambda x: function(call, x), backend=backend, fullgraph=True)
        return measured(lambda: run(x), leaves)

    (ours, ours_bytes), (plain, plain_bytes) = compiled(checkpoint), compiled(plainly)

    assert all_equal(ours, plain)
    assert ours_bytes < plain_bytes / 2
    if backend != "inductor":  # which computes in another order than eager torch
        assert all_equal(ours, measured(lambda: function(plainly, x), leaves)[0])


def test_a_graph_has_one_operator_per_call():
    graphs, x = Graphs(), leaf(4)
    run = torch.compile(
        lambda x: checkpoint(torch.exp, checkpointed(torch.sin)(x * 2)) + 1, backend=graphs, fullgraph=True
    )

    run(x).sum().backward()

    assert graphs.checkpoints == [2]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_recompute_runs_the_operations_again(backend):
    # As dynamo traces the body once, its operations are counted where they run.
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        exps = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.exps += func is torch.ops.aten.exp.default
            return func(*args, **(kwargs or {}))

    def exps(call):
        torch.compiler.reset()
        x = leaf(4)
        run = torch.compile(lambda x: call(lambda x: x.exp().sin().tanh(), x), backend=backend, fullgraph=True)
        run(x)
        loss = run(x).sum()
        Count.exps = 0
        with Count():
            loss.backward()
        return Count.exps

    assert (exps(plainly), exps(checkpoint)) == (0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_numbers_are_drawn_again(backend):
    x = torch.rand(64, requires_grad=True)
    run = torch.compile(
        lambda x: checkpoint(lambda x: torch.dropout(x.exp(), 0.5, True).square(), x * 1),
        backend=backend,
        fullgraph=True,
    )

    y = run(x)
    before = torch.get_rng_state()
    (grad,) = torch.autograd.grad(y.sum(), x)

    # The gradient of the square of twice the exponential where it was kept, and nothing where it was dropped.
    torch.testing.assert_close(grad, 2 * y.detach())  # another order of multiplications
    assert 0 < (y == 0).sum() < 64 and torch.equal((y == 0), (grad == 0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("backend", ["aot_eager", BACKENDS[2]])
def test_buffers_are_written_once(backend):
    layer, x = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), leaf(8, 4)
    twin = copy.deepcopy(layer)
    run = torch.compile(lambda x: checkpoint(layer, x), backend=backend, fullgraph=True)

    run(x).sum().backward()
    torch.compile(twin, backend=backend)(x).sum().backward()

    assert layer[0].num_batches_tracked == 1
    assert all_equal(list(layer.buffers()), list(twin.buffers()))


def test_a_backend_that_may_write_buffers_twice_is_refused():
    layer, x = nn.BatchNorm1d(4), leaf(8, 4)
    run = torch.compile(lambda x: checkpoint(layer, x), backend="eager")

    with pytest.raises(UnsupportedError, match="writes to a tensor that was there before"):
        run(x)
    layer.eval()
    assert torch.equal(run(x), layer(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_place_operations_on_what_a_region_has_made(backend):
    x = leaf(8)

    def body(x):
        return x.sin().add_(1).cos()

    run = torch.compile(lambda x: checkpoint(body, x), backend=backend, fullgraph=True)

    assert all_equal(measured(lambda: run(x), [x])[0], measured(lambda: body(x), [x])[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_nested_calls(backend):
    block, x = Block(), leaf(16, 4)
    leaves = [x, *block.parameters()]
    run = torch.compile(
        lambda x: checkpoint(lambda x: checkpoint(block, x.sin()).cos(), x), backend=backend, fullgraph=True
    )

    assert all_equal(measured(lambda: run(x), leaves)[0], measured(lambda: block(x.sin()).cos(), leaves)[0])


def test_a_compiled_region():
    graphs, x = Graphs(), leaf(4)
    run = torch.compile(checkpointed(lambda x: x.exp().sin()), backend=graphs, fullgraph=True)

    assert torch.equal(run(x), x.exp().sin()) and graphs.checkpoints == [1]


def test_without_grad_there_is_no_operator():
    graphs = Graphs()
    run = torch.compile(lambda x: checkpoint(torch.exp, x), backend=graphs, fullgraph=True)

    with torch.no_grad():
        run(leaf(4))

    assert graphs.checkpoints == [0]


# --------------------------------------------------------------------------------------------------- wrapped modules


@pytest.mark.parametrize(
    ("way", "backend"),
    [("in place", "aot_eager"), ("compile", "eager"), ("compile", "aot_eager")],
)
def test_wrapped_modules_in_a_compiled_model(backend, way):
    def run(wrapped):
        torch.compiler.reset()
        model, x = stack()
        if wrapped:
            wrap(model, "blocks.*")
        leaves = [x, *model.parameters()]
        if way == "compile":
            fast = torch.compile(model, backend=backend, fullgraph=True)
        else:
            model.compile(backend=backend, fullgraph=True)
            fast = model
        return measured(lambda: fast(x), leaves)

    (ours, ours_bytes), (plain, plain_bytes) = run(True), run(False)

    assert all_equal(ours, plain)
    assert ours_bytes < plain_bytes / 2


def test_each_wrapped_module_keeps_its_own_weights_and_one_graph():
    graphs = Graphs()
    model, x = stack()
    plain, _ = measured(lambda: model(x), [x, *model.parameters()])
    fast = torch.compile(wrap(model, "blocks.*"), backend=graphs, fullgraph=True)

    ours, _ = measured(lambda: fast(x), [x, *model.parameters()])
    again, _ = measured(lambda: fast(x), [x, *model.parameters()])

    assert all_equal(ours, plain) and all_equal(again, plain)
    assert graphs.checkpoints == [3]


def test_a_model_that_is_unwrapped_is_compiled_again():
    graphs = Graphs()
    model, x = stack()
    fast = torch.compile(wrap(model, "blocks.*"), backend=graphs, fullgraph=True)

    fast(x)
    unwrap(model)
    fast(x)

    assert graphs.checkpoints == [3, 0]


# ------------------------------------------------------------------------------------------------------ graph breaks


def test_a_function_that_breaks_the_graph_is_a_region_of_ours():
    graphs, x, log = Graphs(), leaf(4), Log()

    def body(x):
        y = x.exp()
        torch._dynamo.graph_break()
        log.append(1)
        return y.sin()

    run = torch.compile(lambda x: checkpoint(body, x * 2) + 1, backend=graphs)

    (ours,) = torch.autograd.grad(run(x).sum(), x)

    assert torch.equal(ours, torch.autograd.grad((x * 2).exp().sin().sum(), x)[0])
    assert len(log) == 2 and graphs.checkpoints == [0, 0]


@pytest.mark.parametrize(
    "options",
    [{"preserve_rng": False}, {"early_stop": False}, {"check": "values"}, {"debug": True}, {"guard": [[]]}],
    ids=str,
)
@pytest.mark.parametrize("way", ["checkpointed", "wrapped"])
def test_options_that_the_operator_cannot_honour_break_the_graph(way, options):
    graphs, x = Graphs(), leaf(16, 4)
    block = Block()
    counted = Counted(block)
    plain, _ = measured(lambda: block(x), [x])
    if way == "checkpointed":
        region = checkpointed(counted, **options)
    else:
        region = wrap(nn.Sequential(block), "0", **options)
    run = torch.compile(lambda x: region(x * 1) + 0, backend=graphs)

    ours, _ = measured(lambda: run(x), [x])

    assert all_equal(ours, plain)
    assert graphs.checkpoints == [0, 0]
    assert way == "wrapped" or counted.calls == 2


# ------------------------------------------------------------------------------------------- compiled ones in regions


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_around_a_compiled_block(backend):
    graphs = []
    block, x = Block(), leaf(16, 4)
    leaves = [x, *block.parameters()]
    fast = torch.compile(block, backend=backend, fullgraph=True)
    counted = Counted(lambda x: graphs.append(1) or fast(x))
    plain, plain_bytes = measured(lambda: fast(fast(x)), leaves)

    ours, ours_bytes = measured(lambda: checkpoint(counted, checkpoint(counted, x)), leaves)

    assert all_equal(ours, plain)
    assert counted.calls == 4
    assert ours_bytes < plain_bytes / 2


def test_a_region_around_a_compiled_block_with_a_call_inside():
    graphs = Graphs()
    block, x = Block(), leaf(16, 4)
    leaves = [x, *block.parameters()]
    fast = torch.compile(lambda x: checkpoint(block, x).sin(), backend=graphs, fullgraph=True)
    counted = Counted(fast)

    ours, _ = measured(lambda: checkpoint(counted, x), leaves)

    assert all_equal(ours, measured(lambda: block(x).sin(), leaves)[0])
    assert counted.calls == 2 and graphs.checkpoints == [1]


# ------------------------------------------------------------------------------------------------------------- plans


def test_a_planned_model_in_a_compiled_function_is_refused():
    model, _ = stack()
    x = torch.randn(4096, 4)
    plan = torchremat.plan(model, lambda model: model(x).sum(), budget="70%")
    plan.apply(model)

    with pytest.raises(UnsupportedError, match="the model runs by a plan, which cannot be followed inside a compiled"):
        torch.compile(model, backend="eager")(x)
    plan.remove(model)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_a_part_of_a_planned_model_in_a_compiled_function_is_refused():
    model, _ = stack()
    x = torch.randn(4096, 4)
    plan = torchremat.plan(model, lambda model: model(x).sum(), budget="70%")
    plan.apply(model)

    # Compiled after the plan was made, from outside of the region, and called by it.
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")

    told = pytest.warns(torchremat.errors.PlanWarning, match=r"`blocks\.1` has been compiled since")
    with told, pytest.raises(UnsupportedError, match=r"`blocks\.1` runs by a plan"):
        model(x)


def test_compiled_blocks_in_a_planned_model():
    torch.manual_seed(2)
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(4096, 4)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    fast = nn.Sequential(*(torch.compile(block, backend="eager", fullgraph=True) for block in model))

    torchremat.plan(fast, lambda fast: fast(x).sum(), budget="70%").apply(fast)
    ours = torch.autograd.grad(fast(x).sum(), list(model.parameters()))

    assert all_equal(ours, plain)


def test_blocks_that_overlap_leave_dynamo_as_it_was():
    # torch's own stance is the process's: the later of two that overlapped would have put back that of the first.
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    policy = torchremat.policies.save_matmuls

    def first(x):
        first_is_in.set()
        assert second_is_in.wait(120)
        return x.sin()

    def second(x):
        assert first_is_in.wait(120)
        second_is_in.set()
        assert first_is_out.wait(120)
        return x.sin()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(checkpointed(second, policy=policy), leaf(4))
        checkpointed(first, policy=policy)(leaf(4))
        first_is_out.set()
        other.result()

    graphs = Graphs()
    torch.compile(lambda x: x.sin() + 1, backend=graphs)(leaf(4))
    assert len(graphs.calls) == 1
