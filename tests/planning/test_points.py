"""What is live when a unit has returned, in the forward of a step under a plan: measured, and as the simulator says."""

import random
from itertools import pairwise

import pytest

import zoo
from planning.kinds import KINDS
from planning.steps import CPU, profile, random_tree
from probes.memory import record_allocations, subject_of
from probes.planning import Live, MemorySimulator, ProgramPoint, calls_of, installed, over_bytes
from probes.regions import Settings


def measured(model, step, own, tree):
    """By unit, the live bytes when it has returned and its arguments are gone, and the peak until what comes next."""
    units, marks = own.units.units, []
    waiting = {}
    for number, unit in enumerate(units):
        waiting.setdefault(unit.name, []).append(number)
    subject = subject_of(step, model, None)
    with (
        subject.untouched(),
        record_allocations(CPU) as recorder,
        installed(model, calls_of(own.units), tree, Settings()),
    ):
        for name, numbers in waiting.items():
            marking(model.get_submodule(name), numbers, lambda number: marks.append((number, recorder.mark("here"))))
        begins = recorder.mark("begins")
        subject.forward()
        marks.append((None, recorder.mark("loss")))
    trace, found = recorder.trace, {}
    for (number, mark), (_, following) in pairwise(marks):
        position, end = trace.marks[mark].position, trace.marks[following].position
        while position < end and trace.delta_bytes[position] < 0:
            position += 1
        live = trace.live[position : end + 1] - trace.live[trace.marks[begins].position]
        if number is not None:
            found[number] = int(live[0]), int(live.max())
    return found


def marking(module, numbers, mark):
    """Let a module tell when it is entered, by None, and when it has returned, by the next of some numbers."""
    inner, numbers = module.forward, iter(numbers)

    def forward(*args, **kwargs):
        mark(None)
        output = inner(*args, **kwargs)
        mark(next(numbers))
        return output

    module.forward = forward


def predicted(own, tree):
    found = {}
    for state in MemorySimulator(own.units, own.sizes, own.order, own.lifetimes, tree):
        if isinstance(state, Live) and state.key[0] is ProgramPoint.LEFT:
            live = own.extra_bytes[state.key] + state.held_bytes
            found[state.key[1]] = live, live + over_bytes(own, state)
    return found


MODELS = {
    "encoder layers": KINDS["encoder layers"],
    "transformer": KINDS["transformer"],
    "t5": lambda: zoo.t5(blocks=2, width=32),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_dies_as_calls_return_in_a_row_is_gone_when_the_innermost_has_returned(name):
    # `output = layer(output)`: the old output dies when the last call in the layer has returned, then the layer, and
    # the variable has the new one. It counted until the last-but-one return, so the code after the innermost call was
    # predicted an activation too high, 65,536 bytes for encoder layers, where the plan does not hold it.
    model, step = MODELS[name]()
    leaves, rng = profile(model, step).leaves, random.Random(0)
    trees = [random_tree(leaves.units, rng) for _ in range(4)]

    pairs = [(measured(model, step, leaves, tree), predicted(leaves, tree)) for tree in trees]

    assert [real for real, _ in pairs] == [said for _, said in pairs]
