"""Whatever is handed over as an optimizer: every call of ours leaves it, and what it wraps, bit for bit as it was."""

import pytest
import torch
from torch import nn

from logs import Log
from planning.optimizer_kinds import (
    KINDS,
    Forwarding,
    Imitating,
    Trainer,
    changes,
    insides,
    joined,
    late_lookahead,
    plain,
)
from probes.memory import with_wrapped
from torchremat import Adaptive, Planner, StepError, UnsupportedError, fit, frontier, measure, plan, verify
from turns import meetings

BATCH = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)))


def loss_of(model, batch=BATCH):
    return model(batch).square().mean()


def fitted(model, optimizer):
    fit(model, loss_of, budget="95%", optimizer=optimizer, cost="flops", operators=False)


def planned_on_meta(model, optimizer):
    plan(model, loss_of, budget="1GiB", optimizer=optimizer, on="meta", device="h100", cost="flops", operators=False)


CALLS = {
    "plan": lambda m, o: plan(m, loss_of, budget="95%", optimizer=o, cost="flops", operators=False),
    "fit": fitted,
    "verify": lambda m, o: verify(m, loss_of, optimizer=o),
    "frontier": lambda m, o: frontier(m, loss_of, optimizer=o, cost="flops", operators=False, points=3),
    "measure": lambda m, o: measure(m, loss_of, optimizer=o),
    "learn": lambda m, o: Adaptive(m, loss_of, budget="1GiB", optimizer=o).learn(BATCH),
    "meta": planned_on_meta,
    "save_device": lambda m, o: Planner(m, loss_of, optimizer=o, operators=False).save_device("/dev/null"),
}


def train(model, optimizer, steps):
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        model.zero_grad()


# Each kind and each call meets optimizers with state and without.
@pytest.mark.parametrize(
    ("kind", "call", "steps"),
    [(kind, call, 2 * (number % 2)) for number, (kind, call) in enumerate(meetings(KINDS, CALLS, each=2))],
)
def test_every_call_leaves_it_as_it_was(kind, call, steps):
    # accelerate's was left with the state of one step of zeros, and 3 steps later the loss was another one.
    model = net()
    optimizer = kind(model.parameters())
    train(model, optimizer, steps)
    before = insides(optimizer)

    CALLS[call](model, optimizer)

    assert changes(before, insides(optimizer)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_nothing_had_been_planned(kind):
    def trained(planned):
        model = net()
        optimizer = kind(model.parameters())
        train(model, optimizer, 1)
        if planned:
            fitted(model, optimizer)
        train(model, optimizer, 3)
        return list(model.parameters())

    assert all(map(torch.equal, trained(planned=True), trained(planned=False)))


@pytest.mark.parametrize(("kind", "state"), [(kind, 2) for kind in KINDS[:3]] + [(joined, 1.5)])
def test_the_state_of_what_is_wrapped_counts(kind, state):
    # AdamW has two tensors for each parameter, and a step of 4 bytes; two of these three are around it.
    model = net()
    parameters = sum(one.nbytes for one in model.parameters())

    own = Planner(model, loss_of, optimizer=kind(model.parameters()), operators=False).profile.optimizer

    slow = parameters if kind.__name__ == "forwarding_twice" else 0
    if kind.__name__ == "joined":
        halves = [sum(one.nbytes for one in list(model.parameters())[start::2]) for start in (0, 1)]
        assert own.state_bytes == halves[0] + 2 * halves[1] + 4 * 6
    else:
        assert own.state_bytes == state * parameters + slow + 4 * 12
    train(model, optimizer := kind(model.parameters()), 1)
    assert measure(model, loss_of, optimizer=optimizer).optimizer_bytes == own.state_bytes


def test_state_that_comes_at_a_later_step_counts():
    model = net()
    parameters = sum(one.nbytes for one in model.parameters())

    own = Planner(model, loss_of, optimizer=late_lookahead(model.parameters()), operators=False).profile.optimizer

    # AdamW's two tensors and a step for each parameter, and the slow weights of the sixth step
    assert own.state_bytes == 3 * parameters + 4 * 12
    train(model, optimizer := late_lookahead(model.parameters()), 5)
    assert measure(model, loss_of, optimizer=optimizer).optimizer_bytes == 2 * parameters + 4 * 12
    train(model, optimizer, 1)
    assert measure(model, loss_of, optimizer=optimizer).optimizer_bytes == own.state_bytes


def test_no_hook_of_what_is_wrapped_runs():
    model, ran = net(), Log()
    inner = plain(model.parameters())
    inner.register_step_pre_hook(lambda *_: ran.append("before"))
    inner.register_step_post_hook(lambda *_: ran.append("after"))

    fitted(model, Forwarding(inner))

    assert ran == []


class Helpless(Forwarding):
    def step(self, closure=None):
        raise AssertionError


@pytest.mark.parametrize("call", ["plan", "fit", "verify", "frontier", "learn"])
def test_one_that_cannot_step_alone_is_refused_with_the_name_of_the_inner_one(call):
    model = net()
    optimizer = Helpless(plain(model.parameters()))
    before = insides(optimizer)

    with pytest.raises(UnsupportedError, match=r"Hand over the AdamW that it wraps \(its `optimizer`\) in its place"):
        CALLS[call](model, optimizer)

    assert changes(before, insides(optimizer)) == []


class Accumulating(Forwarding):
    """As accelerate's between two steps, in which it does nothing."""

    def step(self, closure=None):
        pass


@pytest.mark.parametrize("call", ["plan", "verify"])
def test_one_that_steps_nothing_now_is_refused_for_its_bytes_would_be_too_few(call):
    model = net()

    with pytest.raises(UnsupportedError, match=r"now it steps nothing.* Hand over the AdamW that it wraps"):
        CALLS[call](model, Accumulating(plain(model.parameters())))


def test_what_is_no_optimizer_and_has_one_is_told_which():
    class Engine:
        def __init__(self, optimizer):
            self.inner = optimizer

    model = net()

    with pytest.raises(StepError, match=r"got Engine, which holds an optimizer: hand over that, the AdamW"):
        measure(model, loss_of, optimizer=Engine(plain(model.parameters())))


def test_what_one_wraps_is_what_has_its_parameters():
    model, trainer = net(), Trainer()
    inner, other = plain(model.parameters()), plain(nn.Linear(2, 2).parameters())
    outer = Imitating(inner, trainer)
    outer._other = other

    assert with_wrapped(outer) == (outer, inner)
    assert with_wrapped(None) == ()
