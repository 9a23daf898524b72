"""What lies beside the values of a joint list, found from what is known of one split."""

from schedules.joint_chains import chain
from torchremat.schedules.joint import Adjustments, adjustments_of, live, split
from torchremat.schedules.saved_values import Saver


def said(joint, saved):
    """What is live in the forward and the backward of a split, by operator."""
    found = split(joint, saved)
    return [{name: size for size, name in one} for one in live(joint, found.saved, found.forward, found.backward)]


def test_a_list_that_is_told_says_what_is_known():
    joint = chain([4, 4, 4, 4], [1, 1, 1, 1])
    found = split(joint, {2, 4})
    # b3 f2 b2 b1 f0 b0: a copy of 7 bytes lies there until b2 has read it, and f0 needs 3 when it runs again.
    first, second = said(joint, {2, 4})
    known = {**second, "b3": second["b3"] + 7, "f2": second["f2"] + 7, "b2": second["b2"] + 7, "f0": second["f0"] + 3}

    beside = adjustments_of(joint, found, first, known)

    told = Saver(joint).told(beside).joint
    assert said(told, {2, 4}) == [first, known]
    # b2: as much as before, and the copy. Of a split that saves all, the same is known of b2, and nothing of f0.
    assert split(joint, {1, 2, 3, 4}).peak_bytes == 16 + 3
    assert split(told, {1, 2, 3, 4}).peak_bytes == 16 + 3 + 7


def test_what_is_not_named_is_as_the_one_before_it():
    joint = chain([4, 4, 4, 4], [1, 1, 1, 1])

    beside = adjustments_of(joint, split(joint, {1, 2, 3, 4}), {"f1": 8 + 5}, {"b2": 16 + 3 + 2})

    # Operators are f0 f1 f2 f3 b3 b2 b1 b0; values 1 and 2 are there while f1 runs.
    assert dict(beside.first) == {0: 0, 1: 5, 2: 5, 3: 5, 4: 0, 5: 2, 6: 2, 7: 2}


def test_less_than_the_values_may_be_there():
    joint = chain([4, 4, 4, 4], [1, 1, 1, 1])
    first, second = said(joint, {1, 2, 3, 4})

    beside = adjustments_of(joint, split(joint, {1, 2, 3, 4}), first, {name: size - 1 for name, size in second.items()})

    assert Saver(joint).told(beside).plain.peak_bytes == 16 + 3 - 1


def test_what_runs_again_has_what_lies_beside_its_reader_unless_it_is_known():
    joint = chain([4, 4, 4, 4], [1, 1, 1, 1])
    late = joint.of_backward
    backward = split(joint, {2, 4}).backward  # b3 f2 b2 b1 f0 b0

    assert Adjustments(first={2: 100, 5: 6, 7: 1}).of(backward, late) == [0, 6, 6, 0, 1, 1]
    assert Adjustments(first={2: 100, 5: 6, 7: 1}, again={2: 9}).of(backward, late) == [0, 9, 6, 0, 1, 1]
    assert Adjustments(first={2: 100}).of([0, 1, 2, 3], late) == [0, 0, 100, 0]
