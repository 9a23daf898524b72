"""`GPipe` is made, read and moved as torchgpipe's is. Letters and numbers are those of its behaviours."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from probes.pipelines import verify_module
from torchremat.interop import torchgpipe
from torchremat.interop.torchgpipe import GPipe

CPU = torch.device("cpu")


def linears(count):
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(count)))


def gpipe(layers, balance=None, **options):
    balance = [1] * len(layers) if balance is None else balance
    return GPipe(layers, balance, **{"devices": ["cpu"] * len(balance), **options})


def test_public_names():
    assert set(torchgpipe.__all__) == {"GPipe", "is_checkpointing", "is_recomputing", "skip", "balance"}
    assert torchgpipe.skip.__all__ == ["skippable", "stash", "pop", "verify_skippables", "Namespace"]
    assert torchgpipe.balance.__all__ == ["balance_by_time", "balance_by_size"]


class Said:
    """Says what it is when it is made a string."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


def test_g7_arguments_are_converted():
    layers = linears(2)

    model = GPipe(layers, iter((1, 1)), devices=iter(("cpu", CPU)), chunks=42.0, checkpoint=Said("always"))

    assert (model.balance, model.devices) == ([1, 1], [CPU, CPU])
    assert (model.chunks, type(model.chunks)) == (42, int)
    assert (model.checkpoint, type(model.checkpoint)) == ("always", str)


def test_g7_defaults():
    model = gpipe(linears(1))

    assert (model.chunks, model.checkpoint) == (1, "except_last")


def shared():
    layer = nn.Linear(1, 1)
    return nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))


TWICE = nn.Linear(1, 1)

# Each message is torchgpipe's up to its end; ours go on with numbers and advice.
REFUSED = {
    "no balance": (linears(1), None, {}, ValueError, "balance is required"),
    "no chunks": (linears(1), [1], {"chunks": 0}, ValueError, "number of chunks must be positive integer"),
    "less than none": (linears(1), [1], {"chunks": -1}, ValueError, "number of chunks must be positive integer"),
    "mode": (
        linears(1),
        [1],
        {"checkpoint": "sometimes"},
        ValueError,
        "checkpoint is not one of 'always', 'except_last', or 'never'",
    ),
    "no sequence": (nn.Linear(1, 1), [1], {}, TypeError, "module must be nn.Sequential to be partitioned"),
    "child twice": (
        nn.Sequential(TWICE, TWICE),
        [1, 1],
        {},
        ValueError,
        "module with duplicate children is not supported",
    ),
    "parameter twice": (
        shared(),
        [1, 1],
        {},
        ValueError,
        "module with duplicate parameters in distinct children is not supported",
    ),
    "too short": (
        linears(2),
        [1],
        {},
        ValueError,
        "module and sum of balance have different length (module: 2, sum of balance: 1)",
    ),
    "too long": (
        linears(2),
        [3],
        {},
        ValueError,
        "module and sum of balance have different length (module: 2, sum of balance: 3)",
    ),
    "zero": (linears(2), [0, 2], {}, ValueError, "all balance numbers must be positive integer (balance: [0, 2])"),
    "negative": (
        linears(2),
        [-1, 3],
        {},
        ValueError,
        "all balance numbers must be positive integer (balance: [-1, 3])",
    ),
    "devices": (
        linears(2),
        [1, 1],
        {"devices": ["cpu"]},
        IndexError,
        "too few devices to hold given partitions (devices: 1, partitions: 2)",
    ),
}


@pytest.mark.parametrize(("layers", "balance", "options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_g8_what_is_refused(layers, balance, options, error, message):
    with pytest.raises(error) as caught:
        GPipe(layers, balance, **{"devices": ["cpu"] * 3, **options})

    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("case", ["no balance", "too short", "zero"])
def test_g8_a_balance_that_is_none_is_advised_on(case):
    layers, balance, *_ = REFUSED[case]

    with pytest.raises(ValueError, match=r"(?s)torchgpipe\.balance.*balance_by_time\(partitions, module, sample\)"):
        GPipe(layers, balance, devices=["cpu"] * 3)


def test_g8_parameters_shared_inside_a_layer_are_fine():
    layer = nn.Linear(1, 1)

    verify_module(nn.Sequential(nn.Sequential(layer, nn.ReLU(), layer), nn.Linear(1, 1)))


def test_g9_shared_parameters_say_which():
    with pytest.raises(ValueError, match=r"'1\.0\.weight' is '0\.0\.weight'; torchremat\.Pipe allows it"):
        verify_module(shared())


def test_g10_devices_left_over_are_dropped():
    assert GPipe(linears(3), [1, 1, 1], devices=["cpu"] * 5).devices == [CPU, CPU, CPU]


def test_g10_a_model_without_layers_passes_on_what_it_checks():
    model = GPipe(nn.Sequential(), [])
    x = torch.tensor(42)

    assert model(x) is x
    assert model((x,)) == (x,)
    with pytest.raises(TypeError, match="expected Tensor, but got int"):
        model(42)


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_g11_it_is_like_a_sequence(balance):
    a, b = layers = linears(2)
    model = gpipe(layers, balance)

    assert len(model) == 2
    assert list(model) == [a, b]
    assert [model[0], model[1], model[-1], model[-2]] == [a, b, b, a]
    for outside in (2, -3):
        with pytest.raises(IndexError):
            model[outside]


def test_g11_partitions_and_names():
    model = gpipe(nn.Sequential(OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 1), c=nn.ReLU())), [1, 2])

    assert isinstance(model.partitions, nn.ModuleList)
    assert [type(partition) for partition in model.partitions] == [nn.Sequential, nn.Sequential]
    assert list(model.state_dict()) == [
        "partitions.0.a.weight",
        "partitions.0.a.bias",
        "partitions.1.b.weight",
        "partitions.1.b.bias",
    ]
    with pytest.raises(AttributeError):
        _ = model.a


MOVES = {
    "cuda": lambda model: model.cuda(),
    "cpu": lambda model: model.cpu(),
    "to device": lambda model: model.to(torch.device("cuda")),
    "to index": lambda model: model.to(0),
    "to name": lambda model: model.to("cpu"),
    "to device=": lambda model: model.to(device=0),
    "to tensor": lambda model: model.to(torch.rand(1)),
    "to tensor=": lambda model: model.to(tensor=torch.rand(1)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_g12_moves_are_denied(move):
    model = gpipe(linears(2))

    with pytest.raises(TypeError, match="denied to move parameters and buffers, because GPipe should manage device"):
        move(model)


def test_g12_the_dtype_may_change():
    model = gpipe(linears(2))

    assert model.half() is model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert model.to(torch.double).to(dtype=torch.float) is model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
