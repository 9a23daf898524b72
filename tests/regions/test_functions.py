import inspect

import pytest
import torch
from torch import nn

from logs import Log
from regions.comparing import Counted, leaf, same
from torchremat import UnsupportedError, checkpoint, checkpointed
from torchremat.policies import save_operators
from turns import in_turn


def three(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Three operations."""
    return x.exp().sin().tanh() * scale


def test_a_decorated_function_is_recomputed_and_looks_the_same():
    body = Counted(three)
    decorated = checkpointed(three)
    x = leaf(4)

    checkpointed(body)(x, scale=2.0).sum().backward()

    assert body.calls == 2
    assert decorated.__name__ == "three" and decorated.__doc__ == three.__doc__
    assert inspect.signature(decorated) == inspect.signature(three)
    assert same(lambda: decorated(x, scale=2.0), lambda: three(x, scale=2.0), [x])


# Names that functions of ours have for their own parameters, through which a call goes.
@in_turn("name", ["self", "run", "body", "args", "kwargs", "operators", "last", "label"])
@pytest.mark.parametrize("options", [{}, {"debug": True}, {"check": "values"}, {"policy": save_operators("aten.exp")}])
def test_a_keyword_may_have_any_name(name, options):
    counted, x = Counted(three), leaf(4)
    decorated = checkpointed(lambda x, **kwargs: counted(x, kwargs[name]), **options)

    assert same(lambda: decorated(x, **{name: 2.0}), lambda: three(x, 2.0), [x])
    assert counted.calls == 2


def test_as_a_decorator_of_a_method():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @checkpointed
        def forward(self, x):
            return self.linear(x).exp().sin()

    block, x = Block(), leaf(2, 4)

    assert same(lambda: block(x), lambda: block.linear(x).exp().sin(), [x], [block])


@pytest.mark.parametrize("options", [{}, {"check": "none"}, {"preserve_rng": False}, {"early_stop": False}], ids=str)
def test_options(options):
    x = leaf(4)

    assert same(lambda: checkpointed(three, **options)(x), lambda: three(x), [x])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": "value"}, r"check='value': allowed are 'metadata', 'values' and 'none'"),
        ({"check": "values", "check_every": 0}, r"check_every=0: expected an int of at least 1"),
        ({"check_every": 2}, r"check_every=2: only check='values' can be left out now and then"),
        ({"guard": 3}, r"guard: expected a list of objects, got int"),
        ({"guard": [torch.ones(2)]}, r"guard: the contents of Tensor cannot be restored"),
        ({"debug": "yes"}, r"debug='yes': expected True or False"),
        ({"preserve_rng": 1}, r"preserve_rng=1: expected True or False"),
        ({"early_stop": None}, r"early_stop=None: expected True or False"),
    ],
)
def test_an_option_that_cannot_be_honoured_raises(options, message):
    with pytest.raises(UnsupportedError, match=message):
        checkpointed(three, **options)


def test_what_is_no_function_is_refused():
    with pytest.raises(UnsupportedError, match="function: expected a callable, got int"):
        checkpointed(3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_it_is_a_plain_call(mode):
    body, x = Counted(three), leaf(4)
    packed = Log()
    with mode(), torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: None):
        y = checkpoint(body, x)

    assert body.calls == 1 and not y.requires_grad and packed == []


def test_no_gradient_flows_where_nothing_requires_it():
    y = checkpoint(three, torch.ones(3))

    assert not y.requires_grad


def test_parameters_alone_require_grad():
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)

    assert same(lambda: checkpoint(lambda x: layer(x).exp(), x), lambda: layer(x).exp(), [], [layer])


def test_no_grad_inside():
    def body(x):
        with torch.no_grad():
            mask = x.exp() > 1
        return (x * mask).sin()

    x = leaf(4)

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])


def test_inference_tensors_among_the_inputs():
    with torch.inference_mode():
        mask = torch.ones(4)
    x = leaf(4)

    def body(x, mask):
        return (x.exp() + mask).sin()

    assert same(lambda: checkpoint(body, x, mask), lambda: body(x, mask), [x])


def test_an_argument_that_contains_itself():
    x = leaf(4)
    cyclic = {"x": x}
    cyclic["self"] = cyclic

    def body(held):
        return held["self"]["x"].sin().exp()

    assert same(lambda: checkpoint(body, cyclic), lambda: body(cyclic), [x])
    x.grad = None
    loss = checkpoint(body, cyclic).sum()
    cyclic["x"] = None
    loss.backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
