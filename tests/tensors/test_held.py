import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from logs import Log
from torchremat import checkpoint
from torchremat.tensors.held import ChangedError, HeldTensor
from torchremat.tensors.metadata import version_of


def test_unpack_gives_a_leaf_of_its_own():
    x = torch.ones(2, requires_grad=True)
    h = x * 2

    found = HeldTensor(h).unpack()

    assert torch.equal(found, h)
    assert found is not h and found.is_leaf and found.requires_grad
    assert found.data_ptr() == h.data_ptr()


def test_a_parameter_is_kept_as_it_is():
    parameter = nn.Parameter(torch.ones(2))

    assert HeldTensor(parameter).unpack() is parameter


def test_the_graph_of_a_tensor_is_not_kept():
    inner = torch.zeros(2, requires_grad=True).exp()  # which its own node saves
    storage = weakref.ref(inner.untyped_storage())
    h = inner + 1

    saved = HeldTensor(h)
    del h, inner

    assert storage() is None
    assert saved.unpack().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_a_write_is_an_error(kind):
    tensor = torch.ones(2) if kind is torch.Tensor else nn.Parameter(torch.ones(2))
    saved = HeldTensor(tensor)
    with torch.no_grad():
        tensor.add_(1)

    with pytest.raises(ChangedError) as caught:
        saved.unpack()

    assert (caught.value.before, caught.value.now) == (0, 1)


def test_hooks_see_the_tensor_once_and_give_it_back():
    events = []

    def pack(tensor):
        events.append(("pack", tensor.requires_grad, torch.is_grad_enabled()))
        return tensor.numpy(force=True).copy()

    def unpack(array):
        events.append(("unpack", torch.is_grad_enabled()))
        return torch.from_numpy(array)

    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        saved = HeldTensor(x * 2)

    found = saved.unpack()

    assert found.tolist() == [2.0, 2.0] and found.requires_grad
    assert events == [("pack", True, False), ("unpack", False)]


def test_a_copy_that_hooks_have_made_may_outlive_a_write():
    tensor = torch.ones(2)
    with saved_tensors_hooks(torch.clone, lambda packed: packed):
        saved = HeldTensor(tensor)
    tensor.add_(1)

    assert saved.unpack().tolist() == [1.0, 1.0]


def test_a_write_is_an_error_if_hooks_hand_back_what_they_got():
    tensor = torch.ones(2)
    with saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
        saved = HeldTensor(tensor)
    tensor.add_(1)

    with pytest.raises(ChangedError):
        saved.unpack()


def test_inference_tensors_have_no_version():
    with torch.inference_mode():
        tensor = torch.ones(2)

    assert version_of(tensor) == -1
    assert HeldTensor(tensor).unpack().tolist() == [1.0, 1.0]


def test_a_tensor_that_does_not_require_grad_stays_the_same_object():
    # Code may tell its tensors apart by `is`, and torch's own saved tensors hand out the object that was saved.
    mask, seen = torch.ones(3), Log()

    def body(x, mask):
        seen.append(mask)
        return (x.exp() * mask).sin()

    checkpoint(body, torch.ones(3, requires_grad=True), mask).sum().backward()

    assert len(seen) == 2 and all(one is mask for one in seen)
