"""The watch that finds out, while the forward runs, which saved tensors need less."""

import threading
from contextlib import contextmanager
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import torchremat
from logs import Count, Log
from torchremat import Compressed, Host, MutationError, StoreError, StoreWarning, Tiers, offload

pytestmark = pytest.mark.usefixtures("no_collector")


class Noting:
    """A store that notes the elements of the floats that it is given: what was stored whole."""

    def __init__(self):
        self.inner, self.whole = Host(), Log()

    def put(self, tensor):
        if tensor.is_floating_point():
            self.whole.append(tensor.numel())
        return self.inner.put(tensor)


def narrowing(store=None):
    return offload(Compressed(Noting()) if store is None else store)


def whole(entered):
    return entered.catalog.store.store.whole


def vgg():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.1, inplace=True),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 8, 1),
        nn.ReLU6(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


def gradients_of(model, x, y, context):
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    with context as entered:
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    return [x.grad, *(parameter.grad.clone() for parameter in model.parameters())], entered


@contextmanager
def plain():
    yield


def test_relu_takes_a_bit_for_each_element():
    x = torch.randn(53_888, requires_grad=True)
    store = Compressed(Host())

    with narrowing(store) as entered:
        y = F.relu(x)

    assert entered.saved_bytes == entered.narrowed_bytes == 215_552
    assert store.statistics.stored_bytes == 6_736
    y.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())
    assert store.statistics.stored_bytes == 0


def test_tiers_of_which_one_compresses():
    x = torch.randn(8000, requires_grad=True)
    tiers = Tiers(Compressed(Host("1500B")), Compressed(Host()))

    with offload(tiers) as entered:
        y = F.relu(x)
        z = F.leaky_relu(x * 1)

    assert entered.narrowed_bytes == 64_000
    assert [store.statistics.stored_bytes for store in tiers.stores] == [1000, 1000]
    (y + z).sum().backward()
    assert torch.equal(x.grad, (x > 0).float() + torch.where(x > 0, 1.0, 0.01))


def test_a_store_that_does_not_compress_stores_whole():
    x = torch.randn(1000, requires_grad=True)

    with offload(Host()) as entered:
        y = F.relu(x)

    assert (entered.narrowed_bytes, entered.copied_out_bytes) == (0, 4000)
    assert torch.equal(y.grad_fn._saved_result, y)


def test_a_convolutional_network():
    model, x, y = vgg(), torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
    expected, _ = gradients_of(model, x, y, plain())

    found, entered = gradients_of(model, x, y, narrowing())

    assert all(map(torch.equal, found, expected))
    # The second convolution, the normalisation, the third convolution and the linear layer need their inputs. The
    # results of relu, leaky relu and relu6 and the inputs of the pools are not here, nor is the mask of the dropout.
    assert whole(entered) == [2048, 2048, 512, 512]


@pytest.mark.parametrize(
    "make", [lambda x: F.relu(x), lambda x: x.relu(), torch.relu, nn.ReLU(), nn.ReLU(inplace=True)]
)
def test_however_it_is_called(make):
    x = torch.randn(1000, requires_grad=True)

    with narrowing() as entered:
        y = make(x * 1)

    assert entered.narrowed_bytes == 4000
    assert whole(entered) == []
    y.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_several_results_and_several_nodes_of_one_function():
    x = torch.randn(2, 3, 32, 32, requires_grad=True)

    with narrowing() as entered:
        values, indices = F.max_pool2d(x * 1, 2, return_indices=True)
        loss = F.cross_entropy(x.flatten(2).mean(1), torch.tensor([0, 1]))

    assert not indices.requires_grad
    # The inputs of the pool, and of the likelihood: cross_entropy saves the result of log_softmax for two nodes.
    assert entered.narrowed_bytes == 4 * x.numel() + 4 * 2 * 1024
    assert whole(entered) == [2048]  # log_softmax
    (values.sum() + loss).backward()


def test_double_backward():
    def penalty(context):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with context:
            y = F.max_pool2d(F.leaky_relu(F.relu(x) ** 3, 0.1), 2).pow(2).sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            second = first.pow(2).sum()
        second.backward()
        return first.detach(), x.grad

    assert all(map(torch.equal, penalty(narrowing()), penalty(plain())))


def test_backward_twice():
    x = torch.randn(1000, requires_grad=True)
    with narrowing():
        y = F.hardtanh(x).sum()

    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()

    assert torch.equal(x.grad, 2 * once)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_inside_stores_whole_and_at_once():
    # `Tensor.backward` is a function of torch as well. What a graph of second derivatives saves must not wait for it.
    x = torch.randn(1000, requires_grad=True)
    stored = []

    with narrowing() as entered:
        y = x.exp().relu().sum()
        before = entered.copied_out_bytes
        x.register_hook(lambda _: stored.append(entered.copied_out_bytes - before))
        y.backward(inputs=x, create_graph=True)

    assert stored[0] > 0
    x.grad = None


def test_an_image_is_for_its_node_alone():
    x = torch.randn(1000, requires_grad=True)
    with narrowing():
        y = F.relu(x)
        z = F.max_pool1d((x * 1).view(1, -1), 2)

    with pytest.raises(StoreError, match="ReluBackward0: of its saved tensor `result` only a mask is held"):
        y.grad_fn._saved_result  # noqa: B018
    pool = z.grad_fn.next_functions[0][0]
    with pytest.raises(StoreError, match="MaxPool2DWithIndicesBackward0: of its saved tensor `self` only the shape"):
        pool._saved_self  # noqa: B018
    seen = []
    z.grad_fn.register_prehook(lambda _: seen.append(failure(lambda: y.grad_fn._saved_result)))
    z.sum().backward()
    assert seen == [StoreError]
    # A node that is called by hand cannot be told from a reader of its slots.
    with pytest.raises(StoreError, match="ReluBackward0"):
        y.grad_fn(torch.ones(1000))


def failure(function):
    try:
        function()
    except StoreError as error:
        return type(error)


def test_what_is_small_or_a_parameter_is_stored_whole():
    weight = nn.Parameter(torch.randn(1000))
    small = torch.randn(255, requires_grad=True)

    with narrowing() as entered:
        y = F.relu(small * 1)
        z = F.leaky_relu(weight)
        view = F.leaky_relu(weight.view(10, 100))

    assert entered.narrowed_bytes == 0
    assert whole(entered) == []
    (y.sum() + z.sum() + view.sum()).backward()


@pytest.mark.parametrize(
    "lay", [lambda x: x[:, ::2], lambda x: x.expand(3, 40, 40), lambda x: x.t(), lambda x: x[3:, 3:]]
)
def test_views(lay):
    x = torch.randn(40, 40, requires_grad=True)
    lay(x * 1).clamp(-0.5, 0.5).pow(2).sum().backward()
    expected, x.grad = x.grad, None

    with narrowing():
        y = lay(x * 1).clamp(-0.5, 0.5)
    y.pow(2).sum().backward()

    assert torch.equal(x.grad, expected)


def test_what_is_stored_does_not_keep_the_tensor():
    x = torch.randn(1000, requires_grad=True)
    with narrowing():
        y = F.relu(x * 1)
        storage = StorageWeakRef(y.untyped_storage())
        z = F.max_pool1d(y.view(1, -1), 2)

    del y

    assert storage.expired()
    z.sum().backward()
    assert x.grad is not None


def test_a_dropped_graph_frees_everything():
    store = Compressed(Host())
    x = torch.randn(1000, requires_grad=True)
    with narrowing(store):
        y = F.relu(x)
        packed = ref(y.grad_fn._raw_saved_result.data)

    assert store.statistics.stored_bytes == 125
    del y

    assert store.statistics.stored_bytes == 0
    assert packed() is None


def test_an_operation_that_raises_leaves_nothing_waiting():
    x = torch.randn(1000, requires_grad=True)

    with narrowing() as entered:
        y = x * 1
        with pytest.raises(RuntimeError, match="pad should be at most half"):
            F.max_pool2d(y.view(1, 10, 100), 2, padding=7)
        with pytest.raises(ValueError, match="Expected input batch_size"):
            F.cross_entropy(y.view(10, 100), torch.tensor([0]))
        z = F.relu(y)

    # The pool had saved its input before it looked at the padding, and log_softmax had run.
    assert whole(entered) == [1000, 1000]
    assert entered.narrowed_bytes == 4000
    z.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


class Broken:
    """A store that fails at its n-th put."""

    def __init__(self, at):
        self.left, self.inner = at, Host()

    def put(self, tensor):
        self.left -= 1
        if self.left == 0:
            raise StoreError("no room")
        return self.inner.put(tensor)


@pytest.mark.parametrize("at", [1, 2])
def test_a_store_that_fails_raises_from_the_operation(at):
    x = torch.randn(10, 100, requires_grad=True)
    labels = torch.arange(10)
    stored = x * 1

    with pytest.raises(StoreError, match="no room"), narrowing(Compressed(Broken(at))):
        F.cross_entropy(F.relu(stored), labels)

    F.relu(x).sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_what_was_not_stored_is_never_other_data():
    x = torch.randn(10, 100, requires_grad=True)
    y = x * 1

    with narrowing(Compressed(Broken(1))), pytest.raises(StoreError, match="no room"):
        y.relu_()

    # In place: the node that the store failed for is in the graph.
    with pytest.raises(StoreError, match="was not stored, because the store failed in the operation that saves it"):
        y.sum().backward()


def test_a_store_without_room_keeps():
    class Full:
        def put(self, tensor):
            return None

    x = torch.randn(1000, requires_grad=True)
    with pytest.warns(StoreWarning, match="has no room"), narrowing(Compressed(Full())) as entered:
        y = F.relu(x)

    assert entered.narrowed_bytes == 0
    y.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_an_operation_that_writes_what_it_has_saved():
    class Rewriting(torch.overrides.TorchFunctionMode):
        """Makes one operation of two, of which the second one writes what the first has saved."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.exp:
                with torch.no_grad():
                    result.mul_(2)
            return result

    x = torch.randn(1000, requires_grad=True)
    with Rewriting():
        plain_result = x.exp().sum()
    with narrowing(), Rewriting():
        inner = x.exp().sum()  # for the watch the write is an operation of its own
    with Rewriting(), narrowing():
        outer = x.exp().sum()  # for the watch it is a part of the operation

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain_result.backward()
    with pytest.raises(MutationError, match=r"\[torch.FloatTensor \[1000\]\] is at version 1; expected version 0"):
        outer.backward()
    # It was copied before it was written.
    inner.backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_without_grad_nothing_is_done():
    x = torch.randn(1000, requires_grad=True)

    with narrowing() as entered, torch.no_grad():
        F.relu(x)

    assert entered.narrowed_bytes == 0 and whole(entered) == []


def test_regions_inside_work_as_before():
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(64, 32)
    calls = Count()
    model[1].register_forward_hook(lambda *_: calls.up())

    def run(context):
        model.zero_grad()
        with context:
            y = torchremat.checkpoint(model, x * 1)
            y = F.relu(y)
        y.sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = run(plain())
    found = run(narrowing())

    assert all(map(torch.equal, found, expected))
    assert calls.value == 4  # a forward and a recompute each: the watch made neither more


def test_a_recompute_inside_of_the_context():
    x = torch.randn(1000, requires_grad=True)

    with narrowing() as entered:
        torchremat.checkpoint(lambda x: F.relu(x * 1) * 2, x).sum().backward()

    assert entered.narrowed_bytes == 0
    assert torch.equal(x.grad, 2 * (x > 0).float())


def test_other_modes_see_what_they_saw():
    x = torch.randn(64, 64, requires_grad=True)
    with FlopCounterMode(display=False) as expected:
        F.relu(x @ x).sum().backward()

    with FlopCounterMode(display=False) as found, narrowing():
        F.relu(x @ x).sum().backward()

    assert found.get_total_flops() == expected.get_total_flops() > 0


def test_each_thread_has_a_watch_of_its_own():
    def work(seed, results):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with narrowing() as entered:
            for _ in range(20):
                y = F.relu(x)
        y.sum().backward()
        results.append(entered.narrowed_bytes == 80_000 and torch.equal(x.grad, (x > 0).float()))

    results = []
    threads = [threading.Thread(target=work, args=(seed, results)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [True] * 4


def test_custom_functions_store_whole():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    x = torch.randn(1000, requires_grad=True)
    with narrowing() as entered:
        y = Square.apply(x * 1)

    assert whole(entered) == [1000]
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_compiled_code_has_no_breaks_and_no_new_versions():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(64, 32)
    compiled = torch.compile(model, backend="aot_eager")

    def run(call, context):
        model.zero_grad()
        with context:
            y = call(x)
        y.sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    torch._dynamo.reset()
    expected = run(model, plain())
    counters = torch._dynamo.utils.counters
    counters.clear()

    found = [run(compiled, narrowing()) for _ in range(3)]

    assert all(all(map(torch.equal, one, expected)) for one in found)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_nothing_is_narrowed_under_a_torch_that_nobody_has_tried(monkeypatch):
    monkeypatch.setattr("torchremat.stores.narrowing.NEWEST", (2, 10))
    x = torch.randn(64, 64, requires_grad=True)

    with (
        pytest.warns(StoreWarning, match=r"is newer than 2\.10, the newest that this torchremat was tested with"),
        offload(Tiers(Compressed(), Host()), min_bytes=0) as offloaded,
    ):
        y = x.relu()
    y.sum().backward()

    assert offloaded.narrowed_bytes == 0
    assert torch.equal(x.grad, (x > 0).float())
