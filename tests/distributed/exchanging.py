"""What other processes have sent is kept by a policy: the recompute exchanges nothing, and its gradients are equal."""

import gc
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from policies.counting import Counted
from torchremat import CheckpointError, Host, PolicyError, checkpoint, checkpointed, name, session
from torchremat.policies import everything_saved, save_matmuls, save_only_these_names, save_operators
from torchremat.regions.selective.op_info import op_info_of

# What torch called these before 2.13.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
functional_gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
functional_scatter_single = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

RECEIVED = save_operators("c10d.*", "_c10d_functional.*")


def peer():
    return 1 - dist.get_rank()


def buffers(x, count=2):
    return [torch.empty_like(x) for _ in range(count)]


def all_reduce(x):
    y = x + 1
    dist.all_reduce(y)
    return y


def all_reduce_later(x):
    y = x + 1
    work = dist.all_reduce(y, async_op=True)
    (reduced,) = work.get_future().wait()
    assert work.wait() and work.is_completed()
    return reduced + y


def all_reduce_together(x):
    y, z = x + 1, x + 2
    with _coalescing_manager(async_ops=True) as both:
        dist.all_reduce(y)
        dist.all_reduce(z)
    both.wait()
    return y * z


def all_gather(x):
    parts = buffers(x)
    dist.all_gather(parts, x)
    return parts[0] - 3 * parts[1]


def all_gather_base(x):
    whole = x.new_empty(2 * len(x), *x.shape[1:])
    gather_single(whole, x)
    return whole[: len(x)] - 3 * whole[len(x) :]


def all_gather_objects(x):
    found = [None, None]
    dist.all_gather_object(found, {"rank": dist.get_rank(), "sum": x.sum().item()})
    return x * (found[0]["sum"] - found[1]["sum"])


def reduce_scatter(x):
    part = torch.empty_like(x)
    dist.reduce_scatter(part, [x, 2 * x])
    return part


def reduce_scatter_base(x):
    part = torch.empty_like(x)
    scatter_single(part, torch.cat([x, 2 * x]))
    return part


def all_to_all_base(x):
    own = torch.empty_like(x)
    dist.all_to_all_single(own, x)
    return own


def broadcast(x):
    y = x * (1 + dist.get_rank())
    dist.broadcast(y, 1)
    return y


def reduce(x):
    y = x * (1 + dist.get_rank())
    dist.reduce(y, 1)
    return y


def gather(x):
    parts = buffers(x) if dist.get_rank() == 0 else None
    dist.gather(x, parts)
    return x if parts is None else parts[1] - parts[0]


def scatter(x):
    own = torch.empty_like(x)
    dist.scatter(own, [x, 2 * x] if dist.get_rank() == 0 else None)
    return own


def barrier(x):
    dist.barrier()
    return x + 1


def ring(x):
    received = torch.empty_like(x)
    sends, receives = dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, received, peer())
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return received


def to_and_fro(x):
    # Each process is first in one of two sends.
    received = torch.empty_like(x)
    if dist.get_rank():
        dist.send(x, 0)
        dist.recv(received, 0)
    else:
        dist.recv(received, 1)
        dist.send(received * 2, 1)
    return received


def halo(x):
    # The middle is written before the ends have come.
    padded = x.new_empty(len(x) + 2, *x.shape[1:])
    works = [dist.isend(x[:1].contiguous(), peer(), tag=1), dist.isend(x[-1:].contiguous(), peer(), tag=2)]
    works += [dist.irecv(padded[-1:], peer(), tag=1), dist.irecv(padded[:1], peer(), tag=2)]
    padded[1:-1] = x
    for work in works:
        work.wait()
    return padded[:-2] + padded[2:]


def in_chunks(x):
    # Both are under way in one tensor.
    whole = x.new_empty(2 * len(x), *x.shape[1:])
    works = [
        dist.all_reduce(whole[: len(x)].copy_(x), async_op=True),
        dist.all_reduce(whole[len(x) :].copy_(2 * x), async_op=True),
    ]
    for work in works:
        work.wait()
    return whole[: len(x)] - whole[len(x) :]


def written_afterwards(x):
    y = all_reduce(x)
    z = y.sin()
    y.mul_(2)
    return y + z


def reduced_twice(x):
    y = all_reduce(x)
    z = y.sin()
    dist.all_reduce(y)
    return y + z


def functional_reduce(x):
    return functional.all_reduce(x, "sum", dist.group.WORLD) + 1


def functional_gather(x):
    whole = functional_gather_single(x, 0, dist.group.WORLD)
    return whole[: len(x)] - 3 * whole[len(x) :]


def functional_scatter(x):
    return functional_scatter_single(torch.cat([x, 2 * x]), "sum", 0, dist.group.WORLD) + 1


def functional_exchange(x):
    return functional.all_to_all_single(x, None, None, dist.group.WORLD) + 1


def functional_in_place(x):
    y = x + 1
    torch.ops._c10d_functional.all_reduce_(y, "sum", dist.group.WORLD.group_name)
    return torch.ops._c10d_functional.wait_tensor(y) + 1


def functional_written_afterwards(x):
    y = functional.all_reduce(x, "sum", dist.group.WORLD)
    z = y.sin()
    y.mul_(2)
    return y + z


KINDS = [
    all_reduce,
    all_reduce_later,
    all_reduce_together,
    all_gather,
    all_gather_base,
    all_gather_objects,
    reduce_scatter,
    reduce_scatter_base,
    all_to_all_base,
    broadcast,
    reduce,
    gather,
    scatter,
    barrier,
    ring,
    to_and_fro,
    halo,
    in_chunks,
    written_afterwards,
    reduced_twice,
    functional_reduce,
    functional_gather,
    functional_scatter,
    functional_exchange,
    functional_in_place,
    functional_written_afterwards,
]


def around(exchange):
    """A function that saves what an exchange gives, and more after it, which a recompute has to reach."""

    def function(x):
        return (exchange((x * 2).detach()) * x.sin()).tanh().cos()

    return function


def leaf():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, 3, generator=generator).requires_grad_()


def exchanges(packet):
    found = (getattr(one, packet, None) for one in (torch.ops.c10d, torch.ops._c10d_functional))
    return any(one is not None and op_info_of(one.default).communicates for one in found)


def run(function, times=1):
    """The gradient of x, and how many operators of each kind have exchanged anything."""
    x = leaf()
    with Counted() as counted:
        loss = function(x).sum()
        grads = [torch.autograd.grad(loss, x, retain_graph=time + 1 < times)[0] for time in range(times)]
    assert all(torch.equal(one, grads[0]) for one in grads)
    return grads[0], {name: count for name, count in counted.counts.items() if exchanges(name)}


def kept(exchange):
    plain, once = run(around(exchange))
    recomputed, twice = run(checkpointed(around(exchange)))
    ours, exchanged = run(checkpointed(around(exchange), policy=RECEIVED))

    assert once
    assert torch.equal(ours, plain) and torch.equal(recomputed, plain)
    assert twice == {name: 2 * count for name, count in once.items()}
    assert exchanged == once


def kept_for_two_backwards():
    for exchange in (all_gather_base, ring, functional_gather):
        plain, once = run(around(exchange), times=2)
        ours, exchanged = run(checkpointed(around(exchange), policy=RECEIVED), times=2)

        assert torch.equal(ours, plain)
        assert exchanged == once


def kept_in_a_region_around():
    for exchange in (all_gather_base, ring, functional_gather):
        function = around(exchange)

        def nested(x, function=function):
            return checkpoint(lambda t: checkpointed(function, policy=RECEIVED)(t).tanh(), x)

        def inherited(x, function=function):
            return checkpointed(lambda t: checkpoint(function, t).tanh(), policy=RECEIVED)(x)

        plain, once = run(lambda x, function=function: function(x).tanh())

        for one in (nested, inherited):
            ours, exchanged = run(one)
            assert torch.equal(ours, plain)
            assert exchanged == once


def kept_ahead():
    for exchange in (all_gather_base, ring):
        plain, once = run(around(exchange))
        x = leaf()
        with Counted() as counted, session() as ahead:
            loss = checkpointed(around(exchange), policy=RECEIVED)(x).sum()
            ahead.recompute(1)
            loss.backward()

        assert torch.equal(x.grad, plain)
        assert {one: counted.counts[one] for one in once} == once


def kept_with_everything():
    for exchange in KINDS:
        plain, once = run(around(exchange))
        ours, exchanged = run(checkpointed(around(exchange), policy=everything_saved))

        assert torch.equal(ours, plain)
        assert exchanged == once


def in_a_store():
    # A functional collective is waited for first; what c10d receives is complete only later, so it runs again.
    for exchange, runs in ((functional_gather, 1), (all_gather_base, 2), (ring, 2)):
        plain, once = run(around(exchange))
        ours, exchanged = run(checkpointed(around(exchange), policy=RECEIVED.into(Host())))

        assert torch.equal(ours, plain)
        assert exchanged == {one: runs * count for one, count in once.items()}


def some_run_again():
    # In their order: of two kinds only one is kept.
    def both(x):
        return all_gather_base(x) + all_to_all_base(x) + all_gather(x)

    plain, _ = run(around(both))
    ours, exchanged = run(checkpointed(around(both), policy=save_operators("c10d.alltoall_base_")))

    assert torch.equal(ours, plain)
    assert exchanged == {"_allgather_base_": 2, "alltoall_base_": 1, "allgather_": 2}


def of_other_operators():
    # What a policy keeps of others is copied before a collective writes to it.
    def reduced_product(x):
        y = x @ x.T
        dist.all_reduce(y)
        return y @ x

    plain, _ = run(around(reduced_product))
    for policy in (save_matmuls, save_matmuls | RECEIVED):
        ours, _ = run(checkpointed(around(reduced_product), policy=policy))
        assert torch.equal(ours, plain)


def of_a_name():
    # The name is given after the collective, which has written to the operator's output.
    def named(x):
        y = x + 1
        dist.all_reduce(y)
        return name(y, "reduced") * 2

    def named_later(x):
        return name(functional.all_reduce(x, "sum", dist.group.WORLD) + 0, "reduced")

    for one in (named, named_later):
        plain, _ = run(around(one))
        ours, _ = run(checkpointed(around(one), policy=save_only_these_names("reduced")))
        assert torch.equal(ours, plain)


def halves_of_an_exchange():
    def ring(x):
        received = torch.empty_like(x)
        work = dist.irecv(received, peer())
        try:
            dist.send(x, peer())
        finally:
            work.wait()
        return received

    for operator in ("c10d.recv_", "c10d.send"):
        with pytest.raises(PolicyError, match=r"keeps (no )?c10d\.send\.default, unlike another send or receive"):
            checkpointed(around(ring), policy=save_operators(operator))(leaf())


def from_anyone():
    # Nobody has sent anything: it is refused before the wait.
    with pytest.raises(PolicyError, match="which process has sent what it received is known only when it runs"):
        checkpointed(around(lambda x: dist.recv(torch.empty_like(x))), policy=RECEIVED)(leaf())


def lost():
    # It would run again on the processes that wrote to it, and not on the others.
    def function(x):
        y = all_reduce((x * 2).detach())
        return y, (y * x.sin()).tanh().cos()

    received, out = checkpointed(function, policy=RECEIVED)(leaf())
    received.zero_()

    with pytest.raises(CheckpointError, match=r"c10d\.allreduce_\.default: .* has been written in place since"):
        out.sum().backward()


def into_older_memory():
    # A later collective into it does not show, as c10d moves no version.
    whole = torch.empty(8, 3)

    def gather(x):
        gather_single(whole, x)
        return whole[: len(x)] + 1

    out = checkpointed(around(gather), policy=RECEIVED)(leaf())

    with pytest.raises(CheckpointError, match=r"_allgather_base_\.default: .* memory that is older than the region"):
        out.sum().backward()


def freed():
    # Once the recompute has them they are the caller's, and without a backward they go with the graph.
    for ends in (lambda out: out.sum().backward(), lambda out: None):
        gc.disable()
        try:
            with Counted() as counted:
                x = leaf()
                out = checkpointed(around(all_gather_base), policy=RECEIVED)(x)
                ends(out)
                del out
                x.grad = None
                patience = 100
                while counted.live_bytes(without=x) and patience:  # gloo's threads let go a little later
                    time.sleep(0.01)
                    patience -= 1
                assert counted.live_bytes(without=x) == 0
        finally:
            gc.enable()


CASES = {
    **{f"kept_{exchange.__name__}": partial(kept, exchange) for exchange in KINDS},
    **{
        case.__name__: case
        for case in (
            kept_for_two_backwards,
            kept_in_a_region_around,
            kept_ahead,
            kept_with_everything,
            in_a_store,
            some_run_again,
            of_other_operators,
            of_a_name,
            halves_of_an_exchange,
            from_anyone,
            lost,
            into_older_memory,
            freed,
        )
    },
}
