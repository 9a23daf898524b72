"""What a device of a pipe holds at each of its actions."""

from torchremat.stages.loads import DeviceLoad
from torchremat.stages.losses import LossBytes
from torchremat.stages.pipes import Clocks, Passed

LOSS = LossBytes(peak_bytes=50, held_bytes=(20, 10, 1), grads=())


def test_a_device_with_all_stages_runs_backward_in_the_order_turned_around():
    passed = [Passed(0, 1, 8), Passed(1, 2, 16)]
    clocks = Clocks(microbatches=2, stages=2, sums={0: 100, 1: 200}, passed=passed, loss=LOSS)

    # F0.0 F0.1 F1.0 F1.1, and back. Each cell's own input counts with it, and so does the gradient that it begins from.
    assert list(clocks.loads()) == [
        DeviceLoad(0, "forward", ()),
        DeviceLoad(0, "forward", ((0, 1),), other_bytes=8),
        DeviceLoad(1, "forward", ((0, 2),), other_bytes=8),
        DeviceLoad(1, "forward", ((0, 2), (1, 1)), other_bytes=16),
        DeviceLoad(None, "loss", ((0, 2), (1, 2)), other_bytes=50),
        DeviceLoad(1, "first", ((0, 2), (1, 1)), other_bytes=20),
        # A gradient waits for the stage before, and the sums of stage 1 are there until its last microbatch has run.
        DeviceLoad(1, "last", ((0, 2),), other_bytes=10 + 8 + 200),
        DeviceLoad(0, "first", ((0, 1),), other_bytes=1 + 8),
        DeviceLoad(0, "last", (), other_bytes=1 + 100),
    ]


def test_of_other_devices_the_one_that_comes_first_is_not_known():
    passed = [Passed(0, 1, 8), Passed(1, 2, 8), Passed(2, 3, 8)]
    loads = list(Clocks(microbatches=2, stages=3, sums={0: 100, 2: 200}, passed=passed, loss=LOSS).loads())

    # In the third clock of three stages microbatch 0 is in the last one, and in the first one when nothing is.
    backwards = [load for load in loads if load.phase in ("first", "last")]
    assert backwards == [
        DeviceLoad(2, "first", ((0, 2), (2, 1)), other_bytes=20),
        DeviceLoad(2, "last", ((0, 2),), other_bytes=10 + 200),
        DeviceLoad(0, "first", ((0, 1),), other_bytes=1),
        DeviceLoad(0, "last", (), other_bytes=1 + 100),
    ]


def test_a_skip_waits_for_its_stage():
    passed = [Passed(0, 1, 8), Passed(1, 2, 8), Passed(0, 2, 32), Passed(2, 3, 8)]
    loads = list(Clocks(microbatches=1, stages=3, sums={0: 0, 1: 0, 2: 0}, passed=passed, loss=LOSS).loads())

    # It is stashed in stage 0 and popped in stage 2, and its gradient goes the other way around.
    assert [(load.running, load.phase, load.other_bytes) for load in loads] == [
        (0, "forward", 0),
        (1, "forward", 32),
        (2, "forward", 0),
        (None, "loss", 50),
        (2, "backward", 20),
        (1, "backward", 10 + 32),
        (0, "backward", 10),
    ]
