"""Plans that choose how the optimizer steps: released gradients, and state in a store."""

import copy
import json
import pickle
import re

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import prune

import torchremat
from models import GPT
from optimizing.loops import equal, measured_peak, train
from probes.planning import SteppingSeconds, ways_of_stepping
from torchremat import (
    Adaptive,
    BudgetError,
    Compressed,
    Disk,
    Host,
    Plan,
    PlanError,
    StepError,
    UnsupportedError,
    codecs,
    guard,
    release_gradients,
)

pytestmark = pytest.mark.usefixtures("declared_speed")

ROWS = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
WORDS = torch.randn(16, 4, 32, generator=torch.Generator().manual_seed(0))


def convolutions():
    def block(inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    blocks = block(3, 32), block(32, 64), block(64, 64)
    return nn.Sequential(*blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 256, 10))


class Recurrent(nn.Module):
    """Each of its modules is called many times, and its gradients are complete only at the end of the backward."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
        self.cell = nn.LSTMCell(32, 64)

    def forward(self, words):
        hidden = state = torch.zeros(words.shape[1], 64)
        for word in words:
            hidden, state = self.cell(self.enter(word), (hidden, state))
        return hidden


MODELS = {
    "gpt": (
        lambda: GPT(blocks=2, width=64, context=64),
        lambda model: F.cross_entropy(model(ROWS[:, :-1]).flatten(0, 1), ROWS[:, 1:].flatten()),
        ROWS,
    ),
    "convolutions": (convolutions, lambda model: model(IMAGES).square().mean(), IMAGES),
    "recurrent": (Recurrent, lambda model: model(WORDS).square().mean(), WORDS),
}
OPTIMIZERS = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def made(model="gpt", optimizer="adamw", *, steps=0):
    torch.manual_seed(0)
    make, loss_of, _ = MODELS[model]
    own = make()
    steps_on = OPTIMIZERS[optimizer](own.parameters())
    train(own, steps_on, loss_of, steps)
    return own, steps_on, loss_of


def is_plain(model, optimizer):
    """Whether nothing is left on an optimizer and its parameters."""
    hooks = [getattr(one, "_post_accumulate_grad_hooks", None) for one in model.parameters()]
    stored = [type(one) for one in optimizer.state.values() if type(one) is not dict]
    return not optimizer._optimizer_step_pre_hooks and not any(hooks) and not stored


WAYS = {
    "released": ({"release_gradients": True}, (True, False)),
    "stored": ({"optimizer_store": Disk}, (False, True)),
    "both": ({"release_gradients": True, "optimizer_store": Disk}, (True, True)),
}


def with_stores(options):
    """The options with a store where they have its class: a store has threads for as long as it is there."""
    return {name: one() if one is Disk else one for name, one in options.items()}


# Each way meets each model, each optimizer, and one that has stepped; so does each model.
@pytest.mark.parametrize(
    ("way", "kind", "optimizer", "begun"),
    [
        ("released", "gpt", "adamw", 2),
        ("released", "convolutions", "momentum", 0),
        ("released", "recurrent", "adamw", 0),
        ("stored", "gpt", "momentum", 0),
        ("stored", "convolutions", "adamw", 0),
        ("stored", "recurrent", "adamw", 2),
        ("both", "gpt", "adamw", 0),
        ("both", "convolutions", "adamw", 2),
        ("both", "recurrent", "momentum", 0),
    ],
)
def test_the_predicted_peak_is_the_measured_one(way, kind, optimizer, begun):
    options, (releases, stores) = WAYS[way]
    model, steps_on, loss_of = made(kind, optimizer, steps=begun)
    before = copy.deepcopy([*model.parameters(), steps_on.state_dict()["state"]])

    plan = torchremat.plan(model, loss_of, budget="min", optimizer=steps_on, **with_stores(options))

    assert (plan.stepping.releases, plan.stepping.stores) == (releases, stores)
    assert is_plain(model, steps_on)
    assert equal(before, [*model.parameters(), steps_on.state_dict()["state"]])
    plan.apply(model)
    train(model, steps_on, loss_of, 2)
    assert measured_peak(model, steps_on, loss_of, MODELS[kind][2]) == plan.peak_bytes
    plain, plain_steps_on, _ = made(kind, optimizer, steps=begun + 3)
    assert equal([*model.parameters()], [*plain.parameters()])
    plan.remove(model)
    assert is_plain(model, steps_on)
    assert equal(steps_on.state_dict(), plain_steps_on.state_dict())


def accumulated(model, optimizer, loss_of, *, last=lambda optimizer: None, clips=lambda model: None):
    for _ in range(3):
        optimizer.zero_grad()
        for number in range(3):
            if number == 2:
                last(optimizer)
            loss_of(model).backward()
        clips(model)
        optimizer.step()


def test_a_plan_for_several_backwards_clips_by_value_and_releases_in_the_last(tmp_path):
    plain, steps_on, loss_of = made()
    accumulated(plain, steps_on, loss_of, clips=lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3))
    model, steps_on, loss_of = made()
    options = {"release_gradients": True, "accumulates": True, "clip_value": 1e-3}

    plan = torchremat.plan(model, loss_of, budget="min", optimizer=steps_on, cost="flops", **options)
    plan.apply(model)
    accumulated(model, steps_on, loss_of, last=torchremat.last_microbatch)

    assert equal([*model.parameters()], [*plain.parameters()])
    assert plan.released_bytes == 0  # they are there when the last backward begins
    assert "each parameter steps in the last backward" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").stepping == plan.stepping
    steps_on.zero_grad()
    for _ in range(2):
        loss_of(model).backward()
    torchremat.last_microbatch(steps_on)
    assert measured_peak(model, steps_on, loss_of, ROWS, keeps_gradients=True) <= plan.peak_bytes
    with pytest.raises(UnsupportedError, match=r"last_microbatch\(\) was not called"):
        accumulated(model, steps_on, loss_of)
    plan.remove(model)
    torchremat.last_microbatch(steps_on)  # nothing is released now


# ------------------------------------------------------------------------------------------------------- the choice


@pytest.fixture(scope="module")
def plainly():
    """A planner of the plain step."""
    model, optimizer, loss_of = made()
    return torchremat.Planner(model, loss_of, optimizer=optimizer)


def test_a_budget_that_the_plain_step_fits_gets_the_plain_plan_and_no_other_profile(plainly):
    model, optimizer, loss_of = made()
    plain = plainly.plan("100%")
    planner = torchremat.Planner(model, loss_of, optimizer=optimizer, release_gradients="auto", optimizer_store=Disk())
    runs = planner.subject.runs

    plan = planner.plan("100%")

    assert planner.subject.runs <= runs + 1  # the plain step's peak
    assert (plan.peak_bytes, plan.tree, plan.stepping) == (plain.peak_bytes, plain.tree, plain.stepping)
    assert "released" not in str(plan) and "waiting" not in str(plan)


def test_where_the_plain_floor_ends_gradients_are_released_and_below_that_state_is_stored(plainly):
    """By flops, which are exact: a way is taken where no plan without it recomputes as little."""
    model, optimizer, loss_of = made()
    common = {"optimizer": optimizer, "cost": "flops"}
    released, both = ({"release_gradients": True, **rest} for rest in ({}, {"optimizer_store": Disk()}))
    others = [torchremat.Planner(model, loss_of, **common, **options) for options in (released, both)]
    floors = [one.floor_bytes for one in (plainly, *others)]

    releasing = torchremat.Planner(model, loss_of, **common, release_gradients="auto")
    planner = torchremat.Planner(model, loss_of, **common, release_gradients="auto", optimizer_store=Disk())
    plans = [releasing.plan(floors[0] - 1), planner.plan(floors[1] - 1), planner.plan(floors[2])]

    assert floors == sorted(floors, reverse=True)
    ways = ["gradients released", *["gradients released, state stored"] * 2]
    assert [str(one.stepping) for one in plans] == ways
    assert all(one.peak_bytes <= one.budget_bytes for one in plans)
    assert planner.floor_bytes == floors[2]
    with pytest.raises(BudgetError, match=f"Smallest budget that works: {floors[2]} bytes"):
        planner.plan(floors[2] - 1)


def test_a_way_that_takes_longer_than_to_recompute_is_not_taken():
    model, optimizer, loss_of = made()
    planner = torchremat.Planner(model, loss_of, optimizer=optimizer, release_gradients="auto", optimizer_store=Disk())
    lowest = planner.profiled.lowest_bytes  # of the plain way

    vars(planner.profiled.placed)["stepping_seconds"] = SteppingSeconds(
        parts_s=1e6, moves_s=1.0, busy_s=1.0, state_bytes=0
    )
    plan = planner.plan(lowest)

    assert str(plan.stepping) == "plain" and plan.recomputed_flops
    assert planner.plan(lowest - 1).stepping_seconds == 1e6  # where nothing else is left


def test_the_seconds_of_ways_are_those_that_a_step_waits_for():
    seconds = SteppingSeconds(parts_s=1.0, moves_s=10.0, busy_s=2.0, state_bytes=0)
    ways = ways_of_stepping(releases="auto", stores=True)

    assert [seconds.added_s(way, backward_s=4.0) for way in ways] == [0.0, 1.0, 1.0 + 10.0 - 4.0]
    assert [seconds.added_s(way, backward_s=30.0) for way in ways] == [0.0, 1.0, 1.0 + 2.0]
    assert seconds.added_s(ways_of_stepping(releases=False, stores=True)[-1], backward_s=30.0) == 10.0


def test_shares_are_of_the_plain_step(plainly):
    model, optimizer, loss_of = made()
    shares = {share: plainly.plan(share).budget_bytes for share in ("75%", "50% of activations")}

    for options in ({"release_gradients": True}, {"release_gradients": "auto", "optimizer_store": Host()}):
        planner = torchremat.Planner(model, loss_of, optimizer=optimizer, **options)
        assert {share: planner.plan(share).budget_bytes for share in shares} == shares
        assert planner.plain_peak() == plainly.plain_peak()


def test_a_frontier_goes_below_the_plain_floor(plainly):
    model, optimizer, loss_of = made()
    plain = plainly.frontier(points=6)

    found = torchremat.frontier(
        model, loss_of, optimizer=optimizer, points=6, release_gradients="auto", optimizer_store=Disk()
    )

    state_bytes = 2 * sum(one.nbytes for one in model.parameters())
    assert found.points[0] == plain.points[0]
    # Some of the state stays, and some gradients were there at the peak.
    assert found.floor.peak_bytes <= plain.floor.peak_bytes - 1.05 * state_bytes
    assert "floor  gradients released, state stored" in str(found)
    plan = found.plan(found.floor)
    assert plan.stepping == found.floor.stepping and plan.peak_bytes == found.floor.peak_bytes
    assert plan.slowdown == pytest.approx(found.floor.slowdown)
    assert found.plan("100%").stepping == found.points[0].stepping
    plan.apply(model)
    train(model, optimizer, loss_of, 1)
    assert equal([*model.parameters()], [*made(steps=1)[0].parameters()])


# -------------------------------------------------------------------------------------------------- plans as values


@pytest.fixture(scope="module")
def below():
    model, optimizer, loss_of = made()
    options = {"release_gradients": True, "optimizer_store": Disk(), "certify": True}
    plan = torchremat.plan(model, loss_of, budget="min", optimizer=optimizer, **options)
    return plan, model, optimizer, loss_of


def test_a_plan_says_what_is_released_and_what_waits_where(below):
    plan, model, _, _ = below
    parameter_bytes = sum(one.nbytes for one in model.parameters())

    assert plan.released_bytes == parameter_bytes and plan.before_bytes["gradients"] == 0
    # The averages of layers below 1 KiB, and the counts of steps, stay.
    counts = 4 * len([*model.parameters()])
    assert plan.waiting_bytes + plan.before_bytes["optimizer"] == 2 * parameter_bytes + counts
    assert plan.before_bytes["optimizer"] < 2**16
    said = re.search(r"^released +(.*)\nwaiting +(.*)$", str(plan), re.MULTILINE)
    assert said[1] == "535.00 KiB of gradients: each parameter steps in the backward"
    assert re.fullmatch(r"1.04 MiB of optimizer state in Disk\(.*\), [0-9.]+ ms added", said[2])
    assert "if the optimizer steps as under the plan (gradients released, state stored)" in str(plan.certificate)


def test_a_plan_in_a_file_needs_an_optimizer_and_a_store_again(below, tmp_path):
    plan, _, _, _ = below
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    model, optimizer, loss_of = made()

    assert loaded == plan
    with pytest.raises(PlanError, match=r"counts on an optimizer .* it was loaded.*apply\(model, optimizer=...\)"):
        loaded.apply(model)
    with pytest.raises(PlanError, match=r"made with Disk\(.*apply\(model, optimizer=..., optimizer_store=...\)"):
        loaded.apply(model, optimizer=optimizer)
    with pytest.raises(StepError, match="none of its 29 parameters is one of the model's"):
        loaded.apply(model, optimizer=below[2], optimizer_store=Disk())
    assert not loaded.is_on(model) and is_plain(model, optimizer)
    loaded.apply(model, optimizer=optimizer, optimizer_store=Disk())
    train(model, optimizer, loss_of, 2)
    assert equal([*model.parameters()], [*made(steps=2)[0].parameters()])
    plan.remove(model)  # an equal plan
    assert is_plain(model, optimizer)


def test_an_older_file_is_of_a_plan_that_steps_plainly(below, tmp_path):
    plan = torchremat.plan(below[1], below[3], budget="75%", optimizer=below[2])
    file = tmp_path / "plan.json"
    plan.save(file)
    content = json.loads(file.read_text())
    for name in ("released_bytes", "waiting_bytes", "stepping_seconds", "optimizer_store"):
        del content[name]
    for name in ("away_bytes", "room_bytes", "parameter_store", "stepping"):
        del content[name]
    file.write_text(json.dumps(content))

    assert Plan.load(file) == plan


def test_a_copy_of_a_plan_does_not_have_the_optimizer(below):
    for copied in (copy.copy(below[0]), copy.deepcopy(below[0].given_optimizer), pickle.loads(pickle.dumps(below[0]))):
        given = copied if isinstance(copied, type(below[0].given_optimizer)) else copied.given_optimizer
        assert given.get() is (below[2] if copied is not given and given is below[0].given_optimizer else None)


def test_a_plan_does_not_keep_the_optimizer_alive():
    model, optimizer, loss_of = made()
    plan = torchremat.plan(model, loss_of, budget="75%", optimizer=optimizer, release_gradients=True)
    del optimizer

    with pytest.raises(PlanError, match="or the optimizer is gone"):
        plan.apply(model)


# ------------------------------------------------------------------------------------------------- on and off a model


def test_unwrap_takes_off_all_of_it(below):
    plan, model, optimizer, _ = below
    plan.apply(model)
    assert not is_plain(model, optimizer)

    torchremat.unwrap(model)

    assert is_plain(model, optimizer) and not plan.is_on(model)


def test_a_copy_of_the_model_steps_plainly_and_leaves_the_first_alone(below):
    plan, model, optimizer, loss_of = below
    plan.apply(model)
    copied = copy.deepcopy(model)

    loss_of(copied).backward()
    assert all(one.grad is not None and one.grad.norm() > 0 for one in copied.parameters())
    plan.remove(copied)

    assert plan.is_on(model) and not is_plain(model, optimizer)
    plan.remove(model)


def test_an_open_step_is_ended_first(below):
    plan, _, _, _ = below
    model, optimizer, loss_of = made()
    plan.apply(model, optimizer=optimizer)
    loss_of(model).backward()

    for remove in (plan.remove, torchremat.unwrap):
        with pytest.raises(UnsupportedError, match=r"Call `optimizer.step\(\)` first"):
            remove(model)
        assert plan.is_on(model)
    optimizer.step()
    plan.remove(model)
    assert is_plain(model, optimizer)


@pytest.mark.parametrize("begun", [0, 1], ids=["new", "begun"])
def test_verify_compares_gradients_that_are_released(below, begun, monkeypatch):
    plan, _, _, _ = below
    model, optimizer, loss_of = made(steps=begun)
    plan.apply(model, optimizer=optimizer)

    report = torchremat.verify(model, loss_of, optimizer=optimizer)

    assert report.is_exact and report.peak_bytes == report.predicted_bytes == plan.peak_bytes
    plain = torchremat.Planner(made()[0], loss_of).plain_peak()[0]
    assert report.plain_peak_bytes > plain + plan.waiting_bytes
    assert len(optimizer.state) == (29 if begun else 0)

    # A recompute that changes a gradient is found, though the gradient is gone at the end.
    def wrong(module, args):
        return args if torch._C._current_graph_task_id() < 0 else tuple(1.1 * one for one in args)

    with model.blocks[1].up.register_forward_pre_hook(wrong):
        assert torchremat.verify(model, loss_of, optimizer=optimizer).is_exact is False


def test_verify_compares_a_released_gradient_with_one_that_is_added_to_zeros():
    # A pruned weight has gradients of -0.0, and -0.0 added to zeros is 0.0.
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(model):
        return model(-torch.ones(4, 8)).square().sum()

    plan = torchremat.plan(model, loss_of, budget="min", optimizer=optimizer, release_gradients=True, cost="flops")
    plan.apply(model)

    assert torchremat.verify(model, loss_of, optimizer=optimizer).is_exact


def test_fit_confirms_by_a_real_step(below):
    model, optimizer, loss_of = made()
    smallest = below[0].floor_bytes

    torchremat.fit(
        model, loss_of, budget=smallest, optimizer=optimizer, release_gradients="auto", optimizer_store=Disk()
    )

    train(model, optimizer, loss_of, 1)
    assert measured_peak(model, optimizer, loss_of, ROWS) <= smallest
    torchremat.unwrap(model)


def test_each_shape_of_adaptive_has_released_gradients():
    model, optimizer, _ = made()
    parameter_bytes = sum(one.nbytes for one in model.parameters())

    def loss_of(model, rows):
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    batches = [ROWS[:, :length] for length in (17, 33, 65, 33)]
    with pytest.raises(BudgetError, match="no plan fits"):
        Adaptive(model, loss_of, budget="2750KiB", optimizer=optimizer)(batches[2])

    with Adaptive(model, loss_of, budget="2750KiB", optimizer=optimizer, release_gradients=True, cost="flops") as run:
        for rows in batches:
            optimizer.zero_grad()
            run(rows)
            optimizer.step()
        peaks = [one.peak_bytes for one in run.plans]

    assert max(peaks) <= 2750 * 1024 and min(peaks) > 3 * parameter_bytes
    assert is_plain(model, optimizer)
    plain, steps_on, _ = made()
    for rows in batches:
        steps_on.zero_grad()
        loss_of(plain, rows).backward()
        steps_on.step()
    assert equal([*model.parameters()], [*plain.parameters()])


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"release_gradients": "yes"}, "release_gradients='yes': allowed are True, False and \"auto\""),
        ({"release_gradients": 1}, "release_gradients=1: allowed are"),
        ({"release_gradients": True}, "none is given: pass the one that trains the model, `optimizer=`"),
        ({"optimizer_store": Host()}, "none is given: pass the one that trains the model, `optimizer=`"),
        ({"optimizer_store": "disk"}, "optimizer_store='disk': expected an object with a method `put`"),
        ({"optimizer_store": Disk}, "optimizer_store=.*Disk'>: expected an object with a method `put`"),
        (
            {"optimizer_store": Compressed(Host(), lossy=codecs.BFloat16())},
            "optimizer_store=.* loses digits .*Plan without it, and call `torchremat.offload_optimizer` before",
        ),
        ({"release_gradients": True, "on": "meta"}, "parts of the optimizer's step run .* need data.*or on='meta'"),
    ],
)
def test_options_that_cannot_be_honoured(options, said):
    model, _, loss_of = made()

    with pytest.raises(UnsupportedError, match=said):
        torchremat.plan(model, loss_of, budget="75%", **options)


def test_gradients_that_are_released_already_are_not_released_by_a_plan():
    model, optimizer, loss_of = made()

    with (
        release_gradients(model, optimizer),
        pytest.raises(UnsupportedError, match="the gradients of this AdamW are released already"),
    ):
        torchremat.plan(model, loss_of, budget="min", optimizer=optimizer, release_gradients=True)
    assert is_plain(model, optimizer)


@pytest.mark.parametrize(
    "options", [{"release_gradients": "auto"}, {"optimizer_store": Host()}], ids=["released", "stored"]
)
def test_an_optimizer_whose_step_has_no_parts_is_refused_whatever_the_budget(options):
    model, _, loss_of = made()
    optimizer = optim.LBFGS(model.parameters())

    with pytest.raises(UnsupportedError, match="LBFGS"):
        torchremat.plan(model, loss_of, budget="100%", optimizer=optimizer, **options)


def test_a_guard_refuses_a_plan_that_trains_in_the_backward(below):
    plan, model, optimizer, loss_of = below

    with (
        pytest.raises(UnsupportedError, match=r"the plan releases gradients.*cannot be run again"),
        guard(model, loss_of, plan=plan, optimizer=optimizer),
    ):
        pass


def test_a_store_that_would_hold_nothing_is_refused():
    model, optimizer, loss_of = made()
    plan = torchremat.plan(model, loss_of, budget="75%", optimizer=optimizer)

    with pytest.raises(PlanError, match="made without a store for the optimizer's state"):
        plan.apply(model, optimizer=optimizer, optimizer_store=Disk())
