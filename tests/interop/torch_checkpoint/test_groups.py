import pytest
import torch
from torch.utils import checkpoint as torchs

from regions.comparing import Counted, Twice, Watched, leaf, three
from torchremat import UnsupportedError, session
from torchremat.interop.torch_checkpoint import CheckpointError, GraphExecGroup, checkpoint


class Halves:
    """A region with two outputs whose backward graphs share no saved tensor."""

    def __init__(self):
        self.function = Counted(lambda a, b: (a.exp().sin(), b.exp().sin()))
        self.a, self.b = leaf(3), leaf(3)

    def run(self):
        return checkpoint(self.function, self.a, self.b, use_reentrant=False, early_stop=False)

    def expected(self):
        leaves = self.a.detach().requires_grad_(), self.b.detach().requires_grad_()
        for one in leaves:
            one.exp().sin().sum().backward()
        return [one.grad for one in leaves]


def test_several_backward_calls_recompute_once():
    halves = Halves()
    y, z = halves.run()

    with GraphExecGroup():
        y.sum().backward()
        z.sum().backward()

    assert halves.function.calls == 2
    assert all(map(torch.equal, [halves.a.grad, halves.b.grad], halves.expected()))


def test_outside_of_a_group_each_recomputes():
    halves = Halves()
    y, z = halves.run()

    y.sum().backward()
    z.sum().backward()

    assert halves.function.calls == 3


def test_the_same_group_entered_again_goes_on():
    halves = Halves()
    group = GraphExecGroup()
    y, z = halves.run()

    with group:
        y.sum().backward()
    with group:
        z.sum().backward()

    assert halves.function.calls == 2


def test_another_group_recomputes_again():
    halves = Halves()
    y, z = halves.run()

    with GraphExecGroup():
        y.sum().backward()
    with GraphExecGroup():
        z.sum().backward()

    assert halves.function.calls == 3


def test_the_forward_may_be_in_the_group():
    halves = Halves()

    with GraphExecGroup():
        y, z = halves.run()
        y.sum().backward()
        z.sum().backward()

    assert halves.function.calls == 2


@pytest.mark.parametrize("make", [torchs.GraphExecGroup, GraphExecGroup])
def test_backward_calls_that_overlap_are_an_error(make):
    module = torchs if make is torchs.GraphExecGroup else None
    run = module.checkpoint if module else checkpoint
    y = run(three, leaf(3), use_reentrant=False).sum()

    with make():
        y.backward(retain_graph=True)
        with pytest.raises(
            CheckpointError,
            match=r"torch\.utils\.checkpoint: Unpack is being triggered for a tensor that was already unpacked once\. "
            r"Performing two backward calls that overlap .* is not allowed while under the "
            r"torch\.utils\.checkpoint\.GraphExecGroup context",
        ):
            y.backward()


def test_the_same_backward_in_two_groups_is_none_of_these():
    function = Counted(three)
    y = checkpoint(function, leaf(3), use_reentrant=False).sum()
    first, second = GraphExecGroup(), GraphExecGroup()

    for group in (first, second):
        with group:
            y.backward(retain_graph=True)

    assert function.calls == 3


def test_outside_of_a_group_they_are_none():
    function = Counted(three)
    y = checkpoint(function, leaf(3), use_reentrant=False).sum()

    y.backward(retain_graph=True)
    y.backward()

    assert function.calls == 3


def test_one_node_may_unpack_twice():
    x = leaf(3)

    with GraphExecGroup():
        checkpoint(Twice.apply, x, use_reentrant=False).sum().backward()

    assert torch.equal(x.grad, 2 * x.detach())


@pytest.mark.parametrize("inner", [torchs.GraphExecGroup, GraphExecGroup])
@pytest.mark.parametrize("outer", [torchs.GraphExecGroup, GraphExecGroup])
def test_groups_do_not_nest(outer, inner):
    with outer() as group:
        with pytest.raises(RuntimeError, match=r"GraphExecGroup contexts cannot be nested\. Already inside group"):
            inner().__enter__()
        assert outer._get_current_group() is group

    assert outer._get_current_group() is None


def test_a_group_inside_a_session_is_an_error_and_leaves_none_behind():
    with session(), pytest.raises(UnsupportedError, match="a session is open in this thread already"):
        GraphExecGroup().__enter__()

    assert GraphExecGroup._get_current_group() is None
    with GraphExecGroup():
        pass


def test_torch_sees_the_group():
    with GraphExecGroup() as group:
        assert torchs.GraphExecGroup._get_current_group() is group
    assert torchs.GraphExecGroup._get_current_group() is None


def test_torchs_own_regions_in_it_recompute_once_too():
    halves = Halves()
    y, z = torchs.checkpoint(halves.function, halves.a, halves.b, use_reentrant=False, early_stop=False)

    with GraphExecGroup():
        y.sum().backward()
        z.sum().backward()

    assert halves.function.calls == 2


@pytest.mark.usefixtures("no_collector")
def test_what_was_recomputed_for_nobody_goes_with_the_group():
    watched = Watched()
    x = leaf(3)
    y = checkpoint(lambda a: (watched(a), a.sin()), x, use_reentrant=False, early_stop=False)

    group = GraphExecGroup()
    with group:
        y[1].sum().backward()
    assert len(watched.alive) == 1  # the exp of the other output, which may be asked for in the group
    del group
    assert len(watched.alive) == 0


def test_a_group_that_outlives_many_regions_keeps_none_of_them():
    group = GraphExecGroup()
    watched = Watched()

    with group:
        for _ in range(3):
            checkpoint(watched, leaf(3), use_reentrant=False).sum().backward()

    assert len(watched.alive) == 0


def test_a_reentrant_region_does_not_care():
    function = Counted(three)
    y = checkpoint(function, leaf(3), use_reentrant=True).sum()

    with GraphExecGroup():
        y.backward(retain_graph=True)
        y.backward()

    assert function.calls == 3
