"""Moves of parameters as stretches of a record, and the record without them."""

import itertools

import numpy as np
import torch

from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.traces import AllocationTrace, TraceMark
from torchremat.stores.parameter_moves import marking_moves, moving


def test_moves_inside_of_moves_are_one_stretch():
    count = itertools.count()

    with marking_moves(lambda _: next(count)) as stretches:
        with moving(), moving():
            pass
        with moving():
            pass
    with moving():
        pass

    assert stretches == [(0, 1), (2, 3)]


def test_what_a_move_allocates_is_hidden_wherever_it_is_freed():
    with record_allocations(torch.device("cpu")) as recorder, marking_moves(recorder.mark) as moves:
        kept = torch.ones(1000, device="cpu")
        with moving():
            moved = torch.ones(5000, device="cpu")
        other = torch.ones(100, device="cpu")
        del moved, kept
        after = recorder.mark("after")
        del other
    recorder.hide(moves)

    assert recorder.trace.peak_bytes == 4400
    assert recorder.trace.live_bytes_at(after) == 400


def test_what_was_there_before_and_leaves_in_a_move_stays_in_the_record():
    # A device's allocator tells of frees of memory from before the block: here 8 bytes in a move, and 16 after it.
    marks = [(1, 0), (4, 3)]
    found = AllocationTrace(
        device=torch.device("cpu"),
        time_ns=np.array([2, 2, 3, 5]),
        ptr=np.array([1, 2, 2, 3]),
        delta_bytes=np.array([-8, 32, -32, -16]),
        marks=tuple(TraceMark(id=i, label="", time_ns=t, position=p) for i, (t, p) in enumerate(marks)),
    )

    assert found.within([(0, 1)]).tolist() == [True, True, True, False]
    assert found.made_in([(0, 1)]).tolist() == [False, True, True, False]
    assert found.is_of_before.tolist() == [True, False, False, True]
    with record_allocations(torch.device("cpu")) as recorder:
        pass
    recorder._trace = found
    recorder.hide([(0, 1)])
    assert recorder.trace.delta_bytes.tolist() == [-16]
