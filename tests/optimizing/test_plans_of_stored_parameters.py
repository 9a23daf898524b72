"""Plans made while parameters of the model wait in a store: all of them may be too large to be in memory."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import torchremat
from logs import Log
from optimizing.chains import stored
from optimizing.loops import equal, measured_peak, train
from optimizing.test_parameters_in_plans import KINDS, ROWS, SMALL, made, rows_of
from probes.planning import trace
from torchremat import Disk, Host, Pipe, Plan, PlanError, UnsupportedError, offload_parameters
from torchremat.pipeline import plan_stages

pytestmark = pytest.mark.usefixtures("declared_speed")


def planner_of(model, optimizer, **options):
    return torchremat.Planner(model, rows_of, optimizer=optimizer, cost="flops", **options)


def away(store=None):
    model, optimizer, _ = made()
    return model, optimizer, offload_parameters(model, optimizer, Disk() if store is None else store)


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_is_that_of_a_model_in_memory_to_the_byte(kind):
    """Each parameter has other memory each time that it comes back, and a trace took it for an activation."""
    here, theirs, loss_of = made(kind)
    model, optimizer, _ = made(kind)
    plain = torchremat.Planner(here, loss_of, optimizer=theirs, cost="flops").profile

    offload_parameters(model, optimizer, Disk())
    found = torchremat.Planner(model, loss_of, optimizer=optimizer, cost="flops").profile

    for name in ("sizes", "order", "extra_bytes", "after_bytes", "start_bytes"):
        assert getattr(found, name) == getattr(plain, name), name
    for unit, one in plain.backwards.items():
        ours = found.backwards[unit]
        assert ours.delta_bytes.tolist() == one.delta_bytes.tolist()
        for name in ("asked_at", "freed_at", "lost_at", "remade", "storages", "fixed"):
            assert getattr(ours, name) == getattr(one, name), name
    ours, own = found.units.trace, plain.units.trace
    assert (ours.storage_bytes, ours.fixed, ours.parameters) == (own.storage_bytes, own.fixed, own.parameters)
    runs = [(one.name, one.reads, one.makes, one.flops) for one in ours.operators.runs]
    assert runs == [(one.name, one.reads, one.makes, one.flops) for one in own.operators.runs]
    assert found.before.parameter_bytes == sum(one.nbytes for one in model.parameters() if type(one) is nn.Parameter)


def test_a_trace_brings_back_no_parameter_before_its_module_runs():
    model, _, _ = away()
    seen, before = Log(), len(stored(model))

    def step(model):
        seen.append(len(stored(model)))
        return rows_of(model)

    trace(model, step)

    assert seen == [before]


@pytest.mark.parametrize("releases", [False, True])
def test_a_plan_counts_the_most_that_are_in_memory(releases):
    model, optimizer, offload = away()
    options = {"release_gradients": True, "optimizer_store": Disk()} if releases else {}

    plan = torchremat.plan(model, rows_of, budget="min", optimizer=optimizer, cost="flops", **options)

    large = [one.nbytes for one in model.parameters() if one.nbytes >= 2**15]
    assert (plan.away_bytes, plan.room_bytes) == (sum(large), 4 * max(large))
    assert plan.is_of_stored and not plan.stepping.stores_parameters
    assert "1.78 MiB of parameters already, at most 1.00 MiB of them in memory" in str(plan)
    plan.apply(model)
    train(model, optimizer, rows_of, 2)
    peak_bytes = measured_peak(model, optimizer, rows_of, ROWS)
    assert plan.peak_bytes - 3 * max(large) <= peak_bytes <= plan.peak_bytes == plan.budget_bytes - 4096
    assert stored(model) == [name for name, one in model.named_parameters() if one.nbytes >= 2**15]
    assert torchremat.verify(model, rows_of, optimizer=optimizer).is_exact
    plan.remove(model)
    offload.remove()
    assert equal([*model.parameters()], [*made(steps=3)[0].parameters()])


@pytest.mark.parametrize("store", [None, Disk()], ids=["already", "by the plan"])
def test_planning_has_few_parameters_in_memory_at_once(store):
    """It profiled the step with all of them, in any way."""

    class Counting(nn.Linear):
        def forward(self, x):
            seen.append(24 - len(stored(model)))
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Counting(256, 256, bias=False) for _ in range(24)))
    optimizer = optim.SGD(model.parameters(), 0.1)
    options = {} if store is None else {"parameter_store": store}
    if store is None:
        offload_parameters(model, optimizer, Disk())
    seen, x = Log(), torch.ones(4, 256)

    plan = torchremat.plan(model, lambda own: own(x).square().mean(), budget="min", optimizer=optimizer, **options)

    assert plan.away_bytes == 24 * 2**18
    assert 0 < max(seen[-24:]) <= 4


def test_a_step_that_fits_only_while_parameters_wait_is_planned_so():
    def step(model):
        if not stored(model):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rows_of(model)

    model, optimizer, _ = made()

    plan = torchremat.plan(model, step, budget="min", optimizer=optimizer, cost="flops", parameter_store=Disk())

    assert str(plan.stepping) == "parameters stored" and plan.plain_source == "predicted"
    whole = torchremat.plan(model, rows_of, budget="100%", optimizer=optimizer, cost="flops")
    assert plan.plain_peak_bytes == whole.plain_peak_bytes
    assert plan.peak_bytes < torchremat.plan(model, rows_of, budget="min", optimizer=optimizer, cost="flops").peak_bytes


def test_a_store_in_the_same_memory_counts():
    model, optimizer, _ = away(Host())

    plan = torchremat.plan(model, rows_of, budget="90%", optimizer=optimizer, cost="flops")

    assert plan.away_bytes == 0
    assert plan.before_bytes["parameters"] == sum(one.nbytes for one in model.parameters())


def test_ways_are_chosen_and_frontiers_made_as_in_memory():
    model, optimizer, _ = away()
    options = {"cost": "flops", "optimizer": optimizer, "release_gradients": "auto", "optimizer_store": Disk()}

    found = torchremat.frontier(model, rows_of, points=2, **options)

    assert found.points[0].slowdown == 1.0  # of the plain step, whose parameters wait as well
    assert str(found.plan("min").stepping) == "gradients released, state stored"
    torchremat.fit(model, rows_of, budget="90%", optimizer=optimizer, cost="flops")
    torchremat.unwrap(model)


def test_without_an_optimizer():
    model, _, _ = away()

    assert torchremat.plan(model, rows_of, budget="min").room_bytes == 4 * 2**18


def test_a_plan_for_all_shapes_counts_them():
    def step(model, rows):
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    model, optimizer, _ = away()
    adaptive = torchremat.Adaptive(model, step, budget=2**25, optimizer=optimizer)
    adaptive(ROWS)
    theirs, others, _ = made()
    plain = torchremat.Adaptive(theirs, step, budget=2**25, optimizer=others)
    plain(ROWS)

    waiting = sum(one.nbytes for one in theirs.parameters() if one.nbytes >= 2**15)
    difference = plain.plans[0].peak_bytes - adaptive.plans[0].peak_bytes
    assert difference == waiting - 4 * 2**18


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parameter_store": Disk()}, r"parameter_store=: parameters of this model wait in a store already"),
        ({"on": "meta", "device": "h100"}, r"on='meta': parameters of this model wait in a store already"),
        ({"stores": [SMALL]}, r"stores= and offload_parameters: parameters take a part of the limit"),
    ],
)
def test_options_that_cannot_be_honoured(options, said):
    model, optimizer, _ = away(SMALL)

    with pytest.raises(UnsupportedError, match=said):
        torchremat.plan(model, rows_of, budget="60%", optimizer=optimizer, **options)


def test_stages_are_refused():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    pipe = Pipe(model, balance=[1, 1], devices=["cpu", "cpu"], chunks=2)
    offload_parameters(model, None, Disk())

    with pytest.raises(UnsupportedError, match="parameters of this stage wait in a store"):
        plan_stages(pipe, lambda own: own(torch.ones(4, 256)).sum(), budget="1GiB")


def test_a_plan_that_counts_on_them_is_applied_while_they_wait(tmp_path):
    model, optimizer, offload = away()
    plan = torchremat.plan(model, rows_of, budget="90%", optimizer=optimizer, cost="flops")
    offload.remove()
    plan.save(tmp_path / "plan.json")

    with pytest.raises(PlanError, match=r"made while 1.78 MiB of parameters wait in a store, and here none do"):
        Plan.load(tmp_path / "plan.json").apply(model)
    with offload_parameters(model, optimizer, Disk()):
        Plan.load(tmp_path / "plan.json").apply(model)
        torchremat.unwrap(model)
