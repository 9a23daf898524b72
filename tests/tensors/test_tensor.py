"""What is special to a `SavedTensor`; what it shares with autograd's own is compared with that in another file."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from logs import Count
from torchremat import SavedTensor, UnsupportedError, checkpoint
from versions import NEEDS_SAVED_TENSORS

pytestmark = [NEEDS_SAVED_TENSORS, pytest.mark.usefixtures("no_collector")]


def computed():
    return torch.ones(4, requires_grad=True) * 2


def test_an_output_that_its_own_node_owns_goes_with_the_node():
    h = computed()
    h.grad_fn.metadata["saved"] = SavedTensor(h, is_output=True)
    storage = StorageWeakRef(h.untyped_storage())

    found = h.grad_fn.metadata["saved"].unpack(saved_for=h.grad_fn)

    assert found.grad_fn is h.grad_fn and found is not h
    del found
    assert not storage.expired()
    del h
    assert storage.expired()


@pytest.mark.parametrize("moment", ["active", "registered"])
def test_so_it_does_with_hooks(moment):
    h = computed()
    pair = (torch.Tensor.detach, torch.Tensor.detach)
    if moment == "active":
        with saved_tensors_hooks(*pair):
            h.grad_fn.metadata["saved"] = SavedTensor(h, is_output=True)
    else:
        h.grad_fn.metadata["saved"] = SavedTensor(h, is_output=True)
        h.grad_fn.metadata["saved"].register_hooks(*pair)
    storage = StorageWeakRef(h.untyped_storage())

    assert h.grad_fn.metadata["saved"].unpack(saved_for=h.grad_fn).grad_fn is h.grad_fn
    del h
    assert storage.expired()


def test_an_output_in_a_view_finds_its_node_as_long_as_there_is_one():
    base = computed()
    view = base[1:]
    view.mul_(2)
    saved = SavedTensor(view, is_output=True, is_inplace_on_view=True)

    assert saved.unpack().grad_fn is view.grad_fn
    del base, view
    with pytest.raises(RuntimeError, match="detached in-place"):
        saved.unpack()


def test_an_input_goes_with_the_saved_tensor_or_when_it_is_freed():
    h = computed()
    storage = StorageWeakRef(h.untyped_storage())
    saved = SavedTensor(h)
    del h

    assert not storage.expired()
    saved.reset_data()
    assert storage.expired()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        saved.unpack()


def test_hooks_take_the_tensors_place():
    h = computed()
    storage = StorageWeakRef(h.untyped_storage())
    saved = SavedTensor(h)
    saved.register_hooks(torch.Tensor.tolist, torch.tensor)
    del h

    assert storage.expired()
    assert saved.unpack().tolist() == [2.0] * 4
    assert saved.retrieve_unpack_hook_data() == (torch.tensor, [2.0] * 4)


def test_what_was_packed_goes_when_it_is_freed():
    class Packed:
        pass

    alive = []

    def pack(tensor):
        packed = Packed()
        alive.append(StorageWeakRef(tensor.untyped_storage()))
        packed.tensor = tensor
        return packed

    saved = SavedTensor(computed())
    saved.register_hooks(pack, lambda packed: packed.tensor)

    assert not alive[0].expired()
    saved.reset_data()
    assert alive[0].expired()


def test_a_pack_that_raises_loses_nothing():
    # Autograd's own saved tensor has hooks and no data then.
    def full(tensor):
        raise OSError("no room")

    h = computed()
    saved = SavedTensor(h)

    with pytest.raises(OSError, match="no room"):
        saved.register_hooks(full, lambda packed: packed)

    assert saved.unpack() is h
    saved.register_hooks(torch.Tensor.tolist, torch.tensor)
    assert saved.unpack().tolist() == [2.0] * 4


def test_another_node_is_refused():
    h = computed()
    saved = SavedTensor(h, is_output=True)

    with pytest.raises(UnsupportedError, match="saved_for=SinBackward0: the saved tensor is an output of another node"):
        saved.unpack(saved_for=h.sin().grad_fn)


def test_what_is_no_output_cannot_be_one_in_a_view():
    with pytest.raises(UnsupportedError, match="is_output=True and a grad_fn"):
        SavedTensor(computed(), is_inplace_on_view=True)
    with pytest.raises(UnsupportedError, match="grad_fn=None"):
        SavedTensor(torch.ones(1), is_output=True, is_inplace_on_view=True)


def test_hooks_have_to_be_callable():
    saved = SavedTensor(computed())

    with pytest.raises(TypeError, match="callable, got int"):
        saved.register_hooks(1, torch.tensor)

    assert saved.retrieve_unpack_hook_data() is None


def test_a_region_recomputes_it():
    runs, kept = Count(), []

    def body(x):
        runs.up()
        h = x.exp()
        kept.append(SavedTensor(h))
        return h.sin()

    x = torch.ones(3, requires_grad=True)
    out = checkpoint(body, x)

    found = kept[0].unpack()

    assert runs.value == 2
    assert torch.equal(found, x.exp()) and found.grad_fn.name() == "ExpBackward0"
    out.sum().backward()


def test_a_custom_function_can_hold_what_autograd_does_not_see():
    # Attributes of `ctx` are seen by no hook; a `SavedTensor` in one is.
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = SavedTensor(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.held.unpack() * grad

    packed = []
    x = torch.arange(3.0, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor.clone(), lambda copy: copy):
        out = Square.apply(x)

    out.sum().backward()

    assert len(packed) == 1
    assert x.grad.tolist() == [0.0, 2.0, 4.0]
