"""Models of `transformers` under a store."""

import pytest
import torch

from torchremat import Disk, offload, wrap
from zoo import ZOO

DISK = Disk()


def run(make, change=lambda model, step: step(model)):
    model, step = make(blocks=2, width=64, dropout=0.1)
    torch.manual_seed(0)
    loss = change(model, step)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_those_of_the_plain_run(name):
    plain, context = run(ZOO[name]), offload(DISK)

    def offloaded(model, step):
        with context:
            return step(model)

    found = run(ZOO[name], offloaded)

    assert len(found) == len(plain) and all(map(torch.equal, found, plain))
    assert context.copied_out_bytes > 2**20
    assert DISK.statistics.stored_bytes == 0


def test_layers_by_name():
    plain = run(ZOO["llama"])

    found = run(ZOO["llama"], lambda model, step: step(wrap(model, "model.layers.*", store=DISK)))

    assert len(found) == len(plain) and all(map(torch.equal, found, plain))
    assert DISK.statistics.copied_in_bytes > 0
