"""No placement of regions by hand, around whole units and without nesting, is better than a plan."""

import pytest
import torch
from torch import nn

from planning.by_hand import against_by_hand, chain
from torchremat import Planner


@pytest.mark.parametrize("seed", [0, 2, 11, 68])  # in all but the second a plan was beaten
def test_none_by_hand_is_cheaper_or_lower(seed):
    planner = Planner(*chain(seed), cost="flops")

    lowest_bytes, beaten, tried = against_by_hand(planner)

    assert planner.solver.floor.prediction.peak_bytes <= lowest_bytes
    assert not beaten and tried


@pytest.mark.parametrize("cost", ["seconds", "flops"])
def test_the_floor_of_layers_that_cost_the_same_is_below_the_plain_step(cost):
    # With flops, which operators were held was decided by their order, and the floor was the plain step's peak.
    torch.manual_seed(0)
    model, x = nn.LSTM(128, 128, num_layers=3), torch.randn(64, 32, 128)

    planner = Planner(model, lambda model: model(x)[0].square().mean(), cost=cost)

    assert planner.floor_bytes < 0.85 * planner.plain_peak()[0]
