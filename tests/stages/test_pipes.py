"""Plans for the stages of a `Pipe`."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from logs import Log
from pipeline.inline import cells_inline
from probes.memory import record_allocations
from stages.blocks import Block, Pop, Stash
from torchremat import BudgetError, Pipe, PipelineError, PlanError, StepError, UnsupportedError
from torchremat.pipeline import StagePlanner, StagePlans, plan_stages

WIDTH, CHUNKS = 16, 4
X = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(0))


def made(checkpoint="never", stages=2, blocks=8):
    torch.manual_seed(0)
    layers = nn.Sequential(*(Block(WIDTH) for _ in range(blocks)))
    return Pipe(layers, [blocks // stages] * stages, devices=["cpu"] * stages, chunks=CHUNKS, checkpoint=checkpoint)


def step(pipe):
    return pipe(X).square().mean()


@pytest.fixture(scope="module")
def planner():
    return StagePlanner(made(), step, cost="flops")


@pytest.fixture(scope="module")
def alone():
    """Of a pipe with its device for itself."""
    return StagePlanner(made(stages=1), step, cost="flops")


def trained(pipe):
    """Gradients of a step, and how often each block was called for a microbatch."""
    step(pipe).backward()
    return [parameter.grad for parameter in pipe.parameters()], [getattr(block, "calls", 0) / CHUNKS for block in pipe]


def measured(pipe, step=step):
    """The peak of a step, all that lies there before it included."""
    for parameter in pipe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with cells_inline(), record_allocations(torch.device("cpu")) as recorder:
        step(pipe).backward()
    return recorder.trace.peak_bytes + 2 * sum(one.nbytes for one in pipe.parameters()) + X.nbytes


def test_where_all_fits_nothing_is_recomputed(planner):
    plans = planner.plan("100%")

    assert [one.plan for one in plans] == [None, None]
    assert trained(made(plans))[1] == [1] * 8


@pytest.mark.parametrize("budget", ["80%", "60%", "50%"])
def test_gradients_are_equal_and_the_peak_is_within_the_budget(planner, budget):
    plans = planner.plan(budget)
    (device,) = plans.devices

    ours, calls = trained(made(plans))
    expected, _ = trained(made())

    assert all(map(torch.equal, ours, expected))
    assert sum(calls) == 8 + sum(one.plan.recomputed_calls for one in plans if one.plan)
    assert 0.999 * device.peak_bytes <= measured(made(plans)) <= device.peak_bytes <= device.budget_bytes


@pytest.mark.parametrize("budget", ["100%", "80%", "60%", "35%"])
def test_the_predicted_peak_of_a_device_with_one_stage(alone, budget):
    plans = alone.plan(budget)
    (device,) = plans.devices

    assert 0.999 * device.peak_bytes <= measured(made(plans, stages=1)) <= device.peak_bytes


def test_a_lower_budget_recomputes_more(planner):
    flops = [planner.plan(budget).recomputed_flops for budget in ("100%", "80%", "60%", "50%")]

    # What is cheap, an activation function, is recomputed first: no flop that counts.
    assert flops == sorted(flops)
    assert flops[1] < flops[-1]


def test_never_more_flops_than_a_mode_that_needs_as_much(planner):
    # Both recompute whole stages, of all microbatches or of all but one; an early stop spares neither anything.
    for mode, share in (("always", 1), ("except_last", 3 / 4)):
        peak = measured(made(mode))
        forward_flops = 8 * 2 * 2 * X.shape[0] * WIDTH * 4 * WIDTH
        device = planner.plan("100%").devices[0]
        if peak >= device.floor_bytes:
            assert planner.plan(peak).recomputed_flops <= share * forward_flops


def test_the_floor_in_the_message_is_one_that_works(planner):
    with pytest.raises(BudgetError, match=r"cpu: no plans fit the budget of 1\.00 KiB \(1KiB\)") as raised:
        planner.plan("1KiB")
    floor = int(re.search(r"that works: (\d+) bytes", str(raised.value))[1])

    assert planner.plan(floor).devices[0].peak_bytes <= floor
    with pytest.raises(BudgetError):
        planner.plan(floor - 1)
    with pytest.raises(BudgetError, match="set aside"):
        planner.plan(floor, margin="1KiB")


def test_plans_go_on_and_off(planner):
    plans, pipe = planner.plan("60%"), made()

    plans.apply(pipe)
    with pytest.raises(PlanError, match="has wrapped modules already"):
        plans.apply(pipe)
    with pytest.raises(PlanError, match="has wrapped modules already"):
        plan_stages(pipe, step, budget="60%")
    plans.remove(pipe)

    assert trained(pipe)[1] == [1] * 8


def test_wrong_counts_are_named(planner):
    with pytest.raises(PipelineError, match=r"budget: 3 were given for 1 devices: cpu\. Give one for each"):
        planner.plan(["1GiB"] * 3)
    with pytest.raises(PipelineError, match="plans of 2 stages were given, and the pipeline has 4"):
        made(planner.plan("60%"), stages=4)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"budget": "much"}, BudgetError),
        ({"budget": 1.5}, BudgetError),
        ({"budget": None}, BudgetError),
        ({"budget": "0%"}, BudgetError),
        ({"budget": "9999TiB"}, BudgetError),
        ({"budget": ["1GiB", "1GiB"]}, PipelineError),
        ({"margin": "much"}, BudgetError),
        ({"margin": "1GiB"}, BudgetError),
        ({"cost": "money"}, UnsupportedError),
        ({"optimizer": "fast"}, StepError),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))])}, StepError),
        ({"lookahead": True}, UnsupportedError),
    ],
)
def test_wrong_options_are_refused_before_any_work(options, error):
    # All stages were profiled first, and what that took was lost.
    ran = Log()

    with pytest.raises(error):
        plan_stages(made(), lambda pipe: ran.append(1) or step(pipe), **{"budget": "1GiB", **options})
    assert not ran


def test_what_is_no_step_is_named():
    with pytest.raises(StepError, match="step: expected a function that returns the loss, got int"):
        plan_stages(made(), 3, budget="1GiB")


def test_plans_for_another_module_are_refused(planner):
    plans = planner.plan("60%")
    other = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    with pytest.raises(PlanError, match="stage 0: the plan was made for another model"):
        Pipe(other, [4, 4], devices=["cpu"] * 2, checkpoint=plans)


OPTIMIZERS = {
    "without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "with state": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "with temporaries": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
}


@pytest.mark.parametrize(
    ("name", "has_stepped"),
    [("without state", False), *((name, has) for name in ("with state", "with temporaries") for has in (False, True))],
)
def test_the_optimizer_counts(name, has_stepped):
    pipe = made(stages=1, blocks=4)
    optimizer = OPTIMIZERS[name](pipe.parameters())
    if has_stepped:
        step(pipe).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [one.detach().clone() for one in pipe.parameters()]
    plans = plan_stages(pipe, step, budget="70%", optimizer=optimizer, cost="flops")
    (device,) = plans.devices
    assert all(map(torch.equal, pipe.parameters(), values))
    assert bool(optimizer.state) == (has_stepped and name != "without state")

    plans.apply(pipe)
    trained(pipe)
    optimizer.step()  # makes the state, if it is not there
    for parameter in pipe.parameters():
        parameter.grad.zero_()
    state = {one.untyped_storage() for own in optimizer.state.values() for one in own.values()}
    there = 2 * sum(one.nbytes for one in pipe.parameters()) + sum(one.nbytes() for one in state) + X.nbytes
    with cells_inline(), record_allocations(torch.device("cpu")) as recorder:
        step(pipe).backward()
    peak_bytes = recorder.trace.peak_bytes + there
    with record_allocations(torch.device("cpu")) as recorder:
        optimizer.step()
    stepping_bytes = recorder.trace.peak_bytes + there

    assert 0.999 * device.peak_bytes <= max(peak_bytes, stepping_bytes) <= device.peak_bytes <= device.budget_bytes
    assert device.optimizer_peak_bytes == stepping_bytes


def test_an_optimizer_whose_step_alone_is_too_much():
    pipe = Pipe(nn.Sequential(Block(64), Block(64)), [2], devices=["cpu"], checkpoint="never")
    optimizer = torch.optim.AdamW(pipe.parameters(), foreach=True)

    def step(pipe):
        return pipe(X.view(-1, 64)[:2]).square().mean()

    with pytest.raises(
        BudgetError, match=r"optimizer.step\(\) alone peaks at .*, which no recomputation lowers"
    ) as raised:
        plan_stages(pipe, step, budget="1KiB", optimizer=optimizer)
    floor = int(re.search(r"that works: (\d+) bytes", str(raised.value))[1])

    plans = plan_stages(pipe, step, budget=floor, optimizer=optimizer)
    assert plans.devices[0].where == "optimizer.step()"


def test_an_optimizer_of_other_parameters():
    with pytest.raises(StepError, match="none of its 2 parameters is one of the model's"):
        plan_stages(made(), step, budget="60%", optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))


def test_a_pipe_has_no_lookahead_to_count():
    with pytest.raises(UnsupportedError, match="lookahead=True with a Pipe"):
        plan_stages(made(), step, budget="60%", lookahead=True)


def test_a_step_has_to_call_the_pipe_once():
    with pytest.raises(StepError, match="calls the pipe 2 times"):
        plan_stages(made(), lambda pipe: step(pipe) + step(pipe), budget="60%")


def test_a_table_tells_of_devices_and_stages(planner):
    text = str(planner.plan("100%"))

    assert re.search(r"^cpu +\d", text, re.MULTILINE)
    assert re.search(r"^1 +4 .* never$", text, re.MULTILINE)


def skipping(checkpoint="never", balance=(2, 2, 2)):
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(WIDTH), Stash(WIDTH), Block(WIDTH), Block(WIDTH), Pop(WIDTH), Block(WIDTH))
    return Pipe(blocks, list(balance), devices=["cpu"] * len(balance), chunks=CHUNKS, checkpoint=checkpoint)


def test_skips():
    plans = plan_stages(skipping(), step, budget="60%", cost="flops")

    assert isinstance(plans, StagePlans)
    assert any(one.plan for one in plans)
    assert all(map(torch.equal, trained(skipping(plans))[0], trained(skipping())[0]))


def test_a_region_that_pops_holds_the_skip():
    # Blocks 3 to 5 are one region, and the skip of block 1 is no argument of theirs: it was held uncounted, 3%.
    planner = StagePlanner(skipping(balance=[6]), step, cost="flops")
    plans = planner.plan(planner.plan("100%").devices[0].floor_bytes)
    pipe = skipping(plans, balance=[6])

    assert plans[0].plan
    assert 0.999 <= measured(pipe) / plans.devices[0].peak_bytes <= 1


@pytest.mark.parametrize("stages", [1, 2])
def test_autocast_within_the_step(stages):
    # Stages were profiled outside of it: the second one got the first one's bfloat16, "mat1 and mat2 must have the same
    # dtype", and a single one was planned for float32, for bytes that no step has.
    def casting(pipe):
        with torch.autocast("cpu", torch.bfloat16):
            return pipe(X).float().square().mean()

    def within(pipe):
        pipe.zero_grad()
        casting(pipe).backward()
        return [parameter.grad for parameter in pipe.parameters()]

    plans = plan_stages(made(stages=stages, blocks=4), casting, budget="75%", cost="flops")
    pipe = made(plans, stages, blocks=4)

    assert sum(one.plan.recomputed_calls for one in plans if one.plan) > 0
    assert all(map(torch.equal, within(pipe), within(made(stages=stages, blocks=4))))
    assert measured(pipe, casting) <= plans.devices[0].peak_bytes <= plans.devices[0].budget_bytes
    assert stages > 1 or measured(pipe, casting) / plans.devices[0].peak_bytes > 0.99


@pytest.mark.parametrize("around", ["both", "forward", "backward"])
def test_a_flop_counter_around_a_step(planner, around):
    # See test_policies_under_modes: recomputes in parts once failed where its hooks were on. They are on all threads.
    plans = planner.plan("80%")
    assert any(one.plan.held for one in plans if one.plan)
    pipe = made(plans)

    with FlopCounterMode(display=False) if around != "backward" else nullcontext():
        loss = step(pipe)
        if around == "both":
            loss.backward()
    with FlopCounterMode(display=False) if around == "backward" else nullcontext():
        if around != "both":
            loss.backward()

    expected = trained(made())[0]
    assert all(torch.equal(one.grad, other) for one, other in zip(pipe.parameters(), expected, strict=True))
