"""What the first step under a plan is compared with."""

import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

import torchremat
from torchremat import BudgetWarning, Plan, PlanWarning


class Block(nn.Module):
    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.net(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.used = 4

    def forward(self, x):
        for block in self.blocks[: self.used]:
            x = block(x)
        return x


X = torch.randn(8, 16, 16)


def step(model):
    parameter = next(model.parameters())
    return model(X.to(parameter.dtype)).square().mean()


def planned(model):
    plan = torchremat.plan(model, step, budget="60%", cost="flops", operators=False)
    plan.apply(model)
    return plan


def told(model, surroundings=nullcontext, steps=3):
    """The words of all warnings of some steps, and their categories."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            with surroundings():
                loss = step(model)
            loss.backward()
    # That some of these steps are above the budget as well is told apart.
    return [(one.category.__name__, str(one.message)) for one in found if one.category is not BudgetWarning]


def train(model):
    model.train()


def rest_in_part(model):
    model.blocks[1].eval()


def cast(model):
    model.double()


def recompute(model):
    model.blocks[2].gradient_checkpointing = True


def wrap_blocks(model):
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))


def compile_one(model):
    model.blocks[0].net[1].compile(backend="eager")


def leave_out(model):
    model.used = 2


@pytest.mark.parametrize(
    ("change", "category", "words"),
    [
        (train, "PlanWarning", "all in evaluation mode when it was planned, all in training mode now"),
        (cast, "PlanWarning", "the parameters were float32 when it was planned, and are float64 now"),
        (recompute, "PlanWarning", "`gradient_checkpointing_enable()` or the like, and now recomputes twice"),
        (
            wrap_blocks,
            "PlanWarning",
            "by `checkpoint_wrapper` or `apply_activation_checkpointing`, and now recomputes twice",
        ),
        (
            compile_one,
            "PlanWarning",
            "`blocks.0.net.1` has been compiled since, and compiled code",
        ),
        (leave_out, "OrderWarning", "was called 0 times in one forward, and planned for 1"),
    ],
)
def test_each_difference_is_told_once(change, category, words):
    model = Net().train(change is not train)
    planned(model)

    change(model)
    ((kind, said),) = told(model)

    assert kind == category
    assert words in said


def test_a_checkpoint_around_the_model_is_told():
    model = Net()
    planned(model)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            checkpoint(model, X, use_reentrant=False).square().mean().backward()

    (said,) = [str(one.message) for one in found if one.category is PlanWarning]
    assert "by `torch.utils.checkpoint` around it, and now recomputes twice" in said


def test_modules_that_were_compiled_before_are_no_difference():
    model = Net()
    model.blocks[0].compile(backend="eager")
    planned(model)

    assert told(model) == []


def test_a_plan_that_does_not_know_what_was_compiled_tells_nothing_of_it():
    model = Net()
    plan = planned(model)
    plan.remove(model)
    conditions = {name: replace(one, compiled=None) for name, one in plan.conditions.items()}
    replace(plan, conditions=conditions).apply(model)

    compile_one(model)

    assert told(model) == []


def test_what_is_in_another_mode_is_named():
    model = Net()
    planned(model)
    rest_in_part(model)

    ((_, said),) = told(model)

    assert "`blocks.1` in evaluation mode now" in said


def test_autocast_that_was_not_planned_is_told():
    model = Net()
    planned(model)

    ((kind, said),) = told(model, lambda: torch.autocast("cpu", torch.bfloat16))

    assert kind == "PlanWarning"
    assert "autocast on cpu was off when it was planned, and is bfloat16 now" in said


@pytest.mark.parametrize("is_fitted", [False, True])
def test_a_step_as_it_was_planned_is_told_nothing(is_fitted):
    model = Net()
    if is_fitted:
        torchremat.fit(model, step, budget="60%", cost="flops", operators=False)
    else:
        planned(model)
    model.eval()
    with torch.no_grad():
        step(model)
    model.train()

    assert told(model) == []


def test_runs_that_measure_are_no_first_step():
    model = Net().eval()
    planned(model)
    torchremat.verify(model, step)
    torchremat.measure(model, step)
    model.train()

    assert len(told(model)) == 1


def test_a_plan_in_a_file_knows_its_conditions(tmp_path):
    model = Net().eval()
    plan = planned(model)
    plan.remove(model)
    plan.save(tmp_path / "plan.json")

    read = Plan.load(tmp_path / "plan.json")
    read.apply(model.train())

    assert read == plan
    assert read.conditions[""].resting == ("",)
    assert len(told(model)) == 1


def test_later_steps_are_not_looked_at():
    model = Net()
    planned(model)

    assert told(model, steps=1) == []
    model.used = 2
    assert told(model, steps=1) == []
