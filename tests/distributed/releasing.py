"""Gradients released in the backward, and optimizer state in a store, over two processes."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distributed.comparing import train
from distributed.fully_sharded import mesh, sharded, wrapped
from distributed.models import batch, net, partly_frozen, some, tied_inside
from optimizing.loops import in_memory
from torchremat import Disk, Host, UnsupportedError, offload_optimizer, plan, release_gradients
from torchremat.optimizing.tombstones import ReleasedGradient

STEPS = 4
AdamW = partial(torch.optim.AdamW, lr=0.125)


def released(model, optimizer):
    release_gradients(model, optimizer)


def stored(model, optimizer):
    offload_optimizer(optimizer, Host(), min_bytes=8)


def both(model, optimizer):
    released(model, optimizer)
    offload_optimizer(optimizer, Disk(), min_bytes=8)


def planned(model, optimizer):
    def loss_of(model):
        return model(batch(dist.get_rank(), 0)).square().sum()

    options = {"budget": "min", "cost": "flops", "optimizer": optimizer}
    lowest = plan(model, loss_of, **options)
    found = plan(model, loss_of, **options, release_gradients=True)
    chosen = plan(model, loss_of, **options, release_gradients="auto")
    assert (chosen.stepping, chosen.tree, chosen.peak_bytes) == (found.stepping, found.tree, found.peak_bytes)
    assert found.stepping.releases and found.before_bytes["gradients"] == 0
    shards = [one.to_local() for one in model.parameters()]
    assert found.released_bytes == sum(one.nbytes for one in shards)
    assert found.plain_peak_bytes == lowest.plain_peak_bytes
    assert found.peak_bytes < lowest.peak_bytes
    found.apply(model)


def nothing(model, optimizer):
    """The plain loop."""


def trained(build, prepare, *transformations, steps=STEPS):
    model = build()
    for transform in transformations:
        model = transform(model)
    optimizer = AdamW(model.parameters())
    prepare(model, optimizer)
    for number in range(steps):
        optimizer.zero_grad()
        train(model, dist.get_rank(), number, 1)
        kinds = {type(p.grad) for p in model.parameters() if p.grad is not None}
        optimizer.step()
    assert (ReleasedGradient in kinds) == (prepare in (released, both, planned))
    if prepare in (stored, both):
        counts = [one for entries in optimizer.state.values() for one in [dict.__getitem__(entries, "step")]]
        assert in_memory(optimizer) == 4 * len(counts)
    return [whole(p) for p in model.parameters()], whole(copy.deepcopy(optimizer.state_dict()["state"]))


def whole(one):
    if isinstance(one, DTensor):
        return one.detach().full_tensor()
    if isinstance(one, dict):
        return {key: whole(value) for key, value in one.items()}
    return one.detach().clone() if isinstance(one, torch.Tensor) else one


def same(one, other):
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other)


def compare(build, prepare, *transformations):
    plain, plain_state = trained(build, nothing, *transformations)
    own, own_state = trained(build, prepare, *transformations)
    assert all(map(same, own, plain))
    assert same(own_state, plain_state)


def shards_are_released():
    compare(net, released, sharded)


def state_of_shards_is_stored():
    compare(net, stored, sharded)


def shards_are_released_and_their_state_stored():
    compare(net, both, sharded)


def shards_are_released_under_regions():
    compare(net, both, wrapped, sharded)


def only_the_root_is_sharded():
    compare(net, both, partial(sharded, modules=[]))


def shards_of_tied_parameters():
    compare(tied_inside, both, sharded)


def shards_that_are_frozen():
    compare(partly_frozen, both, sharded)


def shards_without_gradients():
    compare(some, both, sharded)


def a_plan_releases_shards():
    compare(net, planned, sharded)


def state_under_data_parallelism():
    compare(net, stored, DistributedDataParallel)


def data_parallelism_is_refused():
    model = DistributedDataParallel(net())
    for handed in (model, model.module):
        with pytest.raises(UnsupportedError, match="its buckets keep the memory of all gradients"):
            release_gradients(handed, AdamW(model.parameters()))


def data_parallelism_that_comes_later_is_refused_before_a_step():
    """Each process would step on its own gradients, and the replicas would drift apart."""
    model = net()
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    model = DistributedDataParallel(model)
    before = [whole(p) for p in model.parameters()]

    with pytest.raises(UnsupportedError, match="a DistributedDataParallel has these parameters"):
        model(batch(dist.get_rank(), 0)).square().sum().backward()

    assert all(map(same, [whole(p) for p in model.parameters()], before))


def buckets_of_data_parallelism_stay():
    """Why it is refused: the memory that is reduced is not freed with the gradients, which can be views of it."""
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    found = []
    for number in range(3):
        model.zero_grad()
        model(batch(dist.get_rank(), number)).square().sum().backward()
        memories = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage() for p in model.parameters()}
        found.append((set(memories), sum(one.nbytes() for one in memories.values())))

    assert found[1] == found[2]
    assert found[2][1] == sum(p.nbytes for p in model.parameters())


def shards_that_accumulate():
    """Gradients that FSDP2 accumulates without reducing come to the shards in the last backward alone."""

    def trained(prepare):
        model = sharded(net())
        optimizer = AdamW(model.parameters())
        release = prepare(model, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                if release is not None and part == 1:
                    release.last_microbatch()
                torch.manual_seed(part)
                model(batch(dist.get_rank(), 2 * number + part)).square().sum().backward()
            optimizer.step()
        return [whole(p) for p in model.parameters()]

    own = trained(partial(release_gradients, accumulates=True))
    assert all(map(same, own, trained(lambda *_: None)))


def shards_are_freed_one_group_after_the_other():
    """A group's gradients are released together: its shards are views of what was reduced."""
    model = net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    model = fully_shard(model, mesh=mesh())
    optimizer = AdamW(model.parameters())
    release_gradients(model, optimizer)
    order = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: order.append((name, type(p.grad).__name__)))
    train(model, dist.get_rank(), 0, 1)

    assert len(order) == len([*model.parameters()])
    assert {kind for _, kind in order} == {"ReleasedGradient"}
    optimizer.step()


CASES = {
    case.__name__: case
    for case in (
        shards_are_released,
        state_of_shards_is_stored,
        shards_are_released_and_their_state_stored,
        shards_are_released_under_regions,
        only_the_root_is_sharded,
        shards_of_tied_parameters,
        shards_that_are_frozen,
        shards_without_gradients,
        a_plan_releases_shards,
        state_under_data_parallelism,
        data_parallelism_is_refused,
        data_parallelism_that_comes_later_is_refused_before_a_step,
        buckets_of_data_parallelism_stay,
        shards_that_accumulate,
        shards_are_freed_one_group_after_the_other,
    )
}
