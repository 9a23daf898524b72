"""Portals: a skip goes to the stage that pops it, and nobody holds it longer than the table in portals.py says."""

from weakref import WeakSet

import pytest
import torch
from torch import nn

from logs import Log
from pipeline.skip.modules import PopValue, StashValue
from probes.pipelines import CPU_STREAM, CpuStream, copying, portals
from regions.comparing import leaf
from torchremat import Pipe, SkipError, checkpointed, is_recomputing
from torchremat.pipeline.ordering import Ordering
from torchremat.pipeline.skip import (
    CellTracker,
    Namespace,
    Portal,
    PortalTracker,
    SkipLayout,
    inspect_skip_layout,
    use_skip_tracker,
)

pytestmark = pytest.mark.usefixtures("no_collector")

SOURCE, TARGET = CpuStream(), CpuStream()


def on_cpu(stage):
    return SOURCE, TARGET


@pytest.fixture
def copies(monkeypatch):
    """Lets copies within the CPU be copies, as they are between devices; returns the storages at the target."""
    found = WeakSet()

    def copied(tensor, source, target):
        copy = tensor.clone()
        if target is not SOURCE:  # that would be a gradient on its way back
            found.add(copy.untyped_storage())
        return copy

    monkeypatch.setattr(copying, "copied", copied)
    return found


# ----------------------------------------------------------------------------------------------------------- a portal


def test_it_gives_its_value_once():
    value = leaf(3)
    portal = Portal(value, 0, 2)

    assert (portal.source, portal.target) == (0, 2)
    assert portal.take() is value
    for again in (portal.take, lambda: portal.copy(CPU_STREAM, CPU_STREAM, Ordering([]))):
        with pytest.raises(SkipError) as error:
            again()
        assert str(error.value) == (
            "the skip from stage 0 to stage 2: tensor in portal has been removed; it can be taken once."
        )


def test_a_copy_is_a_part_of_the_graph(copies):
    x = leaf(3)
    portal = Portal({"a": x * 2, "b": (x.detach(), None, "c")}, 0, 1)
    portal.copy(CPU_STREAM, CPU_STREAM, Ordering([]))
    value = portal.take()

    assert len(copies) == 2
    assert value["b"][1:] == (None, "c") and not value["b"][0].requires_grad
    assert [node_names(value["a"].grad_fn)] == [
        ["WaitBackward", "ForkBackward", "CopyBackward", "WaitBackward", "MulBackward0"]
    ]
    (value["a"] * value["b"][0]).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def node_names(node):
    names = []
    while node is not None and len(names) < 5:
        names.append(node.name())
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return names


@pytest.mark.parametrize("value", [None, (), {"a": [None]}, "words"])
def test_without_tensors_there_is_nothing_to_copy(value, copies):
    portal = Portal(value, 0, 1)
    portal.copy(CPU_STREAM, CPU_STREAM, Ordering([]))

    assert portal.take() == value
    assert not copies


def test_a_copy_that_nobody_uses_gets_no_gradient():
    x = leaf(3)
    portal = Portal(x * 2, 0, 1)
    portal.copy(CPU_STREAM, CPU_STREAM, Ordering([]))
    unused = portal.take()
    x.sin().sum().backward()

    assert unused.requires_grad
    assert torch.equal(x.grad, x.detach().cos())


class FakeStream(str):
    """A stream with a name for its device."""

    @property
    def device(self):
        return f"device of {self}"


def test_the_copy_waits_and_is_waited_for(monkeypatch):
    events, source, target = [], torch.device("cpu"), torch.device("cpu")
    monkeypatch.setattr(copying, "wait_stream", lambda waiting, awaited: events.append(f"{waiting} for {awaited}"))
    monkeypatch.setattr(copying, "copied", lambda tensor, *streams: events.append(f"copy {streams}") or tensor.clone())
    monkeypatch.setattr(portals, "current_stream", lambda device: f"current of {device}")
    x = leaf(3)
    portal = Portal(x.sin(), 0, 1)
    portal.copy(FakeStream("A"), FakeStream("B"), Ordering([]))
    events.append("backward")
    portal.take().sum().backward()

    assert events == [
        "A for current of device of A",
        "copy ('A', 'B')",
        "current of device of B for B",
        "backward",
        "B for current of device of B",
        "copy ('B', 'A')",
        "current of device of A for A",
    ]
    assert source == target


@pytest.mark.gpu
def test_between_devices():
    cpu, cuda = CPU_STREAM, torch.cuda.Stream()
    x = leaf(1 << 16)
    there, back = Portal((x.sin(), x.detach()), 0, 1), None
    there.copy(cpu, cuda, Ordering([]))
    h, constant = there.take()
    back = Portal(h * constant, 1, 2)
    back.copy(cuda, cpu, Ordering([]))
    y = back.take()
    y.sum().backward()

    assert h.device.type == constant.device.type == "cuda" and y.device.type == "cpu"
    assert torch.allclose(x.grad, x.detach().cos() * x.detach())  # CUDA computes products as the CPU does, sums not


# ------------------------------------------------------------------------------------------- those of a microbatch


def test_copies_are_in_the_order_of_the_layout():
    one, two = sorted([Namespace(), Namespace()])
    routes = {(two, "a"): (0, 2), (None, "z"): (1, 2), (one, "a"): (0, 2), (None, "y"): (0, 2), (None, "w"): (0, 1)}
    layout, asked = SkipLayout(3, routes), []

    def streams_of(stage):
        asked.append(stage)
        return CPU_STREAM, CPU_STREAM

    tracker = PortalTracker(layout)
    tracker.stashed(0, {(two, "a"): 1, (one, "a"): 2, (None, "y"): 3, (None, "w"): 4})
    tracker.copy_to(1, streams_of, Ordering([]))
    assert tracker.incoming(1) == {(None, "w"): 4}
    tracker.stashed(1, {(None, "z"): 5})
    tracker.copy_to(2, streams_of, Ordering([]))

    assert asked == [0, 0, 0, 0, 1]
    assert list(tracker.incoming(2).items()) == [
        ((None, "y"), 3),
        ((one, "a"), 2),
        ((two, "a"), 1),
        ((None, "z"), 5),
    ]
    with pytest.raises(SkipError, match="tensor in portal has been removed"):
        tracker.incoming(2)
    assert tracker.incoming(0) == {}


def test_one_that_has_not_been_stashed():
    tracker = PortalTracker(SkipLayout(2, {(None, "a"): (0, 1)}))

    with pytest.raises(SkipError, match=r"^'a' has not been stashed by stage 0\.$"):
        tracker.copy_to(1, on_cpu, Ordering([]))
    with pytest.raises(AssertionError, match=r"'a' leaves stage 1, but its route is from 0 to 1\. This is a bug"):
        tracker.stashed(1, {(None, "a"): 1})


# ---------------------------------------------------------------------------------------------- the table, by bytes


class Probe(torch.autograd.Function):
    """Passes a tensor on, and notes when its gradient comes."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return grad, None


class Microbatch:
    """One microbatch on its way through stages on devices of their own, and back.

    The events are named as in the table; each is noted with the bytes of skips that are alive at the source and at the
    target then.
    """

    def __init__(self, copies, call):
        self.copies, self.call = copies, call
        self.made = WeakSet()
        self.events = Log()

    def note(self, event):
        alive = [sum(storage.nbytes() for storage in found) for found in (self.made, self.copies)]
        self.events.append(f"{event} {alive[0]}/{alive[1]}")

    def run(self, stages):
        self.stages = stages
        self.layout = inspect_skip_layout(stages)
        x = torch.ones(256, requires_grad=True)
        try:
            self.forward(x).backward()
        finally:
            del self.stages  # they know the microbatch
        self.note("end")

    def forward(self, value):
        portals = PortalTracker(self.layout)
        for stage, name in enumerate("SMT"):
            portals.copy_to(stage, on_cpu, Ordering([]))
            if name == "T":
                self.note("copy")
            value, outgoing = self.call(self.cell, stage, value, portals.incoming(stage))
            portals.stashed(stage, outgoing)
            del outgoing
            self.note(f"forward {name}")
            # Its gradient comes when the stages after it are done.
            value = Probe.apply(value, lambda name=name: self.note(f"before backward {name}"))
        return value.sum()

    def cell(self, stage, value, incoming):
        tracker = CellTracker(self.layout, stage, incoming)
        with use_skip_tracker(tracker):
            output = self.stages[stage](value)
        return output, tracker.outgoing


def events(copies, call, *, keeps=True):
    """The events of a microbatch whose skip has 1024 bytes.

    Args:
        copies: The copies that are alive.
        call: Runs a cell.
        keeps: Whether the backward of S needs the skip: `exp` saves its result, a product with 2 saves nothing.
    """
    batch = Microbatch(copies, call)

    def makes(x):
        value = x.exp() if keeps else x * 2
        batch.made.add(value.untyped_storage())
        if is_recomputing():
            batch.note("recompute S")
        return value

    def uses(x, skip):
        if is_recomputing():
            batch.note("recompute T")
        return (x * skip).sin()

    batch.run([StashValue(makes), nn.Tanh(), PopValue(uses)])
    return " | ".join(batch.events)


def kept(function, *args):
    return function(*args)


def recomputed(function, *args):
    return checkpointed(function, early_stop=False)(*args)


def test_life_where_all_is_kept(copies):
    # The product saves the copy until the backward of T.
    assert events(copies, kept) == (
        "forward S 1024/0 | forward M 1024/0 | copy 1024/1024 | forward T 1024/1024 | "
        "before backward T 1024/1024 | before backward M 1024/0 | before backward S 1024/0 | end 0/0"
    )
    assert events(copies, kept, keeps=False) == (
        "forward S 1024/0 | forward M 1024/0 | copy 0/1024 | forward T 0/1024 | "
        "before backward T 0/1024 | before backward M 0/0 | before backward S 0/0 | end 0/0"
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_life_where_all_is_recomputed(copies, keeps):
    # The source holds nothing between the copy and the recompute of S.
    assert events(copies, recomputed, keeps=keeps) == (
        "forward S 1024/0 | forward M 1024/0 | copy 0/1024 | forward T 0/1024 | "
        "before backward T 0/1024 | recompute T 0/1024 | before backward M 0/0 | before backward S 0/0 | "
        "recompute S 1024/0 | end 0/0"
    )


@pytest.mark.parametrize("call", [kept, recomputed])
def test_a_microbatch_that_is_given_up_holds_nothing(copies, call):
    batch = Microbatch(copies, call)

    def makes(x):
        value = x.exp()
        batch.made.add(value.untyped_storage())
        return value

    with pytest.raises(ZeroDivisionError):
        batch.run([StashValue(makes), Failing(), PopValue(torch.mul)])

    assert batch.events == ["forward S 1024/0"]
    batch.note("after the error")
    assert batch.events[1] == "after the error 0/0"


class Failing(nn.Module):
    def forward(self, x):
        return x / (1 // 0)


# ----------------------------------------------------------------------------------------------- several, in a pipe


class Counts(nn.Module):
    """Counts the skips that are alive at the target; what the stage is given beside them is another one."""

    def __init__(self, copies, counts):
        super().__init__()
        self.copies, self.counts = copies, counts

    def forward(self, x):
        self.counts.append(len(self.copies) - 1)
        return x


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize(
    ("mode", "has_grad", "alive"),
    [
        ("never", True, [3, 2, 1, 0]),
        ("never", False, [3, 2, 1, 0]),
        ("always", False, [3, 2, 1, 0]),
        ("always", True, [4, 4, 4, 4]),  # as inputs of what is recomputed
    ],
)
def test_a_stage_holds_no_skip_that_it_has_popped(copies, mode, has_grad, alive, record):
    # All of them stayed until the stage was done, in the arguments of the calls around it.
    counts, rooms = [], [Namespace() for _ in range(4)]
    stashing = [StashValue(torch.neg).isolate(one) for one in rooms]
    popping = [layer for one in reversed(rooms) for layer in (PopValue(torch.add).isolate(one), Counts(copies, counts))]
    pipe = Pipe(nn.Sequential(*stashing, *popping), [4, 8], devices=["cpu"] * 2, checkpoint=mode, record=record)

    with torch.set_grad_enabled(has_grad):
        pipe(torch.ones(2, 8, requires_grad=True))

    assert counts == alive
