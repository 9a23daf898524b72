import re

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs

from logs import Log
from regions.comparing import leaf, same
from torchremat import is_recomputing
from torchremat.interop.torch_checkpoint import checkpoint_sequential

WAYS = pytest.mark.parametrize("use_reentrant", [True, False])


class Step(nn.Module):
    def __init__(self, number, log):
        super().__init__()
        self.number = number
        self.log = log
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        self.log.append(f"{self.number}r" if is_recomputing() else str(self.number))
        return self.linear(x).exp().sin()


def steps(count):
    log = Log()
    return nn.Sequential(*(Step(number, log) for number in range(count))), log


@WAYS
@pytest.mark.parametrize(
    ("count", "segments", "order"),
    [
        (9, 5, "0 1 2 3 4 5 6 7 8 6r 7r 4r 5r 2r 3r 0r 1r"),
        (5, 2, "0 1 2 3 4 0r 1r 2r"),
        (4, 3, "0 1 2 3 2r 0r 1r"),
        (3, 3, "0 1 2 1r 0r"),
        (3, 1, "0 1 2"),
    ],
)
def test_segments_are_as_even_as_can_be_and_the_last_is_kept(use_reentrant, count, segments, order):
    model, log = steps(count)
    x = leaf(2, 3)

    checkpoint_sequential(model, segments, x, use_reentrant=use_reentrant).sum().backward()

    assert " ".join(log) == order


@WAYS
def test_gradients_are_the_plain_ones(use_reentrant):
    model, _ = steps(5)
    x = leaf(2, 3)

    assert same(lambda: checkpoint_sequential(model, 3, x, use_reentrant=use_reentrant), lambda: model(x), [x], [model])
    assert same(
        lambda: checkpoint_sequential(list(model), 3, input=x, use_reentrant=use_reentrant),
        lambda: model(x),
        [x],
        [model],
    )


@WAYS
def test_the_way_may_be_the_argument_after_the_input(use_reentrant):
    model, log = steps(2)

    y = checkpoint_sequential(model, 2, leaf(2, 3), use_reentrant)
    y.sum().backward()

    assert " ".join(log) == "0 1 0r"


@pytest.mark.parametrize("sequential", [torchs.checkpoint_sequential, checkpoint_sequential])
def test_without_it_there_is_a_warning(sequential):
    model, _ = steps(2)

    with pytest.warns(
        UserWarning,
        match=r"^torch\.utils\.checkpoint\.checkpoint_sequential: the use_reentrant parameter should be passed "
        r"explicitly\. In version 2\.9 we will raise an exception if use_reentrant is not passed\. use_reent",
    ):
        sequential(model, 2, leaf(2, 3))


@WAYS
def test_several_inputs_and_outputs_as_in_pytorch_1(use_reentrant):
    log = Log()

    def apart(a, b):
        log.append("apart")
        return a.exp(), b.sin()

    def together(a, b):
        log.append("together")
        return a * b

    functions = [apart, apart, together, torch.tanh]
    x, y = leaf(3), leaf(3)

    assert same(
        lambda: checkpoint_sequential(functions, 3, x, y, use_reentrant=use_reentrant),
        lambda: torch.tanh(together(*apart(*apart(x, y)))),
        [x, y],
    )
    assert log[3:] == ["apart", "apart", "together", "together", "apart", "apart"]


def test_outputs_that_are_a_tuple_are_given_as_the_next_function_takes_them():
    class Last(nn.Module):
        def forward(self, outputs):
            return outputs[0][:, -1]

    model = nn.Sequential(nn.LSTM(3, 3, batch_first=True), Last(), nn.Linear(3, 3))
    x = leaf(2, 4, 3)

    for segments in (1, 2, 3):
        assert same(
            lambda segments=segments: checkpoint_sequential(model, segments, x, use_reentrant=False),
            lambda: model(x),
            [x],
            [model],
        )

    functions = [lambda a: (a.exp(), a.sin()), lambda a, b: a * b, torch.tanh]
    assert same(
        lambda: checkpoint_sequential(functions, 3, x, use_reentrant=False),
        lambda: torch.tanh(x.exp() * x.sin()),
        [x],
    )


@WAYS
def test_random_numbers_are_drawn_again_unless_told_otherwise(use_reentrant):
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    x = leaf(64)

    def run(**options):
        return lambda: checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant, **options)

    assert same(run(), lambda: model(x), [x])
    assert not same(run(preserve_rng_state=False), lambda: model(x), [x])


@pytest.mark.parametrize("segments", [0, -1, 4])
def test_a_number_of_segments_that_cannot_be_is_an_error(segments):
    model, _ = steps(3)

    message = rf"segments={segments}, but there are 3 functions: expected 1 to 3"
    with pytest.raises(ValueError, match=message):
        checkpoint_sequential(model, segments, leaf(2, 3), use_reentrant=False)


@pytest.mark.parametrize("sequential", [torchs.checkpoint_sequential, checkpoint_sequential])
def test_other_keyword_arguments_are_an_error(sequential):
    with pytest.raises(ValueError, match=re.escape("Unexpected keyword arguments: scale")):
        sequential(steps(2)[0], 2, leaf(2, 3), use_reentrant=False, scale=3)


def test_no_input_is_an_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input'"):
        checkpoint_sequential(steps(2)[0], 2, use_reentrant=False)
    with pytest.raises(TypeError, match="multiple values for argument 'input'"):
        checkpoint_sequential(steps(2)[0], 2, leaf(2, 3), input=leaf(2, 3), use_reentrant=False)
