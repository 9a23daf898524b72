"""Loops as users write them, with what they bring along: each must end with the bits of the plain loop."""

import copy
import io
import threading
import warnings
from functools import cache

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn, optim
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from optimizing.loops import adamw, equal, loss_of, net, nothing, values
from torchremat import Host, offload_optimizer, release_gradients


def stored(model, optimizer):
    offload_optimizer(optimizer, Host(), min_bytes=8)


def both(model, optimizer):
    release_gradients(model, optimizer)
    stored(model, optimizer)


def step(model, optimizer, number):
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def with_one_cycle(prepare):
    """A schedule that moves the momentum, which is an option of the groups, in each step."""
    model = net()
    optimizer = adamw(model)
    prepare(model, optimizer)
    schedule = OneCycleLR(optimizer, 0.1, total_steps=12)
    for number in range(10):
        step(model, optimizer, number)
        schedule.step()
    return values(model), optimizer.state_dict()


def with_an_average(prepare):
    model = net()
    optimizer = adamw(model)
    prepare(model, optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(4):
        step(model, optimizer, number)
        average.update_parameters(model)
    return values(model), values(average)


def with_a_group_that_comes_later(prepare):
    model = net()
    torch.manual_seed(1)
    head = nn.Linear(32, 1)
    optimizer = adamw(model)
    prepare(model, optimizer)
    step(model, optimizer, 0)
    optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.05})
    for number in range(1, 4):
        optimizer.zero_grad()
        (loss_of(model, number) + head(model.embed.weight[:3]).square().mean()).backward()
        optimizer.step()
    return values(model), values(head), optimizer.state_dict()


def with_copies(prepare):
    """Both go on from where they were copied."""
    model = net()
    optimizer = adamw(model)
    prepare(model, optimizer)
    step(model, optimizer, 0)
    other, others = copy.deepcopy((model, optimizer))
    for number in range(1, 3):
        step(other, others, number)
        step(model, optimizer, number + 5)
    return values(model), values(other), optimizer.state_dict(), others.state_dict()


def saved_as_a_whole(prepare):
    model = net()
    optimizer = adamw(model)
    prepare(model, optimizer)
    step(model, optimizer, 0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return values(torch.load(file, weights_only=False))


def that_freezes_and_thaws(prepare):
    model = net()
    optimizer = adamw(model)
    prepare(model, optimizer)
    for number in range(6):
        if number % 2 == 0:
            model.blocks[1].requires_grad_(number != 2)
            model.blocks[0].requires_grad_(number != 4)
        step(model, optimizer, number)
    return values(model), optimizer.state_dict()


def that_trains_complex_numbers(prepare):
    torch.manual_seed(0)
    model = nn.Linear(8, 8, dtype=torch.complex64)
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    prepare(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 8, dtype=torch.complex64)).abs().sum().backward()
        optimizer.step()
    return values(model), optimizer.state_dict()


def trained(prepare, backward):
    """What three steps end with whose gradients `backward` makes, of a model and a number."""
    model = net()
    optimizer = adamw(model)
    prepare(model, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
    return values(model), optimizer.state_dict()


def with_a_backward_in_a_thread(prepare):
    def backward(model, number):
        thread = threading.Thread(target=loss_of(model, number).backward)
        thread.start()
        thread.join()

    return trained(prepare, backward)


def with_a_penalty_on_a_gradient(prepare):
    def backward(model, number):
        loss = loss_of(model, number)
        (gradient,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)
        (loss + gradient.square().sum()).backward()

    return trained(prepare, backward)


def that_takes_gradients_as_results(prepare):
    """`torch.autograd.grad` completes no gradient: the step is the optimizer's own."""
    model = net()
    optimizer = adamw(model)
    prepare(model, optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    for number in range(3):
        found = torch.autograd.grad(loss_of(model, number), trained, allow_unused=True)
        for p, gradient in zip(trained, found, strict=True):
            p.grad = gradient
        optimizer.step()
    return values(model), optimizer.state_dict()


def that_is_compiled_as_a_whole(prepare):
    model = net()
    optimizer = adamw(model)
    prepare(model, optimizer)
    compiled = torch.compile(model, backend="aot_eager")
    for number in range(3):
        step(compiled, optimizer, number)
    return values(model), optimizer.state_dict()


def of_peft(prepare):
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), LoraConfig(target_modules=["0", "1"], r=2))
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    prepare(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return values(model)


def of_accelerate(prepare):
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = adamw(model)
    prepare(model, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, number))
        optimizer.step()
    return values(model)


def of_lightning(prepare, *, is_automatic=True):
    """Its `step` has a closure: the whole step, or nothing where the module steps by itself."""
    import lightning  # takes seconds

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = net(), is_automatic

        def training_step(self, batch, number):
            loss = loss_of(self.net, number)
            if not is_automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self):
            optimizer = adamw(self.net)
            prepare(self.net, optimizer)
            return optimizer

    module, quiet = Module(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(max_steps=4, accelerator="cpu", enable_model_summary=False, **quiet)
        trainer.fit(module, DataLoader(TensorDataset(torch.zeros(8)), batch_size=1))
    return values(module)


def of_lightning_by_hand(prepare):
    return of_lightning(prepare, is_automatic=False)


LOOPS = [
    with_one_cycle,
    with_an_average,
    with_a_group_that_comes_later,
    with_copies,
    saved_as_a_whole,
    that_freezes_and_thaws,
    that_trains_complex_numbers,
    with_a_backward_in_a_thread,
    that_takes_gradients_as_results,
    with_a_penalty_on_a_gradient,
    that_is_compiled_as_a_whole,
    of_peft,
    of_accelerate,
    of_lightning,
    of_lightning_by_hand,
]


@cache
def plain(loop):
    return loop(nothing)


@pytest.mark.parametrize("prepare", [release_gradients, stored, both])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop(loop, prepare):
    assert equal(loop(prepare), plain(loop))
