"""What comes between a backward that has released gradients and the step that ends it."""

import contextlib
import pickle

import pytest
import torch
from torch import nn, optim

from optimizing.loops import equal, loss_of, net
from torchremat import Host, UnsupportedError, offload_optimizer, release_gradients


def _schedule(model, optimizer):
    optimizer.param_groups[0]["lr"] = 1e-3


def _decay(model, optimizer):
    with torch.no_grad():
        model.embed.weight.mul_(0.99)


def _cancel(model, optimizer):
    model.embed.weight.grad = None


def _replace(model, optimizer):
    model.embed.weight.grad = torch.ones_like(model.embed.weight)


def _forget(model, optimizer):
    optimizer.state.clear()


def _reset(model, optimizer):
    optimizer.state[model.embed.weight]["exp_avg"].zero_()


def _load(model, optimizer):
    optimizer.load_state_dict(optim.AdamW(model.parameters(), lr=1e-2).state_dict())


BETWEEN = {
    "a schedule steps": (_schedule, "the option 'lr' of a group was changed"),
    "a parameter is decayed": (_decay, "embed.weight was written"),
    "a gradient is dropped": (_cancel, "the gradient of embed.weight was dropped or replaced"),
    "a gradient is replaced": (_replace, "the gradient of embed.weight was dropped or replaced"),
    "all gradients are dropped": (lambda _, optimizer: optimizer.zero_grad(), "the gradient of .* was dropped"),
    "the state is cleared": (_forget, "the state of .* was changed"),
    "a momentum is reset": (_reset, "the state of embed.weight was changed"),
    "a state is loaded": (_load, "the groups of parameters were replaced"),
}


@pytest.mark.parametrize(("change", "words"), BETWEEN.values(), ids=BETWEEN)
def test_what_a_plain_step_would_read_may_not_change_before_it(change, words):
    """Each was ignored, or undone, in silence: a plain step reads all of it."""
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    release_gradients(model, optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    change(model, optimizer)

    with pytest.raises(UnsupportedError, match=words + r".*between a backward.*and AdamW.step\(\)"):
        optimizer.step()


def test_what_another_loss_has_stepped_on_is_told_before_it_is_saved():
    """A generator's loss goes through its discriminator, and steps on it: in silence, if no other step came."""
    judge, maker = nn.Linear(4, 1), nn.Linear(4, 4)
    optimizer = optim.SGD(judge.parameters(), lr=0.1)
    release_gradients(judge, optimizer)

    judge(maker(torch.ones(2, 4))).sum().backward()

    with pytest.raises(UnsupportedError, match=r"state_dict\(\): a backward has released gradients"):
        optimizer.state_dict()
    optimizer.step()
    optimizer.state_dict()


class Late(nn.Module):
    """Has a parameter that gets its gradient from the training loop."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.late = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.layers(x) * self.late.detach()


@pytest.mark.parametrize("stores", [False, True], ids=["state in memory", "state in a store"])
def test_what_no_part_has_read_may_change_before_the_step(stores):
    def trained(releases):
        torch.manual_seed(0)
        model = Late()
        groups = [{"params": model.layers.parameters()}, {"params": [model.late]}]
        optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
        with contextlib.ExitStack() as stack:
            if releases:
                stack.enter_context(release_gradients(model, optimizer))
            if releases and stores:
                stack.enter_context(offload_optimizer(optimizer, Host()))
            for number in range(3):
                optimizer.zero_grad()
                model(torch.ones(4, 8)).square().mean().backward()
                model.late.grad = torch.full_like(model.late, 0.5)
                optimizer.param_groups[1]["lr"] = 0.1 / (number + 1)
                with torch.no_grad():
                    model.late.mul_(0.9)
                optimizer.step()
        return [*model.parameters()], [group["lr"] for group in optimizer.param_groups]

    (released, rates), (plain, plain_rates) = trained(True), trained(False)

    assert equal(released, plain)
    assert rates == plain_rates


def test_parameters_that_change_their_shape_or_dtype_go_on():
    """What stood in place of their gradients was that of the old shape: torch raised in the middle of a backward."""

    def trained(releases):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
        optimizer = optim.SGD(model.parameters(), lr=0.1)

        def step(rows):
            optimizer.zero_grad()
            model(torch.arange(rows)).square().mean().backward()
            optimizer.step()

        with release_gradients(model, optimizer) if releases else contextlib.nullcontext():
            step(10)
            optimizer.zero_grad()
            model[0].weight.data = torch.cat([model[0].weight.data, torch.ones(2, 4)])
            step(12)
            optimizer.zero_grad()
            model.double()
            step(12)
        return [*model.parameters()]

    assert equal(trained(True), trained(False))


def test_a_parameter_at_the_address_of_an_old_one_is_released():
    """It was taken for the old one, and its gradient stayed for good."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    release_gradients(model, optimizer)
    for _ in range(50):
        gone = {id(one) for one in model[1].parameters()}
        optimizer.param_groups[0]["params"][2:] = []
        model[1] = None
        model[1] = nn.Linear(4, 4)
        optimizer.param_groups[0]["params"] += [*model[1].parameters()]
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        if gone & {id(one) for one in model[1].parameters()}:
            break
    else:
        pytest.skip("no address came back")

    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()

    assert {type(one.grad).__name__ for one in model.parameters()} == {"ReleasedGradient"}
    optimizer.step()


def test_memory_of_a_released_gradient_can_be_asked_for():
    """It had a storage at address 0, which `Module.share_memory()` read: the process died."""
    model = net()
    optimizer = optim.AdamW(model.parameters())
    with release_gradients(model, optimizer):
        loss_of(model, 0).backward()
        optimizer.step()

        model.share_memory()

        assert model.embed.weight.is_shared() and model.embed.weight.grad.untyped_storage().nbytes() == 0
        with pytest.raises(UnsupportedError, match="is read, and it was released"):
            pickle.dumps(model.embed.weight.grad)
