"""`respect_saved_tensors_hooks`: what a policy keeps goes through the hooks of a user, if they ask for it."""

import copy
import inspect
import weakref
from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint as torchs

import torchremat
import torchremat.extend
from logs import Log
from regions.comparing import leaf, same
from torchremat import MutationError, UnsupportedError
from torchremat.interop import torch_checkpoint as ours
from torchremat.interop.torch_checkpoint.contexts import Hooks

MATMULS = [torch.ops.aten.mm.default]
TORCH_RESPECTS = "respect_saved_tensors_hooks" in inspect.signature(torchs.checkpoint).parameters
contexts = partial(ours.create_selective_checkpoint_contexts, MATMULS)


class Logged(saved_tensors_hooks):
    """Hooks that copy, and log shapes."""

    def __init__(self):
        self.packed, self.unpacked = [], []
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor):
        self.packed.append(tuple(tensor.shape))
        return tensor.clone()

    def _unpack(self, packed):
        self.unpacked.append(tuple(packed.shape))
        return packed


@pytest.fixture
def weight():
    return leaf(4, 6)


@pytest.fixture
def function(weight):
    return lambda a: (a @ weight).exp().sin()


def selective(function, *args, **options):
    return ours.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **options)


def test_hooks_get_what_is_kept(function, weight):
    x, logged = leaf(2, 4), Logged()

    def run():
        with logged:
            return selective(function, x, respect_saved_tensors_hooks=True)

    assert same(run, lambda: function(x), [x, weight])
    assert sorted(logged.packed) == [(2, 4), (2, 6)]  # the input of the region, and the product
    assert sorted(logged.unpacked) == [(2, 4), (2, 6)]  # each once, though several operations save of them


def test_what_is_kept_is_kept(function):
    ran = []

    @torchremat.extend.only_watches
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    with Logged():
        y = selective(function, leaf(2, 4), respect_saved_tensors_hooks=True)
    with Counting():
        y.sum().backward()

    assert ran.count("aten.mm.default") == 2 and ran.count("aten.exp.default") == 1  # those of the backward; recomputed


def test_save_on_cpu(function, weight):
    x = leaf(2, 4)

    def run():
        with save_on_cpu():
            return selective(function, x, respect_saved_tensors_hooks=True)

    assert same(run, lambda: function(x), [x, weight])


def test_offload_stores_what_is_kept(function):
    x = leaf(64, 4)

    def stored(**options):
        with torchremat.offload(torchremat.Host(), min_bytes=0) as context:
            y = selective(function, x, **options)
        y.sum().backward()
        return context.copied_out_bytes

    assert stored(respect_saved_tensors_hooks=True) - stored(respect_saved_tensors_hooks=False) == 4 * 64 * 6


def test_hooks_around_an_outer_region(function, weight):
    x, logged = leaf(2, 4), Logged()

    def outer(a):
        return selective(function, a * 2, respect_saved_tensors_hooks=True) + 1

    def run():
        with logged:
            return torchremat.checkpoint(outer, x)

    assert same(run, lambda: function(x * 2) + 1, [x, weight])
    assert logged.packed.count((2, 6)) == 1


def test_without_a_word_they_are_passed_by_with_a_warning(function):
    logged = Logged()

    with logged, pytest.warns(FutureWarning, match="respect_saved_tensors_hooks=True|False") as found:
        y = selective(function, leaf(2, 4))
    y.sum().backward()

    assert [one.filename for one in found] == [__file__]
    assert logged.packed == [(2, 4)]


def test_told_so_they_are_passed_by(function):
    logged = Logged()

    with logged:
        selective(function, leaf(2, 4), respect_saved_tensors_hooks=False).sum().backward()

    assert logged.packed == [(2, 4)]


@pytest.mark.parametrize("respects", [None, True, False])
def test_without_hooks_nothing_changes(function, weight, respects):
    x = leaf(2, 4)

    assert same(lambda: selective(function, x, respect_saved_tensors_hooks=respects), lambda: function(x), [x, weight])


@pytest.mark.parametrize("respects", [None, True, False])
def test_without_a_policy_nothing_changes(function, weight, respects):
    x = leaf(2, 4)

    def run():
        with Logged():
            return ours.checkpoint(function, x, use_reentrant=False, respect_saved_tensors_hooks=respects)

    assert same(run, lambda: function(x), [x, weight])


def test_answers_to_recompute_stay(weight):
    logged = Logged()
    policy = partial(ours.create_selective_checkpoint_contexts, lambda ctx, op, *args, **kwargs: op in MATMULS)

    with logged:
        y = ours.checkpoint(
            lambda a: (a.sin() @ weight).exp(),
            leaf(2, 4),
            use_reentrant=False,
            context_fn=policy,
            respect_saved_tensors_hooks=True,
        )
    y.sum().backward()

    assert logged.packed == [(2, 4), (2, 6)]


def test_what_hooks_keep_itself_and_somebody_writes_is_computed_again(weight):
    # It was an error once, although the region can compute it.
    x, written, ran = leaf(2, 4), Log(), Log()

    @torchremat.extend.only_watches
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    def function(a):
        product = a @ weight
        y = product.sin()
        written.append(product.detach())
        return y

    def run():
        with saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0]):
            y = selective(function, x, respect_saved_tensors_hooks=True)
        written[-1].add_(1)
        return y

    assert same(run, lambda: (x @ weight).sin(), [x, weight])
    y = run()
    with Counting():
        y.sum().backward()
    assert ran.count("aten.mm.default") == 3  # the recompute's, and those of the backward


def test_hooks_that_keep_what_they_are_given():
    x = torch.randn(2, 4)
    kept = Hooks(lambda tensor: (tensor,), lambda packed: packed[0]).put(x)
    assert torch.equal(kept.get(), x)

    x.add_(1)

    with pytest.raises(MutationError, match="version 0 when the saved-tensor hooks around the region got it"):
        kept.get()


@pytest.mark.skipif(not TORCH_RESPECTS, reason="this torch's own contexts know nothing of hooks; those of 2.14 do")
def test_torchs_own_contexts_cannot(function):
    own = partial(torchs.create_selective_checkpoint_contexts, MATMULS)

    with pytest.raises(UnsupportedError, match="Make them with torchremat"):
        ours.checkpoint(function, leaf(2, 4), use_reentrant=False, context_fn=own, respect_saved_tensors_hooks=True)


def test_reentrant_regions_cannot():
    with pytest.raises(ValueError, match="`respect_saved_tensors_hooks` is only supported when use_reentrant=False"):
        ours.checkpoint(torch.sin, leaf(2), use_reentrant=True, respect_saved_tensors_hooks=True)


def test_nothing_of_it_outlives_the_graph(function):
    class Mark:
        pass

    mark = Mark()
    alive = weakref.ref(mark)
    with saved_tensors_hooks(lambda tensor, mark=mark: tensor.clone(), lambda packed: packed):
        y = selective(function, leaf(2, 4), respect_saved_tensors_hooks=True)
    del mark
    assert alive() is not None

    y.sum().backward()
    del y
    assert alive() is None


# ------------------------------------------------------------------------------------------------------- decorators


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_decorator(use_reentrant):
    calls = Log()

    @ours.checkpoint(use_reentrant=use_reentrant)
    def function(a):
        """A sine."""
        calls.append(a)
        return a.sin()

    x = leaf(3)

    assert same(lambda: function(x), x.sin, [x])
    assert len(calls) == 2
    assert (function.__name__, function.__doc__) == ("function", "A sine.")


def test_a_decorated_method():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((3,), 2.0))

        @ours.checkpoint(use_reentrant=False)
        def scaled(self, x, *, power=1):
            return (x * self.weight).pow(power).sin()

        forward = scaled

    model, x = Scale(), leaf(3)

    assert same(lambda: model(x, power=2), lambda: (x * model.weight).pow(2).sin(), [x, model.weight])
    assert Scale.scaled.__name__ == "scaled"
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_the_functions_own_arguments_may_be_called_as_options_are():
    @ours.checkpoint(use_reentrant=False, early_stop=False)
    def function(x, *, debug, early_stop=1.0):
        return (x * debug * early_stop).sin()

    x, scale = leaf(3), leaf(3)

    assert same(lambda: function(x, debug=scale, early_stop=3.0), lambda: (x * scale * 3.0).sin(), [x, scale])


def test_a_decorator_of_nothing_that_can_be_called():
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        ours.checkpoint(use_reentrant=False, scale=2)
    with pytest.raises(TypeError, match="expected a callable, got int"):
        ours.checkpoint(use_reentrant=False)(3)
    with pytest.raises(TypeError, match="expected a callable, got NoneType"):
        ours.checkpoint(None, leaf(3), use_reentrant=False)


@pytest.mark.skipif(TORCH_RESPECTS, reason="this torch's own operator has the option, as that of 2.14")
def test_where_torchs_own_operator_runs_the_option_is_not_dropped():
    # It was: a recorded region left the hooks out without a word.
    def contexts():
        return ours.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    def body(x):
        return ours.checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts, respect_saved_tensors_hooks=True)

    with pytest.raises(UnsupportedError, match=r"since torch 2\.14"):
        make_fx(body)(leaf(4))
