import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from stores.memory import Memory
from torchremat import (
    Compressed,
    Disk,
    Host,
    Keep,
    MutationError,
    StoreError,
    StoreWarning,
    Tiers,
    UnsupportedError,
    offload,
)
from torchremat.stores.catalog import Catalog, unpack
from torchremat.stores.in_catalog import Kept

STORES = {
    "memory": Memory,
    "keep": Keep,
    "host": Host,
    "disk": Disk,
    "compressed": lambda: Compressed(Host()),
    "tiers": lambda: Tiers(Host(6000), Disk(limit=20000)),
}


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def hooks(catalog):
    return saved_tensors_hooks(catalog.put, unpack)


# ------------------------------------------------------------------------------------------------------ what is kept


def test_parameters_and_their_views_stay():
    store = Memory()
    layer, frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
    h = leaf(64, 64).sin()  # which nothing saves but the two layers and the sine

    with offload(store) as context:
        frozen(layer(h)).sum()

    assert context.copied_out_bytes == 64 * 64 * 4  # h, for the gradient of the first weight


def test_buffers_of_a_module_stay():
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("turn", torch.randn(64, 64))

        def forward(self, h):
            return h * self.turn[:32].t() * self.turn.t()[:, :32]

    store = Memory()

    with offload(store) as context:
        nn.Sequential(Rotated())(leaf(64, 32))

    # The second product saves the first factor's product; the turns stay.
    assert context.copied_out_bytes == 0
    assert context.catalog.totals.kept == context.catalog.totals.saved == 2


def test_statistics_that_are_written_without_a_version_are_read_each_time():
    # Batch normalisation writes its statistics without a new version. A second call that saved them found the first
    # call's copy, as storage and version were the same, and its gradient was that of the first call's statistics.
    def run(context):
        torch.manual_seed(0)
        x, mean, variance = leaf(8, 512), torch.zeros(512), torch.ones(512)
        with context:
            first = F.batch_norm(x.sin(), mean, variance, training=False)
            F.batch_norm(x.cos() * 5, mean, variance, training=True)
            second = F.batch_norm(x.sin(), mean, variance, training=False)
        return torch.autograd.grad(second.sum(), x), first

    (plain,), _ = run(offload(Memory(), min_bytes=10**9))

    (found,), _ = run(offload(Memory(), min_bytes=0))

    assert torch.equal(found, plain)


def test_noise_that_is_filled_after_it_was_saved_is_stored_when_it_is_filled():
    store = Memory()

    def run(context):
        torch.manual_seed(0)
        x = leaf(64, 64)
        with context:
            y = F.rrelu(x.sin(), training=True)
        return torch.autograd.grad(y.sum(), x)[0]

    plain = run(offload(store, min_bytes=10**9))

    assert torch.equal(run(offload(store)), plain)
    assert store.bytes("put") == 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(40).to_sparse(),
        lambda: torch.eye(40).to_sparse_csr(),
        lambda: torch.randn(40, 40).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.randn(30, 20), torch.randn(10, 20)]),
        lambda: torch.empty(40, 40, device="meta"),
        lambda: torch.empty(0, 40),
        lambda: torch.quantize_per_tensor(torch.randn(40, 40), 0.1, 0, torch.qint8),
    ],
    ids=["coo", "csr", "mkldnn", "nested", "meta", "empty", "quantized"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_array_of_bytes_stays(make):
    store = Memory()
    tensor = make()

    packed = Catalog(store, min_bytes=0).put(tensor)

    assert type(packed.get()) is type(tensor) and packed.get().layout == tensor.layout
    assert not store.log


def test_a_jagged_tensor_keeps_its_offsets():
    def run(context):
        torch.manual_seed(0)
        parts = [leaf(30, 20), leaf(10, 20)]
        with context:
            jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
            y = (jagged.sin() * jagged).exp()
            total = y.values().sum()
        return torch.autograd.grad(total, parts)

    store = Memory()
    plain = run(offload(Memory(), min_bytes=10**9))

    found = run(offload(store))

    assert all(map(torch.equal, found, plain))
    assert store.bytes("put") > 0 and store.bytes("get") == store.bytes("put")
    assert not store.live


# ---------------------------------------------------------------------------------------------------------- subclasses


def two():
    return TwoTensor(torch.randn(32, 32), torch.randn(32, 32))


def test_a_subclass_is_taken_apart_and_put_together():
    store = Memory()
    a = two().requires_grad_()

    with offload(store):
        y = a.sin().exp()
    storages = store.bytes("put")
    (gradient,) = torch.autograd.grad(y.sum(), a)

    assert storages == 2 * 32 * 32 * 4
    assert torch.equal(gradient.a, (a.a.sin().exp() * a.a.cos()))
    assert torch.equal(gradient.b, (a.b.sin().exp() * a.b.cos()))


def test_a_wrapper_that_is_written_has_new_bytes():
    # Writes below a wrapper are counted by the wrapper alone: by storage and version of what it wraps, the second save
    # found the bytes of the first.
    a = two().requires_grad_()

    with offload(Memory()):
        h = a.sin()
        first = h * h
        h = h.detach().mul_(2)
        w = a.cos()
        second = w * h
        h.add_(1)
        third = w * h
    gradients = [torch.autograd.grad(one.sum(), a, retain_graph=True)[0] for one in (second, third)]

    assert first.shape == (32, 32)
    assert torch.equal(gradients[0].a, -a.a.sin() * (2 * a.a.sin()))
    assert torch.equal(gradients[1].a, -a.a.sin() * (2 * a.a.sin() + 1))


# ------------------------------------------------------------------------------------------------------- writes after


def add_(h):
    with torch.no_grad():
        h.add_(1)


def write_a_view(h):
    with torch.no_grad():
        h[0].add_(1)


def write_an_alias(h):
    h.detach().add_(1)


def write_many(h):
    with torch.no_grad():
        torch._foreach_add_([h], 1)


def gradient_or_error(y, x):
    try:
        return torch.autograd.grad(y, x)[0]
    except MutationError as error:
        return error


WRITES = [add_, write_a_view, write_an_alias, write_many]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", STORES)
def test_a_tensor_that_is_written_after_it_was_saved_is_right_or_an_error(name, write):
    x = leaf(32, 32)
    with offload(STORES[name]()):
        h = x.sin()
        y = h.exp().sum() + (h * h).sum()
    write(h)

    found = gradient_or_error(y, x)

    h = x.sin()
    (expected,) = torch.autograd.grad(h.exp().sum() + (h * h).sum(), x)
    if name in ("keep", "disk", "tiers") and isinstance(found, MutationError):  # a disk writes behind the forward
        assert "modified by an inplace operation" in str(found)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("what", ["parameter", "small"])
def test_what_is_kept_may_not_be_written(what, write):
    tensor = nn.Parameter(torch.randn(32, 32)) if what == "parameter" else torch.randn(2, 2)
    with offload(Memory()):
        y = leaf(*tensor.shape).sin() * tensor
    write(tensor)

    with pytest.raises(MutationError, match="is at version 1; expected version 0"):
        y.sum().backward()


def test_an_optimizer_step_between_forward_and_backward_is_an_error():
    layer = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with offload(Memory()):
        first, second = layer(torch.randn(8, 32)).sum(), layer(torch.randn(8, 32)).sum()
    first.backward()
    optimizer.step()

    with pytest.raises(MutationError):
        second.backward()


def test_a_write_between_two_saves_makes_two_records():
    x = leaf(32, 32)
    with offload(Memory()):
        h = x.sin()
        first = h * h
        with torch.no_grad():
            h.mul_(2)
        second = h * h

    gradients = [torch.autograd.grad(one.sum(), x, retain_graph=True)[0] for one in (second, first)]

    assert torch.equal(gradients[0], 4 * x.sin() * x.cos())
    assert torch.equal(gradients[1], 2 * x.sin() * x.cos())


# ------------------------------------------------------------------------------------------------------- lifetimes


@pytest.mark.parametrize("name", ["memory", "host", "disk", "compressed", "tiers"])
def test_storages_are_gone_after_the_forward(name):
    store, storages = STORES[name](), []
    x = leaf(32, 32)

    with offload(store):
        h = x
        for _ in range(6):
            h = h.sin()
            storages.append(weakref.ref(h.untyped_storage()))
        y = h.sum()
        del h
    until = time.monotonic() + 60  # a disk writes behind the forward
    while time.monotonic() < until and any(one() is not None for one in storages):
        time.sleep(0.01)

    assert [one for one in storages if one() is not None] == []
    y.backward()


@pytest.mark.usefixtures("no_collector")
def test_a_graph_that_is_dropped_leaves_nothing():
    store = Memory()
    with offload(store):
        h = leaf(32, 32).sin()
        y = h.exp().softmax(0) @ h.t()
    assert store.live

    del y, h

    assert not store.live


def test_a_forward_that_raises_leaves_nothing():
    store = Memory()

    with pytest.raises(ZeroDivisionError), offload(store):
        F.rrelu(leaf(32, 32).sin().exp(), training=True) / (1 // 0)

    assert not store.live


def test_what_is_loaded_is_held_until_the_last_alias_has_been_asked_for():
    store, x = Memory(), leaf(32, 32)
    catalog = Catalog(store)
    seen = []

    def watch(tag):
        return lambda *_: seen.append((tag, store.times("get")))

    with hooks(catalog):
        h = x.sin()
        a = h.exp() * 1
        b = h * 3
        y = (h * h).sum()
        z = (h[:8].sin() * 2).sum()
        del h
    (y + z + a.sum() + b.sum()).register_hook(watch("begin"))

    (y + z + a.sum() + b.sum()).backward()

    assert store.times("put") == 2  # h, and the exponential
    assert store.times("get") == 2
    assert not store.live


def test_each_backward_of_a_retained_graph_loads_once():
    store, x = Memory(), leaf(32, 32)
    with offload(store):
        h = x.sin()
        y = (h @ h.t()).sum()
        del h

    for _ in range(3):
        y.backward(retain_graph=True)

    assert store.bytes("put") == 32 * 32 * 4
    assert store.bytes("get") == 3 * 32 * 32 * 4


def test_a_tensor_that_is_still_there_is_not_loaded():
    store, x = Memory(), leaf(32, 32)
    with offload(store):
        h = x.sin()
        y = h.exp()

    y.sum().backward()

    assert store.bytes("get") == 0  # h and y live, and nobody has written to them


def test_a_function_that_writes_to_what_it_has_saved_does_not_change_what_others_get():
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return h * 1

        @staticmethod
        def backward(ctx, gradient):
            (h,) = ctx.saved_tensors
            return gradient * h.zero_()

    x = leaf(32, 32)
    with offload(Memory()):
        h = x.sin()
        y = h * h
        z = Writes.apply(h)
        del h

    (gradient,) = torch.autograd.grad((y + z).sum(), x)

    assert torch.equal(gradient, 2 * x.sin() * x.cos())


# ------------------------------------------------------------------------------------------------------------- order


class Slow(Memory):
    """A memory whose loads take their time, in no order."""

    def put(self, tensor):
        handle = super().put(tensor)
        get, pause = handle.get, torch.rand(()).item() / 500
        handle.get = lambda: (threading.Event().wait(pause), get())[1]
        return handle


def test_any_order_of_unpacks_is_right():
    x = leaf(32, 32)
    catalog = Catalog(Slow())
    tensors = [x.detach() * number for number in range(20)]
    tensors += [tensor[3:9] for tensor in tensors[:5]] + [tensor.t() for tensor in tensors[:5]]
    expected = [tensor.clone() for tensor in tensors]
    packed = [catalog.put(tensor) for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    del tensors

    for order in [torch.randperm(len(packed)).tolist() for _ in range(5)]:
        for index in order:
            found = unpack(packed[index])
            assert torch.equal(found, expected[index]) and found.stride() == strides[index]


def test_threads_that_unpack_the_same_tensors():
    catalog = Catalog(Slow())
    tensors = [torch.randn(32, 32) for _ in range(8)]
    expected = [tensor.clone() for tensor in tensors]
    packed = [catalog.put(tensor) for tensor in tensors] + [catalog.put(tensor.t()) for tensor in tensors]
    del tensors
    wrong = []

    def read(seed):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
        for index in order:
            tensor = expected[index % 8]
            if not torch.equal(unpack(packed[index]), tensor if index < 8 else tensor.t()):
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_threads_that_pack_and_go_backward_at_once():
    catalog = Catalog(Slow())
    shared = torch.randn(32, 32)
    found = {}

    def step(seed):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for _ in range(5):
            with hooks(catalog):
                h = (x * shared).sin()
                y = ((h @ h.t()).exp() * shared).sum()
                del h
            found[seed] = torch.autograd.grad(y, x)[0]

    threads = [threading.Thread(target=step, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    several = dict(found)

    for seed in several:
        step(seed)
    assert all(torch.equal(several[seed], found[seed]) for seed in several)
    assert len(several) == 4


# ---------------------------------------------------------------------------------------------------- stores that fail


class Full(Memory):
    """Has room for so many tensors."""

    def __init__(self, room, *, strict=False):
        super().__init__()
        self.room = room
        self.strict = strict

    def put(self, tensor):
        if self.times("put") < self.room:
            return super().put(tensor)
        if self.strict:
            raise StoreError("no room")
        return None


def test_what_a_store_has_no_room_for_stays_with_one_warning():
    x, store = leaf(32, 32), Full(2)
    with pytest.warns(StoreWarning, match="no room") as caught, offload(store) as context:
        y = x.sin().sin().sin().sin().sin().sum()

    (gradient,) = torch.autograd.grad(y, x)

    assert len(caught) == 1
    assert context.refused_bytes == 2 * 32 * 32 * 4
    assert torch.equal(gradient, torch.autograd.grad(x.sin().sin().sin().sin().sin().sum(), x)[0])


@pytest.mark.filterwarnings("ignore::torchremat.StoreWarning")
def test_what_stays_for_lack_of_room_may_not_be_written():
    x = leaf(32, 32)
    with offload(Full(0)):
        h = x.sin()
        y = (h * h).sum() + (h[:, 3:5] * 2 * h[:, 5:7]).sum()
    add_(h)

    with pytest.raises(MutationError):
        y.sum().backward()


def test_a_strict_store_raises_from_the_forward_and_loses_nothing():
    x, store = leaf(32, 32), Full(1, strict=True)
    with offload(store):
        before = x.sin().exp().sum()
        with pytest.raises(StoreError, match="no room"):
            x.cos().exp()

    (gradient,) = torch.autograd.grad(before, x)

    assert torch.equal(gradient, torch.autograd.grad(x.sin().exp().sum(), x)[0])


class Lost(Memory):
    def put(self, tensor):
        handle = super().put(tensor)

        def get():
            raise StoreError("the bytes are gone")

        handle.get = get
        return handle


def test_an_error_of_a_store_names_the_node_and_the_slot():
    with offload(Lost()):
        y = (leaf(32, 32).sin() @ leaf(32, 8).cos()).sum()

    with pytest.raises(StoreError, match=r"shape \(32, 8\) .* that MmBackward0 has saved as `mat2`: the bytes"):
        y.backward()


def test_a_class_or_a_word_is_no_store():
    with pytest.raises(UnsupportedError, match="store=Host"):
        offload(Host)
    with pytest.raises(UnsupportedError, match="store='disk'"):
        offload("disk")


# ------------------------------------------------------------------------------------------------------------ the rest


@pytest.mark.parametrize("start", [0, 1, 3, 16])
def test_what_comes_back_is_aligned_as_it_was(start):
    base = torch.randn(4096)
    tensor = base[start : start + 2048]
    address, expected = tensor.data_ptr() % 64, tensor.clone()
    packed = Catalog(Host()).put(tensor)
    del tensor, base

    found = packed.get()

    assert found.data_ptr() % 64 == address
    assert torch.equal(found, expected)


def test_nothing_is_saved_without_grad():
    store = Memory()

    with offload(store), torch.no_grad():
        leaf(32, 32).sin().exp()

    assert not store.log


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own, when first used
def test_forward_mode_runs_inside():
    with offload(Memory()):
        _, tangent = torch.func.jvp(torch.sin, (torch.zeros(32, 32),), (torch.ones(32, 32),))

    assert torch.equal(tangent, torch.ones(32, 32))


def test_a_vmapped_function_runs_inside():
    x, w = leaf(4, 32, 32), leaf(32, 32)

    def run():
        return torch.autograd.grad(torch.vmap(lambda one: (one.sin() @ w).exp())(x).sum(), (x, w))

    plain = run()
    with offload(Memory()):
        found = run()

    assert all(map(torch.equal, found, plain))


@pytest.mark.usefixtures("no_collector")
def test_what_waits_to_be_filled_is_no_cycle():
    # The record held what it was still to store by the packed object, which holds the record.
    catalog, tensor = Catalog(Memory()), torch.randn(32, 32)
    packed = catalog.put(tensor)
    storage = weakref.ref(tensor.untyped_storage())

    del packed, tensor

    assert storage() is None


def test_a_catalog_by_storage_takes_whole_storages_or_nothing_and_not_before_it_settles():
    store = Host()
    catalog = Catalog(store, window_bytes=0, by_storage=True)
    whole, tail = torch.randn(64, 64), torch.randn(4, 1024)

    rows = catalog.put(whole[:40])
    piece = catalog.put(tail[3])

    assert store.statistics.stored_bytes == 0
    rows.record.settle()
    assert store.statistics.stored_bytes == whole.nbytes
    assert isinstance(piece, Kept)
    assert torch.equal(rows.get(), whole[:40])


def test_what_is_written_before_a_catalog_by_storage_settles_is_an_error():
    catalog = Catalog(Host(), by_storage=True)
    tensor = torch.randn(64, 64)
    packed = catalog.put(tensor)

    tensor.add_(1)
    packed.record.settle()

    with pytest.raises(MutationError):
        packed.get()
