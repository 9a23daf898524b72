"""Which operator runs at which line: in forward, in backward, in recomputes, and where nobody knows."""

import inspect

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchremat import measure, wrap
from torchremat.measuring.before import BytesBefore
from torchremat.measuring.lines import OperatorStart, matched, noted
from torchremat.measuring.timeline import UNKNOWN, MemoryTimeline, OperatorLine
from torchremat.measuring.traces import AllocationTrace, TraceMark

HERE = "tests/measuring/test_lines.py"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        return torch.exp(self.second(y))


FORWARD = inspect.getsourcelines(Two.forward)[1]
TANH, EXP = FORWARD + 1, FORWARD + 2


def told(timeline):
    """Phase, operator and line of each event, without those that are not known and those that repeat."""
    seen = []
    for event in range(len(timeline)):
        operator = timeline.operator_at(event)
        one = (timeline.phase_at(event), operator.operator, operator.line, operator.recomputes)
        if operator is not UNKNOWN and operator.operator and (not seen or seen[-1] != one):
            seen.append(one)
    return seen


def measured(model):
    x = torch.randn(32, 64)
    return measure(model, lambda model: model(x).sum()).timeline


def test_forward_and_backward_have_the_lines_of_the_forward():
    seen = told(measured(Two()))

    lines = {(phase, operator): line for phase, operator, line, _ in seen}
    assert lines["forward", "aten.tanh.default"] == f"{HERE}:{TANH}"
    assert lines["forward", "aten.exp.default"] == f"{HERE}:{EXP}"
    assert lines["backward", "aten.tanh_backward.default"] == f"{HERE}:{TANH}"
    assert not any(recomputes for *_, recomputes in seen)


def test_recomputes_are_told_from_backward_and_have_their_own_lines():
    inner = Two()
    model = nn.Sequential(inner)
    wrap(model, "0")

    seen = told(measured(model))

    assert ("backward", "aten.tanh.default", f"{HERE}:{TANH}", True) in seen
    assert ("backward", "aten.tanh_backward.default", f"{HERE}:{TANH}", False) in seen


def test_recomputes_of_torchs_own_modules_have_the_line_of_the_step_that_ran_them():
    # Between backward and an `nn.Linear` there is no line of anybody's; that of the caller of `measure` was told.
    model = wrap(nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))), "0")
    x = torch.randn(32, 64)

    def step(model):
        return model(x).sum()

    timeline = measure(model, step).timeline

    line = f"{HERE}:{inspect.getsourcelines(step)[1] + 1}"
    again = {line for _, operator, line, recomputes in told(timeline) if recomputes}
    assert again == {line}


def test_reentrant_checkpoints_are_recomputes_as_well():
    inner = Two()
    x = torch.randn(32, 64, requires_grad=True)

    timeline = measure(inner, lambda model: checkpoint(model, x, use_reentrant=True).sum()).timeline

    assert any(operator == "aten.tanh.default" and recomputes for _, operator, _, recomputes in told(timeline))


def test_a_plain_step_recomputes_nothing_not_even_its_first_gradient():
    # `ones_like` of the loss runs with grad mode on, in no node.
    assert not any(one.recomputes for one in measured(nn.Linear(64, 64)).operators)


def line(text):
    return OperatorLine("aten.op.default", text)


def events(deltas, modules=()):
    """The events of a step, of these bytes, and the modules that run from some of them on, by position."""
    labels = [(0, "start"), *((len(deltas), name) for name in ("end of forward", "end")), *modules]
    marks = [TraceMark(id=i, label=name, time_ns=0, position=at) for i, (at, name) in enumerate(labels)]
    columns = np.array([(i, i, delta) for i, delta in enumerate(deltas)], dtype=np.int64)
    trace = AllocationTrace.of(torch.device("cpu"), columns, marks)
    before = BytesBefore(parameter_bytes=0, gradient_bytes=0, buffer_bytes=0, optimizer_bytes=0, input_bytes=0)
    return MemoryTimeline(trace=trace, start=0, backward=1, ends=2, before=before)


def lines_of(timeline):
    return [timeline.operator_at(event).line for event in range(len(timeline))]


def test_events_that_were_noted_belong_to_the_operator_that_began_last():
    found = noted(events([512, 512, 512]), [OperatorStart(1, line("a")), OperatorStart(2, line("b"))])

    assert lines_of(found) == ["", "a", "b"]


def test_allocations_of_two_runs_are_matched_by_size_and_temporaries_belong_to_the_one_before():
    # The allocator saw a temporary of 4096 that was no tensor; the sizes of devices are rounded up to 512.
    allocator, tensors = events([1024, 4096, -4096, 2048], [(0, "m")]), events([1000, 2048], [(0, "m")])

    found = matched(allocator, noted(tensors, [OperatorStart(0, line("a")), OperatorStart(1, line("b"))]))

    assert lines_of(found) == ["a", "a", "a", "b"]


def test_where_modules_were_called_otherwise_nothing_is_told():
    one, other = events([1024], [(0, "m")]), events([1024], [(0, "n")])

    assert lines_of(matched(one, noted(other, [OperatorStart(0, line("a"))]))) == [""]


def test_sizes_are_matched_within_one_module_alone():
    modules = [(0, "m"), (1, "n")]
    allocator, tensors = events([512, 1024, 512], modules), events([512, 512], modules)

    found = matched(allocator, noted(tensors, [OperatorStart(0, line("m")), OperatorStart(1, line("n"))]))

    assert lines_of(found) == ["m", "n", "n"]


def test_long_stretches_are_matched_in_order():
    sizes = [512 * (1 + place % 3) for place in range(3000)]
    with_temporaries = [size for pair in zip(sizes, [8192] * 3000, strict=True) for size in pair]
    ran = [OperatorStart(place, line(str(place))) for place in range(3000)]

    found = matched(events(with_temporaries), noted(events(sizes), ran))

    assert lines_of(found) == [str(place) for place in range(3000) for _ in range(2)]


def test_where_compiled_code_ran_nothing_is_told():
    # It runs eagerly where operators are noted, so sizes would be matched with operators that the step does not run.
    compiled = torch.compile(Two(), backend="aot_eager")
    inner = Two()
    function = torch.compile(lambda x: torch.exp(inner(x)), backend="aot_eager")
    x = torch.randn(32, 64)

    assert told(measure(compiled, lambda model: model(x).sum()).timeline) == []
    assert told(measure(lambda: function(x).sum()).timeline) == []
