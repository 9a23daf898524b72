"""Selective checkpoints of the drop-in: all that torch's can do, and what it refuses."""

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import CheckpointPolicy

import torchremat
from policies.counting import Counted, gradients
from torchremat.interop import torch_checkpoint as ours
from torchremat.policies import save_matmuls

aten = torch.ops.aten


def function(x):
    return ((x @ x).exp() @ x).sin()


def selective(policy, create=ours.create_selective_checkpoint_contexts, **options):
    return partial(create, policy, **options)


def chosen(context_fn, checkpoint=ours.checkpoint, **options):
    return lambda x: checkpoint(function, x, use_reentrant=False, context_fn=context_fn, **options)


def x_and_expected():
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    return x, gradients(function, x)


def everything(decision):
    def policy(ctx, op, *args, **kwargs):
        assert isinstance(ctx, torchs.SelectiveCheckpointContext) and ctx.is_recompute is False
        assert ctx.op_output is not None
        return decision

    return policy


@pytest.mark.parametrize("decision", list(CheckpointPolicy))
@pytest.mark.parametrize("checkpoint", [ours.checkpoint, torchs.checkpoint], ids=["ours", "torch's"])
def test_all_six_values_do_what_they_say(decision, checkpoint):
    x, expected = x_and_expected()
    run = chosen(selective(everything(decision)), checkpoint)

    # Torch refuses the second backward of a selective checkpoint.
    assert gradients(run, x, times=2) == expected
    loss = run(x).sum()
    with Counted() as counted:
        loss.backward()
    recomputes = "RECOMPUTE" in decision.name
    # Torch's own checkpoint asks for all of a region; what was kept is given to it, and nothing runs.
    assert ("exp" in counted.counts) is recomputes


def test_offloaded_outputs_are_in_a_store():
    # Torch recomputes them, without a word.
    x, _ = x_and_expected()
    policy = everything(CheckpointPolicy.MUST_CPU_OFFLOAD)

    with Counted() as counted:
        y = chosen(selective(policy))(x)
        made = counted.live_bytes(without=y)
        y.sum().backward()

    assert made == 2 * 64  # copies of what autograd saves: the outputs of `exp` and of the second product
    assert counted.counts["mm"] == 2 + 4
    assert counted.counts["exp"] == 1


@pytest.mark.parametrize("checkpoint", [ours.checkpoint, torchs.checkpoint], ids=["ours", "torch's"])
def test_a_list_of_operators(checkpoint):
    x, expected = x_and_expected()
    run = chosen(selective([aten.mm.default]), checkpoint)

    assert gradients(run, x) == expected
    loss = run(x).sum()
    with Counted() as counted:
        loss.backward()
    assert counted.counts["mm"] == 4
    assert counted.counts["exp"] == 1


def test_a_policy_of_torchremat():
    x, expected = x_and_expected()

    assert gradients(chosen(selective(save_matmuls)), x, times=2) == expected


@pytest.mark.parametrize("checkpoint", [ours.checkpoint, torchs.checkpoint], ids=["ours", "torch's"])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_kept_output_that_is_written_is_copied_before(checkpoint, allowed):
    # Torch raises, or with allow_cache_entry_mutation=True gives a wrong gradient.
    def function(x):
        return (x @ x).mul_(2).cos().exp()

    x, _ = x_and_expected()
    contexts = selective([aten.mm.default], allow_cache_entry_mutation=allowed)

    found = gradients(lambda x: checkpoint(function, x, use_reentrant=False, context_fn=contexts), x)

    assert found == gradients(function, x)


def test_contexts_of_a_users_own_around_the_pair():
    x, expected = x_and_expected()
    entered = []

    @contextmanager
    def both(name, inner):
        entered.append(name)
        with inner:
            yield

    def context_fn():
        forward, recompute = ours.create_selective_checkpoint_contexts([aten.mm.default])
        return both("forward", forward), _Again(recompute, entered)

    for checkpoint in (ours.checkpoint, torchs.checkpoint):
        entered.clear()
        loss = checkpoint(function, x, use_reentrant=False, context_fn=context_fn).sum()
        with Counted() as counted:
            (found,) = torch.autograd.grad(loss, x)
        assert found.tolist() == expected[0]
        assert counted.counts["mm"] == 4
        assert entered == ["forward", "recompute"]


class _Again:
    def __init__(self, inner, entered):
        self.inner, self.entered, self.stack = inner, entered, ExitStack()

    def __enter__(self):
        self.entered.append("recompute")
        self.stack.enter_context(self.inner)

    def __exit__(self, *error):
        return self.stack.__exit__(*error)


def test_debug_with_a_selective_pair():
    x, expected = x_and_expected()

    assert gradients(chosen(selective([aten.mm.default]), debug=True), x) == expected
    with pytest.raises(ValueError, match="debug=True is incompatible"):
        chosen(lambda: (ExitStack(), ExitStack()), debug=True)(x)


def test_installed_it_takes_the_place_of_torchs():
    x, expected = x_and_expected()
    with torchremat.install():
        contexts = selective([aten.mm.default], torchs.create_selective_checkpoint_contexts)
        run = chosen(contexts, torchs.checkpoint)
        assert gradients(run, x, times=3) == expected


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_in_a_compiled_function_torchs_own_pair_is_used(backend):
    x, expected = x_and_expected()
    torch.compiler.reset()

    compiled = torch.compile(chosen(selective([aten.mm.default])), backend=backend)

    assert gradients(compiled, x) == expected


def test_a_region_inside_of_a_selective_one():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)

    def inner(x):
        return ours.checkpoint(layer, x.sin(), use_reentrant=False, context_fn=selective([aten.addmm.default])).tanh()

    def outer(x):
        return ours.checkpoint(inner, inner(x), use_reentrant=False, context_fn=selective([aten.tanh.default]))

    def plain(x):
        return layer(layer(x.sin()).tanh().sin()).tanh()

    assert gradients(outer, x, layer, times=2) == gradients(plain, x, layer)
