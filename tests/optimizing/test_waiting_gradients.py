"""Gradients that wait for others and step together with them."""

import copy

import pytest
import torch
from torch import nn, optim

import torchremat
from optimizing.loops import KINDS, Lion, Loop, equal, loss_of, measured_peak, net
from optimizing.test_plans import ROWS, trained
from optimizing.test_plans import loss_of as loss_of_gpt
from probes.memory import record_allocations
from probes.optimizing import ReleasedGradient, counted, share_of
from torchremat import UnsupportedError, release_gradients


def released(batch_bytes):
    return lambda model, optimizer: release_gradients(model, optimizer, batch_bytes=batch_bytes)


@pytest.mark.parametrize("kind", ["AdamW", "foreach", "fused", "groups", "Counting", "Muon"])
@pytest.mark.parametrize("batch_bytes", [0, 9000, 2**30])
def test_a_run_is_bit_for_bit_the_plain_one(kind, batch_bytes):
    plain = Loop(KINDS[kind]).run(stop=8).ends_with()

    own = Loop(KINDS[kind], released(batch_bytes)).run(stop=8).ends_with()

    assert equal(own, plain)


class Noting(Lion):
    """Notes the shapes of the parameters in each part of its step, and calls the step of its base class."""

    def step(self, closure=None):
        some = [tuple(p.shape) for group in self.param_groups for p in group["params"] if p.grad is not None]
        parts = getattr(self, "parts", None)
        if parts is not None and some:
            parts.append(some)
        return super().step(closure)


@pytest.mark.parametrize(
    ("batch_bytes", "parts"),
    [
        (0, [[(8,)], [(8, 8)], [(8,)], [(8, 8)], [(8,)], [(8, 8)]]),
        (256, [[(8,), (8, 8)], [(8,), (8, 8)], [(8,), (8, 8)]]),
        (576, [[(8,), (8, 8), (8,), (8, 8)], [(8,), (8, 8)]]),
        (2**20, [[(8,), (8, 8), (8,), (8, 8), (8,), (8, 8)]]),
    ],
)
def test_parts_are_made_when_bytes_have_come_together(batch_bytes, parts):
    """The weight has 256 bytes, and the bias, which is complete before it, 32."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    Lion(model.parameters())  # torch has wrapped its step now, to run hooks
    optimizer = Noting(model.parameters())
    release_gradients(model, optimizer, batch_bytes=batch_bytes)
    optimizer.parts = []
    model(torch.ones(2, 8)).sum().backward()

    assert sum(len(part) for part in optimizer.parts) == 6
    # A part of a step has the parameters in the order of their group.
    assert [sorted(part) for part in optimizer.parts] == [sorted(part) for part in parts]
    assert all(isinstance(p.grad, ReleasedGradient) for p in model.parameters())


def test_as_many_bytes_are_in_memory_as_may_wait():
    # As in `test_one_gradient_is_in_memory_at_a_time`, of which two wait and a third one is complete.
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(10)))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    release_gradients(model, optimizer, batch_bytes=3 * 2**18)
    loss = model(torch.ones(1, 256)).sum()
    with record_allocations(torch.device("cpu")) as recorder:
        loss.backward()

    # A row of 256 floats comes in as gradient and another one goes out; the loss has one of its own.
    assert recorder.trace.peak_bytes == 3 * 2**18 + 2 * 1024 + 4


def test_small_gradients_wait_unless_the_user_says_otherwise():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    assert share_of(model.parameters()) == 8 * (256 * 256 + 256) * 4 // 1000 == 2105
    # Biases of 1 KiB, three of which are at least as large as what waits at any time.
    assert len(counted(model.parameters(), 2105)) == 3
    assert counted(model.parameters(), 0) == set()


def test_a_backward_that_fails_while_all_waits_has_stepped_nothing():
    """So it may be run again, as out of memory with a smaller batch."""
    plain, own = Loop(KINDS["AdamW"]), Loop(KINDS["AdamW"], released(2**30))
    for loop in (plain, own):
        loop.run(stop=2)
        loop.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="out of memory"):
            failing(loop.model).backward()
        loop.run(2, 4)

    assert equal(own.ends_with(), plain.ends_with())


def failing(model):
    """A loss whose backward fails behind the last block."""
    x = model.blocks[0](torch.ones(4, 32, requires_grad=True))
    x.register_hook(raising)
    return model.head(model.blocks[1](x)).sum()


def raising(_):
    raise RuntimeError("out of memory")


@pytest.fixture
def failed():
    """A loop whose last backward has failed after a part, with the states to load before that."""
    loop = Loop(KINDS["AdamW"], released(0)).run(stop=2)
    states = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    loop.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="out of memory"):
        failing(loop.model).backward()
    return loop, states


STANDS = r"a backward has failed when 7 of 15 parameters had made this step .*load_state_dict\(\)` begins afresh"


@pytest.mark.parametrize(
    "asked",
    [
        lambda loop: loss_of(loop.model, 2).backward(),
        lambda loop: loop.optimizer.step(),
        lambda loop: loop.optimizer.state_dict(),
    ],
    ids=["backward", "step", "state_dict"],
)
def test_a_backward_that_has_failed_after_a_part_is_told(failed, asked):
    loop, _ = failed
    loop.optimizer.zero_grad()

    with pytest.raises(UnsupportedError, match=STANDS):
        asked(loop)


def test_a_checkpoint_that_is_loaded_begins_afresh(failed):
    plain = Loop(KINDS["AdamW"]).run(stop=4)
    loop, (model, optimizer) = failed

    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(optimizer)
    loop.run(2, 4)

    assert equal(loop.ends_with(), plain.ends_with())


def test_a_checkpoint_may_be_loaded_in_place_of_a_step():
    plain = Loop(KINDS["AdamW"]).run(stop=4)
    loop = Loop(KINDS["AdamW"], released(0)).run(stop=2)
    model, optimizer = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    loop.optimizer.zero_grad()
    loss_of(loop.model, 7).backward()

    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(optimizer)
    loop.optimizer.zero_grad()
    loop.run(2, 4)

    assert equal(loop.ends_with(), plain.ends_with())


@pytest.mark.parametrize("batch_bytes", [0, 40_000])
def test_a_plan_counts_what_waits(batch_bytes):
    model, optimizer, _ = trained(released(batch_bytes), steps=1)

    plan = torchremat.plan(model, loss_of_gpt, budget="min", optimizer=optimizer)

    counts = plan.before_bytes["gradients"]
    assert batch_bytes <= counts < 2 * batch_bytes + 1
    plan.apply(model)
    assert plan.peak_bytes - counts <= measured_peak(model, optimizer, loss_of_gpt, ROWS) <= plan.peak_bytes


@pytest.mark.parametrize("batch_bytes", [-1, 1.5, "1MiB"])
def test_refusals(batch_bytes):
    model = net()

    with pytest.raises(UnsupportedError, match=r"batch_bytes=.*: expected a number of bytes"):
        release_gradients(model, optim.SGD(model.parameters()), batch_bytes=batch_bytes)
