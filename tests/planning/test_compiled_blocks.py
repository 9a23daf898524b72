"""Plans over blocks that are compiled, in either way."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compiled import MARKS, Block, fresh, graph_breaks, graphs
from planning.steps import recomputed_flops
from probes.memory import has_compiled
from probes.regions import is_wrapped
from torchremat import Planner, plan, verify, wrap
from torchremat.errors import BudgetError, PlanWarning, UnsupportedError, WrapError

pytestmark = MARKS


def compiled(function):
    return torch.compile(function, backend="aot_eager")


class Decorated(Block):
    forward = compiled(Block.forward)


class Helped(Block):
    """A block that calls its layers in a method."""

    def forward(self, x):
        return x + self.layers(self.norm(x))

    def layers(self, x):
        return F.dropout(self.down(F.gelu(self.widened(x))), self.dropout)

    def widened(self, x):
        return self.up(x)


class Helping(Helped):
    layers = compiled(Helped.layers)


class Listed(Helped):
    """A block whose methods are in a list."""

    def forward(self, x):
        return x + self.methods[0](self.norm(x))


def compile_list(block):
    block.methods = [compiled(block.layers)]


def compile_forward(block):
    block.forward = compiled(block.forward)


def compile_method(block):
    block.layers = compiled(block.layers)


# By way: the class of the blocks, and how they are compiled where they are.
IN_PLACE = {
    "in place": (Block, lambda block: block.compile(backend="aot_eager")),
    "forward": (Block, compile_forward),
    "class": (Decorated, lambda block: None),
    "method": (Helped, compile_method),
    "method of the class": (Helping, lambda block: None),
    "methods in a list": (Listed, compile_list),
}
WAYS = ["wrapped", *IN_PLACE]


class Net(nn.Module):
    def __init__(self, way, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        kind, compile_ = IN_PLACE.get(way, (Block, None))
        blocks = [kind(32, dropout) for _ in range(4)]
        if compile_ is None:
            blocks = [compiled(block) for block in blocks]
        else:
            for block in blocks:
                compile_(block)
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


@pytest.mark.parametrize("way", WAYS)
def test_compiled_modules_are_planned_where_they_run(way):
    # They were planned as if they were eager, without a word.
    with pytest.raises(
        UnsupportedError, match=r"on='meta': modules of the model are compiled.*Plan where the step can"
    ):
        plan(Net(way), step, budget="1GB", on="meta", device="h100")


@pytest.fixture(scope="module", params=WAYS)
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


class Gated(Block):
    """A block that calls a compiled function which no module has."""

    def forward(self, x):
        return x + self.down(_gated(self.up(self.norm(x))))


@compiled
def _gated(x):
    return F.gelu(x) * torch.sigmoid(x) * torch.tanh(x)


def test_a_compiled_function_between_operators_saves_what_it_saves_compiled():
    # Of eager code other saves are traced; the peaks are those of runs.
    fresh()
    model = Net("in place")
    model.blocks = nn.ModuleList(Gated(32, 0.0) for _ in range(4))
    model.zero_grad()

    for percent in (90, 60):
        made = plan(model, step, budget=f"{percent}%", cost="flops")
        made.apply(model)
        try:
            report = verify(model, step)
        finally:
            made.remove(model)

        assert report.peak_bytes == made.step_peak_bytes <= made.budget_bytes
        assert report.is_exact
    assert graph_breaks() == 0


def test_what_only_a_compiled_function_calls_is_refused():
    fresh()
    block = Block(32, 0.0)
    run = compiled(lambda module, x: module(x))
    model = nn.Sequential(nn.Linear(32, 32), block)
    model.forward = lambda x: run(block, model[0](x)).mean()

    with pytest.raises(UnsupportedError, match=r"`1` is called by a compiled function that is neither a method"):
        plan(model, step, budget="80%")


def test_planned_blocks_that_are_compiled_afterwards():
    # The order of activation checkpointing in large trainers. It was refused.
    fresh()
    model = Net("wrapped", dropout=0.0)
    model.blocks = nn.ModuleList(Block(32, 0.0) for _ in range(4))
    plain = gradients(model)
    model.zero_grad()
    made = plan(model, step, budget="60%", cost="flops")
    made.apply(model)
    copied = deepcopy(model)

    for block in (*model.blocks, *copied.blocks):
        block.compile(backend="aot_eager")
    with pytest.warns(PlanWarning, match="have been compiled since"):  # told once
        assert all(map(torch.equal, gradients(model), plain))
    model.zero_grad()
    assert all(map(torch.equal, gradients(copied), plain))
    assert graphs() == 1  # those of which the plan keeps single operators run eagerly
    assert graph_breaks() == 0

    assert recomputed_flops(model, step) > 0
    made.remove(model)
    assert recomputed_flops(model, step) == 0
    assert all(map(torch.equal, gradients(model), plain))
    assert all(block._compiled_call_impl is not None and "compile" not in vars(block) for block in model.blocks)


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
