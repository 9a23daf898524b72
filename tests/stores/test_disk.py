import copy
import gc
import os
import threading
import time
import warnings
from weakref import ref

import numpy
import pytest
import torch

from stores.conformance import filled, same
from stores.faults import descriptors, left, threads
from torchremat import Disk, MutationError, StoreError, UnsupportedError
from torchremat.stores.disk_file import BLOCK_BYTES, Checksum, DiskFile
from torchremat.stores.extents import Extent


def soon(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"limit": "6 apples"}, UnsupportedError, r"Disk\(limit=...\): '6 apples' is not a size"),
        ({"limit": -1}, UnsupportedError, r"Disk\(limit=...\): a size must be at least 1 B"),
        ({"pending": None}, UnsupportedError, r"Disk\(pending=...\): a size cannot be None"),
        ({"pending": 0}, UnsupportedError, r"Disk\(pending=...\)"),
        ({"threads": 0}, UnsupportedError, r"Disk\(threads=0\): expected an int of at least 1"),
        ({"threads": True}, UnsupportedError, r"Disk\(threads=True\)"),
        ({"timeout_s": 0}, UnsupportedError, r"Disk\(timeout_s=0\): expected a number of seconds above 0"),
        ({"timeout_s": float("nan")}, UnsupportedError, r"Disk\(timeout_s=nan\)"),
        ({"timeout_s": "1"}, UnsupportedError, r"Disk\(timeout_s='1'\)"),
        ({"directory": 3}, UnsupportedError, r"Disk\(directory=3\): expected a path"),
        (
            {"directory": "/nowhere/at/all"},
            StoreError,
            r"Disk\('/nowhere/at/all'\): no file .*: .*No such",
        ),
        ({"directory": __file__}, StoreError, r"no file can be made there: .*Not a directory"),
        ({"directory": "/proc"}, StoreError, r"no file can be made there"),
    ],
)
def test_what_cannot_be_is_said_before_any_training(arguments, error, message):
    with pytest.raises(error, match=message):
        Disk(**arguments)


def test_the_file_has_no_name_and_lies_where_it_should(tmp_path):
    before = set(descriptors())
    store = Disk(tmp_path)

    (mine,) = set(descriptors()) - before

    assert os.readlink(f"/proc/self/fd/{mine}").startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert repr(store) == f"Disk({str(tmp_path)!r})"
    assert repr(Disk(tmp_path, "1GiB")) == f"Disk({str(tmp_path)!r}, '1.00 GiB')"


def test_a_file_system_without_files_that_have_no_name(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    store = Disk(tmp_path)

    handle = store.put(filled((1000,), torch.float32))
    handle.settle()

    assert list(tmp_path.iterdir()) == []
    assert same(handle.get(), filled((1000,), torch.float32))


def test_a_file_system_that_cannot_reserve(monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    store = Disk()

    handle = store.put(filled((1000,), torch.float32))
    handle.settle()

    assert same(handle.get(), filled((1000,), torch.float32))


def test_with_the_last_handle_thread_descriptor_and_file_go():
    before, store = descriptors(), Disk()
    assert threads() == []  # until there is something to do
    handles = [store.put(filled((1000,), torch.float32, seed)) for seed in range(3)]
    assert len(threads()) == 2
    assert len(descriptors()) == len(before) + 1

    del store
    for handle in handles:
        handle.settle()
    assert same(handles[2].get(), filled((1000,), torch.float32, 2))

    handle = None
    handles.clear()
    assert threads() == []
    assert descriptors() == before


def test_a_tensor_on_its_way_is_read_without_the_disk(writes, reads):
    writes.gate.clear()
    store = Disk()
    handles = [store.put(filled((1000,), torch.float32, seed)) for seed in range(4)]
    writes.wait()

    got = [handle.get() for handle in handles]
    handles[3].prefetch()
    for each in got:
        each.add_(0)  # fresh memory, so the tensor itself is not written

    assert all(same(handle.get(), filled((1000,), torch.float32, seed)) for seed, handle in enumerate(handles))
    assert reads.count == 0
    writes.gate.set()
    for handle in handles:
        handle.settle()
    assert all(same(handle.get(), filled((1000,), torch.float32, seed)) for seed, handle in enumerate(handles))
    assert reads.count == 4


def test_put_waits_while_too_much_is_pending(writes):
    writes.gate.clear()
    store = Disk(pending=10_000)
    sources, handles = [], []

    def forward():
        for seed in range(6):
            tensor = filled((1000,), torch.float32, seed)
            sources.append(ref(tensor.untyped_storage()))
            handles.append(store.put(tensor))

    thread = threading.Thread(target=forward)
    thread.start()
    writes.wait()
    soon(lambda: len(handles) == 2)
    time.sleep(0.3)

    # Two are pending; the third one's `put` has not returned, and its caller still has the tensor.
    assert len(handles) == 2
    writes.gate.set()
    thread.join(60)
    assert len(handles) == 6
    assert sum(source() is not None for source in sources) <= 2
    assert all(same(handle.get(), filled((1000,), torch.float32, seed)) for seed, handle in enumerate(handles))


def test_a_tensor_larger_than_what_may_be_pending_is_in_the_file_when_put_returns():
    store = Disk(pending=100)
    tensor = filled((5000,), torch.float32)
    storage = ref(tensor.untyped_storage())

    handle = store.put(tensor)
    del tensor

    assert storage() is None
    assert store.statistics.copied_out_bytes == 20_000
    assert same(handle.get(), filled((5000,), torch.float32))


def test_what_is_dropped_before_it_is_written_is_never_written(writes):
    writes.gate.clear()
    store = Disk(threads=1)
    first = store.put(filled((1000,), torch.float32))
    writes.wait()
    tensors = [filled((1000,), torch.float32, seed) for seed in range(3)]
    storages = [ref(tensor.untyped_storage()) for tensor in tensors]
    handles = [store.put(tensor) for tensor in tensors]

    del handles, tensors

    assert [storage() for storage in storages] == [None] * 3
    assert store.statistics.stored_bytes == 4000
    writes.gate.set()
    first.settle()
    assert writes.count == 1


def test_room_of_a_tensor_that_is_dropped_while_it_is_written(writes):
    # Its bytes no longer count, but a thread still writes to its place: the next tensor waits for the place.
    writes.gate.clear()
    store = Disk(limit=4000, threads=1)
    handle = store.put(filled((1000,), torch.float32, 1))
    writes.wait()
    del handle
    assert store.statistics.stored_bytes == 0
    handles = []
    thread = threading.Thread(target=lambda: handles.append(store.put(filled((1000,), torch.float32, 2))))

    thread.start()
    time.sleep(0.2)
    assert handles == []
    writes.gate.set()
    thread.join(60)

    handles[0].settle()
    assert same(handles[0].get(), filled((1000,), torch.float32, 2))
    assert store.statistics.refused == 0


def test_prefetch_reads_once_and_hands_out_once(reads):
    store = Disk(threads=1)
    handle = store.put(filled((1000,), torch.float32))
    handle.settle()

    handle.prefetch()
    handle.prefetch()
    reads.wait()
    first = handle.get()
    assert reads.count == 1
    second = handle.get()

    assert reads.count == 2
    assert same(first, second) and first.data_ptr() != second.data_ptr()
    assert store.statistics.copied_in_bytes == 8000


def test_get_waits_for_a_read_that_has_begun(reads):
    store = Disk()
    handle = store.put(filled((1000,), torch.float32))
    handle.settle()
    reads.gate.clear()
    handle.prefetch()
    reads.wait()
    got = []
    thread = threading.Thread(target=lambda: got.append(handle.get()))

    thread.start()
    time.sleep(0.2)
    assert got == []
    reads.gate.set()
    thread.join(60)

    assert same(got[0], filled((1000,), torch.float32))
    assert reads.count == 1


def test_what_was_read_ahead_goes_with_its_handle(reads):
    store = Disk()
    handles = [store.put(filled((1000,), torch.float32, seed)) for seed in range(3)]
    for handle in handles:
        handle.settle()
        handle.prefetch()
    handle = None
    soon(lambda: reads.count == 3)

    handles.clear()

    assert store.statistics.stored_bytes == 0
    assert store.statistics.copied_in_bytes == 0


def test_a_tensor_written_in_place_before_it_is_in_the_file_is_an_error(writes):
    writes.gate.clear()
    store = Disk(threads=1)
    first, second = torch.zeros(100), torch.zeros(100)
    handles = [store.put(first), store.put(second)]
    writes.wait()

    first.add_(1)  # in the middle of its write
    second.add_(1)  # before it

    message = r"\[torch.FloatTensor \[100\]\] is at version 1; expected version 0"
    for handle in handles:
        with pytest.raises(MutationError, match=message):
            handle.get()
    writes.gate.set()
    for handle in handles:
        handle.settle()
        with pytest.raises(MutationError, match=message):
            handle.get()


def test_a_tensor_written_in_place_once_it_is_in_the_file_comes_back_as_it_was():
    store = Disk()
    tensor = torch.zeros(100)
    handle = store.put(tensor)
    handle.settle()

    tensor.add_(1)

    assert torch.equal(handle.get(), torch.zeros(100))


def test_a_write_past_the_version_counter_on_the_way_does_not_reach_what_is_summed(writes):
    # The backward of oneDNN's LSTM writes to what its forward saved: now and then its checksum differed.
    writes.gate.clear()
    store = Disk()
    tensor = torch.zeros(100, device="cpu")
    handle = store.put(tensor)
    writes.wait()

    tensor.numpy()[3] = 1
    writes.gate.set()
    handle.settle()

    assert torch.equal(handle.get(), torch.zeros(100, device="cpu"))


@pytest.mark.parametrize("sizes", [(2 * BLOCK_BYTES + 700,), (700, BLOCK_BYTES, BLOCK_BYTES), (1, 1, 2 * BLOCK_BYTES)])
def test_bytes_in_extents_that_do_not_end_where_blocks_do(tmp_path, sizes):
    file = DiskFile(tmp_path, None)
    extents = [Extent(3 * BLOCK_BYTES * number, size) for number, size in enumerate(sizes)]
    written = filled((sum(sizes),), torch.uint8).numpy()
    read = numpy.empty_like(written)

    expected = Checksum(written.size)
    for start in range(0, written.size, BLOCK_BYTES):
        expected.add(written[start : start + BLOCK_BYTES])

    assert file.write(extents, written) == file.read(extents, read) == expected.number
    assert numpy.array_equal(read, written)


def test_views_that_are_not_as_they_lie_in_memory():
    store = Disk()
    conjugate = torch.randn(10, dtype=torch.complex64).conj()
    negative = torch.randn(10, dtype=torch.complex64).conj().imag
    columns = torch.arange(12.0).view(3, 4).t()

    for tensor in (conjugate, negative, columns):
        handle = store.put(tensor)
        handle.settle()
        assert torch.equal(handle.get(), tensor)


def test_through_autograd_a_step_holds_no_more_than_what_may_be_pending():
    x = torch.randn(2**16, requires_grad=True)  # 256 KiB
    store = Disk(pending="512KiB")
    storages = []

    def pack(tensor):
        storages.append(ref(tensor.untyped_storage()))
        return store.put(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.get()):
        y = x
        for _ in range(20):
            y = y.sin()

    # Those pending, and the input, which saves itself.
    assert len(storages) == 20
    assert sum(storage() is not None for storage in storages) <= 3
    (ours,) = torch.autograd.grad(y.sum(), x)
    y = x
    for _ in range(20):
        y = y.sin()
    (plain,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(ours, plain)


def test_a_handle_may_be_dropped_in_the_middle_of_anything():
    # The cycle collector starts in the middle of any line, of one that holds a lock as well.
    store = Disk()
    handles = [store.put(filled((100,), torch.float32)) for _ in range(2)]
    writer = store._lease.writer()

    with writer._condition, writer.ledger._lock:
        del handles[0]
    assert store.statistics.stored_bytes == 400

    del store
    with writer._condition:
        handles.clear()  # the last one: its finalizer tells the threads to end
    assert left() == []


def test_no_warnings():
    with warnings.catch_warnings(action="error"):
        store = Disk()
        handles = [store.put(filled((100,), dtype)) for dtype in (torch.bfloat16, torch.float8_e5m2, torch.bool)]
        for handle in handles:
            handle.settle()
            handle.prefetch()
            handle.get()


def test_what_lies_on_a_disk_cannot_be_copied_and_is_none_the_worse():
    disk = Disk()
    handle = disk.put(filled((1000,), torch.float32))
    handle.settle()

    # The copy of a file's number would close the file when it goes, and the number is the next file's then.
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(disk._lease.writer().file)
    gc.collect()

    assert same(handle.get(), filled((1000,), torch.float32))
