from __future__ import annotations

import functools
from dataclasses import dataclass
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchremat.errors import StepError
from torchremat.measuring.step import check_materialised, holdings_of, loss_of


@dataclass
class Output:
    loss: object
    logits: Tensor | None = None


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: Output(loss=x), lambda x: {"loss": x, "logits": None}])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_losses_that_are_found(wrap, shape: tuple[int, ...]):
    loss = torch.zeros(shape, requires_grad=True)

    assert loss_of(wrap(loss)) is loss


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, r"returned None \(is a `return` missing\?\)"),
        (3.5, "returned a float: 3.5"),
        ({"logits": 1}, r"a dict with the keys \['logits'\], and no tensor at 'loss'"),
        ((1, 2), "a tuple of 2"),
        (Output(loss=None), "returned a Output"),
        (torch.zeros(3, 2, requires_grad=True), r"a loss of shape \(3, 2\)"),
        (torch.zeros(()), "does not require grad"),
        (Output(loss=torch.zeros(())), "does not require grad"),
    ],
)
def test_bad_results_are_named(result: object, said: str):
    with pytest.raises(StepError, match=said):
        loss_of(result)


GLOBAL = torch.zeros(1)
UNNAMED = torch.zeros(2)


def test_closure_defaults_containers_and_named_globals_are_found():
    model = nn.Linear(2, 2)
    x, y, z = torch.zeros(3), torch.zeros(4), torch.zeros(5)
    batches = [{"x": x, "again": [x]}, (y,)]

    def step(default=z, *, key=model):
        return key(batches[0]["x"]) + default + GLOBAL

    found = holdings_of(step)

    assert found.modules == (model,)
    assert [id(t) for t in found.tensors] == [id(t) for t in (z, GLOBAL, x, y)]


def test_partials_methods_modules_and_objects():
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(2, 2)
            self.batch = torch.zeros(3)
            self.UNNAMED = 1

        def step(self):
            return self.model(self.batch).sum() + self.UNNAMED

        __call__ = step

    trainer, x = Trainer(), torch.zeros(4)

    method = holdings_of(trainer.step)
    partial = holdings_of(functools.partial(lambda model, x: model(x), trainer.model, x=x))

    assert method.modules == holdings_of(trainer).modules == partial.modules == (trainer.model,)
    assert [t is trainer.batch for t in method.tensors] == [True]
    assert [t is x for t in partial.tensors] == [True]
    assert holdings_of(trainer.model).modules == (trainer.model,)
    assert holdings_of(trainer.model.forward).modules == (trainer.model,)


def through(model, x):
    return F.mse_loss(model(x), GLOBAL)


def test_functions_that_the_step_holds_are_searched():
    # A step that called its loss by a function of the user's had none of what that function held: a teacher kept what
    # planning, or a failed attempt of `guard`, did to its statistics.
    teacher, x, y = nn.Linear(2, 2), torch.zeros(3), torch.zeros(4)

    def inner():
        return teacher(y)

    @torch.no_grad()
    def target():
        return inner()

    def step(model):
        return through(model, x) + target()

    found = holdings_of(step)

    assert found.modules == (teacher,)
    assert [id(t) for t in found.tensors] == [id(t) for t in (x, GLOBAL, y)]


def test_functions_of_libraries_are_not_searched_for_globals():
    def step():
        return called()

    names = {"__name__": "numpy.linalg", "GLOBAL": GLOBAL}
    called = FunctionType((lambda: GLOBAL).__code__, names)
    users = holdings_of(FunctionType((lambda: GLOBAL).__code__, {**names, "__name__": "train"}))

    assert holdings_of(step).tensors == ()
    assert users.tensors == holdings_of(called).tensors == (GLOBAL,)


def test_a_cell_without_a_value_and_a_cycle_are_no_trouble():
    cycle: list[object] = []
    cycle.append(cycle)

    def step():
        return later, cycle

    assert holdings_of(step).tensors == ()
    later = 1
    assert holdings_of(step).tensors == ()
    assert later


def test_parameters_without_values():
    check_materialised(nn.Linear(2, 2))
    with pytest.raises(StepError, match=r"2 parameters or buffers are on the meta device \(weight, bias\)"):
        check_materialised(nn.Linear(2, 2, device="meta"))
    with pytest.raises(StepError, match=r"2 parameters or buffers of the model have no shape yet \(weight, bias\)"):
        check_materialised(nn.LazyLinear(2))
