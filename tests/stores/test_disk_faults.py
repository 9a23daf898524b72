"""Whatever fails, on whichever call: what comes back is right, or there is an error; and nobody waits for ever."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from weakref import ref

import pytest
import torch

from forked import run_main
from probes.stores import disk_entries, disk_writer
from stores.conformance import filled, same
from stores.faults import Calls, broken, descriptors, no_space, threads, workers
from torchremat import Disk, Host, MutationError, StoreError, StoreWarning, Tiers


@pytest.fixture
def grows(monkeypatch):
    calls = Calls(os.posix_fallocate)
    monkeypatch.setattr(os, "posix_fallocate", calls)
    return calls


class Clock:
    """The seconds by which a disk's patience goes. While it runs, each look at it takes some; else none go by."""

    def __init__(self):
        self.now_s = 0.0
        self.runs = False

    def monotonic(self):
        self.now_s += 0.2 if self.runs else 0.0
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(disk_entries, "time", made)
    return made


def value(seed, size=1000):
    return filled((size,), torch.float32, seed)


def stored(store, seed=0, size=1000):
    """A handle of a tensor that is in the file."""
    handle = store.put(value(seed, size))
    handle.settle()
    return handle


# A full disk.


def test_a_full_disk_is_said_once_and_counted(grows):
    store = Disk()
    grows.fail = no_space

    with pytest.warns(StoreWarning, match=r"no room for a tensor of shape \(1000,\), float32.*No space left"):
        assert store.put(value(0)) is None
    with warnings.catch_warnings(action="error"):
        assert store.put(value(1)) is None
    assert store.statistics.refused == 2
    assert store.statistics.stored_bytes == 0

    grows.fail = lambda number: None  # somebody has made room
    assert same(stored(store, 2).get(), value(2))


def test_a_disk_with_less_room_than_a_whole_step(grows):
    # Space is reserved in large steps; where there is less, just what is needed will do.
    grows.fail = lambda number: no_space(number) if number % 2 else None
    store = Disk()

    handles = [stored(store, seed) for seed in range(3)]

    assert all(same(handle.get(), value(seed)) for seed, handle in enumerate(handles))
    assert grows.count == 6


def test_a_full_disk_has_room_again_where_tensors_were(grows):
    store = Disk()
    grows.fail = lambda number: no_space(number) if number > 5 or number % 2 else None
    handles = [stored(store, seed, 1000) for seed in range(2)]
    del handles[0]

    handles.append(stored(store, 5, 600))  # where the first one was
    handles.append(stored(store, 6, 400))

    assert grows.count == 4
    assert [same(handle.get(), value(seed, size)) for handle, seed, size in zip(
        handles, (1, 5, 6), (1000, 600, 400), strict=True)] == [True] * 3  # fmt: skip


def test_a_full_disk_is_an_error_if_strict(grows):
    store = Disk(strict=True)
    grows.fail = no_space

    with pytest.raises(StoreError, match=r"no room for .* cannot grow: .*No space left"):
        store.put(value(0))

    assert store.statistics.stored_bytes == 0


def test_the_next_tier_takes_what_a_full_disk_does_not(grows):
    host = Host()
    store = Tiers(Disk(), host)
    grows.fail = no_space

    with pytest.warns(StoreWarning):
        handle = store.put(value(0))

    assert same(handle.get(), value(0))
    assert host.statistics.stored_bytes == 4000
    assert store.statistics.refused == 0


def test_the_largest_size_of_a_file_that_the_system_allows(tmp_path):
    program = tmp_path / "limited.py"
    program.write_text(
        textwrap.dedent("""
        import resource, warnings, torch
        from torchremat import Disk, StoreWarning

        warnings.simplefilter("error")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store = Disk()
        handles = [store.put(torch.full((10_000,), float(seed))) for seed in range(2)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handles.append(store.put(torch.zeros(10_000)))
        for handle in handles[:2]:
            handle.settle()
        print([handle is None or handle.get().eq(seed).all().item() for seed, handle in enumerate(handles)])
        print([warning.category.__name__ for warning in caught], "File too large" in str(caught[0].message))
        """)
    )

    ended = run_main(program, folder=tmp_path, timeout=120)

    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "[True, True, True]\n['StoreWarning'] True\n"


# Writes that fail.


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("fault", [no_space, broken])
def test_a_write_that_fails_keeps_the_tensor(writes, fault, number):
    writes.fail = lambda count: fault(count) if count == number else None
    store = Disk(threads=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handles = [store.put(value(seed, 200_000)) for seed in range(3)]  # two blocks each
        for handle in handles:
            handle.settle()
        handles.append(store.put(value(3, 200_000)))
        handles.append(store.put(value(4, 200_000)))
        for handle in handles:
            handle.settle()

    (told,) = caught
    assert told.category is StoreWarning
    assert "could not be written: [Errno" in str(told.message)
    assert "Such tensors stay where they are. This warning is shown once." in str(told.message)
    lost = (number - 1) // 2
    assert [handle.stored_bytes for handle in handles] == [0 if index == lost else 800_000 for index in range(5)]
    assert store.statistics.failed == 1
    assert store.statistics.stored_bytes == 3_200_000
    assert all(same(handle.get(), value(seed, 200_000)) for seed, handle in enumerate(handles))
    handle = None
    handles.clear()
    assert store.statistics.stored_bytes == 0


def test_what_was_kept_is_checked_for_writes_in_place(writes):
    writes.fail = broken
    store = Disk()
    tensor = value(0)
    handle = store.put(tensor)
    handle.settle()

    tensor.mul_(2)

    with pytest.raises(MutationError, match="version 1; expected version 0"):
        handle.get()


def test_what_was_kept_is_freed_with_its_handle(writes):
    writes.fail = broken
    store = Disk()
    tensor = value(0)
    storage = ref(tensor.untyped_storage())
    handle = store.put(tensor)
    handle.settle()
    del tensor
    assert storage() is not None

    del handle

    assert storage() is None


def test_a_write_that_fails_is_an_error_at_the_next_put_if_strict(writes):
    writes.fail = lambda count: broken(count) if count == 1 else None
    store = Disk(strict=True)
    handle = stored(store)

    with pytest.raises(StoreError, match=r"float32, 3.91 KiB, from cpu could not be written: .*Input/output error"):
        store.put(value(1))

    assert same(handle.get(), value(0))  # it is not lost
    assert same(stored(store, 2).get(), value(2))


@pytest.mark.parametrize("most", [1, 7, 511, 4096])
def test_calls_that_move_less_than_they_were_asked_to(writes, reads, most):
    writes.most = reads.most = most
    store = Disk()

    handle = stored(store)

    assert same(handle.get(), value(0))
    assert writes.count == reads.count == -(-4000 // most)


def test_a_write_of_nothing_does_not_go_on_for_ever(monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, place: 0)
    store = Disk()

    handle = stored(store)

    assert handle.stored_bytes == 0
    assert same(handle.get(), value(0))


# Reads that fail, and a file that is damaged.


@pytest.mark.parametrize("ahead", [False, True])
def test_a_read_that_fails_is_an_error_that_names_the_tensor(reads, ahead):
    store = Disk()
    handle = stored(store)
    reads.fail = broken

    if ahead:
        handle.prefetch()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"of shape \(1000,\), float32.* cannot be read back: .*Input/outp"):
            handle.get()

    reads.fail = lambda number: None
    assert same(handle.get(), value(0))


def test_a_read_ahead_that_fails_is_tried_again(reads):
    store = Disk()
    handle = stored(store)
    reads.fail = lambda count: broken(count) if count == 1 else None

    handle.prefetch()
    reads.wait()

    assert same(handle.get(), value(0))


def slab_of(store):
    (mine,) = [one for one in descriptors() if os.fstat(one).st_size]
    return mine


def test_every_flipped_bit_is_an_error():
    store = Disk()
    handle = stored(store, size=300)
    descriptor, chance = slab_of(store), random.Random(0)

    for place in [0, 1199, *(chance.randrange(1200) for _ in range(50))]:
        byte = os.pread(descriptor, 1, place)[0]
        os.pwrite(descriptor, bytes([byte ^ 1 << chance.randrange(8)]), place)
        with pytest.raises(StoreError, match="is not what was written, its checksum differs"):
            handle.get()
        handle.prefetch()
        with pytest.raises(StoreError, match="is not what was written, its checksum differs"):
            handle.get()
        os.pwrite(descriptor, bytes([byte]), place)

    assert same(handle.get(), value(0, 300))


@pytest.mark.parametrize("left", [0, 1, 4096, 7999])
def test_a_file_that_was_cut_off_is_an_error(left):
    store = Disk()
    handles = [stored(store, seed) for seed in range(2)]

    os.ftruncate(slab_of(store), left)

    errors = []
    for seed, handle in enumerate(handles):
        try:
            assert same(handle.get(), value(seed))
        except StoreError as error:
            errors.append(str(error))
    assert len(errors) == (2 if left < 4000 else 1)
    assert all("cannot be read back" in error and "the file ends before byte" in error for error in errors)


def test_a_file_that_was_cut_off_and_grew_again_is_an_error():
    store = Disk()
    handle = stored(store)
    descriptor = slab_of(store)

    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, 1_000_000)  # zeros

    with pytest.raises(StoreError, match="its checksum differs"):
        handle.get()


def test_a_sector_that_was_never_written_is_an_error():
    # The disk says that it has written, and brings back what was there before.
    store = Disk()
    first = stored(store, 1)
    descriptor = slab_of(store)
    old = os.pread(descriptor, 512, 512)
    del first
    second = stored(store, 2)

    os.pwrite(descriptor, old, 512)

    with pytest.raises(StoreError, match="its checksum differs"):
        second.get()


# Threads that are interrupted, or hang.


def interrupt(thread):
    """Raise SystemExit at the next line of a thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


@pytest.mark.parametrize("pending", [1, 9000, "1MiB"])
@pytest.mark.parametrize("times", [1, 2])
def test_threads_that_are_interrupted_in_the_middle_of_a_write(writes, pending, times):
    store = Disk(pending=pending)
    main = threading.current_thread()
    interrupted = []

    def fail(number):
        if threading.current_thread() is not main and len(interrupted) < times:
            interrupted.append(number)
            return SystemExit()
        return None

    writes.fail = fail
    handles = [store.put(value(seed)) for seed in range(8)]

    for handle in handles:
        handle.settle()
    assert len(interrupted) == times
    assert len(workers()) == 2
    assert all(same(handle.get(), value(seed)) for seed, handle in enumerate(handles))
    assert store.statistics.copied_out_bytes == 32_000
    handle = None
    handles.clear()
    assert store.statistics.stored_bytes == 0


def test_threads_that_every_write_interrupts_do_not_spin_for_ever(writes):
    # They went on until the program ended, each at full speed.
    writes.fail = lambda number: SystemExit("no more")
    store = Disk(pending=1)

    with pytest.raises(StoreError, match=r"its threads have ended, since 50 moves in a row failed with SystemExit: no"):
        store.put(value(0))
    deadline = time.monotonic() + 60
    while workers() and time.monotonic() < deadline:
        time.sleep(0.01)

    assert not workers()
    assert 50 <= writes.count <= 50 * 8
    with pytest.raises(StoreError, match="its threads have ended"):
        store.put(value(1))


def test_threads_that_are_interrupted_while_they_wait():
    store = Disk()
    first = stored(store)
    before = workers()
    for thread in before:
        interrupt(thread)

    second = store.put(value(1))  # wakes one, which is interrupted then
    first.prefetch()

    assert same(first.get(), value(0))
    second.settle()
    assert same(second.get(), value(1))
    assert workers() == before


def test_threads_that_are_interrupted_in_the_middle_of_a_read(reads):
    store = Disk()
    handle = stored(store)
    main = threading.current_thread()
    reads.fail = lambda number: None if threading.current_thread() is main else SystemExit()

    handle.prefetch()
    reads.wait()

    assert same(handle.get(), value(0))


def test_a_disk_that_hangs_is_an_error_in_the_end(writes, clock):
    writes.gate.clear()
    store = Disk(pending=5000, timeout_s=0.3)
    handle = store.put(value(0))

    clock.runs = True
    with pytest.raises(StoreError, match=r"nothing was written or read for 0.3 s, and 8000 B wait to be written"):
        store.put(value(1))
    with pytest.raises(StoreError, match=r"nothing was written or read for 0\.3 s"):
        handle.settle()
    clock.runs = False

    assert same(handle.get(), value(0))
    writes.gate.set()
    handle.settle()
    assert store.statistics.stored_bytes == 4000


def test_a_read_that_hangs_is_an_error_in_the_end(reads, clock):
    store = Disk(timeout_s=0.3)
    handle = stored(store)
    reads.gate.clear()
    handle.prefetch()
    reads.wait()

    clock.runs = True
    with pytest.raises(StoreError, match=r"nothing was written or read for 0\.3 s"):
        handle.get()
    clock.runs = False

    reads.gate.set()
    assert same(handle.get(), value(0))


def test_a_disk_that_is_slow_is_waited_for(writes, clock):
    # Each write takes less than the patience, by the clock; all of them take more.
    def slowly(number):
        time.sleep(0.15)  # long enough for who waits to look at the clock
        clock.now_s += 0.4

    store = Disk(pending=4000, timeout_s=0.5, threads=1)
    writes.fail = slowly

    handles = [store.put(value(seed)) for seed in range(5)]

    assert all(same(handle.get(), value(seed)) for seed, handle in enumerate(handles))


@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random(writes, reads, grows, seed):
    # Whatever happens, a tensor comes back right or with an error, and all is given back in the end.
    chance = random.Random(seed)
    main = threading.current_thread()

    def fail(number):
        if chance.random() < 0.05 and threading.current_thread() is not main:
            return SystemExit()
        return broken(number) if chance.random() < 0.1 else None

    writes.fail = reads.fail = fail
    grows.fail = lambda number: no_space(number) if chance.random() < 0.3 else None
    store = Disk(limit=60_000, pending=chance.choice([1, 10_000, 50_000]))
    held, errors = {}, 0

    with warnings.catch_warnings(action="ignore"):
        for turn in range(300):
            if chance.random() < 0.5:
                held[turn] = store.put(value(turn, chance.randrange(1, 3000)))
            elif held:
                key = chance.choice(list(held))
                handle = held[key]
                if handle is not None and chance.random() < 0.3:
                    handle.prefetch()
                try:
                    got = handle and handle.get()
                except StoreError:
                    errors += 1
                else:
                    assert got is None or same(got, value(key, got.numel()))
                if chance.random() < 0.7:
                    del held[key]
            handle = None
            assert store.statistics.stored_bytes <= 60_000
        held.clear()

    assert errors > 0
    assert store.statistics.stored_bytes == 0
    del store
    for thread in workers():
        thread.join(60)
    assert threads() == []


# The end of a step, of a store, and of a process.


def test_a_graph_that_is_dropped_leaves_nothing():
    before = descriptors()
    store = Disk()
    x = torch.randn(1000, requires_grad=True)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(store.put, lambda handle: handle.get()):
            y = x.sin().exp().tanh()
        assert store.statistics.stored_bytes == 12_000
        del y
        assert store.statistics.stored_bytes == 0

    del store

    assert threads() == []
    assert descriptors() == before


def test_a_forward_that_raises_leaves_nothing():
    store = Disk()
    x = torch.randn(1000, requires_grad=True)

    def forward():
        with torch.autograd.graph.saved_tensors_hooks(store.put, lambda handle: handle.get()):
            y = x.sin().exp()
            raise KeyError(y.shape)

    with pytest.raises(KeyError):
        forward()

    assert store.statistics.stored_bytes == 0


def test_a_retained_graph_goes_backward_again():
    store = Disk()
    x = torch.randn(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(store.put, lambda handle: handle.get()):
        y = x.sin().exp().sum()

    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)

    (plain,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert torch.equal(first, plain) and torch.equal(second, plain)
    assert store.statistics.stored_bytes == 0


def test_a_store_that_is_dropped_while_it_writes(writes):
    before = descriptors()
    writes.gate.clear()
    store = Disk()
    handles = [store.put(value(seed)) for seed in range(5)]
    writes.wait()
    threading.Timer(0.2, writes.gate.set).start()

    del handles, store

    for thread in workers():
        thread.join(60)
    assert threads() == []
    assert descriptors() == before
    assert writes.count <= 2  # what was begun, and nothing else


def in_a_process(code, *, wait=True):
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if not wait:
        return process
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    return out


def test_a_process_that_ends_in_the_middle_of_writes(tmp_path):
    out = in_a_process(
        f"""
        import os, time, torch
        from torchremat import Disk

        write = os.pwrite
        def slowly(*arguments):
            time.sleep(0.2)
            return write(*arguments)
        os.pwrite = slowly
        store = Disk({str(tmp_path)!r})
        handles = [store.put(torch.zeros(1000)) for _ in range(1000)]
        print("the end")
        """
    )

    assert out == "the end\n"
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    process = in_a_process(
        f"""
        import time, torch
        from torchremat import Disk

        store = Disk({str(tmp_path)!r})
        handles = [store.put(torch.zeros(100_000)) for _ in range(50)]
        print("stored", flush=True)
        time.sleep(100)
        """,
        wait=False,
    )
    with process:
        assert process.stdout.readline() == "stored\n"

        process.send_signal(signal.SIGKILL)

        assert process.wait(60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_fork_may_not_write_to_the_file_of_its_parent(tmp_path):
    program = tmp_path / "forks.py"
    program.write_text(
        textwrap.dedent("""
        import os, sys, warnings, torch
        from torchremat import Disk, StoreError

        store = Disk()
        handle = store.put(torch.ones(1000))
        handle.settle()
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            for call in (lambda: store.put(torch.zeros(10)), handle.get, handle.prefetch, lambda: store.statistics):
                try:
                    call()
                except StoreError as error:
                    print("a fork of it. Make a Disk of its own" in str(error))
            del handle, store
            mine = Disk().put(torch.full((10,), 2.0))
            mine.settle()
            print(mine.get().sum().item(), flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(handle.get().sum().item(), store.statistics.stored_bytes)
        """)
    )

    ended = run_main(program, folder=tmp_path, timeout=120)

    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "True\nTrue\nTrue\nTrue\n20.0\n1000.0 4000\n"


def test_threads_that_are_woken_together_write_different_tensors(monkeypatch):
    # Both found the oldest tensor that waited, and the signal for the other one was lost.
    monkeypatch.setattr(disk_writer, "_LOOK_S", 5.0)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        store = Disk(timeout_s=1)
        handles = [store.put(value(seed, 16)) for seed in range(1000)]
        for handle in handles:
            handle.settle()
    finally:
        sys.setswitchinterval(interval_s)

    assert all(same(handle.get(), value(seed, 16)) for seed, handle in enumerate(handles))
