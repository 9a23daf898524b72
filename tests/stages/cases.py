"""What two processes do with plans for the stages of schedules."""

from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from logs import Count
from probes.memory import record_allocations
from stages.blocks import Block, Long
from torchremat import BudgetError, PipelineError, PlanError, StepError, UnsupportedError, unwrap, wrap
from torchremat.pipeline import StagePlanner, attach, plan_stages
from versions import NEEDS_OWN_SENDS, skip_unless

WIDTH, BLOCKS, MICROBATCHES, ROWS = 32, 4, 4, 32
CPU = torch.device("cpu")


class Program:
    """A schedule with two stages, one in each process, or four, two in each: looped, or back again as in a V."""

    def __init__(self, name, block=Block):
        pipelining = import_module("torch.distributed.pipelining")
        rank = dist.get_rank()
        is_single = name in ("ScheduleGPipe", "Schedule1F1B")
        is_v_shaped = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        if is_v_shaped:
            skip_unless(NEEDS_OWN_SENDS)
        second = 3 - rank if is_v_shaped else rank + 2
        here, count = ([rank], 2) if is_single else ([rank, second], 4)
        self.modules = []
        for number in here:
            torch.manual_seed(number)
            self.modules.append(nn.Sequential(*(block(WIDTH) for _ in range(BLOCKS))))
        self.stages = [
            pipelining.PipelineStage(module, number, count, CPU)
            for module, number in zip(self.modules, here, strict=True)
        ]
        self.schedule = getattr(pipelining, name)(
            self.stages[0] if is_single else self.stages, MICROBATCHES, loss_fn=functional.mse_loss
        )
        self.x, self.target = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(self, schedule):
        first = (self.x,) if self.stages[0].is_first else ()
        last = {"target": self.target} if any(one.is_last for one in self.stages) else {}
        return schedule.step(*first, **last)

    def peak_bytes(self):
        """The measured peak of a step, with what lies there before it."""
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        for one in parameters:
            one.grad = torch.zeros_like(one)
        with record_allocations(CPU) as recorder:
            self.step(self.schedule)
        there = 2 * sum(one.nbytes for one in parameters)
        # And of each stage inputs, and gradients or targets: in buffers that are made once, or in the batch.
        return recorder.trace.peak_bytes + there + len(self.stages) * (self.x.nbytes + self.target.nbytes)

    def gradients(self):
        for module in self.modules:
            module.zero_grad()
        for block in (block for module in self.modules for block in module):
            block.ran = Count()
        self.step(self.schedule)
        return [parameter.grad for module in self.modules for parameter in module.parameters()]


def equal(ours, theirs):
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def planned(name, budget, block=Block, **lookahead):
    """Plan for a budget, and measure; with the look-ahead that planner and `attach` have by default, or without."""
    program = Program(name, block)
    expected = [one.clone() for one in program.gradients()]
    plans = StagePlanner(program.schedule, program.step, cost="flops", **lookahead).plan(budget)
    mine = plans.devices[dist.get_rank()]

    plans.apply(program.schedule)
    # Gloo never says that a gradient has come, so all that may be recomputed ahead is.
    with attach(program.schedule, **lookahead):
        ours = program.gradients()
        recomputed = [sum(block.calls for block in module) - BLOCKS * MICROBATCHES for module in program.modules]
        peak_bytes = program.peak_bytes()
    plans.remove(program.schedule)

    assert equal(ours, expected)
    chosen = [plans[stage].plan for stage in mine.stages]
    assert recomputed == [MICROBATCHES * one.recomputed_calls if one else 0 for one in chosen]
    assert 0.999 * mine.peak_bytes <= peak_bytes <= mine.peak_bytes <= mine.budget_bytes, (peak_bytes, mine)
    everywhere = [None] * 2
    dist.all_gather_object(everywhere, plans)
    assert everywhere[0] == everywhere[1]
    return plans


def gpipe():
    plans = planned("ScheduleGPipe", "75%")

    assert [one.in_flight for one in plans] == [MICROBATCHES, MICROBATCHES]
    # The last stage waits for no gradient, so nothing is recomputed ahead there. The first one needs less without.
    without = planned("ScheduleGPipe", "75%", lookahead=False)
    assert without.devices[0].floor_bytes < 0.9 * plans.devices[0].floor_bytes
    assert without.devices[1].floor_bytes == plans.devices[1].floor_bytes


def a_lookahead_that_was_not_counted():
    # Once none was: the plans of `plan_stages` with the look-ahead of `attach`, each by default, were above the budget.
    program = Program("ScheduleGPipe")
    plans = plan_stages(program.schedule, program.step, budget="60%", cost="flops", lookahead=False)

    plans.apply(program.schedule)
    with attach(program.schedule):
        program.step(program.schedule)
        peak_bytes = program.peak_bytes()
    plans.remove(program.schedule)

    if dist.get_rank() == 0:
        assert peak_bytes > 1.05 * plans.devices[0].budget_bytes


def one_forward_one_backward():
    program = Program("Schedule1F1B")
    fits = StagePlanner(program.schedule, program.step).plan("100%").devices[1].peak_bytes

    # What the last stage needs plainly is too little for the first, which holds two.
    plans = planned("Schedule1F1B", fits)

    assert [one.in_flight for one in plans] == [2, 1]
    assert plans[0].plan is not None
    assert plans[1].plan is None
    assert plans[0].kept_bytes < plans[1].kept_bytes


def in_parts():
    plans = planned("Schedule1F1B", "min", Long, lookahead=False)
    assert all(any(held.cuts for held in one.plan.held) for one in plans)

    # What is recomputed ahead is whole. The last stage waits for no gradient.
    plans = planned("Schedule1F1B", "min", Long)
    assert [any(held.cuts for held in one.plan.held) for one in plans] == [False, True]

    # The input pass of a backward keeps what weights need.
    plans = planned("ScheduleInterleavedZeroBubble", "min", Long, lookahead=False)
    assert not any(held.cuts for one in plans for held in one.plan.held)
    program = Program("ScheduleInterleavedZeroBubble", Long)
    with pytest.raises(BudgetError, match="recompute whole blocks, not parts of them, since their backward is split"):
        plan_stages(program.schedule, program.step, budget="1KiB", lookahead=False)


def interleaved():
    plans = planned("ScheduleInterleaved1F1B", "80%")

    assert [one.in_flight for one in plans] == [4, 3, 2, 1]


def zero_bubble():
    plans = planned("ScheduleInterleavedZeroBubble", "85%")
    planned("ScheduleInterleavedZeroBubble", "85%", lookahead=False)

    assert [one.in_flight for one in plans] == [4, 4, 2, 2]


def zero_bubble_in_a_v():
    planned("ScheduleZBVZeroBubble", "95%")


def two_directions():
    planned("ScheduleDualPipeV", "80%")


def optimizers():
    """The peak of a whole training step, that of the optimizer included, which is each process's own."""
    program, rank = Program("ScheduleInterleaved1F1B"), dist.get_rank()
    parameters = [parameter for module in program.modules for parameter in module.parameters()]
    optimizer = torch.optim.Adam(parameters) if rank == 0 else torch.optim.SGD(parameters, momentum=0.9)
    planner = StagePlanner(program.schedule, program.step, optimizer=optimizer, cost="flops")
    without = StagePlanner(program.schedule, program.step, cost="flops").plan("100%").devices[rank]
    plans = planner.plan("90%")
    mine = plans.devices[rank]
    assert not optimizer.state

    plans.apply(program.schedule)
    with attach(program.schedule):
        program.gradients()
        optimizer.step()
        state = {one.untyped_storage() for own in optimizer.state.values() for one in own.values() if one is not None}
        state_bytes = sum(one.nbytes() for one in state)
        peak_bytes = program.peak_bytes() + state_bytes
    plans.remove(program.schedule)

    assert state_bytes >= (2 if rank == 0 else 1) * sum(one.nbytes for one in parameters)
    assert mine.before_bytes == without.before_bytes + state_bytes
    assert 0.999 * mine.peak_bytes <= peak_bytes <= mine.peak_bytes <= mine.budget_bytes
    with pytest.raises(StepError, match=r"optimizer: none of its 1 parameters is one of the model's"):
        StagePlanner(program.schedule, program.step, optimizer=torch.optim.SGD([torch.zeros(1)]))


def errors():
    program = Program("Schedule1F1B")
    rank = dist.get_rank()
    with pytest.raises(PipelineError, match=r"budget: 3 were given for 2 processes"):
        plan_stages(program.schedule, program.step, budget=["1GiB"] * 3)
    # One process alone has too little, and both say so.
    with pytest.raises(BudgetError, match=r"process 1 .cpu.: no plans fit the budget of 1\.00 KiB") as raised:
        plan_stages(program.schedule, program.step, budget=["1GiB", "1KiB"])
    assert ("in process 1 (this is 0)" in str(raised.value)) == (rank == 0)
    wrap(program.modules[0], "0")
    with pytest.raises(PlanError, match="has wrapped modules already"):
        plan_stages(program.schedule, program.step, budget="1GiB")
    unwrap(program.modules[0])


def plans_need_all_their_regions():
    program = Program("ScheduleGPipe")
    plans = plan_stages(program.schedule, program.step, budget="75%", cost="flops")

    plans.apply(program.schedule)
    with pytest.raises(UnsupportedError, match="with a plan on stage"):
        attach(program.schedule, checkpoint="in_flight")
    plans.remove(program.schedule)

    attach(program.schedule, checkpoint="in_flight").detach()


CASES = {
    case.__name__: case
    for case in (
        gpipe,
        a_lookahead_that_was_not_counted,
        one_forward_one_backward,
        in_parts,
        interleaved,
        zero_bubble,
        zero_bubble_in_a_v,
        two_directions,
        optimizers,
        errors,
        plans_need_all_their_regions,
    )
}
