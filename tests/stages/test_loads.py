"""What a device holds at each of its actions."""

from schedules.orders import one_forward_one_backward, parse
from torchremat.schedules.pipelines import most_held
from torchremat.stages.loads import DeviceLoad, loads_of


def test_the_first_stage_of_1f1b_holds_two_and_the_last_one():
    first, last = one_forward_one_backward(4, 2)

    assert (most_held(first), most_held(last)) == ({0: 2}, {1: 1})
    assert loads_of(first, {}) == [
        DeviceLoad(0, "forward", ()),
        DeviceLoad(0, "forward", ((0, 1),)),
        DeviceLoad(0, "backward", ((0, 1),)),
        DeviceLoad(0, "backward", ()),
    ]
    assert loads_of(last, {}) == [DeviceLoad(1, "forward", ()), DeviceLoad(1, "backward", ())]


def test_what_lies_between_the_passes_of_a_backward_is_counted_apart():
    (actions,) = parse(["F1.0 F1.1 I1.0 W1.0 I1.1 W1.1"])

    assert most_held(actions) == {1: 2}
    assert loads_of(actions, {1: 8}) == [
        DeviceLoad(1, "forward", ()),
        DeviceLoad(1, "forward", ((1, 1),)),
        DeviceLoad(1, "input", ((1, 1),)),
        DeviceLoad(1, "weight", ((1, 1),)),
        DeviceLoad(1, "input", (), other_bytes=8),
        DeviceLoad(1, "weight", (), other_bytes=8),
    ]


def test_between_the_passes_of_two_microbatches():
    (actions,) = parse(["F1.0 F1.1 I1.0 I1.1 W1.0 W1.1"])

    assert loads_of(actions, {})[2:] == [
        DeviceLoad(1, "input", ((1, 1),)),
        DeviceLoad(1, "input", (), ((1, 1),)),
        DeviceLoad(1, "weight", (), ((1, 1),)),
        DeviceLoad(1, "weight", ()),
    ]


def test_two_stages_of_a_process_and_outputs_that_stay():
    (actions,) = parse(["F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1"])

    assert loads_of(actions, {1: 8})[2:] == [
        DeviceLoad(1, "backward", ((0, 1),)),
        DeviceLoad(0, "backward", (), other_bytes=8),
        DeviceLoad(0, "forward", (), other_bytes=8),
        DeviceLoad(1, "forward", ((0, 1),), other_bytes=8),
        DeviceLoad(1, "backward", ((0, 1),), other_bytes=8),
        DeviceLoad(0, "backward", (), other_bytes=16),
    ]


def test_outputs_are_held_while_a_whole_backward_runs():
    (actions,) = parse(["F0.0 B0.0 F0.1 I0.1 W0.1"])

    # Whoever calls a whole backward has them until its end. Of a split backward they are let go of in the first.
    assert [load.other_bytes for load in loads_of(actions, {0: 8}, {0: 100})] == [0, 100, 8, 8, 8]


def test_a_recompute_ahead_comes_before_its_backward():
    (actions,) = parse(["F0.0 F0.1 R0.0 B0.0 R0.1 I0.1 W0.1"])

    assert loads_of(actions, {0: 8}, {0: 100})[2:] == [
        DeviceLoad(0, "ahead", ((0, 1),)),
        DeviceLoad(0, "backward", ((0, 1),), other_bytes=100),
        DeviceLoad(0, "ahead", (), other_bytes=8),
        DeviceLoad(0, "input", (), other_bytes=8),
        DeviceLoad(0, "weight", (), other_bytes=8),
    ]
