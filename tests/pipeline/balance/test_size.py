"""Bytes of layers, counted by hand. A float has 4 bytes."""

import pytest
import torch
from torch import nn

from torchremat import Host, offload, saved, wrap
from torchremat.errors import StepError
from torchremat.pipeline.balance import balance_by_size

# `nn.Linear` saves its input, and its weight, which is a parameter and counts as such alone.


def test_bytes_of_layers():
    # Batch 8. The input of the first layer has 8*4*4 = 128 B. Tanh saves its output of 8*16*4 = 512 B, which the last
    # layer saves as well. Weights have 4*16*4 = 256 B and 16*2*4 = 128 B, biases 64 B and 8 B.
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    found = balance_by_size(2, model, torch.rand(8, 4), param_scale=0)
    scaled = balance_by_size(2, model, torch.rand(8, 4), param_scale=2.5)

    assert found.costs == (128, 512, 0)
    assert found == [1, 2]
    assert scaled.costs == (128 + 800, 512, 340)
    assert str(scaled) == (
        "stage  layers  count   cost  share\n"
        "    0  0           1  928 B  52.1%\n"
        "    1  1 .. 2      2  852 B  47.9%\n"
        "stage 0 costs most: 1.04 x an even share of 50.0%"
    )


def test_the_input_that_a_layer_alone_saves_is_its_own():
    # Outputs of linear layers are 8*16*4 = 512 B and saved by the layer behind. A layer that writes in place saves its
    # output, which is the memory of its input.
    chain = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    inplace = nn.Sequential(nn.Linear(4, 16), nn.ReLU(inplace=True), nn.Linear(16, 2), nn.ReLU())

    assert balance_by_size(1, chain, torch.rand(8, 4), param_scale=0).costs == (128, 512, 512)
    assert balance_by_size(1, inplace, torch.rand(8, 4), param_scale=0).costs == (128, 512, 0, 64)


def test_layers_add_up_to_the_model():
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(196, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(1))
    images = torch.rand(2, 3, 16, 16)

    found = balance_by_size(1, model, images, param_scale=0)

    whole = saved(model, lambda model: model(images).exp().sum())
    # The exp saves its own output, of 2*8*4 = 64 B.
    assert sum(found.costs) == whole.saved_bytes + whole.bytes_of("input") - 64
    assert found.costs[0] == 2 * 3 * 16 * 16 * 4


def test_a_microbatch_counts():
    # 3 microbatches of 10 rows: the largest has 4. Four rows of 4 floats are 64 B.
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch = torch.rand(10, 4)

    whole = balance_by_size(1, model, batch, param_scale=0)
    cut = balance_by_size(1, model, batch, chunks=3, param_scale=0)

    # BatchNorm saves its input, and a mean and a deviation of 4 floats, 32 B; its statistics are buffers.
    assert whole.costs == (160, 160 + 32)
    assert cut.costs == (64, 64 + 32)


def test_what_backward_never_needs_counts_nothing():
    class Drops(nn.Module):
        def forward(self, x):
            kept = x.exp()
            kept.sin().cos()
            return kept, x.detach().exp().exp()

    model = nn.Sequential(nn.Linear(4, 4), Drops())

    assert balance_by_size(1, model, torch.rand(8, 4), param_scale=0).costs == (128, 128)
    # Nothing requires grad before the first parameter.
    assert balance_by_size(1, model[1:], torch.rand(8, 4), param_scale=0).costs == (0,)


def test_regions_and_stores_are_left_as_they_are():
    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

    plain = nn.Sequential(block(), block())
    regions = nn.Sequential(block(), block())
    wrap(regions, "*")

    # Each block saves its input (the second shares it with the first, whose output the tanh saves), and two outputs of
    # tanh: 128 B each. A region keeps its input alone.
    assert balance_by_size(1, plain, torch.rand(8, 4), param_scale=0).costs == (384, 256)
    assert balance_by_size(1, regions, torch.rand(8, 4), param_scale=0).costs == (128, 128)


def test_what_a_store_has_taken_is_not_on_the_device():
    class Offloaded(nn.Module):
        def forward(self, x):
            with offload(Host(pin=False), min_bytes=0):
                return x.exp().sin()

    model = nn.Sequential(nn.Linear(4, 4), Offloaded())

    assert balance_by_size(1, model, torch.rand(8, 4), param_scale=0).costs == (128, 0)


def test_shared_parameters_count_once_in_a_layer():
    first = nn.Linear(4, 4, bias=False)
    second = nn.Linear(4, 4, bias=False)
    second.weight = first.weight

    found = balance_by_size(1, nn.Sequential(nn.Sequential(first, second)), torch.rand(1, 4), param_scale=1)

    assert found.costs == (64 + 16 + 16,)


def test_nothing_is_touched():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.ReLU(inplace=True)).eval()
    batch = torch.rand(4, 3)
    before, batch_before, draws = [*map(torch.clone, model.state_dict().values())], batch.clone(), torch.get_rng_state()

    balance_by_size(2, nn.Sequential(nn.Hardtanh(0.4, 0.6, inplace=True), model), batch)

    assert all(map(torch.equal, model.state_dict().values(), before))
    assert torch.equal(batch, batch_before)
    assert torch.equal(torch.get_rng_state(), draws)
    assert not any(module.training for module in model.modules())
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


def test_what_cannot_be_measured():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].bias.grad = torch.zeros(2)

    with pytest.raises(StepError) as raised:
        balance_by_size(0, model, (torch.rand(8, 2), torch.rand(3, 2)), chunks=4, param_scale=-1)

    assert str(raised.value) == (
        "balance_by_size: 4 problems:\n"
        "  partitions=0: expected a positive integer.\n"
        "  1 of 2 parameters have a gradient already (`0.bias`), which copies would have as well; call "
        "`module.zero_grad(set_to_none=True)` first.\n"
        "  chunks=4: the tensors of a batch need the same number of rows, they have 3 and 8.\n"
        "  param_scale=-1: expected a finite number, at least 0."
    )
    with pytest.raises(StepError, match="chunks=0: expected a positive integer"):
        balance_by_size(1, nn.Sequential(nn.ReLU()), torch.rand(8, 2), chunks=0)
    with pytest.raises(StepError, match=r"chunks=2: the tensors .* but none of them has rows"):
        balance_by_size(1, nn.Sequential(nn.ReLU()), torch.tensor(1.0), chunks=2)


@pytest.mark.gpu
def test_bytes_on_a_device():
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    found = balance_by_size(2, model, torch.rand(8, 4), param_scale=0, device="cuda")

    assert found.costs == (128, 512, 0)
