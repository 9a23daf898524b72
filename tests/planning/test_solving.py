"""The solver against all nested trees, against the uniform ones, and against itself at other budgets."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import models
from planning.kinds import KINDS, inputs, linear, square
from planning.steps import blocks, profile, text, traced_peak, under
from probes.planning import KeepNode, PlanOptions, RegionNode, Search, SearchBudget, Solver, fitted, predict
from turns import in_turn


@cache
def every_tree(first, last):
    """All trees over units `first` to `last`, but for regions whose only child is a region."""
    if first > last:
        return ((),)
    return tuple(
        (node, *rest)
        for end in range(first, last + 1)
        for node in every_node(first, end)
        for rest in every_tree(end + 1, last)
    )


@cache
def every_node(first, last):
    inside = [children for children in every_tree_inside(first, last) if not _is_single_region(children)]
    kept = (KeepNode(first),) if first == last else ()
    return (*kept, *map(RegionNode, inside))


@cache
def every_tree_inside(first, last):
    """As `every_tree`, without the one whose only node is a region over everything."""
    if first == last:
        return ((KeepNode(first),),)
    return tuple(
        (node, *rest)
        for end in range(first, last)
        for node in every_node(first, end)
        for rest in every_tree(end + 1, last)
    )


def _is_single_region(children):
    return len(children) == 1 and isinstance(children[0], RegionNode)


def test_the_brute_force_knows_all_trees():
    # 2: 0 1, (0) 1, 0 (1), (0) (1), (0 1), ((0) 1), (0 (1)), ((0) (1)).
    assert len(every_tree(0, 0)) == 2
    assert len(every_tree(0, 1)) == 8
    assert len(set(every_tree(0, 3))) == len(every_tree(0, 3)) == 352


class Wide(nn.Module):
    """Two layers without modules inside, so that it is one unit however large it is."""

    def __init__(self, inside):
        super().__init__()
        self.up, self.down = nn.Parameter(0.1 * torch.randn(64, inside)), nn.Parameter(0.1 * torch.randn(inside, 64))

    def forward(self, x):
        return F.gelu(x @ self.up) @ self.down


class Uneven(nn.Module):
    """Blocks of different widths inside, so that no uniform plan is best, with a skip around some of them."""

    def __init__(self, insides, skip):
        super().__init__()
        self.blocks = nn.ModuleList(map(Wide, insides))
        self.skip = skip

    def forward(self, x):
        kept = []
        for block in self.blocks:
            x = block(x)
            if len(kept) <= self.skip:
                kept.append(x)
        return x + kept[self.skip]


def uneven(seed, blocks):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Uneven([rng.choice([16, 64, 64, 192, 256]) for _ in range(blocks)], rng.randrange(blocks))
    x = inputs()
    return model, lambda m: square(m(x))


@cache
def every_prediction(seed):
    """A profile, and what each tree over it needs."""
    own = blocks(*uneven(seed, 5))
    return own, {tree: predict(own, tree) for tree in every_tree(0, len(own.units.units) - 1)}


@in_turn("seed", range(4))
def test_no_tree_is_cheaper_than_the_one_found(seed):
    own, judged = every_prediction(seed)
    solver = Solver(own, "flops")
    lowest = min(one.peak_bytes for one in judged.values())
    plain = solver.plain.prediction.peak_bytes

    for place in range(11):
        limit = lowest + (plain - lowest) * place // 10
        found = solver.solve(limit)
        assert found.prediction.peak_bytes <= limit
        assert found.prediction.flops == min(one.flops for one in judged.values() if one.peak_bytes <= limit)


@in_turn("seed", range(4))
def test_the_floor_is_the_lowest_of_all_trees(seed):
    own, judged = every_prediction(seed)
    lowest = min(one.peak_bytes for one in judged.values())

    floor = Solver(own, "flops").floor.prediction.peak_bytes

    assert floor == lowest


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.gpt_step(blocks=6, width=64, context=64, batch=2),
        lambda: models.unet_step(batch=2, size=32),
        lambda: models.resnet_step(batch=8, size=16, width=8),
        KINDS["nested sequentials"],
        KINDS["glue"],
        KINDS["shared weights"],
    ],
)
@pytest.mark.parametrize("cost", ["flops", "seconds"])
def test_cost_falls_with_the_budget_and_is_never_above_a_uniform_tree(make, cost):
    own = blocks(*make())
    solver = Solver(own, cost)
    floor, plain = solver.floor.prediction.peak_bytes, solver.plain.prediction.peak_bytes

    found = []
    for place in range(13):
        limit = floor + (plain - floor) * place // 12
        one = solver.solve(limit)
        assert one.prediction.peak_bytes <= limit
        uniform = [own.cost for own in map(solver.judged, solver.uniform) if own.prediction.peak_bytes <= limit]
        assert all(one.cost <= cost for cost in uniform)
        found.append(one.cost)

    assert found == sorted(found, reverse=True)
    assert found[-1] == 0
    assert found[0] > 0


def test_the_floor_itself_is_a_budget_that_works_and_a_byte_less_is_not():
    solver = Solver(blocks(*models.gpt_step(blocks=4, width=64, context=64, batch=2)), "flops")
    floor = solver.floor.prediction.peak_bytes

    assert solver.solve(floor).prediction.peak_bytes == floor
    assert solver.solve(floor - 1) is None


def test_the_floor_does_not_depend_on_a_clock():
    # Of blocks of small modules, the lowest peak was sought among the trees that cost least.
    torch.manual_seed(0)
    linear, make = lambda: nn.Linear(32, 32), nn.Sequential
    model = make(*(make(linear(), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), linear()) for _ in range(3)))
    x = torch.randn(64, 32)
    measured = profile(model, lambda model: model(x).square().mean())
    found = []
    for seed in range(5):
        draw = random.Random(seed)
        timed = measured.each(
            lambda own, draw=draw: replace(
                own, costs=tuple(one.slower(draw.choice([0.1, 1.0, 10.0])) for one in own.costs)
            )
        )
        search = Search(timed, PlanOptions())
        found.append((search.floor.prediction.peak_bytes, search.floor.cost))

    assert len({peak_bytes for peak_bytes, _ in found}) == 1
    assert len({cost for _, cost in found}) == 5


def test_flops_and_seconds_are_different_aims():
    own = blocks(*models.unet_step(batch=2, size=32))
    by_flops, by_seconds = Solver(own, "flops"), Solver(own, "seconds")
    limit = (by_flops.floor.prediction.peak_bytes + by_flops.plain.prediction.peak_bytes) // 2

    # Of equal flops those of fewer seconds: a whole forward weighs as much as a thousandth of its flops.
    found = by_flops.solve(limit)
    most = 1e-3 * own.units.trace.flops * found.prediction.nominal_s / own.nominal_forward_s
    assert found.cost == pytest.approx(found.prediction.flops + most)
    assert by_seconds.solve(limit).cost == by_seconds.solve(limit).prediction.seconds


def test_the_same_limit_has_the_same_tree():
    own = blocks(*models.gpt_step(blocks=4, width=64, context=64, batch=2))
    limit = int(0.6 * Solver(own, "flops").plain.prediction.peak_bytes)

    assert text(Solver(own, "flops").solve(limit).tree) == text(Solver(own, "flops").solve(limit).tree)


def test_the_search_over_both_grains_is_never_worse_than_the_coarse_one():
    pair = profile(*models.gpt_step(blocks=4, width=64, context=64, batch=2))
    search, alone = Search(pair, PlanOptions(cost="flops")), Solver(pair.blocks, "flops")
    floor, plain = alone.floor.prediction.peak_bytes, alone.plain.prediction.peak_bytes

    assert search.floor.prediction.peak_bytes <= floor
    for place in range(9):
        limit = floor + (plain - floor) * place // 8
        assert search.solve(limit).cost <= alone.solve(limit).cost


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_what_was_found_is_what_is_measured(share):
    model, step = models.gpt_step(blocks=4, width=64, context=64, batch=2)
    own = blocks(model, step)
    solver = Solver(own, "flops")
    floor, plain = solver.floor.prediction.peak_bytes, solver.plain.prediction.peak_bytes
    limit = int(floor + share * (plain - floor))
    found = solver.solve(limit)

    with under(model, own, found.tree):
        measured = traced_peak(model, step)

    assert measured == found.prediction.peak_bytes <= limit


@pytest.mark.parametrize("name", ["siamese", "the same submodule twice"])
def test_calls_of_the_same_root_are_treated_alike(name):
    model, step = KINDS[name]()
    own = blocks(model, step)
    half = len(own.units.units) // 2

    across = RegionNode(tuple(map(KeepNode, range(half + 1))))
    found = text(fitted(own.units, (across, *map(KeepNode, range(half + 1, 2 * half)))))

    first, second = " ".join(map(str, range(half))), " ".join(map(str, range(half, 2 * half)))
    assert found == f"({first}) ({second})"


def test_two_hundred_units_are_solved():
    torch.manual_seed(0)
    model = nn.Sequential(*(linear() for _ in range(100)))
    x = inputs(256, 64)
    own = blocks(model, lambda m: square(m(x)))
    solver = Solver(own, "flops")

    found = solver.solve(int(0.4 * solver.plain.prediction.peak_bytes))

    assert len(own.units.units) == 100
    assert found.prediction.peak_bytes <= 0.4 * solver.plain.prediction.peak_bytes
    # Keeping every tenth of a hundred equal calls recomputes each once.
    assert found.prediction.flops <= 1.5 * own.units.trace.flops


def test_one_unit():
    model, step = KINDS["one linear"]()
    own = blocks(model, step)
    solver = Solver(own, "flops")

    assert text(solver.plain.tree) == "0"
    assert solver.floor.prediction.peak_bytes <= solver.plain.prediction.peak_bytes
    assert solver.solve(solver.plain.prediction.peak_bytes).cost == 0


class Ticking(SearchBudget):
    """Time that goes by with each look at the clock."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    @property
    def left_s(self):
        self.looks -= 1
        return max(0.0, float(self.looks))


@pytest.mark.parametrize("looks", [0, 1, 2, 4, 8, 16])
def test_a_search_without_time_still_has_a_plan_that_fits(looks):
    model, step = uneven(0, 8)
    pair = profile(model, step)
    limit = Search(pair, PlanOptions(cost="flops")).plain.prediction.peak_bytes * 6 // 10

    found = Search(pair, PlanOptions(cost="flops"), search_budget=Ticking(looks)).solve(limit)

    assert found.prediction.peak_bytes <= limit


def test_time_that_runs_out_ends_the_search():
    pair = profile(*uneven(0, 8))
    search_budget = Ticking(0)
    search = Search(pair, PlanOptions(cost="flops"), search_budget=search_budget)

    search.solve(search.plain.prediction.peak_bytes * 6 // 10)

    assert not search.blocks.profile.options[0]
    assert search.blocks._judgements <= 5


def test_a_tree_above_a_limit_is_followed_no_further_and_is_found_again_at_a_higher_one():
    pair = profile(*models.gpt_step(blocks=2, width=32, context=32, batch=2))
    whole, limited = (Search(pair, PlanOptions(cost="flops")).blocks for _ in range(2))

    for tree in whole.uniform:
        peak_bytes = whole.judged(tree).prediction.peak_bytes
        before = limited._judgements
        assert limited.judged_within(tree, peak_bytes - 1) is None
        assert limited.judged_within(tree, peak_bytes - 2) is None  # which is known by now
        assert limited.judged_within(tree, peak_bytes).prediction == whole.judged(tree).prediction
        assert limited.judged_within(tree, peak_bytes - 1) is None
        assert limited._judgements - before in (0, 2)  # 0: the same tree once more

    assert limited._judgements > 10


def test_what_a_tree_without_options_needs_is_found_once_for_all_solvers_of_a_profile():
    search = Search(profile(*models.gpt_step(blocks=2, width=32, context=32, batch=2)), PlanOptions(cost="flops"))
    units = range(len(search.blocks.profile.units.units))
    plain, kept_in_part = (tuple(KeepNode(unit, option * (unit == 2)) for unit in units) for option in (0, 1))

    assert search.blocks is not search.whole and search.blocks.profile.options[2]
    assert search.blocks.judged(plain) is search.whole.judged(plain) is search.dividing._solver.judged(plain)
    assert search.blocks.judged(kept_in_part) is not search.dividing._solver.judged(kept_in_part)
    assert search.blocks.placements is search.whole.placements
