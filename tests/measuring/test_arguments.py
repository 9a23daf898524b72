"""`(model, step)`, as everywhere; and `(step, model)`, which works for one more version and says so once."""

import warnings

import pytest
import torch
from torch import nn

from torchremat import DeprecatedWarning, StepError, measure, saved


def subject():
    x = torch.randn(8, 4)
    return nn.Linear(4, 4), lambda model: model(x).square().sum()


CALLS = pytest.mark.parametrize("call", [measure, saved], ids=["measure", "saved"])


def size_of(found):
    return found.saved_bytes if hasattr(found, "saved_bytes") else found.peak_bytes


@CALLS
def test_the_model_comes_first(call):
    model, step = subject()

    assert size_of(call(model, step)) == size_of(call(model=model, step=step)) == size_of(call(model, step=step)) > 0


@CALLS
@pytest.mark.parametrize("how", ["by place", "the model by name"])
def test_the_old_order_works_and_says_the_new_one(call, how):
    model, step = subject()
    expected = size_of(call(model, step))

    said = rf"^{call.__name__}\(step, model\) is now {call.__name__}\(model, step\).*; 0.3 will remove the old order\.$"
    with pytest.warns(DeprecatedWarning, match=said) as caught:
        found = call(step, model) if how == "by place" else call(step, model=model)

    assert size_of(found) == expected
    assert caught[0].filename == __file__
    assert len(caught) == 1


@CALLS
def test_a_step_that_holds_its_model_is_given_alone(call):
    model, step = subject()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert size_of(call(lambda: step(model))) > 0


@CALLS
def test_a_step_that_is_a_module_comes_second(call):
    model, _ = subject()

    class Loss(nn.Module):
        def forward(self, model):
            return model(torch.ones(8, 4)).square().sum()

    assert size_of(call(model, Loss())) > 0


@CALLS
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((nn.Linear(2, 2),), "step: expected a function that returns the loss, got NoneType"),
        (([nn.Linear(2, 2)], lambda model: None), "model: expected a torch.nn.Module, got list"),
        ((lambda model: None,), r"it is called as `step\(\)`"),
    ],
    ids=["no step", "no model", "no model for the step"],
)
def test_what_is_missing_is_named(call, arguments, said):
    with pytest.raises(StepError, match=said):
        call(*arguments)


def test_users_see_it_by_default():
    # Python shows a DeprecationWarning to nobody but the main script.
    assert issubclass(DeprecatedWarning, FutureWarning)
