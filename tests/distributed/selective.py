"""Policies over modules that FSDP2 has sharded, and around them: what FSDP2 runs itself is none of the region's."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from distributed.comparing import compare
from distributed.fully_sharded import TWICE, called_by, freed, kept, sharded
from distributed.models import batch, net
from torchremat import Host, checkpoint, checkpointed, install, session, wrap
from torchremat.interop.torch_checkpoint import checkpoint as drop_in
from torchremat.interop.torch_checkpoint import create_selective_checkpoint_contexts
from torchremat.policies import everything_saved, save_in_modules, save_matmuls

MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
ONCE = [2, 2, 2]

# torch's own, whatever `install` has put in their place.
torchs, torchs_contexts = torch_checkpoint.checkpoint, torch_checkpoint.create_selective_checkpoint_contexts

mixed = partial(sharded, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def parts_sharded(model):
    """The parts of blocks are sharded, and the blocks are not: FSDP2's hooks run in the middle of a block's forward."""
    return sharded(model, [part for layer in model.layers for part in (layer.up, layer.down)])


def gathered_ahead(model):
    sharded(model)
    for before, after in zip(model.layers[:-1], model.layers[1:], strict=True):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return model


WAYS = (sharded, kept, freed, mixed, parts_sharded, gathered_ahead)
FEW = (sharded, parts_sharded)


def around(policy=save_matmuls):
    return called_by(lambda layer, h: checkpointed(layer, policy=policy)(h))


def dropped_in(function=drop_in, contexts=create_selective_checkpoint_contexts):
    context_fn = partial(contexts, MATMULS)
    return called_by(lambda layer, h: function(layer, h, use_reentrant=False, context_fn=context_fn))


def wrapped(policy=save_matmuls):
    return lambda model: wrap(model, "layers.*", policy=policy)


def everywhere(*transformations, calls=TWICE, ways=FEW):
    """Hold regions in models that are sharded in several ways to the plain run."""
    for way in ways:
        compare(net, [way], [way, *transformations], calls=calls, as_one=way is not mixed)


def policy_around():
    everywhere(around(), ways=WAYS)


def policy_that_keeps_nothing():
    everywhere(around(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE))


def policy_that_keeps_everything():
    # Nothing is recomputed, so nothing of FSDP2 that a policy had kept could be missed.
    everywhere(around(everything_saved), calls=ONCE, ways=WAYS)


def policy_in_a_store():
    everywhere(around(save_matmuls.into(Host())))


def policy_by_module():
    everywhere(around(save_in_modules("*up")))


def wrapped_with_a_policy():
    everywhere(wrapped(), ways=WAYS)


def wrapped_and_then_sharded():
    for way in FEW:
        compare(net, [way], [wrapped(), way], calls=TWICE)


def in_a_region_around():
    # The inner region has the policy, the outer one runs it again with what is kept.
    inner = around()

    def change(model):
        call = inner(model).call
        return called_by(lambda layer, h: checkpoint(lambda t: call(layer, t).tanh(), h))(model)

    def plain(model):
        return called_by(lambda layer, h: layer(h).tanh())(model)

    for way in FEW:
        compare(net, [way, plain], [way, change], calls=[6, 6, 6], as_one=False)


def drop_in_with_its_contexts():
    everywhere(dropped_in())


def drop_in_with_torchs_contexts():
    # They fail in torch too where FSDP2 runs within a block.
    everywhere(dropped_in(contexts=torchs_contexts), ways=[sharded, freed])


def torchs_checkpoint_with_our_contexts():
    # Torch's own has no frame of ours to look up to.
    everywhere(dropped_in(torchs))


def installed():
    # What a trainer calls that knows nothing of us.
    def change(model):
        def call(layer, h):
            context_fn = partial(torch_checkpoint.create_selective_checkpoint_contexts, MATMULS)
            return torch_checkpoint.checkpoint(layer, h, use_reentrant=False, context_fn=context_fn)

        return called_by(call)(model)

    with install():
        everywhere(change)


def method_that_fsdp_surrounds():
    # FSDP2's frame is around the method's own operators, which are the region's all the same.
    def registered(model):
        sharded(model)
        for layer in model.layers:
            layer.encode = layer.forward
            register_fsdp_forward_method(layer, "encode")
        return model

    policy = Counting()
    plain = called_by(lambda layer, h: layer.encode(h))
    ours = called_by(lambda layer, h: checkpointed(layer.encode, policy=policy)(h))

    compare(net, [registered, plain], [registered, ours], calls=TWICE)

    assert policy.seen.count("aten.addmm.default") == 2 * 2 * 3


class Counting:
    """A policy that notes what it was asked about."""

    def __init__(self):
        self.seen = []

    def __call__(self, ctx, op, *args, **kwargs):
        self.seen.append(str(op))
        return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def nobody_asks_about_operators_of_fsdp():
    alone, policy = Counting(), Counting()
    for model, one in ((net(), alone), (sharded(net()), policy), (parts_sharded(net()), policy)):
        around(one)(model)(batch(0, 0)).sum().backward()

    assert policy.seen == 2 * alone.seen


def recomputed_ahead():
    # Ahead of the backward a recompute gathers and frees, as the forward did.
    plain, ours = sharded(net()), around()(sharded(net()))
    x = batch(dist.get_rank(), 0)
    torch.manual_seed(0)
    plain(x).sum().backward()
    torch.manual_seed(0)
    with session() as ahead:
        loss = ours(x).sum()
        done = ahead.recompute(3)
        loss.backward()

    assert done == 3
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())


def operators_are_logged_without_those_of_fsdp():
    # With `debug=True` both logs are compared, and FSDP2's own would be a difference to tell of.
    everywhere(called_by(lambda layer, h: checkpointed(layer, policy=save_matmuls, debug=True)(h)))


CASES = {
    case.__name__: case
    for case in (
        policy_around,
        policy_that_keeps_nothing,
        policy_that_keeps_everything,
        policy_in_a_store,
        policy_by_module,
        wrapped_with_a_policy,
        wrapped_and_then_sharded,
        in_a_region_around,
        drop_in_with_its_contexts,
        drop_in_with_torchs_contexts,
        torchs_checkpoint_with_our_contexts,
        installed,
        method_that_fsdp_surrounds,
        nobody_asks_about_operators_of_fsdp,
        recomputed_ahead,
        operators_are_logged_without_those_of_fsdp,
    )
}
