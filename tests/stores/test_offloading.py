import pytest
import torch
from torch import nn

from stores.memory import Memory
from torchremat import UnsupportedError, checkpoint, offload


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.RReLU(), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Linear(64, 8)
    )


def gradients(run):
    model = network()
    torch.manual_seed(0)
    x = torch.randn(32, 64, requires_grad=True)
    run(model, x).sin().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def test_gradients_are_those_of_the_plain_run():
    store = Memory()
    plain = gradients(lambda model, x: model(x.sin()))
    context = offload(store)

    with context:
        found = gradients(lambda model, x: model(x.sin()))

    assert all(map(torch.equal, found, plain))
    assert context.copied_out_bytes == store.bytes("put") > 0
    assert not store.live


def test_the_inputs_of_a_region_are_stored_and_its_insides_recomputed():
    store, runs = Memory(), []
    plain = gradients(lambda model, x: model(x.sin()))

    def body(model, x):
        runs.append("run")
        return model(x)

    with offload(store):
        found = gradients(lambda model, x: checkpoint(body, model, x.sin()))

    assert all(map(torch.equal, found, plain))
    assert len(runs) == 2
    assert store.bytes("put") == 32 * 64 * 4 + 32 * 8 * 4  # the input and output of the region


def test_a_region_cannot_hold_an_offload():
    def body(x):
        with offload(Memory()):
            return x.sin()

    with pytest.raises(UnsupportedError, match="around the region"):
        checkpoint(body, torch.ones(3, requires_grad=True))
