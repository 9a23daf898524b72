"""What two processes do with attached schedules."""

import gc
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from logs import Hidden, Tally
from pipeline.attaching.models import (
    BLOCKS,
    MICROBATCHES,
    SCHEDULES,
    SINGLE,
    WIDTH,
    Counted,
    Program,
    Stage,
    loss_of,
)
from probes.memory import record_allocations
from regions.comparing import live_regions
from torchremat import Planner, UnsupportedError, wrap
from torchremat.pipeline import attach, detach, in_flight, microbatch_budget
from torchremat.policies import save_matmuls

ONCE, TWICE = [1] * MICROBATCHES, [2] * MICROBATCHES
ZERO_BUBBLE = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


def wrapped(module, **options):
    wrap(module, "layers.*", **options)


@cache
def plain(name):
    """The gradients without regions."""
    return Program(name).train()


def equal(ours, theirs):
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def one_recompute(name, **options):
    program = Program(name, wrapped)

    with attach(program.schedule, **options) as attached:
        ours = program.train()
        assert attached.open_sessions == 0

    assert program.calls == [TWICE] * BLOCKS * len(program.stages), program.calls
    assert equal(ours, plain(name))


def many_recomputes_without():
    program = Program("ScheduleInterleavedZeroBubble", wrapped)

    ours = program.train()

    # A forward, a recompute in the input pass, and one for each of the nine groups of weights. Stage 0 has one pass.
    assert max(map(max, program.calls)) == 1 + 1 + 9
    assert equal(ours, plain(program.name))


def selective(name):
    program = Program(name, partial(wrapped, policy=save_matmuls))

    with attach(program.schedule):
        ours = program.train()

    assert program.calls == [TWICE] * BLOCKS * len(program.stages)
    assert equal(ours, plain(name))


class Shifted(nn.Module):
    """Has products that no node saves: what is held of them is of use to the recompute alone."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.calls = Tally()

    def forward(self, x):
        for linear in self.linears:
            x = (linear(x) + 1).sin()
        return x


def rises(name, piece, attached):
    """By how many bytes the calls of a piece of the first stage here exceed what is live at their beginning."""
    program = Program(name, partial(wrapped, policy=save_matmuls), build=partial(Stage, block=Shifted))
    run, marks = getattr(program.stages[0], piece), []

    def marked(*args, **kwargs):
        marks.append(recorder.mark("begin"))
        done = run(*args, **kwargs)
        marks.append(recorder.mark("end"))
        return done

    setattr(program.stages[0], piece, marked)
    with attach(program.schedule, lookahead=False) if attached else nullcontext():
        for _ in range(2):  # the first step also infers shapes, by calls of its own
            marks.clear()
            with record_allocations(torch.device("cpu")) as recorder:
                program.step()
    live = recorder.trace.live.tolist()
    places = [recorder.trace.marks[mark].position for mark in marks]
    return [max(live[begin : end + 1]) - live[begin] for begin, end in zip(places[::2], places[1::2], strict=True)]


def whole_backwards(name, piece):
    # A session once kept what a policy holds until the end of a backward after which none comes.
    # Without sessions each call of the engine lets go by itself, and in a whole backward there is one.
    ours, theirs = (rises(name, piece, attached=attached) for attached in (True, False))

    # Of the schedule in a V, the first stage here is the first of all in one process alone, and split in the other.
    if name in SINGLE or dist.get_rank() == 0:
        assert len(ours) == MICROBATCHES and ours == theirs, (ours, theirs)


class Tied(nn.Module):
    """Uses a weight before and after what has none. (With weights in between, the split backward of torch fails.)"""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.calls = Tally()

    def forward(self, x):
        self.calls[x.detach().double().sum().item()] += 1
        return torch.sin(x @ self.weight).exp() @ self.weight


def tied_weights():
    expected = Program("ScheduleInterleavedZeroBubble", build=partial(Stage, block=Tied)).train()
    program = Program("ScheduleInterleavedZeroBubble", wrapped, build=partial(Stage, block=Tied))

    with attach(program.schedule):
        ours = program.train()

    # What the first step has learned holds for the second: nothing is dropped early, and nothing is recomputed again.
    assert program.calls == [TWICE] * BLOCKS * len(program.stages)
    assert equal(ours, expected)


# ------------------------------------------------------------------------------------------------------- detach


def attributes(program):
    """All attributes of a schedule and its stages, by identity."""
    return [{name: id(value) for name, value in vars(one).items()} for one in (program.schedule, *program.stages)]


def detach_restores(name):
    program = Program(name, wrapped)
    program.step()
    before = attributes(program)

    attached = attach(program.schedule, lookahead_bytes="1MiB", record=True)
    assert attributes(program) != before
    program.step()
    attached.detach()
    after = attributes(program)
    attached.detach()

    assert after == before == attributes(program)
    gc.collect()


def a_dropped_schedule_drops_all():
    def make():
        program = Program("Schedule1F1B", wrapped)
        attached = attach(program.schedule, record=True)
        program.step()
        return attached

    gc.collect()
    before = len(live_regions())
    attached = make()

    attached.detach()  # of nothing
    assert len(live_regions()) == before and attached.open_sessions == 0


def own_attributes_stay():
    program = Program("Schedule1F1B", wrapped)
    stage, calls = program.stages[0], []

    def forward(*args, **kwargs):
        calls.append(args[0])
        return type(stage).forward_one_chunk(stage, *args, **kwargs)

    stage.forward_one_chunk = forward
    with attach(program.schedule):
        program.train()

    assert calls == 2 * list(range(MICROBATCHES)) and vars(stage)["forward_one_chunk"] is forward
    assert program.calls == [TWICE] * BLOCKS


def errors():
    program = Program("ScheduleInterleaved1F1B", wrapped)
    schedule, stage = program.schedule, program.stages[0]
    before = attributes(program)

    with pytest.raises(UnsupportedError, match="nothing is attached to this ScheduleInterleaved1F1B"):
        detach(schedule)
    with pytest.raises(UnsupportedError, match="checkpoint='none': 'all' or 'in_flight' is allowed; lookahead_bytes=5"):
        attach(schedule, checkpoint="none", lookahead_bytes=5, lookahead=False)
    assert attributes(program) == before

    attach(schedule)
    with pytest.raises(UnsupportedError, match="this ScheduleInterleaved1F1B is attached already"):
        attach(schedule)
    ours, stage.forward_one_chunk = stage.forward_one_chunk, None
    with pytest.raises(UnsupportedError, match="`forward_one_chunk` of the PipelineStage was replaced since"):
        detach(schedule)
    stage.forward_one_chunk = ours
    detach(schedule)

    assert attributes(program) == before


# -------------------------------------------------------------------------------------------- exceptions, no grad


class Failing(torch.autograd.Function):
    """Passes on; raises in the backward if it is told to."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        goes_on("backward")
        return grad


class Breaking(Counted):
    def forward(self, x):
        goes_on("forward")
        return Failing.apply(super().forward(x))


# The number of the forward, recomputes included, or of the backward that breaks.
_breaks = Hidden(forward=None, backward=None)


def goes_on(what):
    at = _breaks[what]
    if at == 0:
        raise RuntimeError(f"the {what} broke")
    _breaks[what] = None if at is None else at - 1


def exceptions(name):
    """In the forward, in a recompute, and in a backward; of a schedule that this process runs alone."""
    build = partial(Stage, block=Breaking)
    expected = Program(name, build=build, alone=True).train()
    program = Program(name, wrapped, build=build, alone=True)
    gc.collect()
    before = len(live_regions())
    regions = MICROBATCHES * BLOCKS * len(program.stages)

    with attach(program.schedule) as attached:
        program.step()
        places = [("forward", 0), ("forward", 3), ("forward", regions + 1), ("backward", 0), ("backward", 3)]
        for what, at in places:
            _breaks[what] = at
            with pytest.raises(RuntimeError):
                program.step()
            _breaks[what] = None
            assert attached.open_sessions == 0
            for stage in program.stages:
                stage.clear_runtime_states()
                stage.backward_state.clear()
                stage.dw_runner.clear()
            program.schedule._internal_losses.clear()
            assert len(live_regions()) == before
        program.step()

    assert program.calls == [TWICE] * BLOCKS * len(program.stages)
    assert equal(program.result(), expected)


def no_grad(name):
    program = Program(name, wrapped)
    expected = Program(name).step(None)

    with attach(program.schedule, record=True) as attached:
        output = program.step()
        evaluated = program.step(program.schedule.eval)
        with torch.no_grad():
            program.step(program.schedule.eval)
        assert {event.kind for event in attached.events} <= {"wait"}
        assert program.calls == [ONCE] * BLOCKS * len(program.stages)
        program.train()

    assert program.calls == [TWICE] * BLOCKS * len(program.stages)
    for one in (output, evaluated):
        assert one is expected is None or torch.equal(one, expected)


# ---------------------------------------------------------------------------------------------------- look-ahead


class Slow:
    """A transfer that is on its way until it was asked `polls` times."""

    def __init__(self, work, polls):
        self.work = work
        self.polls = polls

    def is_completed(self):
        self.polls -= 1
        return self.polls < 0

    def wait(self):
        return self.work.wait()


@contextmanager
def slow_transfers(polls):
    schedules = import_module("torch.distributed.pipelining.schedules")
    had = schedules._batch_p2p

    def slowly(ops, desc=None):
        works = zip(ops, had(ops, desc), strict=True)
        return [Slow(work, polls if op.op is dist.irecv else 0) for op, work in works]

    schedules._batch_p2p = slowly
    try:
        yield
    finally:
        schedules._batch_p2p = had


LETTERS = {"forward": "F", "recompute": "R", "backward": "B", "input": "I", "weight": "W", "wait": "-"}


def order(program, **options):
    """What happens in the second step of this process, as one text; a backward comes after the recomputes in it."""
    with attach(program.schedule, record=True, **options) as attached:
        program.step()
        program.step()
        events = attached.events
        timeline = attached.timeline()
    assert program.calls == [TWICE] * BLOCKS * len(program.stages)
    assert equal(program.result(), plain(program.name))
    assert {event.stage for event in timeline.events} == set(range(timeline.stages))  # those of all processes
    mine = {event.stage for event in events}
    ours = [(one.stage, one.microbatch, one.kind) for one in timeline.events if one.stage in mine]
    assert sorted(ours) == sorted((one.stage, one.microbatch, one.kind) for one in events)
    assert timeline.predicted.step_s > 0
    return " ".join(f"{LETTERS[event.kind]}{event.microbatch}" for event in events if event.stage == 0)


def in_first_process(orders, expected):
    """Compare once nothing is left to be done together, so that no process waits for one that has raised."""
    if dist.get_rank() == 0:
        assert orders == expected


# Four microbatches of two regions. The first process waits for each gradient, and what comes after the wait is in the
# backward: without a look-ahead; with one, if the gradient comes late, during a recompute, or was there before.
IN_BACKWARD = "F0 F1 -0 R0 R0 B0 F2 -1 R1 R1 B1 F3 -2 R2 R2 B2 -3 R3 R3 B3"
BOTH_AHEAD = "F0 F1 R0 R0 -0 B0 F2 R1 R1 -1 B1 F3 R2 R2 -2 B2 R3 R3 -3 B3"
ONE_AHEAD = "F0 F1 R0 -0 R0 B0 F2 R1 -1 R1 B1 F3 R2 -2 R2 B2 R3 -3 R3 B3"


def lookahead_order():
    program, found = Program("Schedule1F1B", wrapped), []
    for polls, options in [(9, {"lookahead": False}), (9, {}), (1, {}), (0, {})]:
        with slow_transfers(polls):
            found.append(order(program, **options))

    in_first_process(found, [IN_BACKWARD, BOTH_AHEAD, ONE_AHEAD, IN_BACKWARD])


def lookahead_order_of_several_stages():
    program = Program("ScheduleInterleaved1F1B", wrapped)
    with slow_transfers(polls=1):
        found = order(program)

    # Stage 0 of two in this process; what it waits for when its turn comes.
    in_first_process(found, "F0 F1 F2 F3 R0 -0 R0 B0 R1 -1 R1 B1 R2 -2 R2 B2 R3 -3 R3 B3")


def lookahead_budget():
    program = Program("Schedule1F1B", wrapped)
    with slow_transfers(polls=9):
        with attach(program.schedule, lookahead_bytes=1) as attached:
            program.step()
            costs = dict(attached._stages[dist.get_rank()].costs)
        budgets = (costs[1] - 1, costs[0] + costs[1] - 1, costs[0] + costs[1])
        found = [order(program, lookahead_bytes=budget) for budget in budgets]

    # The last region comes first. What each of them adds is known from the first microbatches, which no budget lets in.
    assert sorted(costs) == [0, 1] and min(costs.values()) > 0
    in_first_process(found, [IN_BACKWARD, ONE_AHEAD, BOTH_AHEAD])


# ---------------------------------------------------------------------------------------------- in flight, sharded


def in_flight_choice():
    program = Program("Schedule1F1B", wrapped)

    with attach(program.schedule, checkpoint="in_flight"):
        ours = program.train()

    assert program.calls == [[TWICE, ONCE][dist.get_rank()]] * BLOCKS
    assert equal(ours, plain(program.name))


IN_FLIGHT = {
    "ScheduleGPipe": {0: 4, 1: 4},
    "Schedule1F1B": {0: 2, 1: 1},
    "ScheduleInterleaved1F1B": {0: 4, 1: 3, 2: 2, 3: 1},
}


def numbers_in_flight():
    for name, expected in IN_FLIGHT.items():
        assert in_flight(Program(name).schedule) == expected, in_flight(Program(name).schedule)


def planned():
    """A stage with a plan for the smallest budget that lets it hold its microbatches; the other one is wrapped."""
    program = Program("ScheduleInterleaved1F1B")
    module, other = program.modules
    wrapped(other)
    held = in_flight(program.schedule)[program.stages[0].stage_index]
    x, target = torch.randn(2, 64, 4, WIDTH)  # large, so that activations count beside gradients
    planner = Planner(module, lambda module: loss_of(module(x.clone().requires_grad_()), target), accumulates=True)
    before = 2 * sum(one.nbytes for one in module.parameters())
    one = planner.floor_bytes
    budget = before + held * (one - before)
    assert microbatch_budget(budget, before_bytes=before, in_flight=held) == one
    planner.plan(one).apply(module)

    with attach(program.schedule):
        ours = program.train()

    assert TWICE in program.calls[:BLOCKS] and program.calls[BLOCKS:] == [TWICE] * BLOCKS, program.calls
    assert equal(ours, plain(program.name))


def sharded_by(mesh):
    def prepare(module):
        for layer in module.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(module, mesh=mesh, reshard_after_forward=False)

    return prepare


def sharded(name):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))["shards"]
    program = Program(name, wrapped, sharded_by(mesh))
    if name in SINGLE:
        before = attributes(program)
        with pytest.raises(UnsupportedError, match=r"sharded by `fully_shard`: a \w+ does not unshard a stage"):
            attach(program.schedule)
        assert attributes(program) == before
    with attach(program.schedule, lookahead=name not in SINGLE):
        ours = program.train()

    assert program.calls == [TWICE] * BLOCKS * len(program.stages), program.calls
    assert equal([one.full_tensor() if hasattr(one, "full_tensor") else one for one in ours], plain(name))


CASES = {
    **{f"one recompute, {name}": partial(one_recompute, name) for name in SCHEDULES},
    "one recompute without a look-ahead": partial(one_recompute, "ScheduleZBVZeroBubble", lookahead=False),
    "many recomputes without": many_recomputes_without,
    **{f"selective, {name}": partial(selective, name) for name in ZERO_BUBBLE},
    "whole backwards, Schedule1F1B": partial(whole_backwards, "Schedule1F1B", "backward_one_chunk"),
    "whole backwards, stage 0": partial(whole_backwards, "ScheduleZBVZeroBubble", "backward_weight_one_chunk"),
    "tied weights": tied_weights,
    "detach restores, Schedule1F1B": partial(detach_restores, "Schedule1F1B"),
    "detach restores, ScheduleZBVZeroBubble": partial(detach_restores, "ScheduleZBVZeroBubble"),
    "a dropped schedule drops all": a_dropped_schedule_drops_all,
    "own attributes stay": own_attributes_stay,
    "errors": errors,
    "exceptions, Schedule1F1B": partial(exceptions, "Schedule1F1B"),
    "exceptions, ScheduleInterleavedZeroBubble": partial(exceptions, "ScheduleInterleavedZeroBubble"),
    "no grad, ScheduleGPipe": partial(no_grad, "ScheduleGPipe"),
    # Of those with stages that meet in one process, torch's own evaluation fails.
    "no grad, ScheduleInterleaved1F1B": partial(no_grad, "ScheduleInterleaved1F1B"),
    "look-ahead, order": lookahead_order,
    "look-ahead, order of several stages": lookahead_order_of_several_stages,
    "look-ahead, budget": lookahead_budget,
    "in flight, choice": in_flight_choice,
    "in flight, numbers": numbers_in_flight,
    "planned": planned,
    "sharded, ScheduleInterleaved1F1B": partial(sharded, "ScheduleInterleaved1F1B"),
    "sharded, Schedule1F1B": partial(sharded, "Schedule1F1B"),
}
