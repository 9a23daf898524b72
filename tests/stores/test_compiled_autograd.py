"""Stores under a backward that is compiled: each tensor comes back when a node needs it."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import compiled
from compiled import FAST, INDUCTOR, fresh, gradients, graph_breaks, graphs, peak_tensors
from logs import Log
from probes.stores import Stored
from torchremat import Compressed, Disk, Host, Keep, MutationError, UnsupportedError, checkpoint, offload

pytestmark = compiled.MARKS

STORES = {"keep": Keep, "host": Host, "disk": Disk, "compressed": lambda: Compressed(Host())}


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    fresh()
    yield
    fresh()


class Copies:
    """A store outside of torch's memory that knows which of the tensors that it gave back are there."""

    def __init__(self):
        self.given = Log()
        self.events = Log()

    def put(self, tensor):
        return Copy(self, tensor.numpy().copy())


class Copy:
    def __init__(self, store, array):
        self.store, self.array = store, array

    @property
    def stored_bytes(self):
        return self.array.nbytes

    def get(self):
        self.store.events.append(sum(not one.expired() for one in self.store.given))
        tensor = torch.from_numpy(self.array).clone()
        self.store.given.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def prefetch(self):
        pass


def equal(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def matmuls(x, weights):
    for weight in weights:
        x = (x @ weight) * 2
    return x


def pointwise(x, weights):
    for weight in weights:
        x = (x * weight).exp().sin()
    return x


def aliases(x, weights):
    for weight in weights:
        x = (x.t()[1:] @ weight).expand(2, 15, 16).exp().sum(0) * x[1:]
        x = torch.nn.functional.pad(x.relu(), (0, 0, 0, 1))
    return x


PROGRAMS = {"matmuls": matmuls, "pointwise": pointwise, "aliases": aliases}


def leaves_of(layers=2, size=16):
    torch.manual_seed(0)
    return [(torch.randn(size, size) / 4).requires_grad_() for _ in range(layers + 1)]


@pytest.mark.parametrize(
    ("program", "store", "backend"),
    [
        ("matmuls", "host", "eager"),
        *(("matmuls", store, "aot_eager") for store in STORES),
        ("pointwise", "host", "aot_eager"),
        ("aliases", "host", "aot_eager"),
    ],
)
def test_gradients_are_those_of_the_plain_run(program, store, backend):
    leaves, run = leaves_of(), PROGRAMS[program]
    plain = gradients(lambda: run(leaves[0], leaves[1:]), leaves)

    def stored():
        with offload(STORES[store](), min_bytes=0):
            return run(leaves[0], leaves[1:])

    first = gradients(stored, leaves, backend)
    second = gradients(stored, leaves, backend)

    assert equal(first, plain)
    assert equal(second, plain)
    assert graph_breaks() == 0
    assert graphs() == 1


@pytest.mark.parametrize("backend", [INDUCTOR])
def test_gradients_of_inductor_are_those_that_it_has_without_a_store(backend):
    leaves = leaves_of()
    before = [one.detach().clone() for one in leaves]
    plain = gradients(lambda: matmuls(leaves[0], leaves[1:]), leaves, backend)
    fresh()

    def stored():
        with offload(Host(), min_bytes=0):
            return matmuls(leaves[0], leaves[1:])

    assert equal(gradients(stored, leaves, backend), plain)
    assert equal(gradients(stored, leaves, backend), plain)
    assert equal(leaves, before)
    assert graph_breaks() == 0
    assert graphs() == 1


@pytest.mark.parametrize("backend", FAST)
def test_each_tensor_comes_back_once_and_goes_before_the_next(backend):
    store, leaves = Copies(), leaves_of(4)
    with offload(store, min_bytes=0, window_bytes=0):
        loss = matmuls(leaves[0], leaves[1:]).sum()

    with compiled.compiled(backend):
        loss.backward()

    # The inputs of the last three layers; that of the first is a leaf, which stays.
    assert len(store.events) == 3
    assert max(store.events) <= 1


@pytest.mark.parametrize("backend", FAST)
def test_the_peak_is_that_of_the_engine(backend):
    size = 64
    leaves = leaves_of(5, size)

    def run(store=None):
        for one in leaves:
            one.grad = None
        if store is None:
            return matmuls(leaves[0], leaves[1:])
        with offload(store, window_bytes=0):
            return matmuls(leaves[0], leaves[1:])

    def peak(backend=None):
        with compiled.compiled(backend):
            run(Copies()).sum().backward()
        return peak_tensors(lambda: run(Copies()), 4 * size * size, backend)

    engine = peak()

    assert peak(backend) < engine + 1.01
    assert 6 <= engine < 10  # the gradients and what one layer needs


@pytest.mark.parametrize("backend", FAST)
def test_a_graph_that_is_retained_gives_its_tensors_again(backend):
    leaves = leaves_of()
    plain = gradients(lambda: matmuls(leaves[0], leaves[1:]), leaves)
    with offload(Host(), min_bytes=0) as block:
        loss = matmuls(leaves[0], leaves[1:]).sum()
    once = block.copied_out_bytes

    with compiled.compiled(backend):
        for _ in range(2):
            assert equal(torch.autograd.grad(loss, leaves, retain_graph=True), plain)
        assert equal(torch.autograd.grad(loss, leaves), plain)

    assert block.copied_in_bytes == 3 * once
    assert graphs() == 1


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_nothing_outlives_its_graph(backend, retain_graph):
    before = {id(one) for one in gc.get_objects() if type(one) is Stored}  # a traceback of another test may hold some
    for _ in range(2):
        store, leaves = Host(), leaves_of()
        with offload(store, min_bytes=0):
            loss = matmuls(leaves[0], leaves[1:]).sum()
        with compiled.compiled(backend):
            loss.backward(retain_graph=retain_graph)
        del loss
        assert [one for one in gc.get_objects() if type(one) is Stored and id(one) not in before] == []
        assert store.statistics.stored_bytes == 0


@pytest.mark.parametrize("backend", FAST)
def test_regions_inside_of_a_store(backend):
    leaves = leaves_of()
    plain = gradients(lambda: pointwise(leaves[0], leaves[1:]), leaves)

    def run():
        x = leaves[0]
        with offload(Host(), min_bytes=0):
            for weight in leaves[1:]:
                x = checkpoint(lambda a, b: (a * b).exp().sin(), x, weight)
        return x

    assert equal(gradients(run, leaves, backend), plain)
    assert graph_breaks() == 0


@pytest.mark.parametrize("backend", FAST)
def test_a_store_inside_of_a_region(backend):
    leaves = leaves_of()
    plain = gradients(lambda: pointwise(leaves[0], leaves[1:]), leaves)

    def body(x, weight):
        with offload(Host(), min_bytes=0):
            x = (x * weight).exp()
        return x.sin()

    def run():
        x = leaves[0]
        for weight in leaves[1:]:
            x = checkpoint(body, x, weight)
        return x

    assert equal(gradients(run, leaves, backend), plain)
    assert graph_breaks() == 0


@pytest.mark.parametrize("backend", FAST)
def test_second_derivatives_are_refused(backend):
    leaves = leaves_of()
    with offload(Host(), min_bytes=0):
        loss = pointwise(leaves[0], leaves[1:]).sum()

    with compiled.compiled(backend), pytest.raises(UnsupportedError, match="create_graph=True"):
        torch.autograd.grad(loss, leaves, create_graph=True)


@pytest.mark.parametrize("backend", FAST)
def test_a_kept_tensor_that_was_written_is_an_error(backend):
    one = torch.randn(8, requires_grad=True)
    with offload(Host(), min_bytes=10**6):
        h = one.sin()
        loss = h.exp().sum() + (h * one).sum()
    with torch.no_grad():
        h.add_(1)

    with compiled.compiled(backend), pytest.raises(MutationError, match="is at version 1; expected version 0"):
        loss.backward()


@torch._dynamo.config.patch(recompile_limit=1)
def test_second_derivatives_of_a_graph_that_dynamo_gives_up_are_refused():
    for size in (4, 5, 6):
        one = torch.randn(size, requires_grad=True)
        with offload(Host(), min_bytes=0):
            loss = one.exp().sin().sum()
        with compiled.compiled("aot_eager"):
            (found,) = torch.autograd.grad(loss, one, retain_graph=True)
        assert torch.equal(found, torch.autograd.grad(one.exp().sin().sum(), one)[0])

    with compiled.compiled("aot_eager"), pytest.raises(UnsupportedError, match="create_graph=True"):
        torch.autograd.grad(loss, one, create_graph=True)
