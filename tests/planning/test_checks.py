"""What is checked while a model trains under a plan, in bytes: the optimizer, and data parallelism around it."""

import copy
import pickle
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import torchremat
from planning.optimizer_kinds import Forwarding, Imitating, Trainer
from probes.planning import applied_scopes
from torchremat import BudgetWarning, PlanWarning
from torchremat.state import optimizer_steps

X = torch.randn(8, 64, 64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def step(model):
    return model(X).square().mean()


def sgd(parameters):
    return SGD(parameters, lr=1e-3)


def planned(optimizer=None, budget="60%", **options):
    model = Net()
    given = None if optimizer is None else optimizer(model.parameters())
    torchremat.plan(model, step, budget=budget, cost="flops", operators=False, optimizer=given, **options).apply(model)
    return model


def told(model, optimizer, steps=3, category=PlanWarning):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(model).backward()
            optimizer.step()
            model.zero_grad()
    return [str(one.message) for one in found if one.category is category]


def hooks():
    return len(optimizer_steps._after)


def test_an_optimizer_that_the_plan_does_not_know_is_told():
    model = planned()

    (said,) = told(model, AdamW(model.parameters()))

    assert (
        "the model is trained by AdamW, which has 1.51 MiB of state, and the plan was made without an optimizer" in said
    )


def lbfgs(parameters):
    optimizer = torch.optim.LBFGS(parameters, history_size=1, max_iter=1)
    optimizer.step = partial(optimizer.step, lambda: torch.ones(()))
    return optimizer


def two(parameters):
    first, *rest = parameters
    one, other = AdamW([first]), AdamW(rest)
    one.register_step_post_hook(lambda *_: other.step())
    return one


@pytest.mark.parametrize("made", [lbfgs, two])
def test_the_advice_for_an_optimizer_that_cannot_be_planned_with_can_be_followed(made):
    # It was to plan with it, which is refused for LBFGS; of several optimizers only one can be given.
    model = planned(budget="100%")
    (said,) = told(model, made(list(model.parameters())))
    margin = re.search(r"whose step runs by itself; for the rest give `margin=(\d+)`", said)[1]

    model = planned(budget="100%", margin=int(margin))

    assert told(model, made(list(model.parameters()))) == []


def test_state_that_is_more_than_was_planned_is_told():
    model = planned(sgd)

    (said,) = told(model, AdamW(model.parameters()))

    assert "which has 1.51 MiB of state, and the plan has counted 0 B" in said


def test_state_that_was_planned_and_is_not_there_is_told():
    model = planned(AdamW)

    (said,) = told(model, sgd(model.parameters()))

    assert "trained by SGD, which has no state, and the plan has counted 1.51 MiB" in said
    assert "after `offload_optimizer` if its state waits in a store" in said


def test_parameters_of_a_transform_are_not_looked_at():
    # The first call after an optimizer's step compares its state, and here raised: "Cannot access storage of ...".
    model = planned(sgd)
    step(model).backward()
    sgd(model.parameters()).step()
    model.zero_grad()

    def loss_of(parameters):
        return torch.func.functional_call(model, parameters, (X,)).square().mean()

    found = torch.func.grad(loss_of)({name: one.detach() for name, one in model.named_parameters()})

    expected = torch.autograd.grad(step(model), [*model.parameters()])
    assert all(map(torch.equal, found.values(), expected))


def test_state_for_which_the_budget_has_room_is_not_told():
    model = planned(budget="64MiB")

    assert told(model, AdamW(model.parameters())) == []


def imitating(parameters):
    trainer = Trainer()
    made = Imitating(AdamW(parameters), trainer)
    made._optimizer.trainer = [trainer]
    return made


@pytest.mark.parametrize("wrapped", [AdamW, lambda ps: Forwarding(AdamW(ps)), imitating])
def test_wrappers_and_schedulers_of_the_planned_one_are_no_other(wrapped):
    model = planned(AdamW)
    optimizer = wrapped(list(model.parameters()))
    torch.optim.lr_scheduler.StepLR(getattr(optimizer, "optimizer", getattr(optimizer, "_optimizer", optimizer)), 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer.step  # noqa: B018  a wrapper that is asked for it

    assert told(model, optimizer) == []
    average.update_parameters(model)


def test_warm_state_is_no_difference():
    model = Net()
    optimizer = AdamW(model.parameters())
    step(model).backward()
    optimizer.step()
    torchremat.plan(model, step, budget="60%", cost="flops", operators=False, optimizer=optimizer).apply(model)

    assert told(model, optimizer) == []


def test_an_optimizer_of_another_model_is_not_looked_at():
    model, other = planned(AdamW), Net()

    assert told(model, sgd(other.parameters())) == []


def test_nothing_listens_once_it_is_known_or_the_model_is_gone():
    model, optimizer = planned(AdamW), None
    before = hooks()
    step(model).backward()
    listening = hooks()
    optimizer = AdamW(model.parameters())
    optimizer.step()
    model.zero_grad()
    step(model)
    after = hooks()
    other = planned(AdamW)
    step(other).backward()
    del other

    assert listening > before
    # The second forward is measured, and with it the next step of the optimizer; that hook goes with the step.
    assert after == before + 1
    optimizer.step()
    assert hooks() == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_checked_by_their_own_optimizer(copied):
    model = copied(planned())

    assert len(told(model, AdamW(model.parameters()))) == 1


def test_a_plan_for_the_optimizer_is_silent_and_its_steps_too():
    model = planned(AdamW, budget="min")

    assert told(model, AdamW(model.parameters()), steps=20, category=BudgetWarning) == []
    (scope,) = applied_scopes(model)
    assert scope.checks._soundings.measured[0] == 2


def test_state_that_was_read_out_of_a_store_is_not_blamed_on_the_optimizer():
    model = Net()
    optimizer = AdamW(model.parameters())
    torchremat.plan(
        model, step, budget="min", cost="flops", optimizer=optimizer, optimizer_store=torchremat.Host()
    ).apply(model)
    assert told(model, optimizer, steps=1) == []
    copy.deepcopy(optimizer.state_dict())

    (said,) = told(model, optimizer, steps=1)

    assert "State that waits in a store has been read since the last step" in said


@pytest.mark.filterwarnings("ignore::torchremat.BudgetWarning")  # the copies count
def test_parameters_that_are_no_leaves_are_looked_at_in_silence():
    # torch warned of their `.grad`, from a line of this library.
    model = planned(sgd, budget="min")
    optimizer = sgd(model.parameters())
    for _ in range(3):
        computed = {name: one * 1.0 for name, one in model.named_parameters()}
        torch.func.functional_call(model, computed, (X,)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_plans_that_a_guard_makes_are_its_own_affair():
    model, failures = Net(), [True, False]
    optimizer = AdamW(model.parameters())

    def failing(model, x):
        if failures and failures.pop():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(x).square().mean()

    with warnings.catch_warnings(), torchremat.guard(model, failing, optimizer=optimizer) as run:
        warnings.simplefilter("error")
        for _ in range(4):
            run(X)
            optimizer.step()
        plans = applied_scopes(model)

    assert len(run.attempts) == 1
    assert plans[0].checks._soundings is None


def accumulated(model, steps=3):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(model).backward()
    return [str(one.message) for one in found if one.category is PlanWarning]


def test_gradients_that_were_not_planned_are_told_once_with_the_word_to_add():
    (said,) = accumulated(planned())

    assert "a forward begins with 775.50 KiB of them that it has not counted" in said
    assert "plan with `accumulates=True`" in said and "above the budget of" in said


def test_gradients_that_were_planned_or_have_room_are_not_told():
    assert accumulated(planned(accumulates=True)) == []
    assert accumulated(planned(budget="1GiB")) == []
