"""Plans of models whose forward changes wide buffers: what a recompute copies of them is predicted to the byte."""

import torch
from torch import nn

from torchremat import Planner, verify


def test_wide_statistics_of_few_rows_stay_within_the_floor():
    # A recompute runs on copies of the buffers that BatchNorm changes, and a region within a recompute held those
    # beside its own. Nobody had predicted that: here the step took 5% more than the budget.
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(4096), nn.GELU(), nn.Tanh()) for _ in range(8)))
    x = torch.randn(16, 4096)
    step = lambda model: model(x).square().mean()  # noqa: E731
    planner = Planner(model, step, cost="flops", operators=False)
    plan = planner.plan(planner.floor_bytes)

    plan.apply(model)
    report = verify(model, step)

    assert report.is_exact
    assert report.peak_bytes == plan.peak_bytes <= plan.budget_bytes
