"""What a device of a pipe holds at each of its actions."""

from torchremat.stages.loads import DeviceLoad
from torchremat.stages.losses import LossBytes
from torchremat.stages.pipes import Clocks, Passed

LOSS = LossBytes(peak_bytes=50, held_bytes=(20, 10, 1), grads=())


def passed(*given):
    """What is passed, and back as gradients: source, target and bytes of each. The last one goes to the loss."""
    return [
        Passed(source=source, target=target, size_bytes=size, grad_bytes=0 if place == len(given) - 1 else size)
        for place, (source, target, size) in enumerate(given)
    ]


def test_a_device_with_all_stages_runs_backward_in_the_order_turned_around():
    clocks = Clocks(microbatches=2, stages=2, sums={0: 100, 1: 200}, passed=passed((0, 1, 8), (1, 2, 16)), loss=LOSS)

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


def test_of_another_device_come_as_many_gradients_as_its_edges_let_through():
    whole = passed((0, 1, 8), (1, 2, 16), (2, 3, 8))
    first, second = (
        list(Clocks(microbatches=3, stages=3, sums={stage: 100}, passed=whole, loss=LOSS).loads()) for stage in (0, 1)
    )

    # While stage 0 runs one, stage 1 gives it the next gradient and no more.
    assert [load for load in first if load.running == 0] == [
        DeviceLoad(0, "forward", ()),
        DeviceLoad(0, "forward", ((0, 1),)),
        DeviceLoad(0, "forward", ((0, 2),)),
        DeviceLoad(0, "first", ((0, 2),), other_bytes=8),
        DeviceLoad(0, "second", ((0, 1),), other_bytes=8 + 100),
        DeviceLoad(0, "last", (), other_bytes=100),
    ]
    # What stage 1 gives away has gone when it runs again. In its forward the next input comes before the output goes.
    assert second == [
        DeviceLoad(None, "copies", (), other_bytes=8),
        DeviceLoad(1, "forward", ()),
        DeviceLoad(None, "copies", ((1, 1),), other_bytes=8 + 16),
        DeviceLoad(1, "forward", ((1, 1),)),
        DeviceLoad(None, "copies", ((1, 2),), other_bytes=8 + 16),
        DeviceLoad(1, "forward", ((1, 2),)),
        DeviceLoad(None, "copies", ((1, 3),), other_bytes=16),
        DeviceLoad(1, "first", ((1, 2),), other_bytes=16),
        DeviceLoad(1, "second", ((1, 1),), other_bytes=16 + 100),
        DeviceLoad(1, "last", (), other_bytes=100),
    ]


def test_a_device_between_whose_stages_there_is_another():
    whole = passed((0, 1, 8), (1, 2, 16), (2, 3, 8))
    loads = list(Clocks(microbatches=2, stages=3, sums={0: 100, 2: 200}, passed=whole, loss=LOSS).loads())

    backwards = [load for load in loads if load.phase in ("first", "last")]
    assert backwards == [
        DeviceLoad(2, "first", ((0, 2), (2, 1)), other_bytes=20),
        # Stage 1 has what stage 2 has done, and can give it to stage 0.
        DeviceLoad(2, "last", ((0, 2),), other_bytes=10 + 200 + 8),
        # And now the second one as well, if it has taken it from stage 2.
        DeviceLoad(0, "first", ((0, 1),), other_bytes=1 + 8 + 16),
        DeviceLoad(0, "last", (), other_bytes=1 + 100 + 16),
    ]


def test_a_skip_to_another_device_comes_back_clocks_ahead():
    whole = passed((0, 1, 8), (1, 2, 8), (0, 3, 32), (2, 3, 8), (3, 4, 8))
    loads = Clocks(microbatches=5, stages=4, sums={0: 0}, passed=whole, loss=LOSS).loads()

    assert [load.other_bytes for load in loads if load.phase in ("first", "second", "backward", "last")] == [
        8 + 3 * 32,
        8 + 3 * 32,
        8 + 2 * 32,
        8 + 32,
        0,
    ]


def test_what_requires_no_grad_has_no_gradient_that_waits():
    whole = [
        Passed(source=0, target=1, size_bytes=8, grad_bytes=2),
        Passed(source=1, target=2, size_bytes=8, grad_bytes=0),
    ]
    loads = Clocks(microbatches=2, stages=2, sums={0: 0}, passed=whole, loss=LOSS).loads()

    assert [load.other_bytes for load in loads if load.phase in ("first", "last")] == [2, 0]


def test_a_skip_waits_for_its_stage():
    whole = passed((0, 1, 8), (1, 2, 8), (0, 2, 32), (2, 3, 8))
    loads = list(Clocks(microbatches=1, stages=3, sums={0: 0, 1: 0, 2: 0}, passed=whole, loss=LOSS).loads())

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
