import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from stores.memory import Memory
from torchremat import Host, WrapError, unwrap, wrap
from torchremat.errors import UnsupportedError


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))


def gradients(one, x):
    one.zero_grad()
    one(x).sin().sum().backward()
    return [parameter.grad.clone() for parameter in one.parameters()]


def test_calls_of_the_matched_modules_are_offloaded():
    x, store = torch.randn(32, 32), Memory()
    plain = gradients(model(), x)

    found = gradients(wrap(model(), "[12]", store=store), x)

    assert all(map(torch.equal, found, plain))
    # For each of two blocks its input for the weight, and what goes into the GELU.
    assert store.bytes("put") == store.bytes("get") == 4 * 32 * 32 * 4
    assert not store.live


def test_what_several_modules_save_is_stored_once():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            h = x.sin()
            return sum(branch(h) for branch in self.branches)

    store = Memory()
    one = wrap(Branches(), "branches.*", store=store)

    one(torch.randn(32, 32, requires_grad=True)).sum().backward()

    assert store.bytes("put") == 32 * 32 * 4


def test_without_grad_it_is_a_plain_call():
    store = Memory()

    with torch.no_grad():
        wrap(model(), "*", store=store)(torch.randn(32, 32))

    assert not store.log


def test_unwrap_gives_the_forward_back():
    store, one = Memory(), model()
    wrap(one, "*", store=store)

    unwrap(one)

    gradients(one, torch.randn(32, 32))
    assert not store.log and "forward" not in one[0].__dict__


def test_a_copy_has_weights_of_its_own_and_the_same_store():
    store, x = Memory(), torch.randn(32, 32)
    one = wrap(model(), "*", store=store)
    copy = deepcopy(one)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()

    assert all(map(torch.equal, gradients(copy, x), gradients(model(), x)))
    assert store.times("put") == 5 + 1  # the first block's input is no graph's, but the weight's


def test_a_pickled_model_is_offloaded_as_well():
    x = torch.randn(32, 32)

    one = pickle.loads(pickle.dumps(wrap(model(), "*", store=Shelf())))

    assert all(map(torch.equal, gradients(one, x), gradients(model(), x)))
    offloads = {id(block.forward.settings) for block in one}
    assert len(offloads) == 1 and one[0].forward.settings.copied_out_bytes > 0


class Shelf:
    """A store that can be pickled."""

    def put(self, tensor):
        return Host().put(tensor)


@pytest.mark.parametrize(
    "options", [{"check": "values"}, {"preserve_rng": False}, {"early_stop": False}, {"debug": True}, {"guard": [[]]}]
)
def test_options_of_recomputing_are_refused(options):
    with pytest.raises(WrapError, match="store="):
        wrap(model(), "*", store=Host(), **options)


def test_a_class_is_no_store():
    with pytest.raises(UnsupportedError, match="store=Host"):
        wrap(model(), "*", store=Host)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_breaks_at_the_call():
    x, store = torch.randn(32, 32), Memory()
    one = wrap(model(), "1", store=store)
    plain = gradients(model(), x)

    found = gradients(torch.compile(one, backend="eager"), x)

    assert all(map(torch.equal, found, plain))
    assert store.bytes("put") == 2 * 32 * 32 * 4


def test_a_compiled_model_in_one_graph_raises():
    one = wrap(model(), "1", store=Memory())

    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(one, backend="eager", fullgraph=True)(torch.randn(32, 32))
