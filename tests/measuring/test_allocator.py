"""Events of the CPU allocator, against bytes counted by hand."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from torchremat._compat.accelerators import Happened
from torchremat._compat.profiler import start_profiler
from torchremat.errors import UnsupportedError
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.history import _deltas
from torchremat.measuring.profiled import _matched, profiler_is_active

CPU = torch.device("cpu")
KIB = torch.empty  # KIB(256) is 1 KiB of float32


def test_events_are_in_order_and_sized_by_hand():
    with record_allocations(CPU) as recorder:
        a = KIB(256)
        b = KIB(512)
        del a
        c = KIB(256)
        del b, c

    trace = recorder.trace
    assert trace.delta_bytes.tolist() == [1024, 2048, -1024, 1024, -2048, -1024]
    assert trace.live[1:].tolist() == [1024, 3072, 2048, 3072, 1024, 0]
    assert trace.peak_bytes == 3072
    assert trace.time_ns.tolist() == sorted(trace.time_ns.tolist())


def test_temporaries_inside_kernels_are_seen():
    # A logsumexp over 256 rows of 1024 makes exp(x - max), 1 MiB, which no tensor in Python ever holds.
    x = torch.zeros(256, 1024)

    with record_allocations(CPU) as recorder:
        y = torch.logsumexp(x, dim=1)

    assert recorder.trace.peak_bytes > 1024 * 1024
    assert int(recorder.trace.live[-1]) == y.nbytes == 1024


def test_marks_lie_between_the_events_around_them():
    with record_allocations(CPU) as recorder:
        start = recorder.mark("start")
        a = KIB(256)
        middle = recorder.mark("middle")
        del a
        end = recorder.mark("end")

    trace = recorder.trace
    assert (start, middle, end) == (0, 1, 2)
    assert [mark.position for mark in trace.marks] == [0, 1, 2]
    assert [mark.label for mark in trace.marks] == ["start", "middle", "end"]
    assert [trace.live_bytes_at(mark) for mark in (start, middle, end)] == [0, 1024, 0]
    assert trace.peak_bytes_between(start, middle) == 1024
    assert trace.peak_bytes_between(middle, end) == 1024
    assert trace.peak_bytes_between(end, end) == 0


def test_a_mark_after_the_block_is_none_in_the_next_one():
    # A region of a step that had failed marked its end in the next recorder's block, over the mark of the same id.
    with record_allocations(CPU) as first:
        first.mark("in time")
    with record_allocations(CPU) as second:
        second.mark("start")
        second.mark("before")
        a = KIB(256)
        first.mark("late")
        del a

    assert [mark.position for mark in second.trace.marks] == [0, 0]


def test_marks_from_hooks_finalizers_and_other_threads():
    tensor = KIB(1, requires_grad=True)
    tensor.register_hook(lambda grad: recorder.mark("hook") and None)

    class Owner: ...

    with record_allocations(CPU) as recorder:
        owner = Owner()
        weakref.finalize(owner, lambda: recorder.mark("finalizer"))
        del owner
        tensor.sum().backward()
        thread = threading.Thread(target=recorder.mark, args=("thread",))
        thread.start()
        thread.join()

    assert [mark.label for mark in recorder.trace.marks] == ["finalizer", "hook", "thread"]
    assert recorder.trace.marks[2].position == len(recorder.trace.time_ns)


def test_an_address_is_known_as_long_as_its_block_lives():
    with record_allocations(CPU) as recorder:
        x = torch.empty(256)
        first, last = x.data_ptr(), x.data_ptr() + x.nbytes
        live = recorder.mark("live")
        del x
        freed = recorder.mark("freed")
    trace = recorder.trace

    assert [trace.has(address, live) for address in (first - 1, first, last - 1, last)] == [False, True, True, False]
    assert not trace.has(first, freed)


def test_backward_is_part_of_the_trace():
    # y is 4 KiB, the loss 4 B. Backward adds the gradient of the loss, 4 B; that of y is an expanded view of it; the
    # product with w makes 4 KiB. The parameter's gradient is that tensor and stays.
    x = torch.ones(1024)
    w = torch.ones(1024, requires_grad=True)

    with record_allocations(CPU) as recorder:
        start = recorder.mark("start")
        loss = (x * w).sum()
        forward = recorder.mark("forward")
        loss.backward()
        backward = recorder.mark("backward")

    trace = recorder.trace
    assert trace.live_bytes_at(forward) == 4  # `x * w` itself is not saved
    assert trace.peak_bytes_between(start, forward) == 4096 + 4
    assert trace.peak_bytes_between(forward, backward) == 4 + 4 + 4096
    assert trace.live_bytes_at(backward) == 4 + 4096


def matched(events, **calls):
    return [tuple(event) for event in _matched(np.array(events), **calls).tolist()]


def test_a_foreign_free_of_the_cpu_does_not_count():
    # Address 7 was allocated before the block; its 512 may be the size of an earlier owner of the address.
    events = [(1, 5, 100), (2, 7, -512), (3, 5, -100)]

    assert matched(events) == [(1, 5, 100), (3, 5, -100)]


def test_a_foreign_free_of_a_device_counts():
    # A block of CUDA's allocator knows its own size, and that of the history is what was asked for.
    history = [Happened(1, 5, 100), Happened(2, 7, -600), Happened(3, 5, -100)]

    assert _deltas(history, block_bytes=512).tolist() == [512, -1024, -512]


def test_what_a_collective_has_allocated_and_nobody_is_seen_to_free_counts_until_its_end():
    # One collective from 10 to 20, another from 40 to 50. Address 5 is freed unseen, and used again at 30; address 6
    # is freed unseen for good; 7 is freed by the caller, later; 8 was not allocated in a collective, and stays.
    events = [(1, 8, 1), (12, 5, 100), (14, 7, 300), (30, 5, 50), (31, 5, -50), (35, 7, -300), (44, 6, 200)]

    found = matched(events, calls=[10, 20, 40, 50])

    assert found == [*events[:3], (20, 5, -100), *events[3:], (50, 6, -200)]


def test_foreign_frees_on_the_cpu_leave_no_event():
    # The first block leaves addresses in torch's table; whoever gets them next dies "with" their size, if at all.
    with record_allocations(CPU):
        first = [KIB(256) for _ in range(64)]
    first.clear()
    held = [KIB(256) for _ in range(64)]

    with record_allocations(CPU) as recorder:
        held.clear()
        kept = KIB(512)

    assert recorder.trace.delta_bytes.tolist() == [2048]
    assert kept.nbytes == 2048


def test_an_address_that_comes_back_without_a_free_ends_the_old_allocation():
    # Its free was in a thread that torch does not watch.
    events = [(1, 5, 100), (2, 5, 300), (3, 5, -300)]

    assert matched(events) == [(1, 5, 100), (2, 5, -100), (2, 5, 300), (3, 5, -300)]


def test_tensors_without_bytes_make_no_event():
    with record_allocations(CPU) as recorder:
        empty = torch.empty(0)
        recorder.mark("after")

    assert empty.nbytes == 0
    assert recorder.trace.delta_bytes.tolist() == []
    assert recorder.trace.peak_bytes == 0
    assert recorder.trace.live_bytes_at(0) == 0


def test_deep_nesting_needs_no_recursion():
    def nested(depth: int, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("deep"):
            return x.neg() if depth == 0 else nested(depth - 1, x)

    with record_allocations(CPU) as recorder:
        nested(400, torch.zeros(256))

    assert recorder.trace.peak_bytes == 2048


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_goes_through_and_the_profiler_is_closed(error: type[BaseException]):
    with pytest.raises(error), record_allocations(CPU) as recorder:
        raise error

    assert not profiler_is_active()
    with pytest.raises(UnsupportedError, match="no trace yet"):
        _ = recorder.trace
    with record_allocations(CPU) as recorder:
        kept = KIB(256)
    assert recorder.trace.peak_bytes == kept.nbytes


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_of_the_start_leaves_no_profiler(monkeypatch, when: str):
    # Starting takes milliseconds. Ctrl-C in them left a profiler behind, and planning was refused from then on.
    def interrupted():
        if when == "before":
            signal.raise_signal(signal.SIGINT)
        start_profiler()
        if when == "after":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("torchremat.measuring.profiled.start_profiler", interrupted)

    with pytest.raises(KeyboardInterrupt), record_allocations(CPU):
        pass

    assert not profiler_is_active()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so to whoever profiles
def test_an_active_profiler_is_refused_and_keeps_its_events():
    with profile(activities=[ProfilerActivity.CPU]) as users:
        assert profiler_is_active()
        torch.ones(3)
        with pytest.raises(UnsupportedError, match="a profiler is active"), record_allocations(CPU):
            pass

    assert any(event.name == "aten::ones" for event in users.events())
    assert not profiler_is_active()


def test_a_second_thread_is_refused():
    # torch tells of a profiler in its own thread alone: planning in two threads at once ended in a segmentation fault.
    found: list[object] = []

    def record():
        found.append(profiler_is_active())
        try:
            with record_allocations(CPU):
                found.append("recorded")
        except UnsupportedError as error:
            found.append(str(error))

    with record_allocations(CPU) as recorder:
        kept = KIB(256)
        first = threading.Thread(target=record)
        first.start()
        first.join()
    second = threading.Thread(target=record)
    second.start()
    second.join()

    active, refused, *after = found
    assert active and "plan and measure in one thread at a time" in str(refused)
    assert after == [False, "recorded"]
    assert recorder.trace.peak_bytes == kept.nbytes


def test_every_kind_of_profiler_counts_as_active():
    with torch.autograd.profiler.profile():
        assert profiler_is_active()
    with torch.autograd.profiler.emit_itt():
        assert profiler_is_active()
    with record_allocations(CPU):
        assert profiler_is_active()
    assert not profiler_is_active()


def test_a_profiler_that_warms_up_counts_as_active():
    # A second profiler started in the warm-up makes the process crash when the first one stops. torch keeps no flag.
    active: list[bool] = []
    plan = schedule(wait=1, warmup=1, active=1, repeat=1)

    with profile(activities=[ProfilerActivity.CPU], schedule=plan, acc_events=True) as users:
        for _ in range(4):
            active.append(profiler_is_active())
            users.step()

    assert active == [False, True, True, False]


def test_a_profiler_of_another_thread_counts_as_active():
    found: list[bool] = []
    with profile(activities=[ProfilerActivity.CPU]):
        thread = threading.Thread(target=lambda: found.append(profiler_is_active()))
        thread.start()
        thread.join()

    assert found == [True]


def test_a_profiler_inside_the_block_is_an_error():
    with (
        pytest.raises(UnsupportedError, match="started a profiler of its own"),
        record_allocations(CPU),
        profile(activities=[ProfilerActivity.CPU]),
    ):
        torch.ones(3)

    assert not profiler_is_active()


def test_other_devices_are_refused():
    with pytest.raises(UnsupportedError, match="not on meta"), record_allocations(torch.device("meta")):
        pass


def test_marks_are_invisible_to_dispatch_modes():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with record_allocations(CPU) as recorder, Names() as mode:
        recorder.mark("here")

    assert mode.names == []


def test_recording_changes_no_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(4, 8)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        checkpoint(model, x, use_reentrant=False).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    with record_allocations(CPU):
        recorded = gradients()
    gc.collect()

    assert all(map(torch.equal, plain, recorded))


@pytest.mark.gpu
def test_cuda_events_agree_with_cuda_counters():
    device = torch.device("cuda")
    before = torch.empty(1024, device=device)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()

    with record_allocations(device) as recorder:
        w = torch.randn(1024, 1024, device=device, requires_grad=True)
        (w @ w).relu().sum().backward()
        del before

    trace = recorder.trace
    assert trace.peak_bytes == torch.cuda.max_memory_allocated() - start
    assert int(trace.live[-1]) == torch.cuda.memory_allocated() - start
    assert -4096 in trace.delta_bytes  # of `before`


@pytest.mark.gpu
def test_a_slow_host_takes_no_time_of_the_device(monkeypatch):
    is_emulated, delayed_s = "emulator" in sys.modules, []

    def delay(cycles):
        begin_s = time.perf_counter()
        time.sleep(cycles / 2e9)
        delayed_s.append(time.perf_counter() - begin_s)

    if is_emulated:  # its kernels run at once, so a delay is the host's as well
        monkeypatch.setattr(torch.cuda, "_sleep", delay)
    begin_s, marks = time.perf_counter(), []
    with record_allocations(torch.device("cuda")) as recorder:
        for _ in range(6):
            marks.append(recorder.mark(""))
            time.sleep(0.03)
        host_s = time.perf_counter() - begin_s
    trace = recorder.trace

    seconds = [trace.seconds_between(first, last) for first, last in pairwise(marks)]
    assert min(seconds) >= 0
    # The host has slept in between, and has launched nothing.
    assert sum(seconds) < (host_s - sum(delayed_s[:-1]) if is_emulated else host_s / 2)
