"""How far calls are taken apart: the same units however many modules are around them, and never a floor above that of
wrapping every block by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from planning.steps import differences, outcome, profile, traced_peak
from torchremat import Planner
from torchremat.planning.profiles.grain import find_units, finest_units, grain_of, need_bytes_of
from torchremat.planning.profiles.tracing import trace
from torchremat.planning.searches.granularity import divisible, mix
from torchremat.planning.simulator.prediction import predict
from torchremat.schedules.chain import KeepNode
from torchremat.stages.sums import Sums

BATCH, TIME, WIDTH = 4, 32, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_btd):
        return x_btd + self.down(F.gelu(self.up(self.norm(x_btd))))


class Language(nn.Module):
    """A language model whose own code computes the loss, as those of transformers do: it saves the logits."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocabulary, WIDTH), nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens_bt):
        x_btd = self.embed(tokens_bt)
        for block in self.blocks:
            x_btd = block(x_btd)
        return F.cross_entropy(self.head(x_btd).flatten(0, 1), tokens_bt.flatten())


class Around(nn.Module):
    """A wrapper."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


class Towers(nn.Module):
    """Each of four towers saves a quarter, and hides its blocks in two wrappers."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(Around(Around(nn.Sequential(*(Block() for _ in range(4))))) for _ in range(4))

    def forward(self, x_btd):
        return torch.cat([tower(x_btd) for tower in self.towers], -1).square().mean()


def language(vocabulary=256, depth=0):
    torch.manual_seed(0)
    model, tokens_bt = Language(vocabulary), torch.randint(vocabulary, (BATCH, TIME))
    for _ in range(depth):
        model = Around(model)
    return model, lambda model: model(tokens_bt)


def towers():
    torch.manual_seed(0)
    x_btd = torch.randn(BATCH, TIME, WIDTH)
    return Towers(), lambda model: model(x_btd)


class Parts(nn.Module):
    """Blocks that only the step calls."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(WIDTH, WIDTH)


def called_by_the_step(blocks, times):
    torch.manual_seed(0)
    x_btd = torch.randn(BATCH, TIME, WIDTH)

    def step(model):
        y_btd = x_btd
        for block in [*model.blocks] * times:
            y_btd = block(y_btd)
        return model.head(y_btd).square().mean()

    return Parts(blocks), step


def peak_by_hand(model, step):
    """The peak of a step in which every block is a region by hand, each with the tools of torch."""
    for block in [one for one in model.modules() if isinstance(one, Block)]:
        block.forward = lambda *args, own=block.forward: checkpoint(own, *args, use_reentrant=False)
    try:
        return traced_peak(model, step)
    finally:
        for block in [one for one in model.modules() if isinstance(one, Block)]:
            del block.forward


@pytest.mark.parametrize("vocabulary", [32, 256, 2048])
def test_wrappers_around_a_model_that_computes_the_loss_change_no_unit_and_no_floor(vocabulary):
    # With a middling vocabulary the logits were more than a tenth of the whole: it stayed one unit in its wrapper, as
    # in that of PEFT, and the smallest budget was half as high again.
    bare = Planner(*language(vocabulary), cost="flops")
    names = [unit.name for unit in bare.profile.units.units]
    assert names == ["embed", *(f"blocks.{number}" for number in range(6)), "head"]

    for depth in (1, 3):
        found = Planner(*language(vocabulary, depth), cost="flops")

        assert [unit.name for unit in found.profile.units.units] == ["inner." * depth + name for name in names]
        assert found.floor_bytes == bare.floor_bytes


@pytest.mark.parametrize(
    "make",
    [
        language,
        lambda: language(depth=2),
        towers,
        lambda: called_by_the_step(12, 1),
        # Each call of the step was taken apart: the smallest budget was almost that of the plain step.
        lambda: called_by_the_step(1, 24),
        lambda: called_by_the_step(3, 4),
    ],
)
def test_no_floor_is_above_that_of_every_block_by_hand(make):
    model, step = make()
    by_hand, plain = peak_by_hand(model, step), outcome(model, step)
    planner = Planner(model, step, cost="flops")

    plan = planner.plan(planner.floor_bytes)
    plan.apply(model)

    assert plan.step_peak_bytes - planner.fixed_bytes <= by_hand
    assert traced_peak(model, step) == plan.step_peak_bytes - planner.fixed_bytes
    assert differences(outcome(model, step), plain) == []


def test_backwards_that_microbatches_share_know_a_stage_as_a_whole():
    # They had no profile of it: an IndexError, or the bytes of other units.
    model, step = stages()
    solver = Planner(model, step, cost="flops").solver
    around = solver.pair.around
    sums = Sums(model, step, solver.pair_in_parts, 4)
    units = range(len(around.units.units))
    whole, in_part = (tuple(KeepNode(unit, option * (unit == 1)) for unit in units) for option in (0, 1))

    plain, other = (sums.predict(SimpleNamespace(profile=around, tree=tree)) for tree in (whole, in_part))

    assert around.options[1]
    assert plain == sums.predict(solver.plain)
    assert other != plain and other.first_bytes >= predict(around, in_part).backward_bytes


def test_a_need_by_hand():
    # Each linear saves its input, each tanh its output: six tensors of 1 KiB between them, of which the last two are
    # the output of the second pair and the first linear's is the input of the step, which is there before.
    pairs = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    x = torch.randn(32, 8)
    seen = trace(nn.Sequential(*pairs), lambda model: model(x).sum())

    whole = find_units(seen)
    parts = finest_units(whole)

    assert [unit.name for unit in whole.units] == ["0", "1", "2"]
    assert [unit.name for unit in parts.units] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    # The inputs of 0, 1, 2, and in the backward of 2 its linear's output, which tanh gives back as what it saves.
    assert need_bytes_of(whole) == (3 + 1) * 1024
    # All inputs, which are all that is saved but for the last tanh's output.
    assert need_bytes_of(parts) == (6 + 1) * 1024
    assert grain_of(seen).need_bytes == need_bytes_of(whole)


class Scaled(nn.Module):
    """A block as those of ConvNeXt: its sum costs no flops, and its scale saves what the last linear has made."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x_btd):
        return x_btd + self.scale * self.down(F.gelu(self.up(x_btd)))


def stages():
    torch.manual_seed(0)
    x_btd = torch.randn(BATCH, TIME, WIDTH)
    model = nn.Sequential(*(nn.Sequential(*(Scaled() for _ in range(4))) for _ in range(6)))
    return model, lambda model: model(x_btd).square().mean()


def test_a_stage_is_planned_as_a_whole_too_where_that_recomputes_less():
    # One unit for each block: each of them held its input beside the output of its last linear, where the sums of a
    # stage follow from those outputs alone, so plans of a ConvNeXt recomputed a fifth more than with its stages.
    model, step = stages()
    plain = outcome(model, step)
    planner = Planner(model, step, cost="flops")
    blocks, around = planner.profile.units, planner.solver.pair.around
    budget = planner.fixed_bytes + int(0.5 * (planner.plain_peak()[0] - planner.fixed_bytes))

    plan = planner.plan(budget)
    plan.apply(model)

    assert [unit.name for unit in blocks.units] == [f"{stage}.{block}" for stage in range(6) for block in range(4)]
    assert [unit.name for unit in around.units.units] == [str(stage) for stage in range(6)]
    limit_bytes = budget - planner.fixed_bytes - 4096
    found = [one.solve(limit_bytes) for one in planner.solver.solvers if one.profile is not around]
    assert plan.recomputed_flops < min(one.cost for one in found if one is not None)
    assert traced_peak(model, step) == plan.step_peak_bytes - planner.fixed_bytes
    assert differences(outcome(model, step), plain) == []


def test_a_stage_that_needs_more_than_the_budget_by_itself_is_not_watched_as_a_whole():
    model, step = stages()
    free = Planner(model, step, cost="flops")
    around, before_bytes = free.solver.pair.around, free.profiled.before.total_bytes
    needed = before_bytes + need_bytes_of(around.units)

    has_room, has_none = (Planner(model, step, cost="flops", within=size) for size in (needed, needed - 1))

    assert [unit.name for unit in has_room.solver.pair.around.units.units] == [str(stage) for stage in range(6)]
    assert has_none.solver.pair.around is None
    assert has_none.subject.runs < has_room.subject.runs == free.subject.runs


class Squeezed(nn.Module):
    """A block as those of EfficientNet: a norm with an activation in place, of which no part can be a unit."""

    class Norm(nn.BatchNorm1d):
        def __init__(self):
            super().__init__(WIDTH)
            self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.act(self.drop(super().forward(x)))

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.gate, self.last = nn.Linear(WIDTH, WIDTH), self.Norm(), Block(), Block()

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(x * self.gate(x).sigmoid())


def test_a_call_of_which_no_part_is_a_unit_stays_whole_and_the_others_can_be_split():
    # The search looked for the first part of each, and there was none: an IndexError.
    torch.manual_seed(0)
    model, x = Squeezed(), torch.randn(16, WIDTH)
    model = nn.Sequential(model)

    def step(model):
        return model(x).square().mean()

    plain = outcome(model, step)
    pair = profile(model, step)

    names = [unit.name for unit in pair.leaves.units.units]
    assert "0.norm" in names and "0.gate.norm" in names
    units = mix(pair, divisible(pair)).units
    assert [unit.calls for unit in units.units] == [unit.calls for unit in pair.leaves.units.units]
    planner = Planner(model, step, cost="flops")
    planner.plan(planner.floor_bytes).apply(model)

    assert differences(outcome(model, step), plain) == []
