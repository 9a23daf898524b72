"""What a recompute refuses: inputs that were changed, and functions that do not do the same twice."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from logs import Log
from regions.comparing import leaf, same
from torchremat import CheckpointError, MutationError, checkpoint, checkpointed, wrap


def three(x):
    return x.exp().sin().tanh()


PLACES = {
    "args[0]": lambda t: ((t,), {}),
    "args[1][0]": lambda t: ((leaf(3), [t]), {}),
    "kwargs['mask']": lambda t: ((), {"mask": t}),
    r"kwargs['more']['a'][1]": lambda t: ((), {"more": {"a": (1, t)}}),
}


def found(item):
    if isinstance(item, torch.Tensor):
        return item
    items = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
    return sum(found(one) for one in items)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("when", ["after", "within"])
def test_an_input_that_is_changed_in_place_is_named(place, when):
    h = leaf(3) * 2
    args, kwargs = PLACES[place](h)

    def body(*args, **kwargs):
        y = found([*args, kwargs]).exp().sin()
        if when == "within":
            h.data.add_(0)
            h.add_(1)
        return y

    y = checkpoint(body, *args, **kwargs).sum()
    if when == "after":
        h.add_(1)

    with pytest.raises(MutationError) as caught:
        y.backward()
    assert f"its input {place} was changed in place between forward and recompute: version 0 then, 1 now" in str(
        caught.value
    )


def test_an_input_that_the_region_itself_writes_and_that_hooks_have_a_copy_of():
    # The copy is right, and a leaf: autograd's own words for that meant nothing to whoever read them.
    h = leaf(3) * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        y = checkpoint(lambda h: h.add_(1).exp().sin(), h).sum()

    with pytest.raises(MutationError, match="an input that requires grad is written in place in the region"):
        y.backward()


def test_an_input_that_is_changed_under_hooks_that_keep_it():
    h = leaf(3) * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        y = checkpoint(three, h).sum()
    h.add_(1)

    with pytest.raises(MutationError, match=r"its input args\[0\]"):
        y.backward()


def test_a_parameter_as_input_that_is_changed():
    weight = nn.Parameter(torch.ones(3))
    y = checkpoint(three, weight).sum()
    with torch.no_grad():
        weight.add_(1)

    with pytest.raises(MutationError, match=r"its input args\[0\]"):
        y.backward()


def test_a_function_that_saves_more_or_less_is_an_error():
    turns = iter([2, 3, 3, 3, 2, 2])  # forward, recompute, and once more for the message

    def body(x):
        for _ in range(next(turns)):
            x = x.exp()
        return x + 1

    with pytest.raises(CheckpointError, match="trying to save more tensors during recomputation than"):
        checkpointed(body, early_stop=False)(leaf(3)).sum().backward()
    with pytest.raises(CheckpointError, match="forward: 3\nNumber of tensors saved during recomputation: 2"):
        checkpoint(body, leaf(3)).sum().backward()


def test_metadata_that_differ_are_an_error_unless_unchecked():
    def cut(x):
        turns.append(1)
        return x.exp()[: len(turns)].sin().sum()

    turns = Log()
    with pytest.raises(
        CheckpointError,
        match=r"at position 1:\nsaved metadata: {'shape': torch\.Size\(\[1\]\), .*\n.*{'shape': torch\.Size\(\[2\]\)",
    ):
        checkpoint(cut, leaf(3)).backward()

    # Who switches the check off gets what comes of it.
    turns = Log()
    checkpointed(cut, check="none")(leaf(3)).backward()


def test_an_error_of_the_recompute_arrives_as_it_is():
    turns = Log()

    def body(x):
        turns.append(1)
        if len(turns) == 2:
            raise KeyError("mine")
        return three(x)

    x = leaf(3)
    y = checkpoint(body, x).sum()
    with pytest.raises(KeyError, match="mine"):
        y.backward(retain_graph=True)

    y.backward()
    assert torch.equal(x.grad, torch.autograd.grad(three(x).sum(), x)[0])


def test_an_error_of_a_nested_recompute_arrives_as_it_is():
    turns = Log()

    def body(x):
        turns.append(1)
        if len(turns) == 3:
            raise KeyError("mine")
        return three(x)

    y = checkpoint(lambda x: checkpoint(body, x.sin()).cos(), leaf(3)).sum()
    with pytest.raises(KeyError, match="mine"):
        y.backward()
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_names_in_messages():
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    wrap(net, "1")
    net.eval()
    h = leaf(2, 3)
    y = net[1](h).sum()
    with torch.no_grad():
        h.add_(1)

    with pytest.raises(MutationError, match=r"^region 1: "):
        y.backward()

    with torch.no_grad():
        y = checkpoint(three, h.requires_grad_())
    assert y.grad_fn is None

    h = leaf(3)
    y = checkpoint(three, h).sum()
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(MutationError, match=r"^region of three: "):
        y.backward()


@pytest.mark.parametrize("name", ["dropout2d", "alpha_dropout", "gumbel_softmax", "logsigmoid", "multi_head"])
def test_functions_that_draw_or_fill(name):
    attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    body = {
        "dropout2d": lambda x: F.dropout2d(x.exp()[..., None], 0.5).sin(),
        "alpha_dropout": lambda x: F.alpha_dropout(x.exp(), 0.5, training=True).sin(),
        "gumbel_softmax": lambda x: F.gumbel_softmax(x.exp(), hard=True).sin(),
        "logsigmoid": lambda x: F.logsigmoid(x * 1),
        "multi_head": lambda x: attention(x, x, x, need_weights=True)[0],
    }[name]
    x = leaf(2, 4, 8)

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x], [attention])
