"""Parameters that are in a store while regions, hooks and other modes stand around their modules."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from optimizing.chains import chain, gradients
from optimizing.loops import equal
from torchremat import Disk, Host, checkpoint, checkpointed, loop, offload, offload_parameters, policies


# Nodes that save a weight itself, and not its transpose as a linear layer does.
def saves_weights():
    torch.manual_seed(0)
    layers = nn.Conv1d(6, 6, 3, padding=1), nn.PReLU(6), nn.BatchNorm1d(6), nn.Linear(16, 16), nn.LayerNorm(16)
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.Tanh())))


def identity(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return model(x)


CALLS = {
    "region": checkpoint,
    "whole region": lambda model, x: checkpointed(model, early_stop=False)(x),
    "policy": lambda model, x: checkpointed(model, policy=policies.save_matmuls)(x),
    "loop": lambda model, x: loop(lambda carry, _: (model(carry), None), x, length=3, slots=1)[0],
    "loop of unknown length": lambda model, x: loop(
        lambda carry, _: (model(carry), None), x, condition=lambda carry: carry.grad_fn is None, max_length=2, slots=1
    )[0],
    "hooks": identity,
    "hooks in a region": lambda model, x: checkpoint(identity, model, x),
    "region in hooks": lambda model, x: identity(partial(checkpoint, model), x),
    "offload": lambda model, x: offload(Host(), min_bytes=1)(model)(x),
    "torch's": partial(torch_checkpoint, use_reentrant=False),
    "reentrant": partial(torch_checkpoint, use_reentrant=True),
}


ENDS = ("backward", "twice", "of gradients")
REFUSED = {("reentrant", "of gradients")}  # by torch


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's own
@pytest.mark.parametrize(("name", "end"), [(name, end) for name in CALLS for end in ENDS if (name, end) not in REFUSED])
def test_what_comes_back_for_a_saved_weight_is_no_nan(name, end):
    # The slot of a region, or the hook of the user, had the parameter itself. Its values left, and backward read NaN.
    call = CALLS[name]

    def trained(model):
        x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
        loss = call(model, x).square().sum()
        if end == "of gradients":
            first = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
            loss = sum(one.square().sum() for one in first)
        elif end == "twice":
            loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, *(one.grad for one in model.parameters())]

    model = saves_weights()
    with offload_parameters(model, None, Host(), min_bytes=1):
        found = trained(model)

    assert equal(found, trained(saves_weights()))


@pytest.mark.parametrize("store", [Host, Disk], ids=["host", "disk"])
def test_an_evaluation_in_inference_mode_leaves_parameters_that_train(store):
    # What a store brings ahead of its use was made in inference mode there.
    (model, _), (plain, _) = chain(store()), chain()
    expected = gradients(plain)
    gradients(model)

    for _ in range(2):
        with torch.inference_mode():
            model(torch.ones(4, 256))

    assert equal(gradients(model), expected)


@pytest.mark.parametrize("layer", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
def test_the_kernels_for_inference_are_those_of_the_plain_model(layer):
    # Attention reads the weight of a child. While that was away, another kernel ran, and rounded otherwise.
    torch.manual_seed(0)
    model, x = layer(64, 4, batch_first=True).eval(), torch.randn(2, 8, 64)
    call = (lambda: model(x, x, x, need_weights=False)[0]) if layer is nn.MultiheadAttention else (lambda: model(x))

    with torch.no_grad():
        expected = call()
        with offload_parameters(model, None, Host(), min_bytes=1):
            found = call()

    assert torch.equal(found, expected)
