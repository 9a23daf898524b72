"""Plans of steps that call the same modules many times in a row, and of models that run a `torchremat.loop`."""

from functools import cache

import pytest
import torch
from torch import nn

from planning.steps import Measured, blocks, differences, keep_all, outcome, traced_peak, under
from probes.planning import FoundLoop, Solver, depth, loops_in, predict
from schedules.binomial_trees import binomial_tree
from torchremat import Planner, UnsupportedError, checkpoint, loop, plan


class Recurrent(nn.Module):
    """A cell, and a head for each of its states."""

    def __init__(self, width=16):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, width), nn.Linear(width, 4)

    def forward(self, xs):
        state, loss = xs.new_zeros(xs.shape[1], self.head.in_features), 0.0
        for x in xs:
            state = self.cell(x, state)
            loss = loss + self.head(state).square().mean()
        return loss


class Unrolled(nn.Module):
    """A solver: one module, many times, between an encoder and a decoder."""

    def __init__(self, steps, width=32):
        super().__init__()
        self.steps = steps
        self.encoder, self.decoder = nn.Linear(width, width), nn.Linear(width, width)
        self.field = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, y):
        y = self.encoder(y)
        for _ in range(self.steps):
            y = self.field(y)
        return self.decoder(y).square().mean()


class Layered(nn.Module):
    """Three recurrent layers, one after the other: each takes the states of the one before."""

    def __init__(self, width=16):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(width, width) for _ in range(3))

    def forward(self, xs):
        xs = list(xs)
        for cell in self.cells:
            state, states = torch.zeros_like(xs[0]), []
            for x in xs:
                state = cell(x, state)
                states.append(state)
            xs = states
        return torch.stack(xs).square().mean()


def recurrent(steps=60):
    torch.manual_seed(0)
    xs = torch.randn(steps, 32, 8)
    return Recurrent(), lambda model: model(xs)


def unrolled(steps=200):
    torch.manual_seed(0)
    y = torch.randn(64, 32)
    return Unrolled(steps), lambda model: model(y)


def layered(steps=60):
    torch.manual_seed(0)
    xs = torch.randn(steps, 32, 16)
    return Layered(), lambda model: model(xs)


@cache
def planned(make):
    """A model, its step, and a planner of whole units."""
    model, step = make()
    return model, step, Planner(model, step, cost="flops", operators=False)


def test_loops_are_found_in_the_trace():
    found = {make.__name__: loops_in(planned(make)[2].profile.units) for make in (recurrent, unrolled, layered)}

    assert found == {
        "recurrent": (FoundLoop(first=0, period=2, steps=60),),  # a cell and a head
        "unrolled": (FoundLoop(first=1, period=1, steps=200),),
        "layered": tuple(FoundLoop(first=60 * layer, period=1, steps=60) for layer in range(3)),
    }


def test_short_chains_are_solved_by_units():
    # The solver's tables are fine enough for these, and a region may begin anywhere.
    short, long = Solver(blocks(*unrolled(100)), "flops"), solved_unrolled()

    assert len(short.chain.stages) == len(short.profile.units.units) == 102
    assert not short.chain.borders
    assert set(long.chain.stages[1:-1]) == {long.chain.stages[1]}
    assert long.chain.borders == {1, 201}


def test_steps_of_several_units_are_stages_as_well():
    by_units, *_, by_steps = planned(recurrent)[2].solver.solvers

    assert len(by_units.chain.stages) == 120
    assert len(by_steps.chain.stages) == 60


@cache
def solved_unrolled():
    return Solver(planned(unrolled)[2].profile, "flops")


@pytest.mark.parametrize("slots", [3, 5, 8, 15])
def test_a_plan_recomputes_no_more_than_the_multistage_schedule(slots):
    solver = solved_unrolled()
    own = solver.profile
    last = len(own.sizes) - 1
    (found,) = loops_in(own.units)
    # The binomial schedule for a number of states, by hand; encoder and decoder are kept.
    inner = binomial_tree(found.steps, slots)
    tree = (*keep_all(1), *(shifted(node, found.first) for node in inner), *keep_all(last + 1)[last:])
    multistage = predict(own, tree)

    made = solver.solve(multistage.peak_bytes)

    assert made is not None
    assert made.prediction.peak_bytes <= multistage.peak_bytes
    assert made.prediction.flops <= multistage.flops
    assert depth(made.tree) > 1


def shifted(node, by):
    """The node with other stages."""
    if hasattr(node, "children"):
        return type(node)(tuple(shifted(child, by) for child in node.children))
    return type(node)(node.stage + by)


@pytest.mark.parametrize("make", [recurrent, unrolled, layered])
def test_plans_of_loops_are_exact(make):
    model, step, planner = planned(make)
    expected, own = outcome(model, step), Measured(model, step)
    floor, plain = planner.floor_bytes, planner.plain_peak()[0]

    for budget in (floor, floor + (plain - floor) // 20, floor + (plain - floor) // 4):
        made = planner.plan(budget)
        with under(model, planner.profile, made.tree):
            found, peak = outcome(model, step), own.peak()

        assert not differences(found, expected)
        assert peak == made.step_peak_bytes - planner.fixed_bytes
        assert made.recomputed_calls >= 60


def test_a_head_for_each_step_does_not_hold_its_state():
    # The states that the heads read are inputs of the next cells too. A region over some steps holds one of them, and
    # the smallest budget is far below the bytes of all states.
    model, step = recurrent(100)
    planner = Planner(model, step, cost="flops", operators=False)

    # Each head's output is saved by the code around it.
    beside = 100 * 32 * 4 * 4
    assert planner.floor_bytes - planner.fixed_bytes < beside + 100 * 32 * 16 * 4 // 3


# ------------------------------------------------------------------------------------------- declared loops


class Encoder(nn.Module):
    """A recurrent encoder that recomputes its own steps."""

    def __init__(self, width, **options):
        super().__init__()
        self.before, self.cell, self.after = nn.Linear(width, width), nn.GRUCell(width, width), nn.Linear(width, width)
        self.options = options

    def forward(self, xs):
        xs = self.before(xs)

        def body(state, x):
            state = self.cell(x, state)
            return state, state

        _, states = loop(body, xs.new_zeros(xs.shape[1:]), xs, **self.options)
        return self.after(states)


class Declared(nn.Module):
    """Encoders with a loop each, and blocks between them."""

    def __init__(self, width=16, **options):
        super().__init__()
        self.encoders = nn.ModuleList(Encoder(width, **options) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)) for _ in range(3)
        )

    def forward(self, xs):
        xs = self.blocks[0](xs)
        for encoder, block in zip(self.encoders, self.blocks[1:], strict=True):
            xs = xs + encoder(xs)
            xs = xs + block(xs)
        return xs.square().mean()


def declared(steps=30, **options):
    torch.manual_seed(0)
    xs = torch.randn(steps, 16, 16)
    return Declared(**options), lambda model: model(xs)


@pytest.mark.parametrize("options", [{"slots": 3}, {"slots": 1}, {"slots": 100}, {"budget": "40KiB"}])
def test_a_model_with_loops_is_planned_around_them(options):
    model, step = declared(**options)
    expected, own = outcome(model, step), Measured(model, step)
    planner = Planner(model, step, cost="flops", certify=True)

    assert [unit.name for unit in planner.profile.units.units] == [
        *("blocks.0", "encoders.0.before", "encoders.0.after", "blocks.1"),
        *("encoders.1.before", "encoders.1.after", "blocks.2"),
    ]
    assert planner.profiled.peak_of(planner.solver.plain) == planner.plain_peak()[0]
    for budget in (planner.floor_bytes, (planner.floor_bytes + planner.plain_peak()[0]) // 2):
        made = planner.plan(budget)
        made.apply(model)
        found, peak = outcome(model, step), own.peak()
        made.remove(model)

        assert not differences(found, expected)
        assert made.recomputed_calls
        assert peak == made.step_peak_bytes - planner.fixed_bytes
        assert made.certificate.missing == ("the step runs a `torchremat.loop`, which recomputes by itself",)


def test_a_model_with_loops_is_planned_without_running_it():
    model, step = declared(steps=8, slots=3)

    found = plan(model, step, budget="min", cost="flops", on="meta", device="a100")

    assert found.recomputed_calls
    assert found.peak_bytes < found.plain_peak_bytes


def test_a_loop_of_unknown_length_and_one_in_the_step_itself():
    torch.manual_seed(0)
    model = nn.ModuleDict({"field": nn.Linear(16, 16), "block": nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))})
    x = torch.randn(32, 16)

    def step(model):
        y = model["block"](x)
        y, _ = loop(lambda y, _: (y + 0.1 * model["field"](y).tanh(), None), y, length=20, slots=3)
        state = y, torch.tensor(0)
        (y, _), _ = loop(
            lambda c, _: ((c[0] * model["field"](c[0]).cos(), c[1] + 1), None),
            state,
            condition=lambda c: c[1] < 9,
            max_length=20,
            slots=3,
        )
        return y.square().mean()

    expected = outcome(model, step)
    planner = Planner(model, step, cost="flops")
    made = planner.plan("min")

    made.apply(model)

    assert not differences(outcome(model, step), expected)
    assert traced_peak(model, step) == made.step_peak_bytes - planner.fixed_bytes


def test_a_module_that_a_loop_calls_is_no_unit_elsewhere_either():
    # The code that counts its calls would count those of the loop.
    torch.manual_seed(0)
    model = nn.ModuleDict({"field": nn.Linear(16, 16), "block": nn.Linear(16, 16)})
    x = torch.randn(32, 16)

    def step(model):
        y = model["block"](model["field"](x))
        y, _ = loop(lambda y, _: (model["field"](y).tanh(), None), y, length=5, slots=2)
        return model["field"](y).square().mean()

    expected = outcome(model, step)
    made = Planner(model, step, cost="flops").plan("min")
    made.apply(model)

    assert [unit.name for unit in made.units] == ["block"]
    assert not differences(outcome(model, step), expected)


def test_a_model_that_checkpoints_itself_is_still_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(self.block, x).square().mean()

    x = torch.randn(4, 8)
    with pytest.raises(UnsupportedError, match="`block` is called under saved-tensor hooks: the model checkpoints"):
        Planner(Own(), lambda model: model(x))
