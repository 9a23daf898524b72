"""Who plans together, shown by the step: what two processes, or four, do with models that communicate by themselves."""

import datetime
import tempfile
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.communicating.functions import Copied, Rotated
from planning.peer_cases import Block, Counting, X, net, step, verified
from policies.counting import Counted
from probes.planning import messages
from torchremat import (
    Adaptive,
    BudgetError,
    BudgetWarning,
    Plan,
    Planner,
    RepeatWarning,
    StepError,
    UnsupportedError,
    plan,
    unwrap,
)


class After(nn.Module):
    """A module behind something that communicates."""

    def __init__(self, module, exchange):
        super().__init__()
        self.module, self.exchange = module, exchange

    def forward(self, x):
        return self.module(self.exchange(x))


def shifted(x):
    """What another process has sent, in a ring."""
    return Rotated.apply(dist.group.WORLD, x)[0]


def ring():
    return nn.Sequential(*(After(block, shifted) for block in net()))


def summing(group=None):
    return nn.Sequential(*(After(block, lambda x: Copied.apply(x, group)) for block in net()))


@contextmanager
def waiting_at_most(seconds):
    real = messages.store_of_all

    def short():
        store = real()
        return mock.Mock(wraps=store, timeout=datetime.timedelta(seconds=seconds))

    with mock.patch.object(messages, "store_of_all", short):
        yield


def in_turn(*works):
    """Let each process do its own work while the others wait for the end of it."""
    for rank, work in enumerate(works):
        if rank == dist.get_rank():
            work()
        dist.barrier()


def refused(match, error=StepError):
    return pytest.raises(error, match=match)


def a_ring():
    planner = Planner(ring(), step)

    assert planner.profiled.placed.peers.ranks == (0, 1)
    chosen = verified(planner.model, planner.plan("min"))
    assert chosen.recomputed_calls > 0
    assert chosen.processes == 2


def gradients_alone():
    # Nothing of it runs in the forward: it was seen in the watched step.
    planner = Planner(summing(), step)

    assert planner.profiled.placed.peers.ranks == (0, 1)
    assert verified(planner.model, planner.plan("min")).recomputed_calls > 0


def a_model_without_exchanges_asks_nobody():
    in_turn(lambda: plan(net(), step, budget="min"), lambda: None)


def who_does_not_plan_is_named():
    for make in (ring, lambda: DistributedDataParallel(net())):
        model = make()

        def alone(model=model):
            with waiting_at_most(0.2), refused("process 1 did not come within 0.2 s"):
                plan(model, step, budget="min")

        in_turn(alone, lambda: None)
        # Whoever was given up can plan later.
        assert plan(model, step, budget="min").processes == 2


def an_error_of_one_process_is_told_after_it_has_communicated():
    def fails(model):
        loss = step(model)
        return loss if dist.get_rank() == 0 else "no loss"

    with refused("the step returned a str"):
        plan(ring(), fails, budget="min")


class CountingRing(Counting):
    def forward(self, x):
        return super().forward(shifted(super().forward(x)))


def what_one_process_would_not_repeat_does_not_end_before_it_has_communicated():
    # Its recompute differed in the first tensor that it saves, and stopped there: the other one waited for it.
    torch.manual_seed(0)
    model = nn.Sequential(CountingRing(), Block(), CountingRing(), Block())
    for part in model[::2]:
        part.hidden["counts"] = dist.get_rank() == 1

    def from_zero(model):
        for part in model[::2]:
            part.hidden["calls"] = 0
        return step(model)

    with pytest.warns(RepeatWarning, match="`0`, `2`"):
        chosen = verified(model, plan(model, from_zero, budget="min"), from_zero)

    assert chosen.recomputed_calls > 0


def plans_that_differ_are_refused_when_they_are_put_on():
    model = ring()
    planner = Planner(model, step)
    plans = planner.plan("100%"), planner.plan("min")

    with refused("the plan of process 1 is"):
        plans[dist.get_rank()].apply(model)
    plans[1].apply(model)
    unwrap(model)


def a_plan_that_one_process_has_taken_off_is_missed_in_the_first_step():
    model = ring()
    chosen = plan(model, step, budget="min")
    with waiting_at_most(0.2):
        chosen.apply(model)

        def steps():
            with refused("process 1 did not come"):
                step(model)

        in_turn(steps, lambda: chosen.remove(model))


def the_tightest_budget_counts():
    model = ring()
    planner = Planner(model, step, cost="flops")
    least = planner.floor_bytes
    with pytest.warns(BudgetWarning, match="different budgets"):
        chosen = planner.plan([1 << 30, least][dist.get_rank()])

    assert chosen.budget_bytes == least
    verified(model, chosen)


def requests_that_differ_are_refused():
    with refused("the request of process 1 is .*cost='flops'"):
        plan(ring(), step, budget="min", cost=["seconds", "flops"][dist.get_rank()])


def the_user_says_who_plans_together():
    assert plan(net(), step, budget="min", group=dist.group.WORLD).processes == 2
    with refused("its step communicates among the processes 0, 1", UnsupportedError):
        plan(ring(), step, budget="min", group=None)
    with refused("group='all'", UnsupportedError):
        plan(net(), step, budget="min", group="all")


def a_loaded_plan_is_compared():
    model = ring()
    chosen = plan(model, step, budget="min")
    with tempfile.TemporaryDirectory() as folder:
        chosen.save(f"{folder}/plan.json")
        loaded = Plan.load(f"{folder}/plan.json")

    assert (loaded.processes, loaded.ranks) == (2, ())
    verified(model, loaded)
    other = [loaded, Planner(model, step).plan("100%")][dist.get_rank()]
    with refused("the plan of process 1 is"):
        other.apply(model)


def on_batch(model, batch):
    return model(batch).square().mean()


def adapted(model, rows, **options):
    """Train on batches with so many rows under `Adaptive`, with the plain gradients; return how much is recomputed."""
    batches = [torch.randn(number, X.shape[1], generator=torch.Generator().manual_seed(number)) for number in rows]
    expected = []
    for batch in batches:
        model.zero_grad()
        on_batch(model, batch).backward()
        expected.append([one.grad.clone() for one in model.parameters()])
    recomputed = 0
    with Adaptive(model, on_batch, **options) as adaptive:
        for is_known in (False, True):
            for batch, own in zip(batches, expected, strict=True):
                model.zero_grad()
                with Counted() as counted:
                    adaptive(batch)
                assert all(map(torch.equal, (one.grad for one in model.parameters()), own))
                recomputed += is_known * counted.counts["gelu"]
        ran = sum(one.steps for one in adaptive.plans)
    assert ran == (2 * len(rows) if dist.get_rank() == 0 else 0)
    return recomputed - 4 * len(rows)


def lowest_of_batch(model, rows):
    batch = torch.randn(rows, X.shape[1])
    return Planner(model, lambda model: on_batch(model, batch)).floor_bytes


def adaptive_in_a_ring():
    # Each exchange of a recompute meets that of the other process: both recompute the same, at each size.
    rows = (16, 64, 128, 64, 96, 120)

    assert adapted(ring(), rows, budget=lowest_of_batch(ring(), 128)) > 0


def adaptive_with_other_sizes_in_each_process():
    rank = dist.get_rank()
    rows = [(16, 64, 128, 64, 24), (32, 128, 16, 96, 128)][rank]
    model = DistributedDataParallel(net())

    budget = lowest_of_batch(DistributedDataParallel(net()), 128) + rank * 1000
    assert adapted(model, rows, budget=budget, cost="flops") > 0


def adaptive_refuses_together():
    model = DistributedDataParallel(net())
    smallest = lowest_of_batch(DistributedDataParallel(net()), 64)
    rows = 64 << dist.get_rank()
    with Adaptive(model, on_batch, budget=smallest) as adaptive:
        with refused("no plan fits", BudgetError):
            adaptive(torch.randn(rows, X.shape[1]))
        assert adaptive(torch.randn(32, X.shape[1])) > 0
        # Who has a batch of another kind, or none, does not leave the other one waiting.
        with refused("has no tensors in plain sight"):
            adaptive([torch.randn(32, X.shape[1]), "no batch"][dist.get_rank()])
        with refused(r"have \[2, 3\] sizes"):
            adaptive(torch.randn(32, *[X.shape[1]] * (1 + dist.get_rank())))
        assert adaptive(torch.randn(32, X.shape[1])) > 0


def adaptive_needs_no_other_where_the_step_does_not_communicate():
    def alone():
        with Adaptive(net(), on_batch, budget="1GiB") as adaptive:
            assert adaptive(X) > 0

    in_turn(alone, lambda: None)
    with refused("this process is to plan alone", UnsupportedError):
        Adaptive(DistributedDataParallel(net()), on_batch, budget="1GiB", group=None)


def who_shares_no_group_but_is_connected_plans_together():
    # 0-1, 1-2 and 2-3, each in the backward alone.
    pairs = [dist.new_group([one, one + 1]) for one in range(3)]
    rank = dist.get_rank()
    blocks = net()
    own = [pair for number, pair in enumerate(pairs) if rank in (number, number + 1)]

    def exchange(x):
        for pair in own:
            x = Copied.apply(x, pair)
        return x

    planner = Planner(nn.Sequential(*(After(block, exchange) for block in blocks)), step)

    assert planner.profiled.placed.peers.ranks == (0, 1, 2, 3)
    assert verified(planner.model, planner.plan("min")).recomputed_calls > 0


def two_rings_plan_apart():
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    planner = Planner(summing(halves[rank // 2]), step)

    assert planner.profiled.placed.peers.ranks == ((0, 1), (2, 3))[rank // 2]


CASES = {
    case.__name__: case
    for case in (
        a_ring,
        gradients_alone,
        a_model_without_exchanges_asks_nobody,
        who_does_not_plan_is_named,
        an_error_of_one_process_is_told_after_it_has_communicated,
        what_one_process_would_not_repeat_does_not_end_before_it_has_communicated,
        plans_that_differ_are_refused_when_they_are_put_on,
        a_plan_that_one_process_has_taken_off_is_missed_in_the_first_step,
        the_tightest_budget_counts,
        requests_that_differ_are_refused,
        the_user_says_who_plans_together,
        a_loaded_plan_is_compared,
        adaptive_in_a_ring,
        adaptive_with_other_sizes_in_each_process,
        adaptive_refuses_together,
        adaptive_needs_no_other_where_the_step_does_not_communicate,
    )
}

OF_FOUR = {case.__name__: case for case in (who_shares_no_group_but_is_connected_plans_together, two_rings_plan_apart)}
