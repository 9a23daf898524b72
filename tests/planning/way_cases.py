"""Plans of two processes that choose how the optimizer steps, and stores, for shards and parts of parameters."""

import copy
import time
from functools import partial
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from optimizing.loops import equal
from planning.peer_cases import Framed, everywhere, one_frontier, sharded, step
from planning.steps import with_declared_speed
from torchremat import Disk, Host, Plan, Planner, UnsupportedError, fit, plan, unwrap, verify

AdamW = partial(torch.optim.AdamW, lr=0.125)


def in_parts():
    """Each block over both processes, its parameters DTensors, with an optimizer of its part in each."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), Framed()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def replicated():
    """A model whose buckets are those that it keeps: they are made anew in the second forward."""
    model = DistributedDataParallel(Framed())
    for _ in range(2):
        step(model).backward()
    model.zero_grad()
    return model


def local(one):
    """This process's part of a tensor, and of all in a nesting."""
    if isinstance(one, DTensor):
        return one.detach().to_local().clone()
    if isinstance(one, dict):
        return {key: local(value) for key, value in one.items()}
    return one.detach().clone() if isinstance(one, torch.Tensor) else one


def trained(build, prepare=lambda model, optimizer: None):
    """What three steps make of a model, its gradients where the last step has left them, and of its optimizer."""
    model = build()
    optimizer = AdamW(model.parameters())
    chosen = prepare(model, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        (step(model) * (number + 1)).backward()
        optimizer.step()
    releases = chosen is not None and chosen.stepping.releases
    gradients = [None if releases else local(p.grad) for p in model.parameters()]
    return [local(p) for p in model.parameters()], gradients, local(copy.deepcopy(optimizer.state_dict()["state"]))


def chosen_in_both(build, way, *, above_bytes=0, **options):
    """The smallest plan, in a way of stepping, is the same in both processes, exact, and has the peak it predicts."""

    def planned(model, optimizer):
        found = plan(model, step, budget="min", optimizer=optimizer, cost="flops", **options)
        assert str(found.stepping) == way
        first, second = everywhere(found)
        assert first == second
        found.apply(model)
        report = verify(model, step, optimizer=optimizer)
        assert report.is_exact
        assert found.step_peak_bytes - report.peak_bytes in range(above_bytes + 1), (report, found)
        unwrap(model)
        with TemporaryDirectory() as folder:
            found.save(f"{folder}/plan.json")
            loaded = Plan.load(f"{folder}/plan.json")
        stores = {name: value for name, value in options.items() if "store" in name}
        loaded.apply(model, optimizer=optimizer, **stores)
        return found

    with with_declared_speed():
        own, plain = trained(build, planned), trained(build)
    assert equal(own[0], plain[0])
    assert own[1][0] is None or equal(own[1], plain[1])
    assert equal(own[2], plain[2])


def gradients_of_shards_are_released():
    chosen_in_both(sharded, "gradients released", release_gradients="auto")


def state_of_shards_is_stored():
    chosen_in_both(sharded, "state stored", optimizer_store=Disk())


def shards_are_released_and_their_state_stored():
    chosen_in_both(sharded, "gradients released, state stored", release_gradients="auto", optimizer_store=Host())


def saved_tensors_of_shards_are_stored():
    chosen_in_both(sharded, "plain", stores=[Disk()])


def gradients_of_parts_are_released():
    chosen_in_both(in_parts, "gradients released", release_gradients=True)


def state_of_parts_is_stored():
    chosen_in_both(in_parts, "state stored", optimizer_store=Disk())


def parts_are_released_and_their_state_stored():
    chosen_in_both(in_parts, "gradients released, state stored", release_gradients="auto", optimizer_store=Disk())


def saved_tensors_of_parts_are_stored():
    chosen_in_both(in_parts, "plain", stores=[Disk()])


def state_of_replicas_is_stored():
    chosen_in_both(replicated, "state stored", optimizer_store=Disk())


def saved_tensors_of_replicas_are_stored():
    # 128 bytes less than predicted, as in one process: the gradient of a bias is made a little later.
    chosen_in_both(replicated, "plain", above_bytes=128, stores=[Disk()])


class Wide(nn.Module):
    """Parameters that are large enough to leave, whose gradients hooks of the user sum up over the processes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32)) for _ in range(6))
        )
        for one in self.parameters():
            one.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))

    def forward(self, x):
        return self.blocks(x)


def parameters_of_replicas_are_stored():
    # Those in memory at a time are counted by an upper bound.
    chosen_in_both(Wide, "parameters stored", above_bytes=2**18, parameter_store=Disk())


def choices(model, step=step, **options):
    """The plans for some budgets by seconds, the same in both processes, and all ways of stepping among them."""
    optimizer = AdamW(model.parameters())
    planner = Planner(model, step, optimizer=optimizer, release_gradients="auto", **options)
    least, most = planner.floor_bytes, planner.plan("100%").peak_bytes
    plans = [planner.plan(size) for size in (most, (least + most) // 2, planner.profiled.lowest_bytes - 1, least)]
    first, second = everywhere((plans, planner.floor_bytes))
    assert first == second
    assert plans[0].stepping != plans[-1].stepping
    for one in plans[1:]:
        one.apply(model)
        report = verify(model, step, optimizer=optimizer)
        unwrap(model)
        assert report.is_exact
        assert report.peak_bytes == one.peak_bytes <= one.budget_bytes, report
    assert one_frontier(planner).points[-1].stepping == plans[-1].stepping


def a_process_that_is_slow():
    def slow(model):
        end_s = time.perf_counter() + 0.02 * dist.get_rank()
        while time.perf_counter() < end_s:
            pass
        return step(model)

    choices(sharded(), slow, optimizer_store=Host())


class Slow(Host):
    """A store that is slow in process 1."""

    def put(self, tensor):
        time.sleep(0.02 * dist.get_rank())
        return super().put(tensor)


def a_store_that_is_slow_in_one_process():
    model = in_parts()
    chosen = plan(model, step, budget="80%", stores=[Slow()])
    planner = Planner(model, step, optimizer=AdamW(model.parameters()), optimizer_store=Slow())
    moving = planner.plan(planner.floor_bytes)
    first, second = everywhere((chosen, chosen.speeds, moving, moving.stepping_seconds))
    assert first == second
    assert chosen.speeds[0].out.tensor_s > 0.01
    assert moving.stepping_seconds > 0.1


def a_fit_in_a_way():
    model = sharded()
    optimizer = AdamW(model.parameters())
    fit(model, step, budget="min", optimizer=optimizer, release_gradients="auto", optimizer_store=Host())
    step(model).backward()
    optimizer.step()
    assert all(type(one.grad).__name__ == "ReleasedGradient" for one in model.parameters())


def what_cannot_be_is_refused_before_anything_runs():
    runs = []

    def counted(model):
        runs.append(1)
        return step(model)

    for build, options, words in (
        (sharded, {"parameter_store": Host()}, r"inp\.weight is a DTensor, whose memory belongs to its class"),
        (in_parts, {"parameter_store": Host()}, "is a DTensor, whose memory belongs to its class"),
        (replicated, {"parameter_store": Host()}, "a DistributedDataParallel has these parameters"),
        (replicated, {"release_gradients": "auto"}, "its buckets keep the memory of all gradients"),
    ):
        model = build()
        with pytest.raises(UnsupportedError, match=words):
            plan(model, counted, budget="min", optimizer=AdamW(model.parameters()), **options)
    assert not runs


CASES = {
    case.__name__: case
    for case in (
        gradients_of_shards_are_released,
        state_of_shards_is_stored,
        shards_are_released_and_their_state_stored,
        saved_tensors_of_shards_are_stored,
        gradients_of_parts_are_released,
        state_of_parts_is_stored,
        parts_are_released_and_their_state_stored,
        saved_tensors_of_parts_are_stored,
        state_of_replicas_is_stored,
        saved_tensors_of_replicas_are_stored,
        parameters_of_replicas_are_stored,
        a_process_that_is_slow,
        a_store_that_is_slow_in_one_process,
        a_fit_in_a_way,
        what_cannot_be_is_refused_before_anything_runs,
    )
}
