"""Parts of a step on a device: kernels that others wait for, and gradients that are freed on their own stream."""

import pytest
import torch
from torch import nn, optim

from optimizing.loops import equal
from torchremat import Host, offload_optimizer, release_gradients

pytestmark = pytest.mark.gpu


def nothing(model, optimizer):
    """The plain loop."""


def both(model, optimizer):
    release_gradients(model, optimizer)
    offload_optimizer(optimizer, Host(), min_bytes=8)


def trained(prepare, *, on_two_streams):
    """What four steps end with; one layer of four may work on a stream of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).cuda()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    prepare(model, optimizer)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for number in range(4):
        optimizer.zero_grad()
        x = model[0](number * torch.ones(2, 16, device="cuda"))
        stream = side if on_two_streams else main
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            x = model[1](x)
        main.wait_stream(stream)
        model[3](model[2](x)).square().sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("on_two_streams", [False, True])
@pytest.mark.parametrize("batch_bytes", [0, None, 2000, 2**20])
def test_small_gradients_wait_on_their_stream(batch_bytes, on_two_streams):
    def released(model, optimizer):
        release_gradients(model, optimizer, batch_bytes=batch_bytes)

    own = trained(released, on_two_streams=on_two_streams)

    assert equal(own, trained(nothing, on_two_streams=on_two_streams))


@pytest.mark.parametrize("on_two_streams", [False, True])
def test_state_comes_and_goes(on_two_streams):
    own = trained(both, on_two_streams=on_two_streams)

    assert equal(own, trained(nothing, on_two_streams=on_two_streams))
