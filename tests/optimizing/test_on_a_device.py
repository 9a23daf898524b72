"""Parts of a step on a device: kernels that others wait for, and gradients that are freed on their own stream."""

import pytest
import torch
from torch import nn

from optimizing.loops import equal, nothing, trained_on_streams
from torchremat import Host, offload_optimizer, release_gradients

pytestmark = pytest.mark.gpu


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).cuda()


def both(model, optimizer):
    release_gradients(model, optimizer)
    offload_optimizer(optimizer, Host(), min_bytes=8)


@pytest.mark.parametrize("on_two_streams", [False, True])
@pytest.mark.parametrize("batch_bytes", [0, None, 2000, 2**20])
def test_small_gradients_wait_on_their_stream(batch_bytes, on_two_streams):
    def released(model, optimizer):
        release_gradients(model, optimizer, batch_bytes=batch_bytes)

    own = trained_on_streams(net(), released, on_two_streams=on_two_streams)

    assert equal(own, trained_on_streams(net(), nothing, on_two_streams=on_two_streams))


@pytest.mark.parametrize("on_two_streams", [False, True])
def test_state_comes_and_goes(on_two_streams):
    own = trained_on_streams(net(), both, on_two_streams=on_two_streams)

    assert equal(own, trained_on_streams(net(), nothing, on_two_streams=on_two_streams))
