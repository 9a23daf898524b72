"""A mixture of experts, whose calls take as many rows as tokens pick them: exact on any batch, planned for one."""

import functools
import warnings

import pytest
import torch

import mixtures
from planning.steps import differences, outcome, recomputed_flops, traced_peak
from probes.planning import choices, evaluate, flow_of, options
from torchremat import OrderWarning, Planner

CONFIG = mixtures.MixtureConfig(blocks=2, width=32, hidden=48, heads=4, key_heads=2, vocabulary=64, experts=4)


def batch(seed):
    """Random tokens; for None one token everywhere, which all goes to the same two experts."""
    if seed is None:
        return torch.zeros(2, 49, dtype=torch.int64)
    return torch.randint(CONFIG.vocabulary, (2, 49), generator=torch.Generator().manual_seed(seed))


def step(seed):
    return functools.partial(mixtures.mixture_loss, tokens_bt=batch(seed))


@pytest.fixture(scope="module")
def planned():
    """A model, and a planner that has seen one batch."""
    torch.manual_seed(0)
    model = mixtures.Mixture(CONFIG)
    return model, Planner(model, step(0), cost="flops")


@pytest.mark.parametrize("share", [0.5, 0.25, 0.0])
def test_the_budget_holds_for_the_batch_planned_for(planned, share):
    model, planner = planned
    rise = planner.profiled.peak_of(planner.solver.plain) - planner.floor_bytes
    plan = planner.plan(planner.floor_bytes + int(share * rise))
    expected = outcome(model, step(0))

    plan.apply(model)
    try:
        measured = planner.fixed_bytes + traced_peak(model, step(0))
        found, flops = outcome(model, step(0)), recomputed_flops(model, step(0))
    finally:
        plan.remove(model)

    assert measured <= plan.budget_bytes
    assert measured == pytest.approx(plan.step_peak_bytes, rel=0.01)
    assert flops == plan.recomputed_flops
    assert plan.recomputed_calls > 0
    assert share > 0 or flops > 0
    assert differences(found, expected) == []


@pytest.mark.parametrize("seed", [1, 2, None])
def test_on_any_batch_the_gradients_are_equal(planned, seed):
    model, planner = planned
    plain = planner.profiled.peak_of(planner.solver.plain)
    expected = outcome(model, step(seed))

    for limit in (planner.floor_bytes, (planner.floor_bytes + plain) // 2):
        plan = planner.plan(limit)
        plan.apply(model)
        try:
            found, flops = outcome(model, step(seed)), recomputed_flops(model, step(seed))
        finally:
            plan.remove(model)
        assert plan.recomputed_calls > 0
        assert limit > planner.floor_bytes or flops > 0
        assert differences(found, expected) == []


class Skipping(mixtures.Experts):
    """Calls only the experts that have tokens."""

    def forward(self, x_btd):
        x_nd = x_btd.flatten(0, 1)
        best_nk, picks_nk = self.router(x_nd).softmax(-1).topk(self.picks)
        y_nd = torch.zeros_like(x_nd)
        for number, expert in enumerate(self.experts):
            rows_m, places_m = torch.where(picks_nk == number)
            if len(rows_m):
                y_nd.index_add_(0, rows_m, expert(x_nd[rows_m]) * best_nk[rows_m, places_m, None])
        return y_nd.view_as(x_btd), best_nk.sum()


def test_experts_without_tokens_may_be_left_out(monkeypatch):
    monkeypatch.setattr(mixtures, "Experts", Skipping)
    torch.manual_seed(0)
    model = mixtures.Mixture(CONFIG)
    planner = Planner(model, step(0), cost="flops")
    expected = outcome(model, step(None))
    plan = planner.plan((planner.floor_bytes + planner.profiled.peak_of(planner.solver.plain)) // 2)
    plan.apply(model)

    with pytest.warns(OrderWarning, match=r"Gradients stay exact"):
        found = outcome(model, step(None))

    assert differences(found, expected) == []
    assert plan.recomputed_calls > 0


def test_blocks_whose_experts_get_other_tokens_are_solved_once(planned, monkeypatch):
    _, planner = planned
    solved = []
    monkeypatch.setattr(options, "choices", lambda flow, **given: solved.append(flow) or choices(flow, **given))

    found = options.options_of(planner.profile, "flops")

    units = planner.profile.units.units
    blocks = [one for unit, one in zip(units, found, strict=True) if unit.name.startswith("blocks.")]
    assert len(blocks) == CONFIG.blocks
    assert len([flow for flow in solved if any(one.name == "aten.nonzero.default" for one in flow.operators)]) == 1
    # Of each its own bytes all the same: the tokens of the second block go elsewhere.
    assert [one.kept_bytes for one in blocks[0]] != [one.kept_bytes for one in blocks[1]]


def test_no_more_is_held_than_spares_all_flops(planned):
    _, planner = planned
    profile = planner.solver.pair.leaves
    heavy = ("aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default")
    seen = 0

    for unit, own in enumerate(options.options_of(profile, "flops")):
        flow = flow_of(profile, unit)
        by_hand = evaluate(flow, [place for place, one in enumerate(flow.operators) if one.name in heavy])
        if own and by_hand.held and not by_hand.cost:
            seen += 1
            assert min(one.kept_bytes for one in own if not one.flops) <= by_hand.held_bytes

    assert seen >= CONFIG.blocks


def test_nothing_is_warned_of_on_the_batch_planned_for(planned):
    model, planner = planned
    plan = planner.plan(planner.floor_bytes)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.apply(model)
        outcome(model, step(0))
    plan.remove(model)
