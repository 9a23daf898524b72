"""Formulas of operators that torch's registry lacks, against counts by hand and the same mathematics in products."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from probes.memory import FlopsByOperator, formula_of
from torchremat import Planner

ATEN = torch.ops.aten


def counted(function, *tensors):
    """The flops of the forward and of the backward of a function, by operator."""
    with FlopsByOperator() as counter:
        result = function(*tensors)
        forward = dict(counter.by_operator)
        if result.requires_grad:
            result.sum().backward()
    backward = {name: flops - forward.get(name, 0) for name, flops in counter.by_operator.items()}
    return forward, {name: flops for name, flops in backward.items() if flops}


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


# A direction of a layer meets (gates * 7, inputs) and (gates * 7, 7) in each of 3 steps of 4 sequences.
# With one gate that is 24 * 7 * (inputs + 7): 2016 for 5 inputs, 3528 for the 14 that two directions make.


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("layers", "bidirectional", "flops"), [(1, False, 2016), (1, True, 2 * 2016), (2, True, 2 * (2016 + 3528))]
)
@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers(kind, gates, layers, bidirectional, flops, batch_first):
    module = kind(5, 7, layers, bidirectional=bidirectional, batch_first=batch_first)

    forward, backward = counted(lambda x: module(x)[0], *leaves((4, 3, 5) if batch_first else (3, 4, 5)))

    assert sum(forward.values()) == gates * flops
    # As often for the gradients of inputs as for those of weights. What is no kernel of its own leaves out the product
    # for the first hidden state of each direction, which needs no gradient: 2 * 4 * 7 * 7.
    directions = layers * (1 + bidirectional)
    left_out = 0 if kind is nn.LSTM else gates * directions * 392
    assert sum(backward.values()) == 2 * gates * flops - left_out


def test_an_lstm_that_is_one_operator_has_the_flops_of_one_that_is_products():
    # In double precision the CPU runs `addmm`, which torch counts as well.
    module = nn.LSTM(5, 7, 2, bidirectional=True)
    x = torch.randn(3, 4, 5)

    kernel, _ = counted(lambda x: module(x)[0], x)
    module.double()
    with FlopCounterMode(display=False) as theirs:
        module(x.double())
    products, _ = counted(lambda x: module(x)[0], x.double())

    assert kernel == {"aten.mkldnn_rnn_layer": 4 * 2 * (2016 + 3528)}
    assert products == {"aten.addmm": 4 * 2 * (2016 + 3528)}
    assert theirs.get_total_flops() == 4 * 2 * (2016 + 3528)


def test_without_grad_as_well():
    module, x = nn.LSTM(5, 7, bias=False), torch.randn(3, 4, 5)

    with torch.no_grad():
        forward, _ = counted(lambda x: module(x)[0], x)
    with torch.inference_mode():
        under_inference, _ = counted(lambda x: module(x)[0], x)

    assert forward == under_inference == {"aten.mkldnn_rnn_layer": 4 * 2016}


def test_sequences_of_unlike_lengths():
    # Six steps in all: 2 * 6 * 4 * 7 * (5 + 7).
    module = nn.LSTM(5, 7)

    forward, _ = counted(lambda x: module(pack_padded_sequence(x, [3, 2, 1]))[0].data, torch.randn(3, 3, 5))

    assert sum(forward.values()) == 4032


def meta(*shapes):
    return [torch.empty(shape, device="meta") for shape in shapes]


@pytest.mark.parametrize("name", ["_cudnn_rnn", "miopen_rnn"])
def test_recurrent_layers_on_gpus(name):
    # All layers are one operator there, with one list of weights. Two layers, the second on 14 inputs, one direction,
    # biases, and a projection of the 7 states to 2, which is what the next step and layer get: with 12 steps in all
    # 24 * (28*5 + 28*2 + 2*7) and 24 * (28*2 + 28*2 + 2*7).
    x = meta((3, 4, 5))[0]
    weights = meta((28, 5), (28, 2), (28,), (28,), (2, 7), (28, 2), (28, 2), (28,), (28,), (2, 7))
    forward, backward = (formula_of(getattr(ATEN, one).default) for one in (name, f"{name}_backward"))
    stride, others = 4, (None, None, None)

    assert forward(x, weights, stride, *others, out_val=()) == 5040 + 3024
    # The last argument says for what there are to be gradients: inputs, both states, weights.
    assert backward(x, weights, stride, *others, [True, False, False, False], out_val=()) == 5040 + 3024
    assert backward(x, weights, stride, *others, [True, False, False, True], out_val=()) == 2 * (5040 + 3024)


def test_grouped_products():
    # Two groups, of 2 and 6 of eight, whatever is divided. Sizes are multiples of 4, as the kernel wants them.
    ends = torch.tensor([2, 8], dtype=torch.int32)

    def grouped(one, other, ends=None):
        forward, backward = counted(lambda *both: F.grouped_mm(*both, offs=ends).sin(), *leaves(one, other))
        assert set(forward) == set(backward) == {"aten._grouped_mm"}
        assert backward["aten._grouped_mm"] == 2 * forward["aten._grouped_mm"]
        return forward["aten._grouped_mm"]

    assert grouped((8, 16), (2, 16, 4), ends) == 2 * 8 * 16 * 4
    assert grouped((2, 4, 16), (16, 8), ends) == 2 * 4 * 16 * 8
    assert grouped((4, 8), (8, 16), ends) == 2 * 4 * 8 * 16
    assert grouped((2, 8, 16), (2, 16, 4)) == 2 * 2 * 8 * 16 * 4


def by_rows(x, w):
    return torch.cat([one @ other for one, other in zip(x.split([2, 6]), w, strict=True)])


def by_columns(x, w):
    return torch.cat([one @ other for one, other in zip(x, w.split([2, 6], 1), strict=True)], 1)


def by_inner(x, w):
    return torch.stack([one @ other for one, other in zip(x.split([2, 6], 1), w.split([2, 6]), strict=True)])


@pytest.mark.parametrize(
    ("one", "other", "products"),
    [((8, 16), (2, 16, 4), by_rows), ((2, 4, 16), (16, 8), by_columns), ((4, 8), (8, 16), by_inner)],
)
def test_grouped_products_have_the_flops_of_their_groups(one, other, products):
    x, w = (tensor.detach() for tensor in leaves(one, other))
    ends = torch.tensor([2, 8], dtype=torch.int32)

    grouped, _ = counted(lambda x, w: F.grouped_mm(x, w, offs=ends), x, w)
    one_by_one, _ = counted(products, x, w)

    torch.testing.assert_close(F.grouped_mm(x, w, offs=ends), products(x, w))  # the kernel sums in another order
    assert grouped["aten._grouped_mm"] == one_by_one["aten.mm"]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("addmm", ((3, 5), (3, 4), (4, 5)), 120),
        ("addmv", ((3,), (3, 4), (4,)), 24),
        ("addbmm", ((3, 5), (2, 3, 4), (2, 4, 5)), 240),
        ("baddbmm", ((2, 3, 5), (2, 3, 4), (2, 4, 5)), 240),
    ],
)
def test_products_that_are_added(name, shapes, flops, in_place):
    name += "_" * in_place
    tensors = [one.detach() for one in leaves(*shapes)]

    assert counted(getattr(torch.Tensor, name), *tensors) == ({f"aten.{name}": flops}, {})


def test_a_matrix_and_a_vector():
    # Backward is the same for the vector. The gradient of the matrix is an outer product, and counts for nothing.
    assert counted(torch.mv, *leaves((3, 4), (4,))) == ({"aten.mv": 24}, {"aten.mv": 24})


def test_products_of_integers():
    one, other = (torch.ones(shape, dtype=torch.int8) for shape in ((32, 16), (16, 8)))

    assert counted(torch._int_mm, one, other)[0] == {"aten._int_mm": 2 * 32 * 16 * 8}


def test_a_product_with_an_activation():
    bias, one, other = (one.detach() for one in leaves(5, (3, 4), (4, 5)))

    assert counted(torch._addmm_activation, bias, one, other)[0] == {"aten._addmm_activation": 120}


def test_bilinear_layers():
    # 2 * batch * out * in1 * in2, and the same for each of the three gradients.
    module = nn.Bilinear(3, 4, 5, bias=False)

    assert counted(module, *leaves((2, 3), (2, 4))) == ({"aten._trilinear": 240}, {"aten._trilinear": 720})


def test_distances():
    # (30, 4 + 2) and (31, 4 + 2), in each of two batches; the gradients are products that torch counts.
    forward, backward = counted(torch.cdist, *leaves((2, 30, 4), (2, 31, 4)))

    assert forward == {"aten._euclidean_dist": 2 * 2 * 30 * 6 * 31}
    assert backward == {"aten.bmm": 2 * (2 * 2 * 30 * 31 * 4)}


def test_convolutions_over_time():
    # Five of seven places fit a width of 3: 2 * (5*2) * 3 * 3 * 5 flops, as often for each gradient, in addmm_.
    forward, backward = counted(torch.conv_tbc, *leaves((7, 2, 3), (3, 3, 5), 5))

    assert forward == {"aten.conv_tbc": 900}
    assert backward == {"aten.addmm_": 2 * 900}
    assert forward["aten.conv_tbc"] == counted(nn.Conv1d(3, 5, 3), torch.randn(2, 3, 7))[0]["aten.convolution"]


def test_an_operator_of_ones_own_counts_once_it_has_a_formula():
    with torch.library._scoped_library("test_formulas", "DEF") as library:
        library.define("scaled(Tensor x, int times) -> Tensor")
        library.impl("scaled", lambda x, times: x * times, "CompositeExplicitAutograd")
        scaled, x = torch.ops.test_formulas.scaled, torch.ones(3)

        free, _ = counted(scaled, x, 2)
        register_flop_formula(scaled)(lambda x, times, out_shape=None: 7 * times)
        given, _ = counted(scaled, x, 2)
        del flop_registry[scaled]

    assert (free, given) == ({}, {"test_formulas.scaled": 14})


class Block(nn.Module):
    """A recurrent layer beside one of products."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.mixing = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))

    def forward(self, x):
        x = x + self.recurrent(x)[0]
        return x + self.mixing(x)


def test_plans_pay_for_a_recurrent_layer():
    # An LSTM was free to recompute, so plans by flops recomputed LSTMs before anything else.
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(4, 8, 16)
    flops = 3 * 2 * 4 * 8 * (4 * 16 * (16 + 16) + 2 * 16 * 48)

    planner = Planner(model, lambda m: m(x).square().mean(), cost="flops")
    lowest = planner.plan(planner.floor_bytes)

    assert lowest.flops == flops
    assert lowest.recomputed_flops >= 2 * 4 * 8 * (4 * 16 * (16 + 16))
