"""A budget in the place of `accelerator.prepare`."""

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import torchremat
from interop.trainers import layers
from torchremat.regions.patches import forward_under

prepare = torchremat.interop.accelerate.prepare


@pytest.fixture(autouse=True)
def _anew():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Tracker(accelerate.tracking.GeneralTracker):
    name = "rows"
    requires_logging_directory = False
    tracker = None

    def __init__(self):
        super().__init__()
        self.rows = []

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None):
        self.rows.append(values)


def trained(size, *, is_training=True, **options):
    """Model, optimizer, the state of torch's generator and what was logged, after two steps of two batches."""
    AcceleratorState._reset_state(True)
    tracker = Tracker()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=[tracker], **options)
    accelerator.init_trackers("rows")
    model = layers().train(is_training)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batches = [torch.randn(4, 64, 16) for _ in range(4)]
    if size is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = prepare(
            accelerator,
            model,
            optimizer,
            lambda model: model(batches[0]).square().mean(),
            budget=size,
            cost="flops",
            operators=False,
        )
    assert model.training == is_training
    model.train()
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, torch.get_rng_state(), tracker.rows


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16", "is_training": False}], ids=["float32", "bf16"])
def test_the_training_is_the_same_within_the_budget(options):
    torch.manual_seed(1)
    plain, plain_optimizer, plain_random, _ = trained(None, **options)
    torch.manual_seed(1)
    ours, optimizer, random, (row,) = trained("75%", **options)

    assert plain.state_dict().keys() == ours.state_dict().keys()
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    assert torch.equal(plain_random, random)
    assert type(optimizer) is type(plain_optimizer)
    assert len(optimizer.state) == len(plain_optimizer.state)
    assert row["memory_measured_bytes"] <= row["memory_budget_bytes"]
    assert row["memory_slowdown"] > 1
    assert any(forward_under(module) for module in ours.modules())
    torchremat.unwrap(ours)
    assert not any(forward_under(module) for module in ours.modules())


def test_mistakes_are_told():
    accelerator = accelerate.Accelerator(cpu=True)
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4, 64, 16)

    def step(model):
        return model(batch).square().mean()

    with pytest.raises(torchremat.BudgetError, match="is not a size"):
        prepare(accelerator, model, optimizer, step, budget="20Gigs")
    with pytest.raises(torchremat.StepError, match=r"accelerator: an accelerate\.Accelerator is needed"):
        prepare(model, accelerator, optimizer, step, budget="75%")
    with pytest.raises(torchremat.StepError, match="the step returned None"):
        prepare(accelerator, model, optimizer, lambda model: None, budget="75%")
    with pytest.raises(torchremat.BudgetError) as told:
        prepare(accelerator, model, optimizer, step, budget=1000)
    assert "gradient_accumulation_steps" in told.value.__notes__[0]
    model.gradient_checkpointing = True
    with pytest.raises(torchremat.UnsupportedError, match="gradient_checkpointing_disable"):
        prepare(accelerator, model, optimizer, step, budget="75%")
