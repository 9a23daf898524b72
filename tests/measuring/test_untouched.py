"""After the block everything is as before: same objects, same values, same versions, same next random numbers."""

from __future__ import annotations

import random
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from torchremat import measure
from torchremat.measuring import untouched as untouching
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.runs import subject_of
from torchremat.measuring.untouched import gradient_leaves, untouched
from torchremat.tensors.versioned import Versioned


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def train(model: nn.Module, batch: int = 8) -> None:
    model(torch.randn(batch, 4)).sum().backward()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_everything_is_put_back(error: type[BaseException] | None):
    model = net()
    train(model)
    model[3].bias.grad = None
    model[2].eval()
    grads = [p.grad for p in model.parameters()]
    grad_values = [None if g is None else g.clone() for g in grads]
    buffers = dict(model.named_buffers())
    buffer_values = {name: b.clone() for name, b in buffers.items()}
    versions = {name: b._version for name, b in buffers.items()}
    tables = [(dict(m._forward_hooks), dict(m._buffers)) for m in model.modules()]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = (torch.rand(3), random.random(), np.random.rand())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)

    def block() -> None:
        with untouched(model):
            model.train()
            model[1].running_mean = torch.ones(4)
            model[1].register_buffer("cache", torch.ones(1))
            model[1].running_var.data.mul_(2)
            train(model)
            random.random(), np.random.rand()
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(error):
            block()

    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(g is None if v is None else torch.equal(g, v) for g, v in zip(grads, grad_values, strict=True))
    assert {name: id(b) for name, b in model.named_buffers()} == {name: id(b) for name, b in buffers.items()}
    assert all(torch.equal(b, buffer_values[name]) for name, b in model.named_buffers())
    assert {name: b._version for name, b in model.named_buffers()} == versions
    assert [(dict(m._forward_hooks), dict(m._buffers)) for m in model.modules()] == tables
    assert [m.training for m in model] == [True, True, False, True]
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_gradients_are_zeros_of_the_same_layout_inside():
    model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    frozen = nn.Linear(2, 2).requires_grad_(False)

    with untouched([model, frozen], accumulates=True):
        assert model.weight.grad is not None
        assert model.weight.grad.stride() == model.weight.stride()
        assert not model.weight.grad.any()
        assert not model.weight.grad.requires_grad
        assert frozen.weight.grad is None

    assert model.weight.grad is None


def test_the_optimizers_parameters_and_further_leaves_are_kept_too():
    model, other, x = nn.Linear(2, 1), nn.Linear(2, 1), torch.ones(3, 2, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()])
    leaves = gradient_leaves([model], optimizer, [x, x * 1, torch.ones(1)])
    assert [id(t) for t in leaves] == [id(t) for t in (*model.parameters(), *other.parameters(), x)]

    with untouched(model, optimizer, tensors=[x]):
        (model(x) + other(x)).sum().backward()

    assert x.grad is None
    assert all(p.grad is None for p in (*model.parameters(), *other.parameters()))


def test_runs_of_an_undisturbed_step_begin_and_end_alike(monkeypatch: pytest.MonkeyPatch):
    # The state of a model was looked for before each run, of a profile four times: a tenth of it for a small model.
    model, losses, looked = net(), list[float](), list[object]()
    whole = untouching.reach
    monkeypatch.setattr(untouching, "reach", lambda world, items, **how: looked.append(whole(world, items, **how)))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step(model: nn.Module) -> torch.Tensor:
        loss = model(torch.randn(8, 4)).sum()
        model[1].running_mean = torch.ones(4)
        model[2].eval()
        return loss

    subject = subject_of(step, model, None)
    with subject.undisturbed():
        for _ in range(3):
            with subject.untouched():
                losses.append(float(subject.forward().detach()))
            assert model[2].training
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with subject.untouched():
        losses.append(float(subject.forward().detach()))

    assert len(set(losses)) == 1
    assert len(looked) == 2 * 2 + 4  # twice for the state, and in each run for the step


def test_parameters_that_a_run_of_an_undisturbed_step_makes_are_restored_by_the_next():
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.LazyLinear(4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    model = Hides()
    subject = subject_of(lambda model: model(torch.ones(2, 3)).sum(), model, None)

    with subject.undisturbed():
        with subject.untouched():
            subject.forward()
        with subject.untouched():
            subject.forward().backward()

    assert model.layers[0].weight.shape == (4, 3)
    assert model.layers[0].weight.grad is None


def test_no_model_keeps_the_generators():
    state = torch.get_rng_state()

    with untouched(None):
        torch.rand(3)

    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_that_saved_a_buffer_is_still_valid_afterwards():
    # The block writes the buffer, but it is the same again afterwards, and so is its version.
    module = nn.BatchNorm1d(2)
    x = torch.ones(4, 2, requires_grad=True)
    saved = (x * module.running_mean).sum()

    with untouched(module):
        module(torch.randn(4, 2))

    saved.backward()
    assert torch.equal(x.grad, torch.zeros(4, 2))


def test_buffers_that_cannot_be_written_or_have_nan_or_another_shape():
    module = nn.Module()
    module.register_buffer("expanded", torch.ones(1).expand(3))
    module.register_buffer("nan", torch.tensor([float("nan"), 1.0]))
    module.register_buffer("none", None)
    module.register_buffer("grown", torch.ones(2))
    grown = module.grown

    with untouched(module):
        module.grown.data = torch.zeros(5)
        module.nan.data[1] = 2

    assert module.grown is grown
    assert grown.tolist() == [1, 1]
    assert module.nan[1] == 1
    assert module.none is None


def test_the_sign_of_a_zero_is_put_back():
    # -0.0 equals 0.0, and a write through `.data` leaves the version alone: the buffer stayed as the step had made it.
    model = nn.BatchNorm1d(2)

    with untouched(model):
        model.running_mean.data.neg_()

    assert not model.running_mean.signbit().any()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_buffer(kind):
    # `torch.equal` knows no sparse tensors, so a model with one could be neither measured nor planned.
    model = nn.Linear(3, 3)
    model.register_buffer("graph", getattr(torch.eye(3), kind)())
    before = model.graph

    with untouched(model):
        model.graph.values().mul_(2) if kind != "to_sparse" else model.graph._values().mul_(2)

    assert model.graph is before and torch.equal(model.graph.to_dense(), torch.eye(3))


def test_a_buffer_made_in_inference_mode():
    module = nn.Module()
    with torch.inference_mode():
        module.register_buffer("made", torch.ones(2))

    with untouched(module), torch.inference_mode():
        module.made.add_(1)

    assert module.made.tolist() == [1, 1]


def test_an_interrupt_waits_until_all_is_put_back(monkeypatch):
    # One that came between two buffers left the statistics of the second, and of all after it, as the step had them.
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3))).eval()
    before = [buffer.clone() for buffer in model.buffers()]

    reset = Versioned.reset

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        reset(self)

    monkeypatch.setattr(Versioned, "reset", interrupted)

    with pytest.raises(KeyboardInterrupt), untouched(model):
        train(model.train())

    assert all(map(torch.equal, model.buffers(), before))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_handlers_are_let_be():
    seen = []
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, usual)

    def elsewhere():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()

    assert seen == [signal.SIG_IGN, usual]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_a_script_module():
    # The table of its buffers cannot be cleared, which ended in an AttributeError.
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    before = [buffer.clone() for buffer in model.buffers()]

    with untouched(model):
        train(model)

    assert all(map(torch.equal, model.buffers(), before))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_write_to_a_wrapper_is_undone_in_its_parts():
    # Its class writes to the parts out of sight of any mode.
    whole = TwoTensor(torch.ones(128, 128), torch.ones(128, 128))
    model = nn.Linear(4, 4)
    model.average = whole

    def step(model):
        model.average.mul_(0.5)
        return model(torch.ones(2, 4)).sum()

    measure(model, step)

    assert torch.equal(whole.a, torch.ones(128, 128)) and torch.equal(whole.b, torch.ones(128, 128))
