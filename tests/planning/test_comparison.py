"""A watched step tells whether units repeat their forward, and its record is as if nothing had been compared."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from logs import Log
from planning.kinds import block, inputs, linear, square
from planning.steps import CPU, profile
from planning.test_replayability import Between, Counts, Draws, IsTold, Noise, Part, begins, forget, tell
from torchremat import CheckpointError
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.runs import subject_of
from torchremat.measuring.traces import AllocationTrace, TraceMark
from torchremat.planning.devices.machines import Here
from torchremat.planning.exactness.comparison import without_hidden
from torchremat.planning.profiles import profiling
from torchremat.planning.profiles.grain import find_units, finest_units
from torchremat.planning.profiles.tracing import trace
from torchremat.planning.profiles.watched_step import watch
from torchremat.planning.profiles.watching import every_unit


class Ends(nn.Module):
    """Saves its input last, and then computes for a while: what a recompute does not reach in training."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.dropout = linear(), linear(), nn.Dropout(0.5)

    def forward(self, x):
        return self.second(torch.tanh(self.dropout(self.first(x)))) * 2.0 + 1.0


class Shifts(nn.Module):
    """Saves nothing."""

    def forward(self, x):
        return x + 1.0


class Turns(nn.Module):
    """Reads a small buffer, as rotary embeddings do, and saves nothing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.randn(64))

    def forward(self, x):
        return x * self.turn


def frozen_norm():
    """Writes to its buffers, and saves nothing, as its input needs no gradient either."""
    return nn.BatchNorm1d(64).requires_grad_(False)


def step(model):
    begins(model)
    return square(model(inputs()))


def watched(model, *, compares, finest=False):
    subject, here = subject_of(step, model, None), Here(CPU)
    units = find_units(trace(model, step))
    units = finest_units(units) if finest else units
    with heap_set_aside():
        return subject.train(watch(model, subject, units, every_unit(units), here, compares=compares))


def bytes_of(step):
    """All of a profile that is no time."""
    found = step.profile()
    events = {unit: dataclasses.astuple(one)[:6] for unit, one in found.backwards.items()}
    backwards = {unit: (one[0].tolist(), *one[1:]) for unit, one in events.items()}
    return (found.order, found.sizes, found.extra_bytes, found.after_bytes, found.start_bytes, backwards)


MODELS = {
    "blocks": lambda: nn.Sequential(*(block() for _ in range(3))),
    "what runs after the last save": lambda: nn.Sequential(*(Ends() for _ in range(3))),
    "dropout and batch norm": lambda: nn.Sequential(
        *(nn.Sequential(linear(), nn.BatchNorm1d(64), nn.Dropout(0.5)) for _ in range(3))
    ),
    "units that save nothing": lambda: nn.Sequential(block(), Shifts(), block(), Shifts(), nn.Identity(), block()),
    "units with state that save nothing": lambda: nn.Sequential(nn.Dropout(0.5), Turns(), frozen_norm(), block()),
}


@pytest.mark.parametrize("finest", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_compared_leaves_no_byte_in_the_record(kind, finest):
    torch.manual_seed(0)
    model = MODELS[kind]()

    plain, compared = (watched(model, compares=compares, finest=finest) for compares in (False, True))

    assert compared.watcher.comparison.hidden
    assert compared.watcher.comparison.unasked(len(compared.watcher.units.units)) == []
    assert bytes_of(compared) == bytes_of(plain)


class Plain(Part):
    def factor(self, x):
        return 1.0


class Gated(Plain):
    """Saves a parameter whose values show in nothing else that it saves or returns."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return super().forward(x) + 0.0 * (x * self.gate)


def scale(part):
    part.a.weight.data.mul_(1.5)  # its version stays


def scale_gate(part):
    part.gate.data.mul_(1.5)


HIDDEN = {
    "an attribute that is taken back": lambda: Between(IsTold, tell, forget),
    "a count of calls": lambda: Between(Counts),
    "a draw": lambda: Between(Draws),
    "a parameter that is written through `.data`": lambda: Between(Plain, after=scale),
    "a parameter that is saved alone": lambda: Between(Gated, after=scale_gate),
    "noise that is added by a unit that saves nothing": lambda: Between(Noise),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_state_out_of_sight_is_noticed(kind):
    torch.manual_seed(0)

    def compared():
        found = watched(HIDDEN[kind](), compares=True)
        found.watcher.comparison.unasked(len(found.watcher.units.units))

    with pytest.raises((CheckpointError, TypeError), match=r"has not repeated its forward|NoneType"):
        compared()


def test_a_profile_runs_six_forwards_and_two_backwards_and_tries_nothing(monkeypatch):
    # traced; watched, with a recompute; timed; watched with the parts of units, with a recompute
    torch.manual_seed(0)
    forwards, backwards = Log(), Log()

    class Counted(nn.GELU):
        def forward(self, x):
            forwards.append(1)
            return super().forward(x)

    model = nn.Sequential(block(), nn.Sequential(linear(), Counted(), linear()), block())
    monkeypatch.setattr(profiling, "tried", None)

    def step(model):
        loss = square(model(inputs()))
        loss.register_hook(backwards.append)
        return loss

    pair = profile(model, step)

    assert pair.leaves is not None
    assert (len(forwards), len(backwards)) == (6, 2)


@pytest.mark.parametrize("first", [nn.Dropout(0.5), Turns(), frozen_norm()], ids=["draws", "a buffer", "writes"])
def test_a_unit_that_has_state_and_saves_nothing_runs_again_with_the_others(monkeypatch, first):
    # Its region is freed in the forward, so another forward tried it; the region is kept now, with copies of its state.
    torch.manual_seed(0)
    model = nn.Sequential(first, block(), block())
    monkeypatch.setattr(profiling, "tried", None)

    pair = profile(model, step)

    assert [unit.name for unit in pair.blocks.units.units] == ["0", "1", "2"]
    assert pair.blocks.units.unlike == {}


def test_hidden_events_go_with_their_frees_and_their_seconds():
    #           time  event                        kept
    # mark 0     10
    #            11   a is allocated               yes
    # mark 1     20                                hidden from here
    #            21   b is allocated
    #            22   a is freed                   yes, and it is 20 by then
    #            23   b is freed
    #            24   c is allocated
    # mark 2     30                                to here
    #            31   d is allocated               yes, at 21
    #            32   c is freed
    # mark 3     40                                30
    marks = [(10, 0), (20, 1), (30, 5), (40, 7)]
    recorded = AllocationTrace(
        device=CPU,
        time_ns=np.array([11, 21, 22, 23, 24, 31, 32]),
        ptr=np.array([1, 2, 1, 2, 3, 4, 3]),
        delta_bytes=np.array([8, 16, -8, -16, 32, 64, -32]),
        marks=tuple(TraceMark(id=i, label="", time_ns=t, position=p) for i, (t, p) in enumerate(marks)),
    )

    found = without_hidden(recorded, [(1, 2)])

    assert found.delta_bytes.tolist() == [8, -8, 64]
    assert found.ptr.tolist() == [1, 1, 4]
    assert found.time_ns.tolist() == [11, 20, 21]
    assert [(mark.time_ns, mark.position) for mark in found.marks] == [(10, 0), (20, 1), (20, 2), (30, 3)]
    assert without_hidden(recorded, []) is recorded


def test_allocations_and_their_frees_are_paired_as_one_reads_them_address_by_address():
    # 0 comes, goes and comes back to stay; 1 comes again without a free; a free of 2 has no allocation.
    recorded = AllocationTrace(
        device=CPU,
        time_ns=np.arange(8),
        ptr=np.array([0, 1, 0, 2, 0, 1, 1, 2]),
        delta_bytes=np.array([8, 8, -8, -8, 16, 8, -8, 8]),
        marks=(),
    )

    assert sorted(recorded.pairs.tolist()) == [[0, 2], [4, 9], [5, 6], [7, 9]]
    assert recorded.intervals == {0: [(0, 2), (4, 9)], 1: [(5, 6)], 2: [(7, 9)]}
