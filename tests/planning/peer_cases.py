"""What two processes, or four, do with one model in each of them."""

import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from itertools import count
from threading import Timer
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import models
from logs import Hidden, Log
from planning.gradient_steps import Energy, energy_and_forces, molecule
from planning.steps import profile, traced_peak, under
from probes.memory import record_allocations
from probes.planning import Here, KeepNode, evaluate, flow_of, options_with, predict, profiling
from torchremat import Adaptive, BudgetError, Planner, RepeatWarning, StepError, measure, plan, unwrap, verify

WIDTH = 32
X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


class Framed(nn.Module):
    """Blocks, with parameters before and after them, which are the root's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.blocks, self.head = nn.Linear(WIDTH, WIDTH), net(), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        return self.head(self.blocks(self.inp(x)))


def sharded(mesh=None, **options):
    mesh, model = mesh or init_device_mesh("cpu", (dist.get_world_size(),)), Framed()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(model):
    return model(X).float().square().mean()


def everywhere(value):
    """What each process has."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def verified(model, chosen, step=step):
    chosen.apply(model)
    report = verify(model, step)
    unwrap(model)

    assert report.is_exact
    assert report.peak_bytes == report.predicted_bytes <= chosen.budget_bytes, (report, chosen)
    first, *others = everywhere((chosen, report))
    assert all(first == one for one in others)
    return chosen


def data_parallel():
    model = DistributedDataParallel(net())

    # Exact, the buckets included: as large as all gradients, which may be there before a step or not.
    for accumulates in (False, True):
        chosen = verified(model, plan(model, step, budget="85%", accumulates=accumulates))

        assert chosen.recomputed_calls > 0
        before = chosen.before_bytes
        assert before["communication"] == before["parameters"]
        assert before["gradients"] == accumulates * before["parameters"]
        # A measurement took the buckets for something that the step makes itself.
        measured = measure(model, step, accumulates=accumulates)
        assert measured.communication_bytes == before["parameters"]
        assert measured.gradient_bytes == before["gradients"]
        assert measured.before_bytes == sum(before.values())


def data_parallel_in_parts():
    model, step = models.gpt_step(blocks=3, width=32, context=32, batch=8, vocabulary=32)
    parallel = DistributedDataParallel(model)

    chosen = verified(parallel, Planner(parallel, step, cost="flops").plan("min"), step)

    assert any(one.cuts for one in chosen.held)


class Replicas(nn.Module):
    """Blocks that are replicated one by one, and a part that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(map(DistributedDataParallel, net()))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def data_parallel_inside_of_a_model():
    # A region around one called its forward again in the middle of its backward, which its reducer refuses.
    def by_itself(model):
        x = model.first(X)
        for block in model.blocks:
            x = block(x)
        return x.square().mean()

    for own in (step, by_itself):
        planner = Planner(Replicas(), own, cost="flops")
        assert all(name.endswith(".module") for unit in planner.profile.units.units[1:] for name, _ in unit.keys)
        assert verified(planner.model, planner.plan("min"), own).recomputed_calls > 0


def gradients_as_views_of_buckets():
    # They count once: as buckets before there are any, and then as gradients.
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    expected = sum(one.nbytes for one in model.parameters())
    for is_begun in (False, True):
        before = verified(model, plan(model, step, budget="85%")).before_bytes
        assert (before.get("communication", 0), before["gradients"]) == ((0, expected) if is_begun else (expected, 0))
        step(model).backward()


def at_all_budgets(model):
    """Plans that keep all, about half, and as little as there can be."""
    planner = Planner(model, step)
    most, least = planner.plan("100%").peak_bytes, planner.floor_bytes
    plans = [verified(model, planner.plan(size)) for size in (most, (most + least) // 2, least)]

    assert plans[0].recomputed_calls == 0 < min(one.recomputed_calls for one in plans[1:])
    assert plans[2].peak_bytes < plans[1].peak_bytes < plans[0].peak_bytes


def fully_sharded():
    at_all_budgets(sharded())


def fully_sharded_and_kept_gathered():
    at_all_budgets(sharded(reshard_after_forward=False))


def fully_sharded_over_two_of_four():
    at_all_budgets(sharded(reshard_after_forward=2))


def fully_sharded_in_mixed_precision():
    at_all_budgets(sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))


def fully_sharded_and_gathered_ahead():
    model = sharded()
    for before, after in zip(model.blocks[:-1], model.blocks[1:], strict=True):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    for module in (model, *model.blocks):
        module._set_unshard_async_op(True)

    at_all_budgets(model)


def fully_sharded_in_parts():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for options in ({"reshard_after_forward": False}, {"mp_policy": mixed}):
        model, step = models.gpt_step(blocks=3, width=32, context=32, batch=8, vocabulary=32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

        chosen = verified(model, Planner(model, step, cost="flops").plan("min"), step)

        assert {unit for one in chosen.held if one.cuts for unit in one.units} == {2, 3, 4}


def gradients(model):
    return [one.grad.full_tensor() for one in model.parameters()]


def added_up(model, plans):
    """Gradients of three batches that are reduced with the last; at each point the model may be planned for."""
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        if plans:
            Planner(model, step, cost="flops")
        (step(model) * (number + 1)).backward()
    return gradients(model)


def planning_leaves_what_is_added_up():
    # Planning added its own gradients to those that FSDP2 had not reduced yet, or reduced the user's with its own.
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for options in ({}, {"mp_policy": mixed}, {"reshard_after_forward": False}):
        expected, found = added_up(sharded(**options), False), added_up(sharded(**options), True)

        assert all(map(torch.equal, found, expected))


def planning_leaves_what_is_not_summed_over_replicas():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found = []
    for plans in (False, True):
        model = sharded(mesh)
        for is_last in (False, True):
            model.set_requires_all_reduce(is_last)
            if plans:
                Planner(model, step, cost="flops")
            step(model).backward()
        found.append(gradients(model))

    assert all(map(torch.equal, *found))


def a_step_that_reduces_nothing():
    for options in ({}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}):
        model = sharded(**options)
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            planner = Planner(model, step)
            for size in ("100%", planner.floor_bytes):
                chosen = verified(model, planner.plan(size))
            assert chosen.recomputed_calls > 0
            step(model).backward()  # from now on there are gradients


def a_block_kept_in_part_recomputes_when_its_sharded_weight_is_asked_for():
    # Without reduction gradients are added up in place, so they are gone before another tensor of the block is asked
    # for. The weight of its last product is asked for first, and was taken to be there.
    model = sharded()
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        own = profile(model, step).blocks
        blocks = range(1, 5)
        gelu = [(evaluate(flow_of(own, unit), {2}),) if unit in blocks else () for unit in range(6)]
        (options,) = options_with([own], tuple(gelu), "flops")
        kept = replace(own, options=options)
        for unit in blocks:
            tree = tuple(KeepNode(one, int(one == unit)) for one in range(6))
            with under(model, kept, tree):
                assert traced_peak(model, step) == predict(kept, tree).peak_bytes, unit
        step(model).backward()


def verify_compares_gradients_that_are_not_reduced():
    model, runs = sharded(), Log()

    def other_each_time(model):
        runs.append(1)
        y = model(X)
        y.register_hook(lambda gradient: gradient * len(runs))
        return y.square().mean()

    model.set_requires_gradient_sync(False)
    report = verify(model, other_each_time)

    assert report.is_exact is None and not report.is_repeatable
    assert any("`blocks.0.up.weight` that is not reduced differs" in line for line in report.noise)


def replicated_and_sharded():
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))

    at_all_budgets(sharded(mesh))


def a_forward_alone_leaves_nothing_gathered():
    # It left the root's parameters whole: they counted as there before the step, and were not gathered in it.
    model, other = sharded(), sharded()
    expected = measure(model, step)
    with torch.no_grad():
        other(X)

    found = measure(other, step)

    assert (found.before_bytes, found.peak_bytes) == (expected.before_bytes, expected.peak_bytes)
    assert all(isinstance(one, DTensor) for one in other.parameters())


def frees_of_gloo_are_seen():
    # gloo lets go of a tensor after it has said that it is done, in a thread where nobody sees a free: now and then
    # one of these looked as if it stayed. gloo also makes a copy of each, which nobody else has.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.12 and older
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    part, whole, sums = torch.zeros(1024), torch.zeros(2048), torch.zeros(1024)
    with record_allocations(torch.device("cpu")) as recorder:
        for _ in range(50):
            gathered = torch.empty(2048)
            gather(gathered, part)
            del gathered
            reduce(sums, whole)

    live = recorder.trace.live[1:]
    assert (int(live.max()), int(live[-1])) == (2 * 8192, 0), (live.max(), live[-1])


def memory_that_gloo_still_holds_is_waited_for():
    # It lets go of a tensor before the memory of it, and between the two was time to drop the tensor.
    names = {"all_gather_single", "_allgather_base"} & vars(dist.ProcessGroup).keys()
    own = {name: getattr(dist.ProcessGroup, name) for name in names}
    held, timers = [], []

    def late(name, group, *args):
        work = own[name](group, *args)
        held.append(torch.empty(0).set_(args[0].untyped_storage()))
        timers.append(Timer(0.05, held.clear))
        timers[-1].start()
        return work

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, partialmethod(partial(late, name))))
        stack.enter_context(record_allocations(torch.device("cpu")))
        gather(torch.empty(2048), torch.zeros(1024))
        assert timers
        assert not held


def an_error_of_one_process_is_raised_in_both():
    def fails_in_process_1(model):
        return step(model) if dist.get_rank() == 0 else "no loss"

    with pytest.raises(StepError, match="the step returned a str") as raised:
        plan(DistributedDataParallel(net()), fails_in_process_1, budget="1GiB")

    assert ("in process 1 (this is 0)" in str(raised.value)) == (dist.get_rank() == 0)


def the_larger_batch_counts():
    def uneven(model):
        return model(X[: 32 * (1 + dist.get_rank())]).square().mean()

    alone = Planner(net(), uneven, cost="flops").plan("1GiB").peak_bytes
    together = Planner(DistributedDataParallel(net()), uneven, cost="flops").plan("1GiB")

    small, large = everywhere(alone)
    assert small < large
    # Both have the peak of the larger one, and the buckets of the gradients.
    assert together.peak_bytes == large + together.before_bytes["communication"]


def the_larger_batch_counts_in_each_part_of_a_mesh():
    # One replica, in two parts: the first dimension of the mesh is of one process, which asked nobody.
    def uneven(model):
        return model(X[: 32 * (1 + dist.get_rank())]).square().mean()

    model = sharded(init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    first, second = everywhere(Planner(model, uneven, cost="flops").plan("1GiB"))

    assert first == second


def one_frontier(planner):
    """The frontier of a planner, which is the same in all processes, and so is the plan of each of its points."""
    found = planner.frontier(points=6)
    half = (found.points[0].budget_bytes + found.points[-1].budget_bytes) // 2
    plans = [found.plan(one) for one in (*found.points, half, "90%")]

    first, *others = everywhere((found.points, found.ran_out, plans))
    assert all(first == one for one in others)
    return found


def a_frontier_of_unlike_processes():
    # Each had its own, and the plans were those of the first: when its batch was the smaller one, what units keep in
    # part had too few bytes for the other, which was also warned in every step of inputs larger than planned for.
    for larger, model in enumerate((DistributedDataParallel(net()), sharded())):
        rows = 64 if dist.get_rank() == larger else 32

        def uneven(model, rows=rows):
            return model(X[:rows]).square().mean()

        found = one_frontier(Planner(model, uneven, cost="flops"))

        assert len(found.points) > 3
        for point in found.points[1::2]:
            verified(model, found.plan(point), uneven)


def a_frontier_whose_search_ends_in_one_process():
    for slow in range(2):
        model = sharded()
        planner = Planner(model, step, cost="flops")
        if dist.get_rank() == slow:
            planner.solver.search_budget.most_s = 0.0

        found = one_frontier(planner)

        # One process seeks for all: of equals the first.
        assert found.ran_out == (slow == 0)
        verified(model, found.plan(found.points[-1]))


@contextmanager
def short_of_memory(failing):
    """Lets memory run out in the forward of some watched steps, in process 1 alone."""
    runs, watch = count(), profiling.watch

    def short(*args, **options):
        if dist.get_rank() == 1 and next(runs) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return watch(*args, **options)

    with mock.patch.object(profiling, "watch", short):
        yield


def all_watch_what_one_has_memory_for():
    # A process without room for its units watched halves of the calls inside of them, and those of the others counted
    # as "other modules". Or it left out the watched step of these calls, while others waited in the reductions of it.
    for model, failing, in_halves, has_fine in (
        (sharded(), (0,), False, True),
        (DistributedDataParallel(net()), (0, 1), True, False),
        (sharded(), (0, 1), True, False),
        (DistributedDataParallel(net()), (1,), False, False),
    ):
        with short_of_memory(failing):
            planner = Planner(model, step)

        names = [unit.name for unit in planner.profile.units.units]
        assert sum(name.endswith(".up") for name in names) == 4 * in_halves
        assert (planner.solver.pair.leaves is not None) == has_fine
        verified(model, planner.plan("min"))


def no_process_runs_what_one_has_no_room_for():
    for model in (DistributedDataParallel(net()), sharded()):
        with mock.patch.object(Here, "free_bytes", return_value=[None, 0][dist.get_rank()]):
            planner = Planner(model, step, certify=True)
            chosen = planner.plan("90%")

        assert planner.solver.pair.leaves is None
        assert chosen.plain_source == "predicted"
        assert "does not fit into memory" in str(chosen.certificate)
        verified(model, chosen)


class Counting(Block):
    """A block that counts its calls where no recompute looks, in some processes."""

    def __init__(self):
        super().__init__()
        self.hidden = Hidden(counts=False, calls=0)

    def forward(self, x):
        self.hidden["calls"] += self.hidden["counts"]
        return x + self.down(functional.gelu(self.up(x) * (1 + self.hidden["calls"])))


def what_one_process_would_not_repeat_none_recomputes():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(Counting(), Block(), Counting(), Block()))
    counting = model.module[::2]
    for part in counting:
        part.hidden["counts"] = dist.get_rank() == 1

    def from_zero(model):
        for part in counting:
            part.hidden["calls"] = 0
        return step(model)

    with pytest.warns(RepeatWarning, match=r"`module\.0`, `module\.2`"):
        planner = Planner(model, from_zero)
    chosen = verified(model, planner.plan(planner.floor_bytes), from_zero)

    assert chosen.unlike.keys() == {"module.0", "module.2"}
    assert chosen.recomputed_calls > 0


def no_plan_fits():
    with pytest.raises(BudgetError, match="no plan fits the budget"):
        plan(DistributedDataParallel(net()), step, budget="1KiB")


@contextmanager
def energies():
    """A model of energies, which trains on forces as well: its step takes a gradient itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grad strides do not match")  # torch's own, of a gradient of shape [1, 16]
        torch.manual_seed(0)
        yield DistributedDataParallel(Energy())


def a_step_that_takes_gradients_itself():
    # What it needs is found by running it, in both at the same time.
    given = molecule()

    def step(model):
        return energy_and_forces(model, given)

    with energies() as model:
        planner = Planner(model, step)
        plain = planner.plan("100%").peak_bytes
        least, half = (verified(model, planner.plan(size), step) for size in ("min", "70%"))

        assert least.recomputed_calls > half.recomputed_calls > 0
        assert least.peak_bytes < half.peak_bytes < plain
        first, second = everywhere(planner.frontier(points=3).points)
        assert first == second


def the_larger_step_that_takes_gradients_itself_counts():
    given = molecule(16 + 8 * dist.get_rank())

    def step(model):
        return energy_and_forces(model, given)

    with energies() as model:
        chosen = plan(model, step, budget="60%", cost="flops")  # of which each process has others
        chosen.apply(model)
        peaks = everywhere(measure(model, step).peak_bytes)

        first, second = everywhere(chosen)
        assert first == second
        assert min(peaks) < max(peaks) <= chosen.peak_bytes


def sizes_of_a_step_that_takes_gradients_itself():
    with energies() as model:
        adapting = partial(Adaptive, model, energy_and_forces, shape=lambda given: given[0].shape)
        with adapting(budget=10**9) as adaptive:
            adaptive.learn(*(molecule(atoms + 2 * dist.get_rank()) for atoms in (6, 10, 14)))
            assert adaptive.learned == 3
            adaptive(molecule(12 + dist.get_rank()))
            (largest,) = everywhere(adaptive.plans)[0]
            assert largest.shape == (13,) and largest.recomputed_calls == 0
        with adapting(budget=largest.peak_bytes) as smaller:
            smaller.learn(*map(molecule, (6, 8, 10)))
            smaller(molecule(13))
            (planned,) = everywhere(smaller.plans)[0]
            assert planned.recomputed_calls > 0
            assert planned.peak_bytes < largest.peak_bytes


CASES = {
    case.__name__: case
    for case in (
        data_parallel,
        data_parallel_in_parts,
        data_parallel_inside_of_a_model,
        gradients_as_views_of_buckets,
        fully_sharded,
        fully_sharded_and_kept_gathered,
        fully_sharded_in_mixed_precision,
        fully_sharded_and_gathered_ahead,
        fully_sharded_in_parts,
        a_forward_alone_leaves_nothing_gathered,
        planning_leaves_what_is_added_up,
        planning_leaves_what_is_not_summed_over_replicas,
        a_step_that_reduces_nothing,
        a_block_kept_in_part_recomputes_when_its_sharded_weight_is_asked_for,
        verify_compares_gradients_that_are_not_reduced,
        frees_of_gloo_are_seen,
        memory_that_gloo_still_holds_is_waited_for,
        an_error_of_one_process_is_raised_in_both,
        the_larger_batch_counts,
        the_larger_batch_counts_in_each_part_of_a_mesh,
        a_frontier_of_unlike_processes,
        a_frontier_whose_search_ends_in_one_process,
        a_step_that_takes_gradients_itself,
        the_larger_step_that_takes_gradients_itself_counts,
        sizes_of_a_step_that_takes_gradients_itself,
        all_watch_what_one_has_memory_for,
        no_process_runs_what_one_has_no_room_for,
        what_one_process_would_not_repeat_none_recomputes,
        no_plan_fits,
    )
}

OF_FOUR = {case.__name__: case for case in (fully_sharded_over_two_of_four, replicated_and_sharded)}
