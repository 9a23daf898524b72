"""Who hears that an optimizer steps, while other threads train."""

from threading import Event, Thread

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import optimizer as torch_optimizer

import torchremat
from torchremat.state.optimizer_steps import after_each_step, before_each_step


def parameter():
    found = nn.Parameter(torch.ones(2))
    found.grad = torch.ones(2)
    return found


def test_listeners_hear_each_step_until_they_end():
    heard = []
    own = SGD([parameter()], 1.0)
    ends = [
        before_each_step(lambda optimizer, *_: heard.append(("before", optimizer))),
        after_each_step(lambda optimizer: heard.append(("after", optimizer))),
    ]
    own.step()
    for end in ends:
        end()
        end()
    own.step()

    assert heard == [("before", own), ("after", own)]


def test_what_a_listener_returns_goes_to_the_next_and_to_the_step():
    seen = []

    def with_closure(optimizer, args, kwargs):
        return args, {**kwargs, "closure": lambda: torch.ones(())}

    def sees(optimizer, args, kwargs):
        seen.append(sorted(kwargs))

    ends = [before_each_step(with_closure), before_each_step(sees)]
    try:
        assert SGD([parameter()], 1.0).step() == 1
    finally:
        for end in ends:
            end()
    assert seen == [["closure"]]


def test_an_error_of_a_listener_ends_the_step():
    def refuse(*_):
        raise ZeroDivisionError

    one = parameter()
    end = before_each_step(refuse)
    try:
        with pytest.raises(ZeroDivisionError):
            SGD([one], 1.0).step()
    finally:
        end()
    assert one.tolist() == [1, 1]


def test_torch_keeps_the_same_hooks_whatever_listens():
    hooks = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    before = [dict(one) for one in hooks]
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def step(model):
        return model(torch.ones(2, 8)).square().mean()

    end = after_each_step(lambda optimizer: None)
    assert [dict(one) for one in hooks] == before
    end()
    torchremat.plan(model, step, budget="min", optimizer=SGD(model.parameters(), 0.1)).apply(model)
    for _ in range(3):
        step(model).backward()
        model.zero_grad()
        assert [dict(one) for one in hooks] == before


def test_a_thread_that_trains_meanwhile_is_not_disturbed():
    # Hooks came and went while other threads looped over them: "OrderedDict mutated during iteration".
    model, ended, errors, steps = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), Event(), [], []

    def train():
        own = SGD([parameter() for _ in range(4)], 0.1)
        try:
            while not ended.is_set():
                own.step()
                steps.append(1)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    def step(model):
        return model(torch.ones(2, 8)).square().mean()

    thread = Thread(target=train)
    thread.start()
    try:
        for _ in range(500):
            before_each_step(lambda *_: None)()
        for _ in range(3):
            torchremat.measure(model, step, optimizer=SGD(model.parameters(), 0.1))
    finally:
        ended.set()
        thread.join()

    assert errors == [] and steps
