"""Plans that keep parameters in a store."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import torchremat
from models import GPT, UNet
from optimizing.chains import stored
from optimizing.loops import equal, measured_peak, train
from probes.planning import SteppingSeconds, room_bytes, ways_of_stepping
from torchremat import (
    BudgetError,
    Compressed,
    Disk,
    Host,
    Plan,
    PlanError,
    StepError,
    Tiers,
    UnsupportedError,
    codecs,
    guard,
)
from torchremat.interop.training_budget import MemoryBudget
from torchremat.policies import save_smaller_than
from torchremat.stores.base import land

pytestmark = pytest.mark.usefixtures("declared_speed")

ROWS = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SMALL = Disk(limit=2**24)
POINTS = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


def gpt(blocks=2):
    return GPT(blocks=blocks, width=128, context=64)


def tied():
    model = gpt()
    model.head.weight = model.embed.weight
    return model


class Frozen(nn.Module):
    """Blocks of which those in the middle are not trained, as under an adapter."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(5)
        )
        self.blocks[1:4].requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def rows_of(model):
    return F.cross_entropy(model(ROWS[:, :-1]).flatten(0, 1), ROWS[:, 1:].flatten())


KINDS = {
    "gpt": (gpt, rows_of, ROWS),
    "tied": (tied, rows_of, ROWS),
    "unet": (UNet, lambda model: model(IMAGES).square().mean(), IMAGES),
    "frozen": (Frozen, lambda model: model(POINTS).square().mean(), POINTS),
}
OTHERS = {"deep": (partial(gpt, blocks=4), rows_of, ROWS)}


def made(kind="gpt", *, steps=0):
    torch.manual_seed(0)
    make, loss_of, _ = (KINDS | OTHERS)[kind]
    model = make()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, loss_of, steps)
    return model, optimizer, loss_of


def all_stores():
    store = Disk()
    return {"release_gradients": True, "optimizer_store": store, "parameter_store": store}


@pytest.mark.parametrize(("kind", "alone"), [("gpt", False), ("tied", True), ("unet", False), ("frozen", True)])
def test_a_plan_below_all_others_keeps_its_budget_and_every_bit(kind, alone):
    model, optimizer, loss_of = made(kind)
    options = {"parameter_store": Disk()} if alone else all_stores()
    others = {name: value for name, value in options.items() if name != "parameter_store"}
    least = torchremat.Planner(model, loss_of, optimizer=optimizer, cost="flops", **others).floor_bytes

    plan = torchremat.plan(model, loss_of, budget="min", optimizer=optimizer, cost="flops", **options)

    assert plan.peak_bytes <= plan.budget_bytes < least
    assert plan.stepping.stores_parameters and not stored(model)
    plan.apply(model)
    away = stored(model)
    assert away
    train(model, optimizer, loss_of, 2)
    # Of three steps, since on a busy machine less may be in memory in one of them.
    peak_bytes = max(measured_peak(model, optimizer, loss_of, KINDS[kind][2]) for _ in range(3))
    # The bound takes four parameters at once; a peak where none is in memory is not among these.
    largest_bytes = max(one.nbytes for one in model.parameters())
    assert plan.peak_bytes - 3 * largest_bytes <= peak_bytes <= plan.peak_bytes
    assert stored(model) == away
    plain, _, _ = made(kind, steps=5)
    assert equal([*model.parameters()], [*plain.parameters()])
    plan.remove(model)
    assert not stored(model)
    train(model, optimizer, loss_of, 1)
    assert equal([*model.parameters()], [*made(kind, steps=6)[0].parameters()])


def test_it_is_the_last_way():
    """By flops, which are exact: a way is taken where no plan without it recomputes as little."""
    model, optimizer, loss_of = made()
    stores = all_stores() | {"release_gradients": "auto"}
    others = {name: value for name, value in stores.items() if name != "parameter_store"}
    floor = torchremat.Planner(model, loss_of, optimizer=optimizer, cost="flops", **others).floor_bytes

    planner = torchremat.Planner(model, loss_of, optimizer=optimizer, cost="flops", **stores)
    runs = planner.subject.runs
    plain = planner.plan("100%")

    assert str(plain.stepping) == "plain" and planner.subject.runs <= runs + 1  # no other way was profiled
    lower = planner.plan(floor - 1)
    assert str(lower.stepping) == "gradients released, state stored, parameters stored"
    assert lower.plain_peak_bytes == plain.plain_peak_bytes
    runs = planner.subject.runs
    lowest = planner.plan("min")
    assert planner.subject.runs == runs  # it has the profile of the way before it
    assert lowest.budget_bytes == planner.floor_bytes < floor
    with pytest.raises(BudgetError, match=f"Smallest budget that works: {planner.floor_bytes} bytes"):
        planner.plan(planner.floor_bytes - 1)


def test_its_seconds_are_those_that_a_step_waits_for():
    seconds = SteppingSeconds(
        parts_s=1.0, moves_s=10.0, busy_s=2.0, state_bytes=0, parameters_s=4.0, parameters_busy_s=0.5
    )
    ways = ways_of_stepping(releases="auto", stores=True, stores_parameters=True)
    alone = ways_of_stepping(releases=False, stores=False, stores_parameters=True)

    assert [str(way) for way in alone] == ["plain", "parameters stored"]
    # Parts; beside the backward one move of the state, and three of the parameters.
    assert [seconds.added_s(ways[-1], backward_s) for backward_s in (10.0, 100.0)] == [1 + 22 - 10, 1 + 2 + 1.5]
    # The optimizer's step waits for one more.
    assert [seconds.added_s(alone[-1], backward_s) for backward_s in (8.0, 100.0)] == [4 + 12 - 8, 4 + 1.5]


def test_the_room_is_for_what_runs_what_leaves_what_was_read_and_what_comes():
    sizes = {1: 10, 2: 20, 3: 30, 4: 40, 5: 50}
    one_each = {(frozenset({name}), frozenset({name})) for name in sizes}
    in_another = {(frozenset({1}), frozenset({1})), (frozenset({2}), frozenset({1, 2}))}

    assert room_bytes(sizes, one_each) == 50 + 40 + 30 + 20
    assert room_bytes({1: 10, 2: 20}, in_another) == 10 + 20
    assert room_bytes(sizes, {(frozenset({1, 2}), frozenset({1, 2})), *one_each}) == 50 + 40 + 30 + (10 + 20)
    assert room_bytes(sizes, {(frozenset({1}), frozenset({1, 5})), *one_each}) == (10 + 50) + 40 + 30 + 20


def test_saved_tensors_wait_beside_parameters():
    """Nodes of a unit that was stored kept their parameters in memory to their backward, and the two were refused."""
    model, optimizer, loss_of = made("deep")
    store = Disk()
    options = {"release_gradients": True, "optimizer_store": store, "stores": [store], "cost": "flops"}
    least = torchremat.Planner(model, loss_of, optimizer=optimizer, **options).floor_bytes

    plan = torchremat.plan(model, loss_of, budget=least - 2**17, optimizer=optimizer, parameter_store=store, **options)

    assert plan.stored and plan.stepping.stores_parameters
    plan.apply(model)
    away = stored(model)
    train(model, optimizer, loss_of, 2)
    peak_bytes = measured_peak(model, optimizer, loss_of, ROWS)
    assert plan.peak_bytes - 3 * max(one.nbytes for one in model.parameters()) <= peak_bytes <= plan.peak_bytes
    assert stored(model) == away
    plain, _, _ = made("deep", steps=3)
    assert equal([*model.parameters()], [*plain.parameters()])


def test_what_is_leaving_does_not_come_ahead():
    """It was in memory twice, 0.7 MiB above the prediction, where its next use comes after that of one other parameter.

    Only if the disk has written it by then.
    """

    class Low(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 512) / 64)

        def forward(self, x):
            return x + (x @ self.weight.t()) @ self.weight

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(512, 512, bias=False).requires_grad_(False)
            self.between = nn.ModuleList(Low() for _ in range(4))

        def forward(self, x):
            for one in self.between:
                x = self.wide(x)
                land(store, all_of_it=True)
                x = one(x)
                land(store, all_of_it=True)
            return x

    store, x = Disk(), torch.randn(4, 512)
    model = Around()
    optimizer = optim.AdamW(one.weight for one in model.between)

    def loss_of(model):
        return model(x).square().mean()

    plan = torchremat.plan(model, loss_of, budget="min", optimizer=optimizer, cost="flops", parameter_store=store)
    plan.apply(model)
    train(model, optimizer, loss_of, 3)

    assert measured_peak(model, optimizer, loss_of, x) <= plan.peak_bytes


def test_what_other_code_reads_has_room_as_well():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(12))

        def forward(self, x):
            x = F.linear(x, self.layers[0].weight)
            for layer in self.layers:
                x = F.gelu(layer(x))
            return x

    def loss_of(model):
        return model(POINTS).square().mean() + model.layers[1].weight.square().mean()

    def made():
        torch.manual_seed(0)
        model = Reading()
        return model, optim.SGD(model.parameters(), 0.1)

    model, optimizer = made()
    plan = torchremat.plan(
        model, loss_of, budget="min", optimizer=optimizer, cost="flops", release_gradients=True, parameter_store=Disk()
    )

    # That of the model's own code while the model runs, that of the step from the forward to its backward, and four.
    assert plan.room_bytes == 6 * 256 * 256 * 4
    plan.apply(model)
    train(model, optimizer, loss_of, 2)
    assert measured_peak(model, optimizer, loss_of, POINTS) <= plan.peak_bytes
    plain, steps_on = made()
    train(plain, steps_on, loss_of, 3)
    assert equal([*model.parameters()], [*plain.parameters()])


# -------------------------------------------------------------------------------------------------- plans as values


@pytest.fixture(scope="module")
def below():
    model, optimizer, loss_of = made()
    plan = torchremat.plan(model, loss_of, budget="min", optimizer=optimizer, certify=True, **all_stores())
    return plan, model, optimizer, loss_of


def test_a_plan_says_how_many_bytes_of_parameters_wait(below):
    plan, model, _, _ = below
    large = [one.nbytes for one in model.parameters() if one.nbytes >= 2**15]

    assert plan.away_bytes == sum(large)
    assert plan.before_bytes["parameters"] == sum(one.nbytes for one in model.parameters()) - plan.away_bytes
    assert plan.room_bytes == 4 * max(large)
    text = str(plan)
    assert re.search(r"^peak +\S+ MiB predicted, at most, ", text, re.MULTILINE)
    said = re.findall(r"^waiting +(.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"3.58 MiB of optimizer state in Disk\(.*\)", said[0])
    waits = r"1.78 MiB of parameters in Disk\(.*\), at most 1.00 MiB of them in memory, [0-9.]+ ms added"
    assert re.fullmatch(waits, said[1])
    assert "(gradients released, state stored, parameters stored)" in str(plan.certificate)


def test_a_plan_in_a_file_needs_the_stores_again(below, tmp_path):
    plan, _, _, _ = below
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    model, optimizer, loss_of = made()

    assert loaded == plan
    with pytest.raises(
        PlanError, match=r"puts parameters into a store.*apply\(model, optimizer=..., parameter_store=...\)"
    ):
        loaded.apply(model, optimizer=optimizer, optimizer_store=Disk())
    assert not loaded.is_on(model)
    loaded.apply(model, optimizer=optimizer, optimizer_store=Disk(), parameter_store=Host())
    assert stored(model)
    train(model, optimizer, loss_of, 2)
    assert equal([*model.parameters()], [*made(steps=2)[0].parameters()])
    torchremat.unwrap(model)
    assert not stored(model)


def test_a_copy_of_the_model_has_its_parameters_in_memory(below):
    plan, model, _, loss_of = below
    plan.apply(model)
    away = stored(model)

    copied = copy.deepcopy(model)
    loss_of(copied).backward()

    assert away and not stored(copied)
    plan.remove(copied)
    assert plan.is_on(model)
    plan.remove(model)


def test_verify_compares_with_the_plain_step(below):
    plan, model, optimizer, loss_of = below
    plan.apply(model)
    away = stored(model)

    report = torchremat.verify(model, loss_of, optimizer=optimizer)

    assert report.is_exact and stored(model) == away
    # The parameter that was looked at last before the step is in memory when it begins.
    in_memory_bytes = report.predicted_bytes - plan.peak_bytes
    assert 0 <= in_memory_bytes <= max(one.nbytes for one in model.parameters())
    assert report.peak_bytes <= plan.peak_bytes
    plan.remove(model)


def test_a_frontier_goes_on_below_the_lowest_peak_of_other_ways():
    model, optimizer, loss_of = made()
    options = {"points": 3, "optimizer": optimizer, "cost": "flops"}
    others = torchremat.frontier(model, loss_of, release_gradients=True, **options)

    found = torchremat.frontier(model, loss_of, release_gradients=True, parameter_store=Disk(), **options)

    assert found.floor.peak_bytes < others.floor.peak_bytes
    assert "gradients released, parameters stored" in str(found)
    assert found.points[0].peak_bytes == others.points[0].peak_bytes


def test_fit_confirms_by_a_real_step(below):
    model, optimizer, loss_of = made()

    torchremat.fit(model, loss_of, budget=below[0].floor_bytes, optimizer=optimizer, **all_stores())

    assert stored(model)
    torchremat.unwrap(model)
    assert not stored(model)


# ------------------------------------------------------------------------------------------- what regions hold of them


@pytest.mark.parametrize("policy", [None, save_smaller_than(2**30)], ids=["none", "policy"])
def test_a_region_holds_no_parameter_between_forward_and_backward(policy):
    # Under a policy each slot held its parameter from the forward on; and a recompute held those that need no gradient
    # to the end of the backward.
    model, plain = Frozen(), Frozen()
    plain.load_state_dict(model.state_dict())
    KINDS["frozen"][1](plain).backward()
    torchremat.wrap(model, "blocks.*", policy=policy)
    seen = []

    with torchremat.offload_parameters(model, None, Disk()):
        loss = KINDS["frozen"][1](model)
        assert len(stored(model)) == 10
        for block in model.blocks[1:]:
            block.register_full_backward_pre_hook(lambda *_: seen.append(10 - len(stored(model))))
        loss = KINDS["frozen"][1](model)
        loss.backward()

    assert max(seen) <= 3
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs if theirs.grad is not None)


def test_what_a_node_reads_at_once_leaves_when_it_has_run():
    # A call of an LSTM is one node with four weights. They stayed until their gradients were complete, after the first
    # of all calls.
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": nn.LSTM(128, 128), "after": nn.Linear(128, 128)})
    seen = []

    def run():
        x = torch.ones(2, 3, 128)
        for _ in range(3):
            x = model["after"](model["rnn"](x)[0])
            x.register_hook(lambda *_: seen.append(len([*model.parameters()]) - len(stored(model))))
        x.sum().backward()

    small = len([one for one in model.parameters() if one.nbytes < 2**15])
    with torchremat.offload_parameters(model, None, Disk()):
        run()

    assert max(seen) <= small + 2


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parameter_store": Disk}, "parameter_store=.*Disk'>: expected an object with a method `put`"),
        ({"parameter_store": Disk()}, "parameter_store= are about the step of an optimizer, and none is given"),
        (
            {"parameter_store": Compressed(Host(), lossy=codecs.BFloat16())},
            "parameter_store=.* loses digits .*apply the plan, and call `torchremat.offload_parameters` then",
        ),
        ({"parameter_store": Disk(), "on": "meta"}, "parameter_store=: parts of .* need data.*or on='meta'"),
        (
            {"parameter_store": SMALL, "stores": [Disk(), Tiers(SMALL, Disk())]},
            r"stores= and parameter_store=: parameters take a part of the limit of Disk\(.*Give each a store",
        ),
    ],
)
def test_options_that_cannot_be_honoured(options, said):
    model, _, loss_of = made()

    with pytest.raises(UnsupportedError, match=said):
        torchremat.plan(model, loss_of, budget="60%", **options)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_model_whose_parameters_cannot_wait_is_refused_whatever_the_budget():
    model, optimizer, loss_of = made()
    model.blocks[0].compile(backend="eager")

    with pytest.raises(UnsupportedError, match="is compiled, and its code reads parameters without asking"):
        torchremat.plan(model, loss_of, budget="100%", optimizer=optimizer, parameter_store=Disk())


def test_a_callback_for_all_shapes_and_a_guard_refuse():
    model, optimizer, loss_of = made()
    plan = torchremat.plan(model, loss_of, budget="min", optimizer=optimizer, cost="flops", parameter_store=Disk())

    with (
        pytest.raises(UnsupportedError, match="the plan stores parameters, and the smaller plans"),
        guard(model, loss_of, plan=plan, optimizer=optimizer),
    ):
        pass
    with pytest.raises(UnsupportedError, match="parameter_store=: the optimizer steps in one way for all shapes"):
        MemoryBudget("1GiB", shapes=True, parameter_store=Disk())


def test_a_store_that_would_hold_nothing_is_refused():
    model, optimizer, loss_of = made()
    plan = torchremat.plan(model, loss_of, budget="80%", optimizer=optimizer, cost="flops")

    with pytest.raises(PlanError, match="made without a store for parameters"):
        plan.apply(model, optimizer=optimizer, parameter_store=Disk())


def test_a_store_without_room_leaves_parameters_in_memory_and_the_plan_knows():
    model, optimizer, loss_of = made()
    limit = 2**21
    plan = torchremat.plan(
        model, loss_of, budget="min", optimizer=optimizer, release_gradients=True, parameter_store=Disk(limit=limit)
    )

    assert plan.stepping.stores_parameters
    assert limit - 2**18 < plan.away_bytes <= limit


class WithTeacher(nn.Module):
    """Moves the weights of a teacher inside of it before each forward."""

    def __init__(self, move):
        super().__init__()
        self.student = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(3)))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.move = move

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.move(own, other)
        return (self.student(x) - self.teacher(x) - 1).square().mean()


def _assigned(own, other):
    own.data = own.data * 0.9 + other.data * 0.1


MOVED = {
    "in place": lambda own, other: own.mul_(0.9).add_(other, alpha=0.1),
    "past versions": lambda own, other: own.data.mul_(0.9).add_(other.data, alpha=0.1),
}


@pytest.mark.parametrize("first", ["the store", "the plan"])
@pytest.mark.parametrize("move", MOVED.values(), ids=MOVED)
def test_a_teacher_that_the_step_moves_is_as_before_planning(move, first):
    """Weights that a store had were not among those whose writes are undone."""
    x = torch.randn(128, 128)  # of fewer rows the peak is that of the gradients, and nothing is recomputed
    model = WithTeacher(move)
    optimizer = optim.AdamW(model.student.parameters())
    had = {name: one.clone() for name, one in model.state_dict().items()}
    offload = torchremat.offload_parameters(model, optimizer, Host()) if first == "the store" else None
    options = {} if offload is not None else {"parameter_store": Host()}

    plan = torchremat.plan(model, lambda m: m(x), budget="min", optimizer=optimizer, cost="flops", **options)

    assert plan.recomputed_calls > 0 or plan.stepping.stores_parameters
    if offload is not None:
        offload.remove()
    assert all(torch.equal(one, had[name]) for name, one in model.state_dict().items())


def test_a_teacher_that_gets_other_memory_while_a_store_has_it_is_an_error():
    x = torch.randn(64, 128)
    model = WithTeacher(_assigned)
    optimizer = optim.AdamW(model.student.parameters())

    with pytest.raises(StepError, match=r"written in place to `teacher\.0\.0\.weight`.*which was not copied"):
        torchremat.plan(model, lambda m: m(x), budget="min", optimizer=optimizer, parameter_store=Host())
