"""Slips that are likely in code for a device, each made once in the library: the emulated device finds it.

A slip is one line of a function that is another one. A program runs with it and without it, and complains of races, and
of what it measures itself. What the device cannot find is at the end of README.md.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import emulator
import torchremat
from probes.memory import Subject, accelerators
from probes.pipelines import copying
from probes.regions import Now
from probes.stores import ByteSpan, PinnedBlock, transfers
from torchremat import Host, Pipe, checkpointed
from torchremat.policies import save_matmuls

DEVICE = torch.device("cuda", 0)
SIZE = 1 << 18
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _events_do_not_fire(configured):
    configured(lag=emulator.NEVER)


def random(*shape):
    return torch.randn(*(shape or (SIZE,)), device=DEVICE)


# ---------------------------------------------------------------------------------------------------------- programs
#
# Each returns what is wrong beside races.


def puts_and_gets():
    store, tensor = Host(), random()
    handle = store.put(tensor)
    handle.get().sum()
    del handle


def drops_handles():
    store = Host()
    for _ in range(4):
        handle = store.put(random() * 2)
        del handle
        random().zero_()


def lets_go_early():
    store = Host()
    handles = []
    for _ in range(8):
        handles.append(store.put(random() * 2))
        random().zero_()


def fetches_ahead():
    store = Host()
    handles = [store.put(random()) for _ in range(2)]
    for handle in handles:
        handle.settle()
    _ = [random().mul_(2) for _ in range(4)]
    del _  # whose memory is the next one's
    for handle in handles:
        handle.prefetch()
    for handle in handles:
        handle.get().sum()


def fetches_ahead_and_drops():
    store = Host()
    handle = store.put(random())
    handle.settle()
    handle.prefetch()
    del handle
    random().zero_()


def gets_on_another_stream():
    store, side = Host(), torch.cuda.Stream()
    handle = store.put(random())
    handle.settle()
    handle.prefetch()
    with torch.cuda.stream(side):
        got = handle.get()
        got.sum()
    del got, handle
    store.land(all_of_it=True)
    random().zero_()


def writes_what_is_put():
    store, tensor = Host(), random()
    handle = store.put(tensor)
    handle.before_write()
    tensor.zero_()
    handle.get().sum()


def uses_pinned_memory_again():
    store = Host(pin="4MiB")
    for _ in range(16):
        handle = store.put(random())
        handle.prefetch()
        del handle


def drops_the_store():
    store = Host()
    handle = store.put(random() * 2)
    del handle, store
    _ = [random().zero_() for _ in range(3)]


def asks_for_parts_on_two_streams():
    side = torch.cuda.Stream()
    with torchremat.offload(Host(), min_bytes=1):
        h = random(512, 512).requires_grad_() * 2
        parts = [h[:300].sin(), h[200:].sin()]
        del h
    _ = [random(512, 512).mul_(2) for _ in range(4)]
    first = parts[0].grad_fn._saved_self
    with torch.cuda.stream(side):
        second = parts[1].grad_fn._saved_self  # in the buffer that the other one has loaded
        second.sum()
    del first, second, _
    _ = [random(512, 512).zero_() for _ in range(6)]


def goes_through_a_pipe():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    pipe = Pipe(model, [2, 2], devices=["cuda:0", "cuda:1"], chunks=4)
    for _ in range(2):
        x = random(64, 64)
        pipe(x).square().sum().backward()


def infers_through_a_pipe():
    pipe = Pipe(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), [2, 2], devices=["cuda:0", "cuda:1"], chunks=8)
    with torch.no_grad():
        for _ in range(3):
            pipe(random(64, 64))


def measures_twice():
    weight = random(256, 256).requires_grad_()

    def step():
        return (weight @ weight).sum()

    random(64 * MIB).zero_()  # a higher peak than the step's
    found = torchremat.measure(step)
    if found.peak_bytes - found.before_bytes > 64 * MIB:
        yield "a peak of before the step counts as the step's"


def plans():
    with torch.cuda.stream(torch.cuda.Stream()):  # which nobody has warmed
        yield from _plans()


def _plans():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))).to(DEVICE)
    x = random(256, 128)
    plan = torchremat.plan(model, lambda model: model(x).square().mean(), budget="100%")
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        peak = torch.cuda.max_memory_allocated()
    if abs(peak - plan.peak_bytes) > 4096:
        yield f"predicted {plan.peak_bytes}, measured {peak}"


def offloads():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6))).to(DEVICE)
    x, store = random(1024, 256), Host()
    for _ in range(2):
        with torchremat.offload(store):
            loss = model(x).sum()
        stored, held = store.statistics.stored_bytes, store._transfers._flying_bytes
        loss.backward()
    if held > stored / 4:
        yield f"of {stored} bytes {held} are on the device after the forward"


def goes_backward_in_a_region():
    runs = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            runs.append(torchremat.regions.threads.thread.now.selecting is not None)
            return gradient * 2

    def function(x):
        weight = random(8, 8).requires_grad_()
        Doubled.apply((weight @ x.detach()).sin()).sum().backward()
        return (x @ x).sin()

    checkpointed(function, policy=save_matmuls)(random(8, 8).requires_grad_())
    if runs != [True]:
        yield "a backward in a region is not the region's"


# ------------------------------------------------------------------------------------------------------------- slips


@dataclass(frozen=True)
class Slip:
    """A line of a function that is another one, and the program that meets it."""

    owner: object
    name: str
    line: str
    slip: str
    program: Callable[[], object]


Handle, Transfers = transfers.TransferHandle, transfers.Transfers

SLIPS = {
    "a copy out does not wait for what makes the tensor": Slip(
        Transfers, "_begin", "wait_stream(stream, current_stream(content.device))", "pass", puts_and_gets
    ),
    "a copy back does not wait for the copy out": Slip(
        Handle, "_copy", "stream.wait_event(self._flight.copied)", "pass", puts_and_gets
    ),
    "a source is let go before its copy has ended": Slip(
        Transfers, "land", "flights[0].copied.query()", "True", lets_go_early
    ),
    "a source goes with its handle": Slip(
        Handle, "__del__", "self._transfers.pool.give(self._place)",
        "self._transfers.pool.give(self._place); self._flight.source = None", drops_handles,
    ),
    "what comes ahead is used before it is there": Slip(
        Handle, "get", "current.wait_event(ahead.copied)", "pass", fetches_ahead
    ),
    "what comes ahead is written while others use its memory": Slip(
        Handle, "_copy", "wait_stream(stream, owner)", "pass", fetches_ahead
    ),
    "what comes ahead goes with its handle": Slip(
        Handle, "__del__", "self._transfers.leave(self._ahead)", "pass", fetches_ahead_and_drops
    ),
    "the allocator is not told of another stream": Slip(
        Handle, "get", "record_stream(ahead.tensor, current)", "pass", gets_on_another_stream
    ),
    "a write does not wait for the copy out": Slip(
        Handle, "before_write", "current_stream(self._content.device).wait_event(flight.copied)", "pass",
        writes_what_is_put,
    ),
    "pinned memory is given while a copy uses it": Slip(
        PinnedBlock, "is_left", "all(use.query() for use in self._uses)", "True", uses_pinned_memory_again
    ),
    "what copies read goes with the store": Slip(
        Transfers, "__del__", "flight.copied.synchronize()", "pass", drops_the_store
    ),
    "a buffer is used where it was not loaded": Slip(
        ByteSpan, "wait", "current.wait_event(event)", "pass", asks_for_parts_on_two_streams
    ),
    "the allocator is not told of who uses a buffer": Slip(
        ByteSpan, "wait", "record_stream(tensor, current)", "pass", asks_for_parts_on_two_streams
    ),
    "a stage does not wait for its microbatch": Slip(
        copying, "wait_all", "wait_stream(waiting, awaited)", "pass", goes_through_a_pipe
    ),
    "a gradient is not waited for": Slip(
        copying, "wait_all", "wait_stream(awaited, waiting)", "None", goes_through_a_pipe
    ),
    "the allocator is not told of a copy's source": Slip(
        copying, "copied", "record_stream(tensor, source)", "pass", goes_through_a_pipe
    ),
    "the allocator is not told of who computes with a copy": Slip(
        copying, "copied", "record_stream(copy, current_stream(device))", "pass", infers_through_a_pipe
    ),
    "a peak is not begun anew": Slip(
        accelerators._Cuda, "reset_peak", "torch.cuda.reset_peak_memory_stats(device)", "pass", measures_twice
    ),
    "workspaces are taken for the step's": Slip(accelerators._Cuda, "warm", "y.sum().backward()", "pass", plans),
    "what is resident is not counted": Slip(
        Subject, "_resident_now", "if accelerator.counts", "if False", plans
    ),
    "the host asks whether copies have ended, and does not wait": Slip(
        Transfers, "settle", "oldest[0].copied.synchronize()", "return", offloads
    ),
    "a backward's thread does not know what goes on": Slip(
        Now, "share", "stash_in_tls(_KEY, self)", "pass", goes_backward_in_a_region
    ),
}  # fmt: skip


def function_of(slip):
    raw = inspect.getattr_static(slip.owner, slip.name)
    return raw.__func__ if isinstance(raw, staticmethod) else raw


def with_slip(slip):
    """The code of the function with the line that is another one."""
    function = function_of(slip)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(slip.line) == 1, f"{slip.line!r} is {source.count(slip.line)} times in {slip.name}"
    made = {}
    code = "from __future__ import annotations\n" + source.replace(slip.line, slip.slip)
    exec(compile(code, f"<{slip.name} with a slip>", "exec"), function.__globals__, made)
    return getattr(made[slip.name], "__func__", made[slip.name]).__code__


def complaints(program):
    emulator.races()
    found = list(program() or ())
    torch.cuda.synchronize()
    return [*found, *emulator.races()]


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_found(name, monkeypatch):
    slip = SLIPS[name]
    assert complaints(slip.program) == []

    monkeypatch.setattr(function_of(slip), "__code__", with_slip(slip))

    assert complaints(slip.program) != []
