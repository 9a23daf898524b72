"""What is known of a tensor without its values: the class of its strides, and getting them back from a store."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from logs import Log
from regions.comparing import Counted, leaf, same
from torchremat import CheckpointError, checkpoint, checkpointed
from torchremat.tensors.metadata import agree, metadata_of, with_strides
from turns import in_turn

ALIKE = {
    "itself": lambda: (torch.ones(2, 3), torch.ones(2, 3)),
    "with a gap": lambda: (torch.ones(2, 3), torch.ones(2, 5)[:, :3]),
    "one element": lambda: (torch.ones(1, 3), torch.ones(3, 1).t()),
    "transposed twice": lambda: (torch.ones(3, 2).t(), torch.ones(5, 2).t()[:, :3]),
    "expanded": lambda: (torch.ones(1, 3).expand(2, 3), torch.ones(1, 6)[:, ::2].expand(2, 3)),
    "channels last": lambda: (
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(2, 4, 5, 3).permute(0, 3, 1, 2),
    ),
    "nothing in it": lambda: (torch.ones(0, 3), torch.ones(3, 0).t()),
    "a number": lambda: (torch.ones(()), torch.ones(3)[1]),
    "sparse": lambda: (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
}
DIFFERENT = {
    "transposed": lambda: (torch.ones(3, 3), torch.ones(3, 3).t()),
    "channels last": lambda: (torch.ones(2, 3, 4, 5), torch.ones(2, 4, 5, 3).permute(0, 3, 1, 2)),
    "expanded": lambda: (torch.ones(2, 3), torch.ones(1, 3).expand(2, 3)),
    "expanded along another": lambda: (torch.ones(3, 1).expand(3, 3), torch.ones(1, 3).expand(3, 3)),
    "shape": lambda: (torch.ones(2), torch.ones(3)),
    "dtype": lambda: (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "device": lambda: (torch.ones(2), torch.ones(2, device="meta")),
    "sparse": lambda: (torch.eye(2), torch.eye(2).to_sparse()),
    "sparse in another way": lambda: (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("name", [*ALIKE, *(f"not {name}" for name in DIFFERENT)])
def test_the_class_of_strides(name):
    a, b = (DIFFERENT[name[4:]] if name.startswith("not ") else ALIKE[name])()

    assert agree(metadata_of(a), metadata_of(b)) is not name.startswith("not ")


@pytest.mark.parametrize("dims", [(1, 0), (0, 1)])
def test_strides_of_a_recompute_that_are_of_another_class(dims):
    turns = iter([(0, 1), dims])

    def body(x):
        return x.permute(next(turns)).exp().sin()

    region = checkpointed(body, check="metadata")
    y = region(leaf(3, 3)).sum()
    if dims == (0, 1):
        y.backward()
        return
    with pytest.raises(CheckpointError, match="stride"):
        y.backward()


STRIDES = {
    "dense": lambda t: t,
    "transposed": lambda t: t.t(),
    "channels last": lambda t: t.reshape(2, 2, 3, 2).to(memory_format=torch.channels_last),
    "with a gap": lambda t: t[:, :2],
    "expanded": lambda t: t[:1].expand(5, 6),
    "expanded in the middle": lambda t: t[:, None].expand(4, 3, 6),
    "one element": lambda t: t[:1].t(),
    "overlapping": lambda t: t.flatten().unfold(0, 3, 1),
    "empty": lambda t: t[:0],
    "a number": lambda t: t[0, 0],
    "reversed thrice": lambda t: t.reshape(2, 3, 4).permute(2, 1, 0),
}


@pytest.mark.parametrize("name", STRIDES)
def test_strides_come_back_from_a_store(name):
    tensor = STRIDES[name](torch.arange(24.0).reshape(4, 6))
    then = metadata_of(tensor)

    found = with_strides(tensor.clone(memory_format=torch.contiguous_format), then)

    assert torch.equal(found, tensor)
    assert agree(metadata_of(found), then)
    # Elements that were one are one again, and others have no gaps between them.
    assert found.untyped_storage().nbytes() <= 4 * max(tensor.numel(), 1)
    if name.startswith("expanded"):
        assert found.untyped_storage().nbytes() == 4 * 6 * (4 if "middle" in name else 1)


def test_what_came_back_as_it_was_is_not_copied():
    tensor = torch.ones(2, 3)

    assert with_strides(tensor, metadata_of(torch.zeros(2, 3))) is tensor


@pytest.mark.parametrize("other", [torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64), torch.eye(3).to_sparse()])
def test_what_came_back_as_something_else_is_left_to_whoever_compares(other):
    assert with_strides(other, metadata_of(torch.ones(3, 2).t())) is other


def through_numpy():
    return saved_tensors_hooks(lambda t: t.detach().numpy().copy(order="C"), torch.from_numpy)


def through_lists():
    return saved_tensors_hooks(
        lambda t: (t.detach().flatten().tolist(), t.shape), lambda p: torch.tensor(p[0]).reshape(p[1])
    )


@pytest.mark.parametrize("hooks", [save_on_cpu, through_numpy, through_lists])
@in_turn("name", STRIDES)
def test_a_region_inside_foreign_hooks_sees_the_strides_of_its_forward(name, hooks):
    x = torch.arange(24.0).reshape(4, 6).div(24).requires_grad_()
    seen = Log()

    @Counted
    def body(h):
        seen.append(metadata_of(h))
        return h.exp().sin()

    def run(call):
        with hooks():
            return call(body, STRIDES[name](x))

    assert same(lambda: run(checkpoint), lambda: body(STRIDES[name](x)), [x])
    plain, forward, again = seen
    assert body.calls == 3
    assert plain == forward and agree(forward, again)
