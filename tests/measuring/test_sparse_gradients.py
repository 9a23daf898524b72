"""Sparse gradients: their bytes are those of the batch's rows, in a step and in that of the optimizer."""

import pytest
import torch
from torch import nn

import torchremat
from planning.steps import traced_peak
from probes.memory import record_allocations

ROWS, WIDTH = 4096, 32
INDICES = torch.arange(64).repeat(2) * 7


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, indices):
        x = self.table(indices)
        for one in self.layers:
            x = x + one(x)
        return x


def step(model):
    return model(INDICES).square().mean()


OPTIMIZERS = {
    "SparseAdam": lambda model: torch.optim.SparseAdam([model.table.weight], lr=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def trained(model, optimizer):
    """The peaks of a step in training over its beginning, as the allocator has them: until and in the optimizer's."""
    for _ in range(2):  # the first makes the state
        model.zero_grad()
        with record_allocations(torch.device("cpu")) as recorder:
            step(model).backward()
            ends = recorder.mark("end")
            optimizer.step()
        live = recorder.trace.live
        position = next(one.position for one in recorder.trace.marks if one.id == ends)
    return int(live[: position + 1].max()), int(live[position:].max())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plans_count_the_rows_of_a_sparse_gradient(name):
    # It was counted as a dense one, before the step and in the optimizer's, and SparseAdam was refused.
    torch.manual_seed(0)
    model = Embedded()
    optimizer = OPTIMIZERS[name](model)
    dense_bytes = sum(one.nbytes for one in model.layers.parameters())
    before_bytes = ROWS * WIDTH * 4 + dense_bytes + INDICES.nbytes
    state_bytes = 2 * ROWS * WIDTH * 4 if name == "SparseAdam" else 0

    measured = torchremat.measure(model, step)
    plan = torchremat.plan(model, step, budget="100%", optimizer=optimizer, operators=False)
    peak, in_step = trained(model, optimizer)

    assert (measured.gradient_bytes, measured.peak_bytes) == (0, before_bytes + peak)
    assert sum(plan.before_bytes.values()) == before_bytes + state_bytes
    assert plan.step_peak_bytes == before_bytes + state_bytes + peak
    assert plan.optimizer_peak_bytes == before_bytes + state_bytes + in_step
    assert traced_peak(model, step) == peak
    assert model.table.weight.grad.layout is torch.sparse_coo  # the user's own


def test_a_gradient_of_the_user_stays():
    model = Embedded()
    step(model).backward()
    mine = model.table.weight.grad

    torchremat.measure(model, step)

    assert model.table.weight.grad is mine and mine._nnz() == len(INDICES)
