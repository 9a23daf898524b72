"""Three processes whose reductions have state of their own, which planning leaves as it was."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from torchremat import StepError, UnsupportedError, measure, plan, unwrap, verify

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts some of its optimizers
    from torch.distributed.optim import PostLocalSGDOptimizer, _apply_optimizer_in_backward

WIDTH = 64
LARGE = 1 << 13  # elements of a tensor that is not copied for being small


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(one for _ in range(3) for one in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def own(*shape):
    """Numbers of this process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def step(model):
    return model(own(16, WIDTH)).square().mean()


def planned(model, step=step, optimizer=None):
    plan(model, step, budget="min", cost="flops", optimizer=optimizer).apply(model)
    assert verify(model, step).is_exact
    unwrap(model)


def gradients(model):
    return [getattr(one.grad, "_local_tensor", one.grad).clone() for one in model.parameters()]


def trained(model, *, at=(), steps=4):
    """The gradients of some steps, before which the model may be planned for."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for number in range(steps):
        if number in at:
            planned(model)
        optimizer.zero_grad()
        step(model).backward()
        found += gradients(model)
        optimizer.step()
    return found


def same(*each):
    return all(map(torch.equal, *each))


def buckets_that_no_training_step_has_made():
    # The first run made them, in the order of gradients. A sum of three depends on its place in a bucket, so the first
    # step had other gradients.
    def model():
        return DistributedDataParallel(net(), bucket_cap_mb=0.02)

    plain = trained(model())

    for at in ((0,), (1,), (0, 1, 2)):
        assert same(trained(model(), at=at), plain), at


def a_hook_with_errors_memory_and_random_numbers():
    # Its iteration went from 0 to 20 by one plan and one report.
    def model():
        made = DistributedDataParallel(net())
        state = PowerSGDState(None, start_powerSGD_iter=2)
        made.register_comm_hook(state, powerSGD_hook)
        return made, state

    (plain, state), (other, theirs) = model(), model()

    assert same(trained(other, at=(0, 3)), trained(plain))
    assert theirs.iter == state.iter == 4
    assert same(*(one.error_dict.values() for one in (theirs, state)))
    assert next(iter(state.error_dict.values())).count_nonzero() > LARGE


def a_hook_of_a_sharded_model():
    def found(at):
        model = fully_shard(net(), mesh=init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard")))
        errors, runs = torch.zeros(2 * LARGE), []

        def hook(gradient):
            runs.append(1)
            own = errors[: gradient.numel()].view_as(gradient)
            gradient.add_(own.add_(gradient), alpha=0.01)

        model.set_all_reduce_hook(hook)
        return trained(model, at=at), errors, runs

    (plain, errors, runs), (other, theirs, calls) = found(()), found((0, 2))

    assert same(other, plain) and torch.equal(theirs, errors) and calls == runs


def averages_of_models():
    def found(at):
        model = DistributedDataParallel(net())
        model.register_comm_hook(PostLocalSGDState(None, dist.new_subgroups(1)[0], 2), post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(torch.optim.Adam(model.parameters(), 0.1), averager)
        for number in range(4):
            if number in at:
                planned(model, optimizer=optimizer)
            optimizer.zero_grad()
            step(model).backward()
            optimizer.step()
        return [*model.parameters()], averager.step

    (plain, steps), (other, theirs) = found(()), found((0, 2))

    assert same(other, plain) and theirs == steps == 4


class Measured(nn.Module):
    """A layer with a history of the largest inputs of all processes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.history = torch.zeros(LARGE)
        self.all = [[torch.zeros(LARGE) for _ in range(dist.get_world_size())]]

    def forward(self, x):
        dist.all_gather(self.all[0], x.detach().abs().amax().repeat(LARGE))
        dist.all_reduce(self.history, op=dist.ReduceOp.MAX)
        return self.linear(x) * (1 + self.history[0])


def tensors_that_a_collective_writes():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(Measured(), nn.GELU(), Measured()))
    for part in model.module[::2]:
        part.history.fill_(dist.get_rank())

    measure(model, step)

    for part in model.module[::2]:
        assert part.history.eq(dist.get_rank()).all()
        assert not any(one.any() for one in part.all[0])


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.used = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), "a"

    def forward(self, x):
        return getattr(self, self.used)(x)


def parameters_that_only_a_rehearsal_has_used():
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    with model.no_sync():
        planned(model)
    model.module.used = "b"
    step(model).backward()

    assert model.module.a.weight.grad is None


def parameters_that_are_to_be_reduced_later():
    # They were not: after the plan each process had its own gradient of `a`.
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    with model.no_sync():
        step(model).backward()
    model.module.used = "b"
    for planned_for in (model, model.module):
        with pytest.raises(UnsupportedError, match=r"under `no_sync\(\)`, and has noted whose gradients are to be re"):
            planned(planned_for)
    step(model).backward()
    planned(model)

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, model.module.a.weight.grad)
    assert same(*found[:2]) and same(*found[1:])


def optimizers_in_a_backward():
    # The first one trained, and the second one's hook was registered once more by each run, which torch refuses.
    hooked, own = DistributedDataParallel(net()), net()
    hooked._register_fused_optim(torch.optim.SGD, 0.1)
    _apply_optimizer_in_backward(torch.optim.SGD, own.parameters(), {"lr": 0.1})
    for model, name in (
        (hooked, "its communication hook `hook_then_optimizer_wrapper`"),
        (DistributedDataParallel(own), "`_apply_optimizer_in_backward`"),
    ):
        with pytest.raises(UnsupportedError, match=f"trains in its backward, by {name}. To plan"):
            planned(model)
        assert same(model.parameters(), net().parameters())
        planned(net())


def inputs_of_different_number():
    model = DistributedDataParallel(net())
    with Join([model]), pytest.raises(UnsupportedError, match=r"is in a `with Join\(...\)`, where a process without"):
        planned(model)


def a_loss_in_parts():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 12))
    parts = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"2": parts})
    x, y = torch.ones(16, WIDTH), torch.zeros(16, dtype=torch.long)

    def loss(model):
        return functional.cross_entropy(model(x), y)

    def entered(model):
        with loss_parallel():
            return loss(model)

    with loss_parallel():
        planned(model, loss)
    for asked in (planned, measure, verify):
        with pytest.raises(StepError, match=r"under `loss_parallel\(\)`, which ended before the back"):
            asked(model, entered)


def a_sequence_in_parts():
    mesh, x = init_device_mesh("cpu", (dist.get_world_size(),)), own(2, 6 * dist.get_world_size(), WIDTH)
    whole = x.clone()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        planned(net(), lambda model: model(x).square().mean())

        assert x.shape == (2, 6, WIDTH)
    assert torch.equal(x, whole)


CASES = {
    case.__name__: case
    for case in (
        buckets_that_no_training_step_has_made,
        a_hook_with_errors_memory_and_random_numbers,
        a_hook_of_a_sharded_model,
        averages_of_models,
        tensors_that_a_collective_writes,
        parameters_that_only_a_rehearsal_has_used,
        parameters_that_are_to_be_reduced_later,
        optimizers_in_a_backward,
        inputs_of_different_number,
        a_loss_in_parts,
        a_sequence_in_parts,
    )
}
