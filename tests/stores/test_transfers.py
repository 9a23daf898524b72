"""Tensors of a CUDA device in pinned memory; and, without one, the order of things on devices that are pretended."""

import sys
from contextlib import nullcontext
from weakref import ref

import pytest
import torch

from torchremat import Disk, Host, MutationError, UnsupportedError
from torchremat.stores.base import Ledger, content_of
from torchremat.stores.pinned import Pool
from torchremat.stores.transfers import Transfers

gpu = pytest.mark.gpu


class Event:
    """Fires when its device says so."""

    def __init__(self, device):
        self.device = device
        self.fired = device.fires
        device.events.append(self)

    def query(self):
        return self.fired

    def synchronize(self):
        self.device.log.append("the host waits")
        self.fired = True


class Stream:
    """Says what it waits for."""

    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_stream(self, stream):
        self.device.log.append(f"{self.name} waits for {stream.name}")

    def wait_event(self, event):
        self.device.log.append(f"{self.name} waits for event {self.device.events.index(event)}")


class Pretended:
    """A device whose copies are done at once, and whose events fire when the test wants them to."""

    def __init__(self, monkeypatch):
        self.fires = True
        self.log, self.events = [], []
        self.names = iter(["out", "in"])
        self.current = Stream(self, "current")
        for module in ("_compat.streams", "stores.transfers"):
            monkeypatch.setattr(f"torchremat.{module}.accelerator_of", lambda _: self)
        monkeypatch.setattr(
            "torchremat.stores.transfers.record_stream",
            lambda _, stream: self.log.append(f"the allocator waits for {stream.name}"),
        )
        self.ledger = Ledger(None)
        self.pool = Pool(2**26, lambda size: torch.empty(size, dtype=torch.uint8))
        self.transfers = Transfers(self.pool, self.ledger)

    def put(self, tensor):
        self.ledger.reserve(tensor.nbytes)
        return self.transfers.out(tensor, content_of(tensor))

    # As an accelerator.

    def is_capturing(self):
        return False

    def current_stream(self, _):
        return self.current

    def new_stream(self, _):
        return Stream(self, next(self.names))

    def on(self, _):
        return nullcontext()

    def event(self, _):
        return Event(self)


@pytest.fixture
def device(monkeypatch):
    return Pretended(monkeypatch)


def test_streams_wait_for_one_another_and_the_host_for_none(device):
    tensor = torch.randn(100)
    handle = device.put(tensor)
    assert torch.equal(handle.get(), tensor)
    handle.prefetch()
    handle.prefetch()
    assert torch.equal(handle.get(), tensor)
    assert torch.equal(handle.get(), tensor)

    # See NOTE [ Who waits for whom ]
    assert device.log == [
        "out waits for current",
        "current waits for event 0",
        "in waits for current",
        "in waits for event 0",
        "current waits for event 2",
        "current waits for event 0",
    ]
    del handle
    statistics = device.ledger.statistics()
    assert statistics.stored_bytes == 0
    assert statistics.copied_out_bytes == 400 and statistics.copied_in_bytes == 1200


def test_the_source_is_held_until_its_copy_has_ended(device):
    device.fires = False
    tensor = torch.randn(100)
    storage = ref(tensor.untyped_storage())
    handle = device.put(tensor)
    del tensor

    device.transfers.land()
    assert storage() is not None
    device.events[0].fired = True
    device.transfers.land()

    assert storage() is None
    assert handle.get().shape == (100,)


def test_what_a_copy_reads_outlives_the_handle(device):
    device.fires = False
    tensor = torch.randn(2**24)  # the whole pool
    storage = ref(tensor.untyped_storage())
    handle = device.put(tensor)

    del handle, tensor

    device.transfers.land()
    assert storage() is not None
    assert device.pool.take(1) is None
    device.events[0].fired = True
    device.transfers.land()
    assert storage() is None
    assert device.pool.take(1) is not None


def test_what_copies_read_outlives_the_store(device):
    device.fires = False
    handle = device.put(torch.zeros(10))
    handle.prefetch()
    del handle

    device.transfers = None

    assert device.log.count("the host waits") == 2


def test_what_another_stream_has_allocated_is_told_to_the_allocator(device):
    handle = device.put(torch.zeros(10))
    handle.prefetch()
    device.current = Stream(device, "other")

    handle.get()

    assert device.log[-2:] == ["other waits for event 1", "the allocator waits for other"]


def test_a_write_before_the_copy_has_ended_is_an_error_and_one_afterwards_is_none(device, monkeypatch):
    monkeypatch.setattr("torchremat.stores.transfers._FLYING_SHARE", 1.0)
    device.fires = False
    tensors = [torch.zeros(10), torch.zeros(10)]
    handles = [device.put(tensor) for tensor in tensors]
    tensors[1].add_(1)
    device.events[0].fired = True  # in the order of their stream
    device.transfers.land()
    tensors[0].add_(1)

    for _ in range(2):
        with pytest.raises(MutationError, match="version 1; expected version 0"):
            handles[1].get()
        device.events[1].fired = True

    assert torch.equal(handles[0].get(), torch.zeros(10))


def test_what_comes_and_nobody_asks_for_is_held_for_its_copy(device):
    handle = device.put(torch.zeros(10))
    device.fires = False
    handle.prefetch()
    storage = ref(handle._ahead.tensor.untyped_storage())

    del handle

    device.transfers.land()
    assert storage() is not None
    device.events[1].fired = True
    device.transfers.land()
    assert storage() is None


def test_so_much_of_the_device_is_held_for_copies_and_no_more(device, monkeypatch):
    monkeypatch.setattr("torchremat.stores.transfers._FLYING_BYTES", 1000)
    monkeypatch.setattr("torchremat.stores.transfers._FLYING_SHARE", 1.0)
    device.fires = False
    handles = []

    for _ in range(5):
        handles.append(device.put(torch.zeros(100)))

    assert device.log.count("the host waits") == 3
    assert device.transfers._flying_bytes == 800


def test_of_little_that_is_stored_little_is_held_for_copies(device):
    device.fires = False
    handles = [device.put(torch.zeros(100)) for _ in range(16)]

    assert device.transfers._flying_bytes == 800  # an eighth
    device.transfers.settle(most_bytes=0)
    assert device.transfers._flying_bytes == 0
    assert len(handles) == 16


def test_no_place(device):
    handles = [device.put(torch.zeros(2**24)), device.put(torch.zeros(1))]

    assert handles[1] is None


def value(seed, size=1_000_000):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, device="cuda", generator=generator)


@gpu
def test_what_comes_back_is_equal_and_on_its_device():
    for store in (Host(), Host(pin=False), Disk()):
        tensors = [value(seed) for seed in range(5)]
        handles = [store.put(tensor) for tensor in tensors]

        handles[2].prefetch()

        for handle, tensor in zip(handles, tensors, strict=True):
            for _ in range(2):
                got = handle.get()
                assert got.device == tensor.device
                assert torch.equal(got, tensor)
        assert store.statistics.stored_bytes == 20_000_000
        del handle, handles
        assert store.statistics.stored_bytes == 0


@gpu
def test_the_memory_on_the_device_is_freed():
    store = Host()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    tensor = value(0)
    storage = ref(tensor.untyped_storage())
    handle = store.put(tensor)
    del tensor

    handle.settle()

    assert storage() is None
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(handle.get(), value(0))


@gpu
def test_a_copy_waits_for_what_makes_the_tensor_and_the_user_waits_for_the_copy():
    store = Host()
    size = 300 if "emulator" in sys.modules else 4000  # which sees a missing wait, however long a product takes
    big = torch.randn(size, size, device="cuda")
    expected, got = [], []

    for _ in range(20):
        result = big @ big
        handle = store.put(result)
        expected.append(result.clone())
        del result
        handle.prefetch()
        got.append(handle.get() * 1)

    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))


@gpu
def test_a_write_in_place_before_the_copy_has_ended_is_an_error():
    store = Host()
    tensor = value(0)
    torch.cuda._sleep(200_000_000)  # the copy comes after it
    handle = store.put(tensor)

    tensor.add_(1)

    for _ in range(2):
        with pytest.raises(MutationError, match="version 1; expected version 0"):
            handle.get()
        torch.cuda.synchronize()


@gpu
def test_a_write_in_place_after_the_copy_is_none():
    store = Host()
    tensor = value(0)
    handle = store.put(tensor)
    handle.settle()

    tensor.add_(1)

    assert torch.equal(handle.get(), value(0))


@gpu
def test_a_handle_that_is_dropped_at_once_lets_go_of_the_tensor_when_its_copy_has_ended():
    store = Host()
    tensor = value(0)
    storage = ref(tensor.untyped_storage())
    torch.cuda._sleep(200_000_000)
    handle = store.put(tensor)

    del handle, tensor

    assert store.statistics.stored_bytes == 0
    assert storage() is not None  # the copy reads it
    store.land(all_of_it=True)
    assert storage() is None


@gpu
def test_pinned_memory_has_a_limit_and_other_memory_has_not():
    store = Host(pin="8MiB")

    handles = [store.put(value(seed)) for seed in range(5)]

    assert all(torch.equal(handle.get(), value(seed)) for seed, handle in enumerate(handles))
    assert store._transfers.pool.pinned_bytes == 8 * 2**20


@gpu
def test_many_steps_pin_no_more_memory():
    store = Host()
    for _ in range(20):
        handles = [store.put(value(seed)) for seed in range(10)]
        for handle in reversed(handles):
            handle.get()
        del handle, handles

    assert store._transfers.pool.pinned_bytes == 64 * 2**20


@gpu
def test_two_streams():
    store = Host()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        handle = store.put(value(0))
        handle.prefetch()
        on_side = handle.get() + 0

    torch.cuda.current_stream().wait_stream(side)

    assert torch.equal(on_side, handle.get())


@gpu
def test_a_step_is_exact():
    x = torch.randn(500, 500, device="cuda", requires_grad=True)
    store = Host()

    def step():
        y = x
        for _ in range(5):
            y = (y @ x).sin()
        return y.sum()

    with torch.autograd.graph.saved_tensors_hooks(store.put, lambda handle: handle.get()):
        loss = step()
    (ours,) = torch.autograd.grad(loss, x)

    (plain,) = torch.autograd.grad(step(), x)
    assert torch.equal(ours, plain)


@gpu
def test_in_a_captured_graph_it_is_refused():
    store = Host()
    tensor = value(0)
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        tensor.add_(1)  # torch warns of a graph that is empty
        with pytest.raises(UnsupportedError, match="while a graph is captured"):
            store.put(tensor)
