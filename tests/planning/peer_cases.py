"""What two processes do with one model in each of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from torchremat import BudgetError, Planner, StepError, plan, verify

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


def sharded():
    model, mesh = net(), init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model):
    return model(X).square().mean()


def everywhere(value):
    """What each process has."""
    found = [None] * 2
    dist.all_gather_object(found, value)
    return found


def verified(model, least, budget):
    chosen = plan(model, step, budget=budget)
    chosen.apply(model)
    report = verify(model, step)

    assert chosen.recomputed_calls > 0
    assert report.is_exact
    assert least * report.predicted_bytes <= report.peak_bytes <= report.predicted_bytes <= chosen.budget_bytes
    first, second = everywhere((chosen, report))
    assert first == second
    return chosen


def data_parallel():
    model = DistributedDataParallel(net())

    # Exact, the buckets included: as large as all gradients.
    before = verified(model, 1, "85%").before_bytes

    assert before["communication"] == before["gradients"]


def gradients_as_views_of_buckets():
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)

    assert "communication" not in plan(model, step, budget="1GiB").before_bytes


def fully_sharded():
    # What waits to be reduced depends on the other process: a bound from above.
    verified(sharded(), 0.85, "85%")


def an_error_of_one_process_is_raised_in_both():
    def fails_in_process_1(model):
        return step(model) if dist.get_rank() == 0 else "no loss"

    with pytest.raises(StepError, match="the step returned a str") as raised:
        plan(DistributedDataParallel(net()), fails_in_process_1, budget="1GiB")

    assert ("in process 1 of the group (this is 0)" in str(raised.value)) == (dist.get_rank() == 0)


def the_larger_batch_counts():
    def uneven(model):
        return model(X[: 32 * (1 + dist.get_rank())]).square().mean()

    alone = Planner(net(), uneven, cost="flops").plan("1GiB").peak_bytes
    together = Planner(DistributedDataParallel(net()), uneven, cost="flops").plan("1GiB")

    small, large = everywhere(alone)
    assert small < large
    # Both have the peak of the larger one, and the buckets of the gradients.
    assert together.peak_bytes == large + together.before_bytes["communication"]


def no_plan_fits():
    with pytest.raises(BudgetError, match="no plan fits the budget"):
        plan(DistributedDataParallel(net()), step, budget="1KiB")


CASES = {
    case.__name__: case
    for case in (
        data_parallel,
        gradients_as_views_of_buckets,
        fully_sharded,
        an_error_of_one_process_is_raised_in_both,
        the_larger_batch_counts,
        no_plan_fits,
    )
}
