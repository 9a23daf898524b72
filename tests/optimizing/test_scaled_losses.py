"""A loss scaler is refused before a parameter has stepped."""

import gc

import pytest
import torch
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from optimizing.loops import Loop, adamw, equal, loss_of, net
from probes.optimizing import scaled_losses
from torchremat import UnsupportedError, release_gradients


class Own(GradScaler):
    """A user's, with a scale that is not torch's."""

    def scale(self, outputs):
        super().scale(torch.ones(()))
        return outputs * self._scale


SCALERS = {
    "torch": lambda: GradScaler("cpu"),
    "sharded": lambda: ShardedGradScaler("cpu"),
    "own": lambda: Own("cpu"),
}


@pytest.mark.parametrize("options", [{}, {"accumulates": True}, {"batch_bytes": 0}], ids=["", "accumulates", "alone"])
@pytest.mark.parametrize("make", SCALERS.values(), ids=SCALERS)
def test_nothing_has_stepped_when_a_scaler_is_refused(make, options):
    model, scaler = net(), make()
    optimizer = adamw(model)
    release_gradients(model, optimizer, **options)
    before = [p.detach().clone() for p in model.parameters()]

    with pytest.raises(UnsupportedError, match=r"the loss was scaled by a GradScaler.*None has stepped"):
        scaler.scale(loss_of(model, 0)).backward()

    assert equal([p.detach() for p in model.parameters()], before)
    assert not optimizer.state


def test_several_losses_are_scaled_at_once():
    model, scaler = net(), GradScaler("cpu")
    optimizer = adamw(model)
    release_gradients(model, optimizer)
    _, second = scaler.scale([loss_of(model, 0), loss_of(model, 1)])

    with pytest.raises(UnsupportedError, match="the loss was scaled"):
        (2 * second).backward()


def test_training_goes_on_without_the_scaler():
    plain, own = Loop(adamw), Loop(adamw, release_gradients)
    with pytest.raises(UnsupportedError, match="the loss was scaled"):
        GradScaler("cpu").scale(loss_of(own.model, 0)).backward()

    assert equal(own.run(stop=4).ends_with(), plain.run(stop=4).ends_with())


def test_a_scaler_that_is_off_and_one_of_another_model_work():
    def trained(prepare):
        loop, other = Loop(adamw, prepare), Loop(adamw)
        off, on = GradScaler("cpu", enabled=False), GradScaler("cpu")
        for number in range(3):
            for each, scaler in ((loop, off), (other, on)):
                each.optimizer.zero_grad()
                scaler.scale(loss_of(each.model, number)).backward()
                scaler.step(each.optimizer)
                scaler.update()
        return loop.ends_with(), other.ends_with()

    assert equal(trained(release_gradients), trained(lambda *_: None))


def test_the_classes_are_as_before_when_nothing_is_released(monkeypatch):
    monkeypatch.setattr(scaled_losses, "_watching", set())  # other tests may have left some
    monkeypatch.setattr(scaled_losses, "_patches", {})
    scale = GradScaler.scale
    first, second = net(), net()
    optimizers = adamw(first), adamw(second)
    releases = [release_gradients(*both) for both in zip((first, second), optimizers, strict=True)]
    assert GradScaler.scale is not scale

    releases[0].remove()
    assert GradScaler.scale is not scale
    releases[1].remove()
    assert GradScaler.scale is scale

    releases = [release_gradients(first, optimizers[0])]
    assert GradScaler.scale is not scale
    del releases, optimizers
    gc.collect()

    assert GradScaler.scale is scale
