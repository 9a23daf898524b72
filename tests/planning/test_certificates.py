"""How far a plan can be from the best: what the bounds are made from, and what they say."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import models
import torchremat
from planning import steps
from planning.steps import CPU, mixtures, random_tree
from torchremat.measuring.runs import subject_of
from torchremat.planning.bounds.certificates import certain_saves, underestimate
from torchremat.planning.bounds.plain_step import Unseen, plain_step
from torchremat.planning.devices.machines import Here
from torchremat.planning.searches.flows import pooled_seconds, unit_seconds
from torchremat.planning.simulator.prediction import predict
from torchremat.schedules.bounds import lower_bound
from torchremat.schedules.chain import kept
from torchremat.schedules.interpreter import interpret


def tiny(blocks=4):
    return models.gpt_step(blocks=blocks, width=32, context=32, vocabulary=64)


@pytest.fixture(scope="module")
def planner():
    return torchremat.Planner(*tiny(), cost="flops", certify=True)


@pytest.fixture(scope="module")
def step_bytes(planner):
    """What a plain step takes beside what lies there."""
    return planner.profiled.peak_of(planner.solver.plain) - planner.fixed_bytes


def seen(step, model, cost="flops", profile=None, accumulates=None):
    profile = profile or steps.profile(model, step).blocks
    subject = subject_of(step, model, None, accumulates=accumulates)
    return plain_step(subject, Here(CPU), cost, profile=profile, peak_bytes=0)


# ------------------------------------------------------------------------------------------- the plain step


def test_a_plain_step_by_hand():
    # 8 x 16 floats are 512 bytes. sin reads the product again, and the product the input, which was there before.
    model, x = nn.Linear(16, 16, bias=False), torch.randn(8, 16)
    found = seen(lambda model: model(x).sin().sum(), model)

    flow = found.flow
    (product, sine) = [one for one in flow.operators if one.name in ("aten.mm.default", "aten.sin.default")]
    assert product.cost == 2 * 8 * 16 * 16 and sine.cost == 0
    assert [flow.values[value].size_bytes for value in (*product.outputs, *sine.outputs)] == [512, 512]
    assert {flow.values[value].size_bytes for value in product.inputs} == {0}
    # The gradient of the product; the weight's, of 1024 bytes, is made of it and the input.
    assert found.flops == 2 * product.cost
    assert sum(product.outputs[0] in pull.reads for pull in found.pulls) >= 1
    assert max(pull.other_bytes for pull in found.pulls) == 512 + 512 + 4 + 1024 - 512


def test_gradients_of_parameters_pile_up_where_none_lie_there_before():
    model, step = tiny()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())

    assert seen(step, model).pulls[-1].other_bytes == parameter_bytes + 4  # and the loss


def test_gradients_of_parameters_lie_there_before_if_they_accumulate():
    # They are added to what is there, so they do not pile up: what is live at the end is less than one of them.
    model, step = tiny()
    found = seen(step, model, accumulates=True)

    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert found.pulls[-1].other_bytes < parameter_bytes / 10


def test_buffers_that_are_written_take_nothing():
    model, x = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64)), torch.randn(8, 4)
    found = seen(lambda model: model(x).square().sum(), model)

    norm = next(one for one in found.flow.operators if "batch_norm" in one.name)
    sizes = sorted(found.flow.values[value].size_bytes for value in norm.outputs)
    assert sizes == [0, 0, 256, 256, 8 * 64 * 4]


def test_what_kernels_take_for_themselves_lies_there_too():
    # The backward of a convolution takes as much again as the gradients that it makes, and the bound of a U-Net was
    # that of a budget larger by 4 of its 105 MiB.
    model, step = models.unet_step(batch=2, size=16, width=8)
    planner = torchremat.Planner(model, step, cost="flops")
    found, peak = planner.profiled.plain_step, planner.plain_peak()[0] - planner.fixed_bytes
    size = [value.size_bytes for value in found.flow.values]

    last = {value: place for place, pull in enumerate(found.pulls) for value in pull.reads}
    live = [
        pull.other_bytes + sum(size[value] for value, end in last.items() if end >= place)
        for place, pull in enumerate(found.pulls)
    ]

    assert 0.98 * peak <= max(live) <= peak


def test_seconds_are_those_of_the_profile():
    # Plans and bounds once came from two measurements, and their gap was now 2% and now 5% of a step.
    model, step = tiny()
    planner = torchremat.Planner(model, step, cost="seconds")
    profile, costs = planner.profile, [one.cost for one in planner.profiled.plain_step.flow.operators]

    for unit, own in enumerate(profile.costs):
        operators, (_, ends) = profile.units.operators(unit), profile.reached[unit]
        recompute_s = own.seconds_truncated - own.region_s
        if operators.start < ends:
            assert sum(costs[index] for index in operators if index < ends) == pytest.approx(recompute_s)
        if operators.start < ends < operators.stop:
            assert sum(costs[index] for index in operators) == pytest.approx(own.seconds)


def test_a_step_that_ran_other_operators_than_the_profile_takes_as_long():
    model, step = tiny(blocks=1)
    profile = torchremat.Planner(*tiny(blocks=2), cost="seconds").profile

    costs = [one.cost for one in seen(step, model, "seconds", profile).flow.operators]

    assert sum(costs) == pytest.approx(profile.forward_seconds)


def test_a_step_that_does_not_fit_is_not_run(monkeypatch):
    machine, profile = Here(CPU), steps.profile(*tiny()).blocks
    monkeypatch.setattr(machine, "free_bytes", lambda: 10)
    subject = subject_of(lambda model: 1 / 0, nn.Linear(2, 2), None)
    found = plain_step(subject, machine, "flops", profile=profile, peak_bytes=11)

    assert isinstance(found, Unseen) and "does not fit into memory" in found.reason


# -------------------------------------------------------------------------------------------------- regions


def test_what_is_saved_where_an_operator_runs_again():
    # The norm saves its input, weight, bias, mean and rstd; the product its input and the weight; gelu its input, which
    # the product has made, and is counted there: a recompute that runs the product goes on to that save.
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
    x = torch.randn(2, 4, requires_grad=True)
    profile = torchremat.Planner(model, lambda model: model(x).sum(), cost="seconds").profile
    trace = profile.units.trace.operators

    saves = dict(zip((run.name for run in trace.runs), certain_saves(trace), strict=True))

    assert saves["aten.native_layer_norm.default"] == 5
    assert saves["aten.addmm.default"] == 3
    assert saves["aten.gelu.default"] == 0
    assert sum(saves.values()) == len(trace.saves)


def test_seconds_of_regions_are_part_of_the_bound():
    # Once the bound knew nothing of what the executor takes, and plans of small operators seemed far from the best.
    planner = torchremat.Planner(*tiny(), cost="seconds", certify=True)
    claim = planner.plan("min")._claim
    regions, step = claim.keywords["regions"], claim.keywords["step"]
    slow = replace(regions, begun_cost=(1.0,) * len(regions.begun_cost))

    found, with_slow = claim(), claim(cost=100.0, regions=slow)

    assert "if what runs again does so in regions" in str(found)
    assert found.bound_all <= found.cost
    assert with_slow.bound_all > 1.0
    assert len(regions.saved_cost) == len(step.flow.operators)


def test_no_operator_is_charged_for_code_that_no_recompute_reaches(planner):
    # All seconds of a call were shared out among its operators, so a bound was ten times what the plan costs where
    # something waited behind the last save: it was cut off there, and the plan called the best possible.
    profile, pooled = planner.profile, pooled_seconds(planner.profile.units.trace.operators.runs)
    unit = next(unit for unit, own in enumerate(profile.units.units) if own.name == "blocks.1")
    operators, (_, ends) = profile.units.operators(unit), profile.reached[unit]
    waits = replace(profile.costs[unit], seconds=1.0, seconds_truncated=0.03, region_s=0.01)
    costs = tuple(waits if number == unit else one for number, one in enumerate(profile.costs))

    found = unit_seconds(replace(profile, costs=costs), unit, pooled)

    reached = ends - operators.start
    assert 0 < reached < len(found) == len(operators)
    assert sum(found[:reached]) == pytest.approx(0.02)
    assert sum(found[reached:]) == pytest.approx(0.98)


def test_a_bound_above_the_cost_of_the_plan_proves_nothing(planner):
    claim = planner.plan("min")._claim

    found = claim(cost=1e-3, unit="seconds")

    assert claim().bound_all is not None
    assert (found.bound_all, found.gap) == (None, None)
    assert "best of all schedules" not in found.claim
    assert "missing: the measured seconds contradict each other: by those of single operators" in str(found)


def test_flops_know_nothing_of_regions(planner):
    plan = planner.plan("50% of activations")

    assert plan._claim.keywords["regions"] is None
    assert "in regions" not in str(plan.certificate)


# ------------------------------------------------------------------------------------------- underestimates


@pytest.mark.parametrize("make", [tiny, lambda: models.unet_step(batch=1, size=8, width=8)], ids=["gpt", "unet"])
def test_an_underestimate_takes_no_more_than_any_tree(make):
    draw = random.Random(0)
    for profile in mixtures(*make(), draw, 1):
        low = underestimate(profile, "flops")
        for _ in range(40):
            tree = random_tree(profile.units, draw)
            outcome, prediction = interpret(low.chain, tree), predict(profile, tree)

            assert outcome.peak_bytes <= prediction.peak_bytes + low.slack_bytes
            assert outcome.cost <= prediction.flops


# --------------------------------------------------------------------------------------------- certificates


def test_a_plan_that_recomputes_nothing_is_the_best(planner):
    found = planner.plan("100%").certificate

    assert (found.cost, found.bound_all, found.bound_persistent) == (0.0, 0.0, 0.0)
    assert found.gap == found.gap_persistent == 0.0


# Gradients that are made in the step take 0.19 of its bytes at the end, where nothing can be recomputed.
@pytest.mark.parametrize(
    ("share", "accumulates", "gap"),
    [
        (0.8, False, 0.0),
        (0.5, False, 0.07),
        (0.45, False, 0.07),
        (0.8, True, 0.0),
        (0.5, True, 0.06),
        (0.4, True, 0.06),
    ],
)
def test_a_plan_is_near_the_bound(share, accumulates, gap):
    planner = torchremat.Planner(*tiny(), cost="flops", accumulates=accumulates, certify=True)
    plan = planner.plan(f"{100 * share:g}% of activations")

    found = plan.certificate

    assert found.cost == plan.recomputed_flops
    assert found.step_cost == planner.profiled.plain_step.flops
    assert 0 <= found.bound_all <= found.cost and 0 <= found.bound_persistent <= found.cost
    assert 0 <= found.gap <= gap
    if share == 0.4:
        assert found.bound_all > 0.1 * found.step_cost


def test_the_bound_holds_for_every_plan(planner, step_bytes):
    # No plan for less, however it was found, costs less than the bound of a larger budget.
    step = planner.profiled.plain_step
    bounds = {share: lower_bound(step.flow, step.pulls, int(share * step_bytes)) for share in (0.9, 0.6, 0.4)}

    for solver in planner.solver.solvers:
        for one in (*solver._known.candidates.values(), *solver._shared.candidates.values()):
            for share, bound in bounds.items():
                if one.prediction.peak_bytes <= share * step_bytes:
                    assert one.prediction.flops >= bound


def test_a_plan_in_parts_has_the_bound_of_all_schedules():
    # Where only recomputes in parts fit, it was "at most 0.0% above the best of nested regions", and there are none.
    model, step = models.gpt_step(blocks=3, width=32, context=32, batch=8, vocabulary=32)
    planner = torchremat.Planner(model, step, cost="flops", certify=True)
    dividing, step = planner.solver.dividing, planner.profiled.plain_step
    plan = planner.plan("min")

    found = plan.certificate

    assert any(one.cuts for one in plan.held)
    assert (found.bound_persistent, found.gap_persistent) == (None, None)
    assert "best of nested regions" not in f"{found}{plan}"
    assert "missing: nested regions: none over whole calls fits the budget" in str(found)
    assert 0 < found.bound_all < found.cost
    judged = [
        one.prediction
        for one in dividing._solver._known.candidates.values()
        if any(keep.option for keep in kept(one.tree))
    ]
    assert len(judged) > 10
    for limit_bytes in sorted(one.peak_bytes for one in judged)[::8]:
        bound = lower_bound(step.flow, step.pulls, limit_bytes)
        assert all(one.flops >= bound for one in judged if one.peak_bytes <= limit_bytes)


def test_a_certificate_is_printed_and_kept(planner, tmp_path):
    plan = planner.plan("50% of activations")
    plan.save(tmp_path / "plan.json")
    found = torchremat.Plan.load(tmp_path / "plan.json")

    assert f"optimal    {plan.certificate.claim}" in str(plan)
    assert found.certificate == plan.certificate
    assert str(found) == str(plan)
    assert "if a tensor is held as its whole storage or not at all" in str(found.certificate)


def test_nothing_is_run_for_a_certificate_that_nobody_asks_for():
    # The plain step under a log was an eighth of the planning of a Llama.
    model, step = tiny()
    plain, certified = (torchremat.Planner(model, step, cost="flops", certify=one) for one in (False, True))
    plans = [one.plan("50% of activations") for one in (plain, certified)]

    assert certified.subject.runs == plain.subject.runs + 1
    assert plans[0].certificate is None and "optimal" not in str(plans[0])
    assert plans[1].certificate is not None and "optimal" in str(plans[1])
    assert (plans[0].tree, plans[0].held) == (plans[1].tree, plans[1].held)


def test_what_is_not_known_is_said(monkeypatch):
    planner = torchremat.Planner(*tiny(blocks=2), cost="flops", certify=True)
    monkeypatch.setattr(planner.profiled.placed.machine, "free_bytes", lambda: 0)
    found = planner.plan("80%").certificate

    assert found.bound_all is None and found.gap is None
    assert found.bound_persistent is not None
    assert "best of all schedules" not in found.claim
    assert "missing: a step without any recompute" in str(found)


def test_a_plan_for_bytes_runs_no_plain_step_that_needs_more():
    model, step = tiny()
    planner = torchremat.Planner(model, step, cost="flops", certify=True)
    budget, runs = (planner.profiled.peak_of(planner.solver.plain) + planner.floor_bytes) // 2, planner.subject.runs

    found = planner.plan(budget).certificate

    assert planner.subject.runs == runs
    assert found.bound_all is None and found.bound_persistent is not None
    assert "needs more than the budget; for a budget that is a share" in str(found)
    assert planner.plan("60%").certificate.bound_all is not None
    assert planner.subject.runs > runs
    # What has been seen once is known.
    assert planner.plan(budget).certificate.bound_all is not None


def test_shares_are_rounded_up():
    found = torchremat.Certificate(
        unit="seconds",
        cost=1.0,
        step_cost=100.0,
        bound_all=0.7999,
        bound_persistent=None,
        seconds=0.0,
        assumptions=(),
        missing=("nested regions: no chain",),
    )

    assert found.gap == pytest.approx(0.002001)
    assert found.claim == "at most 0.3% of a step above the best of all schedules, in seconds"


def test_with_stores_only_a_plan_that_costs_nothing_is_known_to_be_the_best(planner):
    # Plans with stores had no certificate at all, though nobody recomputes less than nothing.
    claim = planner.plan("60%")._claim

    found, free = claim(stores=True), claim(stores=True, cost=0.0)

    assert (found.gap, found.gap_persistent) == (None, None)
    assert found.claim.startswith("not known: tensors wait in stores")
    assert (free.gap, free.missing) == (0.0, ())
