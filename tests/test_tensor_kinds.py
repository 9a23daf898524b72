"""Tensors of every kind, wherever a model may have them: each entry point computes what the plain step does."""

import pytest
import torch
from torch import nn

import torchremat
from planning.test_wrappers import Opened, two
from torchremat import (
    Adaptive,
    CheckpointError,
    Disk,
    UnsupportedError,
    checkpoint,
    measure,
    offload,
    plan,
    saved,
    verify,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:modules of the model .1. would not do in a recompute"),  # jagged ones made anew
]


class Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return two(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.a + gradient.b


def in_inference(x):
    with torch.inference_mode():
        return x.detach() * 1.0


def nested(x, layout):
    return torch.nested.as_nested_tensor(list(x.reshape(4, 2, 16)), layout=layout)


# By name: a dense tensor of 8 x 16 as one of the kind, and back.
KINDS = {
    "COO": (lambda x: x.to_sparse(), lambda kind: kind.to_dense()),
    "CSR": (lambda x: x.to_sparse_csr(), lambda kind: kind.to_dense()),
    "BSR": (lambda x: x.to_sparse_bsr((2, 2)), lambda kind: kind.to_dense()),
    "nested": (
        lambda x: nested(x, torch.strided),
        lambda kind: torch.nested.to_padded_tensor(kind, 0.0).reshape(8, 16),
    ),
    "jagged": (lambda x: nested(x, torch.jagged), lambda kind: kind.values()),
    "mkldnn": (lambda x: x.to_mkldnn(), lambda kind: kind.to_dense()),
    "quantized": (lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8), lambda kind: kind.dequantize()),
    "conjugated": (lambda x: torch.complex(x, x).conj(), lambda kind: kind.real - kind.imag),
    "negated": (lambda x: torch.complex(x, x).conj().imag, lambda kind: kind * 2),
    "empty": (lambda x: x[:0], lambda kind: kind.sum() + torch.ones(8, 16)),
    "expanded": (lambda x: x.mean(0, keepdim=True).expand(8, 16), lambda kind: kind * 2),
    "inference": (in_inference, lambda kind: kind.clone()),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), lambda kind: kind.to(torch.float32)),
    "wrapper": (Wrapped.apply, Opened.apply),
    "meta": (lambda x: x.detach().to("meta"), lambda kind: torch.ones(8, 16) * kind.shape[0]),
}
PLACES = ["argument", "attribute", "buffer", "inside", "between", "output"]
# Loses the graph there, so that there is nothing to train.
UNTRAINED = {("quantized", "output"), ("inference", "output"), ("meta", "output"), ("empty", "output")}


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Middle(Part):
    """Adds a tensor of a kind from where it is, or returns one."""

    def __init__(self, kind, place):
        super().__init__()
        self.place, (self.make, self.back) = place, KINDS[kind]
        given = self.make(torch.randn(8, 16))
        if place == "buffer":
            self.register_buffer("given", given)
        else:
            self.given = given if place == "attribute" else None

    def forward(self, x, given=None):
        y = super().forward(x)
        if self.place == "between":
            return self.make(y)
        if self.place == "output":
            return y
        given = given if self.place == "argument" else self.make(y) if self.place == "inside" else self.given
        return y + self.back(given)


class Network(nn.Module):
    def __init__(self, kind, place):
        super().__init__()
        torch.manual_seed(0)
        self.place, (self.make, self.back) = place, KINDS[kind]
        self.first, self.middle, self.last = Part(), Middle(kind, place), Part()
        given = self.make(torch.randn(8, 16))
        self.argument = (lambda: given) if place == "argument" else None

    def forward(self, x):
        x = self.middle(self.first(x), *(() if self.argument is None else (self.argument(),)))
        y = self.last(self.back(x) if self.place == "between" else x)
        return self.make(y) if self.place == "output" else y

    def loss(self, run, x):
        y = run(x)
        return (self.back(y) if self.place == "output" else y).square().mean()


def gradients(model):
    found = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    return found


def are_equal(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(one is other is None or (one is not None and torch.equal(one, other)) for one, other in pairs)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_point_computes_what_the_plain_step_does(kind, place, tmp_path):
    if (kind, place) in UNTRAINED:
        pytest.skip("no graph")
    model, x = Network(kind, place), torch.randn(8, 16)

    def step(model):
        return model.loss(model, x)

    step(model).backward()
    expected = gradients(model)

    assert measure(model, step).peak_bytes > 0
    assert str(saved(model, step))
    with offload(Disk(tmp_path), min_bytes=1):
        loss = step(model)
    loss.backward()
    assert are_equal(gradients(model), expected)

    # A jagged tensor made anew has other lengths than the first, to torch: nothing that makes one runs again.
    is_made_anew = kind == "jagged" and place in {"inside", "between"}
    try:
        with offload(Disk(tmp_path), min_bytes=1):
            loss = model.loss(lambda x: checkpoint(model, x), x)
        loss.backward()
    except CheckpointError:
        assert is_made_anew
        gradients(model)
    else:
        assert not is_made_anew
        assert are_equal(gradients(model), expected)

    # Modules that are given one are refused for the same reason.
    try:
        plan(model, step, budget="min")
    except UnsupportedError:
        assert kind == "jagged"
        assert place in {"argument", "between"}
        return
    assert verify(model, step).is_exact
    torchremat.unwrap(model)
    with Adaptive(model, lambda model, x: model.loss(model, x), budget="1GB") as adaptive:
        adaptive(x)
    assert are_equal(gradients(model), expected)
