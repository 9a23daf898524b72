"""Plans over blocks that are compiled, in either way."""

import pytest
import torch
from torch import nn

from compiled import MARKS, Block, fresh, graph_breaks, graphs
from probes.memory import has_compiled
from probes.regions import is_wrapped
from torchremat import Planner, plan, verify, wrap
from torchremat.errors import BudgetError, UnsupportedError, WrapError

pytestmark = MARKS


class Net(nn.Module):
    def __init__(self, way, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block(32, dropout) for _ in range(4)]
        if way == "in place":
            for block in blocks:
                block.compile(backend="aot_eager")
        else:
            blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


X = torch.arange(32 * 16 * 32).view(32, 16, 32).sin()


def step(model):
    return model(X)


def gradients(model):
    model.zero_grad()
    torch.manual_seed(1)
    step(model).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_compiled_modules_are_planned_where_they_run(way):
    # They were planned as if they were eager, without a word.
    with pytest.raises(
        UnsupportedError, match=r"on='meta': modules of the model are compiled.*Plan where the step can"
    ):
        plan(Net(way), step, budget="1GB", on="meta", device="h100")


@pytest.fixture(scope="module", params=["wrapped", "in place"])
def planned(request):
    """A model of compiled blocks, the gradients of its plain run, its planner, and how many graphs there were."""
    fresh()
    model = Net(request.param)
    plain = gradients(model)
    before = graphs()
    model.zero_grad()
    return model, plain, Planner(model, step, cost="flops"), before


def test_profiling_compiles_nothing_more(planned):
    _, _, _, before = planned

    assert graphs() == before
    assert graph_breaks() == 0


def test_blocks_are_units(planned):
    _, _, planner, _ = planned

    assert [unit.name for unit in planner.profile.units.units] == [*(f"blocks.{i}" for i in range(4)), "head"]


@pytest.mark.parametrize("percent", [85, 50])
def test_a_plan_is_exact(planned, percent):
    model, plain, planner, before = planned
    made = planner.plan(f"{percent}%")

    made.apply(model)
    try:
        report = verify(model, step)
        with_plan = gradients(model)
    finally:
        made.remove(model)

    assert report.peak_bytes == made.step_peak_bytes < report.plain_peak_bytes
    assert report.is_exact
    assert all(map(torch.equal, with_plan, plain))
    assert graphs() == before
    assert made.recomputed_calls > 0
    assert not any(map(is_wrapped, model.modules()))


def test_the_first_compilation_may_be_the_plans():
    fresh()
    model = Net("in place", dropout=0.0)
    made = Planner(model, step, cost="flops").plan("60%")

    made.apply(model)

    assert verify(model, step).peak_bytes == made.step_peak_bytes
    assert graphs() == 2  # the first block's input needs no gradient


def test_a_planned_block_is_not_wrapped_again():
    fresh()
    model = Net("in place")
    made = Planner(model, step, cost="flops").plan("60%")
    made.apply(model)

    with pytest.raises(WrapError, match="is wrapped already"):
        wrap(model, "blocks.*")


@pytest.mark.parametrize("way", ["in place", "from outside", "inside"])
def test_a_model_that_is_compiled_as_a_whole_is_told_to_compile_its_blocks(way):
    # It was told to take a smaller batch.
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32, 0.1) for _ in range(4)))
    if way == "in place":
        model = Net("in place")
        model.blocks = nn.ModuleList(Block(32, 0.1) for _ in range(4))
        model.compile(backend="aot_eager")
    else:
        model = torch.compile(model, backend="aot_eager")
    model = nn.Sequential(model, nn.Linear(32, 1)) if way == "inside" else model
    name = {"inside": "`0`"}.get(way, "the model")

    fresh()
    with pytest.raises(BudgetError, match=rf"mostly in {name}, compiled as one piece.*Compile its blocks"):
        plan(model, lambda model: model(X).mean(), budget="1kB", cost="flops")


def test_blocks_that_are_compiled_are_told_nothing_of_the_kind():
    with pytest.raises(BudgetError, match="a smaller batch lowers the rest"):
        plan(Net("in place"), step, budget="1kB", cost="flops")


def test_a_model_without_compiled_modules():
    assert not has_compiled(nn.Sequential(nn.Linear(2, 2)))
