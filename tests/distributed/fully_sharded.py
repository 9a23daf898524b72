"""FSDP2, with regions inside the hooks of sharded modules and around them."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distributed.comparing import compare, held
from distributed.data_parallel import run_of_calls
from distributed.models import batch, looped, net, partly_frozen, siamese, some, tied_inside, twice
from probes.regions import Backups, Reaching, reach
from torchremat import MutationError, UnsupportedError, checkpoint, session, wrap

# Two rounds of a forward and a recompute each.
TWICE = [4, 4, 4]


def mesh():
    return init_device_mesh("cpu", (2,))


def sharded(model, modules=None, **options):
    """Shard each block, or each of `modules`, and then the whole."""
    on = mesh()
    for module in dict.fromkeys(model.layers) if modules is None else modules:
        fully_shard(module, mesh=on, **options)
    return fully_shard(model, mesh=on, **options)


def root_sharded(model, **options):
    return sharded(model, [], **options)


kept = partial(sharded, reshard_after_forward=False)
freed = partial(sharded, reshard_after_forward=True)

# All-gathers in two rounds. Unless told otherwise, FSDP frees the blocks after their forward, and not the root.
GATHERS = {"": 2, "layers.0": 4, "layers.1": 4, "layers.2": 4}
ALL_KEPT = {"": 2, "layers.0": 2, "layers.1": 2, "layers.2": 2}
ALL_FREED = {"": 4, "layers.0": 4, "layers.1": 4, "layers.2": 4}


def wrapped(model):
    return wrap(model, "layers.*")


def root_wrapped(model):
    return wrap(model, lambda name, _: name == "")


def nested(model):
    return wrap(wrapped(model), "layers.*.down")


def called_by(call):
    def change(model):
        model.call = call
        return model

    return change


def checkpoints(model):
    return called_by(checkpoint)(model)


def with_more(call):
    """A call of a block in a region that goes on after it, with an operation that saves its output."""
    return lambda layer, h: call(lambda t: layer(t).tanh(), h)


def pairs(call):
    """The blocks in regions of one and of two."""

    def forward(model, x):
        first, second, third = model.layers
        h = call(first, model.inp(x))
        return model.head(call(lambda t: third(second(t)), h))

    def change(model):
        model.forward = partial(forward, model)
        return model

    return change


# ------------------------------------------------------------------------------------------- regions in the hooks


def wrapped_before():
    compare(net, [sharded], [wrapped, sharded], calls=TWICE, gathers=GATHERS)


def wrapped_after():
    compare(net, [sharded], [sharded, wrapped], calls=TWICE, gathers=GATHERS)


def wrapped_and_kept():
    compare(net, [kept], [wrapped, kept], calls=TWICE, gathers=ALL_KEPT)


def wrapped_and_freed():
    compare(net, [freed], [freed, wrapped], calls=TWICE, gathers=ALL_FREED)


def only_the_root_sharded():
    compare(net, [root_sharded], [root_sharded, wrapped], calls=TWICE, gathers={"": 2})


def only_the_root_sharded_and_freed():
    freed_root = partial(root_sharded, reshard_after_forward=True)
    compare(net, [freed_root], [wrapped, freed_root], calls=TWICE, gathers={"": 4})


def root_wrapped_before():
    compare(net, [sharded], [root_wrapped, sharded], calls=TWICE, gathers=GATHERS)


def root_wrapped_after_and_freed():
    compare(net, [freed], [freed, root_wrapped], calls=TWICE, gathers=ALL_FREED)


def nested_regions():
    compare(net, [sharded], [nested, sharded], calls=TWICE, gathers=GATHERS)


def parameters_shared_in_a_block():
    compare(tied_inside, [sharded], [wrapped, sharded], calls=TWICE, gathers=GATHERS)


def block_called_three_times():
    wrap_it = partial(wrap, modules="layers.0")
    compare(looped, [kept], [wrap_it, kept], calls=[12], gathers={"": 2, "layers.0": 6})


def block_called_three_times_and_freed():
    wrap_it = partial(wrap, modules="layers.0")
    compare(looped, [freed], [wrap_it, freed], calls=[12], gathers={"": 4, "layers.0": 12})


def blocks_called_twice():
    # FSDP's own nodes change the order in which autograd adds the gradients of the two calls.
    compare(siamese, [sharded], [wrapped, sharded], calls=[8, 8, 8], as_one=False)


def parts_of_blocks_sharded_too():
    def shard(model):
        return sharded(model, [part for layer in model.layers for part in (layer.up, layer)])

    compare(net, [shard], [wrapped, shard], calls=TWICE)
    compare(net, [shard], [nested, shard], calls=TWICE)


def replicated_and_sharded():
    def shard(model):
        on = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for layer in model.layers:
            fully_shard(layer, mesh=on)
        return fully_shard(model, mesh=on)

    compare(net, [shard], [wrapped, shard], calls=TWICE)


def frozen_parameters():
    def shard(model):
        return sharded(model, [part for layer in model.layers for part in (layer.up, layer)])

    compare(partly_frozen, [shard], [wrapped, shard], calls=TWICE)


def unused_parameters():
    gathers = {"": 2, "layers.0": 4, "layers.1": 4}
    compare(some, [sharded], [wrapped, sharded], calls=[4, 4, 0], gathers=gathers)


def bytes_between_forward_and_backward():
    held(lambda *ways: [*ways, sharded], wrapped)
    held(lambda *ways: [sharded, *ways], checkpoints)


def buffers_that_do_not_change_are_not_copied():
    model = net()
    layer = model.layers[0]
    layer.register_buffer("table", torch.zeros(10_000))  # small ones are copied before each forward
    sharded(wrapped(model))
    model(batch(dist.get_rank(), 0)).sum().backward()  # the first forward looks at all of them

    world = Reaching()
    reach(world, [layer])
    backups = Backups(world)
    assert not any(one.name == "table" for one in backups._all)


def blocks_of_one_group():
    def grouped(model):
        return sharded(model, [list(model.layers[:2]), model.layers[2]])

    gathers = {"": 2, "layers.1": 4, "layers.2": 4}
    compare(net, [grouped], [wrapped, grouped], calls=TWICE, gathers=gathers)


def mixed_precision():
    # One process has no such precision to compare with.
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    shard = partial(sharded, **options)
    compare(net, [shard], [wrapped, shard], calls=TWICE, gathers=GATHERS, as_one=False)


def accumulation_without_sync():
    gathers = {"": 4, "layers.0": 8, "layers.1": 8, "layers.2": 8}
    compare(net, [sharded], [wrapped, sharded], calls=[8, 8, 8], gathers=gathers, micros=2)


def accumulation_on_gathered_parameters():
    def shard(model):
        kept(model).set_reshard_after_backward(False)
        return model

    # The second round gathers nothing: nobody has freed what the first had gathered.
    compare(net, [shard], [wrapped, shard], calls=[8, 8, 8], micros=2, as_one=False)


# --------------------------------------------------------------------------------------- regions around the hooks


def checkpoint_around():
    compare(net, [sharded], [sharded, checkpoints], calls=TWICE, gathers=GATHERS)


def checkpoint_around_what_is_kept():
    compare(net, [kept], [kept, checkpoints], calls=TWICE, gathers=ALL_KEPT)


def checkpoint_around_what_is_freed():
    compare(net, [freed], [freed, checkpoints], calls=TWICE, gathers=ALL_FREED)


def checkpoint_around_the_root():
    def around(model):
        forward = model.forward
        model.forward = lambda x: checkpoint(forward, x)
        return model

    compare(net, [sharded], [around, sharded], calls=TWICE, gathers=GATHERS)


def checkpoint_around_a_block_and_more():
    def build():
        return called_by(with_more(lambda function, h: function(h)))(net())

    compare(build, [sharded], [called_by(with_more(checkpoint)), sharded], calls=TWICE, gathers=GATHERS)


def checkpoint_around_two_blocks():
    compare(net, [sharded], [pairs(checkpoint), sharded], calls=TWICE, gathers=GATHERS)


def checkpoint_around_wrapped_blocks():
    compare(net, [sharded], [sharded, checkpoints, wrapped], calls=[4, 4, 4], gathers=GATHERS)


def checkpoint_around_in_mixed_precision():
    shard = partial(sharded, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    compare(net, [shard], [shard, checkpoints], calls=TWICE, gathers=GATHERS, as_one=False)


def checkpoint_around_and_accumulation():
    gathers = {"": 4, "layers.0": 8, "layers.1": 8, "layers.2": 8}
    compare(net, [sharded], [checkpoints, sharded], calls=[8, 8, 8], gathers=gathers, micros=2)


def checkpoint_around_and_parameters_shared():
    compare(tied_inside, [sharded], [checkpoints, sharded], calls=TWICE, gathers=GATHERS)


def checkpoint_around_a_block_called_three_times():
    compare(looped, [kept], [checkpoints, kept], calls=[12], gathers={"": 2, "layers.0": 6})


def checkpoint_around_blocks_called_twice():
    # See `blocks_called_twice`.
    compare(siamese, [sharded], [called_by(twice(checkpoint)), sharded], calls=[8, 8, 8], as_one=False)


# ------------------------------------------------------------------------------------------------ what is changed


def stepped(*transformations, write):
    """Write the parameters between a forward and its backward, with what `write` gives for the model."""
    model = net()
    for transform in transformations:
        model = transform(model)
    change = write(model)
    x = batch(dist.get_rank(), 0)
    model(x).sum().backward()  # so that there are gradients
    loss = model(x).sum()
    change()
    with pytest.raises(MutationError, match=r"`layers\.2\.(up|down)\.(weight|bias)` was changed in place") as caught:
        loss.backward()
    assert "version" in str(caught.value)


def step_of(kind, **options):
    return lambda model: getattr(torch.optim, kind)(model.parameters(), **options).step


def write_the_part(model):
    @torch.no_grad()
    def change():
        model.layers[2].up.weight.to_local().mul_(2)

    return change


def step_with_regions_inside():
    stepped(wrapped, sharded, write=step_of("SGD"))


def step_with_regions_around():
    stepped(checkpoints, sharded, write=step_of("AdamW"))


def step_on_kept_parameters():
    stepped(wrapped, kept, write=step_of("SGD"))


def step_around_kept_parameters():
    stepped(checkpoints, kept, write=step_of("SGD"))


def foreach_step_with_regions_inside():
    # The default on CUDA. It moves no version of a DTensor, nor of its part.
    stepped(wrapped, freed, write=step_of("AdamW", foreach=True))


def foreach_step_with_regions_around():
    stepped(checkpoints, sharded, write=step_of("SGD", foreach=True))


def fused_step():
    stepped(wrapped, sharded, write=step_of("AdamW", fused=True))


def step_with_the_root_sharded():
    stepped(wrapped, root_sharded, write=step_of("SGD", foreach=True))


def part_written():
    stepped(wrapped, sharded, write=write_the_part)


def parameters_replaced():
    def write(model):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return lambda: model.load_state_dict(state, assign=True)

    stepped(wrapped, sharded, write=write)


def parameters_without_gradient_stay():
    model = sharded(wrapped(net()))
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    x = batch(dist.get_rank(), 0)
    model(x).sum().backward()
    loss = model(x).sum()
    for name, parameter in model.named_parameters():
        if "layers" in name:
            parameter.grad = None

    optimizer.step()

    loss.backward()
    assert [layer.calls for layer in model.layers] == [4, 4, 4]


def tensor_parallel(model):
    """Each block over both processes: parameters that are DTensors, and no FSDP."""
    for layer in model.layers:
        parallelize_module(layer, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel_blocks():
    # One process has no such sums to compare with.
    compare(net, [tensor_parallel], [tensor_parallel, wrapped], calls=TWICE, as_one=False)


def foreach_step_of_tensor_parallel_blocks():
    # The foreach kernels do not take the two kinds of parameters together.
    stepped(tensor_parallel, wrapped, write=lambda model: step_of("SGD", foreach=True)(model.layers))


# --------------------------------------------------------------------------------------------- what cannot be done


def run_over_sharded_modules():
    model = sharded(run_of_calls(net()))
    words = r"region `layers\.0 \.\. layers\.2` is a run of 3 calls.*`fully_shard` has sharded.*`wrap`"

    with pytest.raises(UnsupportedError, match=words):
        model(batch(dist.get_rank(), 0))


def run_inside_a_sharded_module():
    compare(net, [root_sharded], [run_of_calls, root_sharded], calls=TWICE, gathers={"": 2})


def recompute_ahead_inside_the_hooks():
    model = sharded(wrapped(net()))
    x = batch(dist.get_rank(), 0)
    with session() as ahead:
        loss = model(x).sum()
        with pytest.raises(UnsupportedError, match=r"`layers\.2\.\w+\.\w+` is sharded now.*`checkpoint\(block, x\)`"):
            ahead.recompute()
        model.layers[1].unshard()
        done = ahead.recompute()
        loss.backward()

    assert done == 1
    assert [layer.calls for layer in model.layers] == [2, 2, 2]


def recompute_ahead_around_the_hooks():
    plain, ours = sharded(net()), sharded(checkpoints(net()))
    x = batch(dist.get_rank(), 0)
    torch.manual_seed(0)
    plain(x).sum().backward()
    torch.manual_seed(0)
    with session() as ahead:
        loss = ours(x).sum()
        done = ahead.recompute(3)
        loss.backward()

    assert done == 3
    assert [layer.calls for layer in ours.layers] == [2, 2, 2]
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())


CASES = {
    case.__name__: case
    for case in (
        wrapped_before,
        wrapped_after,
        wrapped_and_kept,
        wrapped_and_freed,
        only_the_root_sharded,
        only_the_root_sharded_and_freed,
        root_wrapped_before,
        root_wrapped_after_and_freed,
        nested_regions,
        parameters_shared_in_a_block,
        block_called_three_times,
        block_called_three_times_and_freed,
        blocks_called_twice,
        parts_of_blocks_sharded_too,
        replicated_and_sharded,
        frozen_parameters,
        unused_parameters,
        bytes_between_forward_and_backward,
        buffers_that_do_not_change_are_not_copied,
        blocks_of_one_group,
        mixed_precision,
        accumulation_without_sync,
        accumulation_on_gathered_parameters,
        checkpoint_around,
        checkpoint_around_what_is_kept,
        checkpoint_around_what_is_freed,
        checkpoint_around_the_root,
        checkpoint_around_a_block_and_more,
        checkpoint_around_two_blocks,
        checkpoint_around_wrapped_blocks,
        checkpoint_around_in_mixed_precision,
        checkpoint_around_and_accumulation,
        checkpoint_around_and_parameters_shared,
        checkpoint_around_a_block_called_three_times,
        checkpoint_around_blocks_called_twice,
        step_with_regions_inside,
        step_with_regions_around,
        step_on_kept_parameters,
        step_around_kept_parameters,
        foreach_step_with_regions_inside,
        foreach_step_with_regions_around,
        fused_step,
        step_with_the_root_sharded,
        part_written,
        parameters_replaced,
        parameters_without_gradient_stay,
        tensor_parallel_blocks,
        foreach_step_of_tensor_parallel_blocks,
        run_over_sharded_modules,
        run_inside_a_sharded_module,
        recompute_ahead_inside_the_hooks,
        recompute_ahead_around_the_hooks,
    )
}
