import warnings
from weakref import ref

import pytest
import torch

from torchremat import Keep, MutationError


def test_the_error_is_that_of_autograd():
    x = torch.ones(3)
    y = torch.ones(3, requires_grad=True)
    loss = (x * y).sum()
    handle = Keep().put(x)

    x.add_(1)

    with pytest.raises(RuntimeError) as theirs:
        loss.backward()
    with pytest.raises(MutationError) as ours:
        handle.get()
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.view(-1)[0].fill_(5),
        lambda x: x.detach().mul_(2),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: x.t().zero_(),
    ],
)
def test_a_write_through_an_alias_is_seen(write):
    x = torch.ones(2, 2)
    handle = Keep().put(x)

    write(x)

    with pytest.raises(MutationError, match="version 1; expected version 0"):
        handle.get()


def test_a_tensor_that_was_written_before_is_kept_as_it_is():
    x = torch.ones(2)
    x.add_(1)

    handle = Keep().put(x)

    assert torch.equal(handle.get(), torch.full((2,), 2.0))


def test_what_comes_back_shares_the_memory_and_has_no_graph():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    handle = Keep().put(y)

    got = handle.get()

    assert got.data_ptr() == y.data_ptr()
    assert got.grad_fn is None and not got.requires_grad


def test_an_output_that_its_own_node_saves_is_freed_with_the_graph():
    # With its graph it would hold the node that holds it: a cycle through C++, which no collector sees.
    x = torch.ones(3, requires_grad=True)
    store = Keep()
    with torch.autograd.graph.saved_tensors_hooks(store.put, lambda handle: handle.get()):
        y = x.exp()
    storage = ref(y.untyped_storage())
    assert store.statistics.stored_bytes == 12

    del y

    assert storage() is None
    assert store.statistics.stored_bytes == 0


def sparse():
    with warnings.catch_warnings(action="ignore"):
        return torch.ones(2, 3).to_sparse_csr()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.ones(3).expand(4, 3),
        lambda: torch.ones(2, 3).to_sparse(),
        sparse,
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.ones(0, 3),
        lambda: torch.ones(3, device="meta"),
    ],
)
def test_any_tensor_can_be_kept(make):
    x = make()
    store = Keep()

    handle = store.put(x)

    got = handle.get()
    assert got.shape == x.shape and got.dtype == x.dtype and got.layout == x.layout
    assert store.statistics.stored_bytes == handle.stored_bytes


def test_a_tensor_of_inference_mode_has_no_version():
    with torch.inference_mode():
        x = torch.ones(3)

    handle = Keep().put(x)

    assert torch.equal(handle.get(), torch.ones(3))
