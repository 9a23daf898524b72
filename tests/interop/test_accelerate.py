"""A budget in the place of `accelerator.prepare`."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import torchremat
from interop.trainers import layers, loss_of, recomputes_of
from probes.regions import forward_under

prepare, within_budget = torchremat.interop.accelerate.prepare, torchremat.interop.accelerate.within_budget

QUICK = {"cost": "flops", "operators": False}


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


def trained_on_lengths(size, lengths=(32, 128, 64, 128), **options):
    """Parameters, recomputes and what was logged, after batches of these lengths."""
    torch.manual_seed(1)
    AcceleratorState._reset_state(True)
    tracker = Tracker()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=[tracker], **options)
    accelerator.init_trackers("rows")
    model = layers()
    recomputed = recomputes_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if size is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = prepare(accelerator, model, optimizer, loss_of, budget=size, shapes=True, **QUICK)
    for batch in [torch.randn(4, length, 16) for length in lengths]:
        with accelerator.accumulate(model):
            with nullcontext() if size is None else within_budget(optimizer, batch):
                accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return [one.detach() for one in model.parameters()], recomputed.value, tracker.rows


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=["float32", "bf16"])
def test_each_shape_has_a_plan(options):
    plain, _, _ = trained_on_lengths(None, **options)
    ours, recomputed, rows = trained_on_lengths("1.5MB", **options)

    assert all(map(torch.equal, ours, plain))
    assert recomputed > 0
    assert [row["memory_slowdown"] > 1 for row in rows][-1]
    assert all(row["memory_measured_bytes"] <= row["memory_budget_bytes"] == 1_500_000 for row in rows)


def test_shapes_are_let_go_with_the_accelerators_memory():
    accelerator = accelerate.Accelerator(cpu=True)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = prepare(accelerator, model, optimizer, loss_of, budget="1.5MB", shapes=True, **QUICK)
    batch = torch.randn(4, 64, 16)
    with within_budget(optimizer, batch):
        accelerator.backward(loss_of(model, batch))
    gone = weakref.ref(model)

    model, optimizer = accelerator.free_memory(model, optimizer)

    gc.collect()
    assert gone() is None


def test_mistakes_with_shapes_are_told():
    accelerator = accelerate.Accelerator(cpu=True)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batch = torch.randn(4, 64, 16)

    with pytest.raises(torchremat.StepError, match=r"step\(model, batch\)"):
        prepare(accelerator, model, optimizer, lambda model: None, budget="2MB", shapes=True)
    with pytest.raises(torchremat.BudgetError, match="give the budget in bytes"):
        prepare(accelerator, model, optimizer, loss_of, budget="70%", shapes=True)
    with pytest.raises(torchremat.StepError, match=r"the one that `prepare\(..., shapes=True\)` returned"):
        within_budget(optimizer, batch).__enter__()
    model, optimizer = prepare(accelerator, model, optimizer, loss_of, budget=700_000, shapes=True, **QUICK)
    accelerator.backward(loss_of(model, batch))
    with pytest.raises(torchremat.UnsupportedError, match=r"within_budget\(optimizer, batch\)"):
        optimizer.step()
    with pytest.raises(torchremat.BudgetError) as told, within_budget(optimizer, batch):
        raise AssertionError("the block has run")
    assert "gradient_accumulation_steps" in told.value.__notes__[0]


def test_mistakes_are_told():
    accelerator = accelerate.Accelerator(cpu=True)
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4, 64, 16)

    def step(model):
        return model(batch).square().mean()

    with pytest.raises(torchremat.BudgetError, match="is not a size"):
        prepare(accelerator, model, optimizer, step, budget="20Gigs")
    with pytest.raises(torchremat.StepError, match=r"accelerator: expected an accelerate\.Accelerator"):
        prepare(model, accelerator, optimizer, step, budget="75%")
    with pytest.raises(torchremat.StepError, match="the step returned None"):
        prepare(accelerator, model, optimizer, lambda model: None, budget="75%")
    with pytest.raises(torchremat.BudgetError) as told:
        prepare(accelerator, model, optimizer, step, budget=1000)
    assert "gradient_accumulation_steps" in told.value.__notes__[0]
    model.gradient_checkpointing = True
    with pytest.raises(torchremat.UnsupportedError, match="gradient_checkpointing_disable"):
        prepare(accelerator, model, optimizer, step, budget="75%")


def test_gradients_are_released_and_state_is_stored_below_the_floor():
    def trained_below(**options):
        AcceleratorState._reset_state(True)
        torch.manual_seed(1)
        accelerator = accelerate.Accelerator(cpu=True, log_with=[tracker := Tracker()])
        accelerator.init_trackers("rows")
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        batches = [torch.randn(4, 64, 16) for _ in range(3)]
        if options:
            model, optimizer = prepare(accelerator, model, optimizer, partial(loss_of, batch=batches[0]), **options)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        for batch in batches:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        return model, tracker.rows

    plain, _ = trained_below()
    _, (floor,) = trained_below(budget="min", **QUICK)
    ours, (row,) = trained_below(budget="min", release_gradients="auto", optimizer_store=torchremat.Disk(), **QUICK)

    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    parameter_bytes = sum(one.nbytes for one in ours.parameters())
    assert row["memory_measured_bytes"] < floor["memory_measured_bytes"] - 1.5 * parameter_bytes
    torchremat.unwrap(ours)
    assert not any(getattr(one, "_post_accumulate_grad_hooks", None) for one in ours.parameters())


def test_several_backwards_for_a_step_are_refused_with_released_gradients():
    AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = partial(loss_of, batch=torch.randn(4, 64, 16))

    with pytest.raises(torchremat.UnsupportedError, match="adds up those of several backwards"):
        prepare(accelerator, model, optimizer, step, budget="75%", release_gradients=True)
