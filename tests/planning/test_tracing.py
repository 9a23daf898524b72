"""One forward, traced: the order of calls, with which tensors, and what they save; and nothing changed by it."""

import gc
import random
from contextlib import nullcontext
from itertools import pairwise
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from logs import Log
from planning.kinds import KINDS, Loop, block, inputs, linear, square
from planning.steps import fingerprint
from torchremat.errors import StepError
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace, TraceMark
from torchremat.planning.profiles.tracing import trace


def called(model, step):
    return " ".join(call.name or "root" for call in trace(model, step).calls)


def test_calls_are_seen_in_the_order_of_entry():
    model, step = KINDS["loop"]()

    found = trace(model, step)

    assert " ".join(call.name or "root" for call in found.calls[:9]) == (
        "root layers.0 layers.0.0 layers.0.1 layers.0.2 layers.1 layers.1.0 layers.1.1 layers.1.2"
    )
    assert [call.parent for call in found.calls[:9]] == [None, 0, 1, 1, 1, 0, 5, 5, 5]
    assert [call.number for call in found.calls] == [0] * 17
    assert found.descendants(1) == [1, 2, 3, 4]
    assert found.children(0) == [1, 5, 9, 13]
    assert found.children(None) == [0]


def test_times_order_entries_exits_and_saves():
    model, step = KINDS["loop"]()

    calls = trace(model, step).calls

    assert [(call.entered, call.left) for call in calls[:5]] == [(1, 34), (2, 9), (3, 4), (5, 6), (7, 8)]
    assert [[save.time for save in call.saved] for call in calls[2:5]] == [[3], [5], [7, 7]]


def test_flops_and_bytes_are_exact():
    model, step = KINDS["loop"]()

    found = trace(model, step)

    # Eight linears of 256 x 64 by 64 x 64, two flops for each multiplication with its addition.
    assert found.flops == 8 * 2 * 256 * 64 * 64
    assert found.calls[1].flops == 2 * 2 * 256 * 64 * 64
    # The second linear saves its input before it computes.
    assert found.calls[1].flops_saved == 2 * 256 * 64 * 64
    inside = [found.storage_bytes[save.storage] for call in found.calls[2:5] for save in call.saved]
    # Input of the first linear, of the GELU, of the second linear, and its weight of 64 x 64: `x` needs no gradient.
    assert inside == [65536, 65536, 65536, 16384]
    assert found.calls[1].saved == []


def test_a_leaf_that_saves_its_weight_alone_saves_a_fixed_storage():
    # The input of the first linear requires no grad, its weight does; in the second it is the other way round.
    model = nn.Sequential(linear(), linear().requires_grad_(False))

    found = trace(model, lambda m: square(m(inputs())))

    first, second = ([save.storage for save in call.saved] for call in found.calls[1:])
    assert set(first).isdisjoint(found.fixed)
    assert set(second) <= found.fixed


def test_a_module_called_several_times_is_counted():
    model, step = KINDS["shared weights"]()

    found = trace(model, step)

    assert [(c.name, c.number) for c in found.calls if c.name in ("block", "head")] == [
        ("block", 0),
        ("block", 1),
        ("block", 2),
        ("head", 0),
    ]


def test_calls_under_no_grad_say_so_and_save_nothing():
    model, step = KINDS["partly without grad"]()

    found = trace(model, step)

    without = [call for call in found.calls if call.name.startswith("teacher")]
    assert len(without) == 9
    assert not any(call.grad or call.saved for call in without)
    assert all(call.grad for call in found.calls if call.name.startswith("student"))


def test_a_write_to_an_input_is_seen():
    model, step = KINDS["shared in-place relu"]()

    found = trace(model, step)

    assert [(call.name, call.mutated) for call in found.calls[1:]] == [
        ("a", []),
        ("relu", [0]),
        ("b", []),
        ("relu", [0]),
        ("c", []),
    ]


def test_identity_and_version_tell_links_from_glue():
    model, step = KINDS["glue in place"]()

    found = trace(model, step)

    layers = [found.calls[index] for index in found.children(0)]
    for before, after in pairwise(layers):
        (out,), (into,) = before.outputs, after.inputs
        assert out.identity == into.identity
        assert out.storage == into.storage
        assert into.version == out.version + 1


def test_lifetimes_are_those_of_the_locals():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = block(), block(), block(), block()

        def forward(self, x):
            early = self.a(x)
            y = self.b(early)
            y = self.c(y)
            y = self.d(y)
            return y + early

    torch.manual_seed(0)
    found = trace(Skip(), lambda m: square(m(inputs())))

    a, b, c, d = (found.calls[index] for index in found.children(0))
    early, middle = a.outputs[0].storage, b.outputs[0].storage
    # The last time at which it was there. What is reassigned after a call was there while that ran, and goes before
    # anything else runs: to count it until then was 2% too much after a head under autocast, which saves its cast.
    # Where the last call in `c` returns as well, it counts no longer than until that.
    last = found.calls[max(found.children(found.calls.index(c)))]
    assert found.died[early] == d.left
    assert last.left == c.left - 1
    assert found.died[middle] == last.left - 1
    assert found.born[early] == found.calls[4].left  # the last call in `a`


def test_the_step_may_call_submodules_alone():
    model, step = KINDS["submodules alone"]()

    assert called(model, step) == (
        "layers.0 layers.0.0 layers.0.1 layers.0.2 layers.1 layers.1.0 layers.1.1 layers.1.2"
    )


def test_tensors_in_keyword_arguments_and_containers_are_inputs():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()

        def forward(self, pair, *, more):
            return self.a(pair[0]) + pair[1] + more["z"]

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.takes = linear(), Takes()

        def forward(self, x):
            h = self.first(x)
            return self.takes((h, x), more={"z": h})

    found = trace(Root(), lambda m: square(m(inputs())))

    takes = next(call for call in found.calls if call.name == "takes")
    h, x, again = (seen.storage for seen in takes.inputs)
    assert h == again != x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_the_inside_of_a_compiled_block_is_not_looked_at():
    model = nn.Sequential(*(torch.compile(block(), backend="eager") for _ in range(2)))

    assert called(model, lambda m: square(m(inputs()))) == "root 0 1"


@pytest.mark.parametrize("name", KINDS)
def test_nothing_of_the_model_has_changed(name):
    model, step = KINDS[name]()
    step(model).backward()
    before = fingerprint(model)

    trace(model, step)

    assert before.changes(fingerprint(model)) == []


def test_dropout_and_buffers_are_as_before():
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.BatchNorm1d(64), nn.Dropout(0.5), linear())

    def step(m):
        random.random()
        return square(m(torch.randn(256, 64)))

    before = fingerprint(model)

    trace(model, step)

    assert before.changes(fingerprint(model)) == []


def test_nothing_is_kept_alive():
    model, alive = Loop(), Log()

    def watched(m):
        h = m.layers[0](inputs())
        alive.append(ref(h.untyped_storage()))
        return square(m(h))

    found = trace(model, watched)
    gc.collect()

    assert alive[0]() is None
    assert len(found.calls) == 21


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda m: None, "returned None"),
        (lambda m: m(inputs()), r"a loss of shape \(256, 64\)"),
        (lambda m: square(m(inputs())).detach(), "does not require grad"),
        (lambda m: torch.zeros(()), "does not require grad"),
    ],
)
def test_bad_losses_are_named(step, said):
    model = Loop()
    before = fingerprint(model)

    with pytest.raises(StepError, match=said):
        trace(model, step)

    assert before.changes(fingerprint(model)) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 6, 17])
def test_an_error_in_the_middle_leaves_nothing(error, at):
    model = Loop()
    step = lambda m: square(m(inputs()))  # noqa: E731
    step(model).backward()
    before = fingerprint(model)
    seen = Log()

    class Raises(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.linear or function is F.gelu:
                seen.append(function)
                if len(seen) == min(at, 12):
                    raise error
            return function(*args, **(kwargs or {}))

    with pytest.raises(error), Raises():
        trace(model, step)

    assert before.changes(fingerprint(model)) == []


class OneMillisecondEach(AllocationRecorder):
    """A device that gets from one mark to the next in a millisecond, whatever the host takes, and allocates nothing."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.count = 0

    def mark(self, label):
        self.count += 1
        return self.count - 1

    @property
    def trace(self):
        nothing = np.zeros(0, np.int64)
        return AllocationTrace(
            device=self.device,
            time_ns=nothing,
            ptr=nothing,
            delta_bytes=nothing,
            marks=tuple(TraceMark(id=i, label="", time_ns=i * 10**6, position=0) for i in range(self.count)),
            has_device_time=True,
        )


def test_operators_take_what_the_device_takes_and_not_their_launch():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    seen = trace(model, lambda model: model(torch.ones(2, 4)).sum(), lambda: nullcontext(OneMillisecondEach()))

    runs = seen.operators.runs
    assert len(runs) > 3
    assert all(run.seconds == pytest.approx(1e-3 * (run.ends - run.begins)) for run in runs)
