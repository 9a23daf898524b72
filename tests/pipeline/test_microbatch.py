"""Batches cut into microbatches."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from torchremat import PipelineError
from torchremat.pipeline.microbatch import Microbatch, gather, scatter

Pair = namedtuple("Pair", "left right")


class Undecided:
    """Compares as arrays do."""

    def __eq__(self, other):
        raise ValueError("neither yes nor no")

    __hash__ = None


def test_a_tensor_is_cut_along_its_rows():
    found = scatter(torch.arange(6).view(6, 1), 3)

    assert [one.value.flatten().tolist() for one in found] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"), [(5, 2, [3, 2]), (2, 4, [1, 1]), (5, 4, [2, 2, 1]), (7, 1, [7]), (1, 8, [1])]
)
def test_a_batch_that_does_not_come_out_has_a_short_last_microbatch_or_fewer(rows, chunks, sizes):
    assert [len(one.value) for one in scatter(torch.rand(rows, 2), chunks)] == sizes


def test_no_rows_are_lost():
    whole = torch.rand(7, 3)

    assert torch.equal(gather(scatter(whole, 3)), whole)


@pytest.mark.parametrize(
    "value",
    [
        (torch.arange(4), torch.arange(4.0)),
        [torch.arange(4)],
        {"x": torch.arange(4), "scale": 2, "mask": None},
        Pair(torch.arange(4), ("words", torch.arange(8).view(4, 2))),
    ],
    ids=["tuple", "list", "dict", "nested"],
)
def test_what_is_no_tensor_goes_to_every_microbatch_and_comes_back(value):
    back = gather(scatter(value, 2))

    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_microbatches_are_views():
    whole = torch.rand(4, 2)

    assert {one.value.untyped_storage().data_ptr() for one in scatter(whole, 2)} == {whole.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((torch.rand(8, 2), torch.rand(3, 2)), r"\[8, 3\] rows"),
        (torch.tensor(1.0), "tensors .0. of 1 have no dimension"),
        ("words", "at least one tensor"),
        ((), "at least one tensor"),
    ],
    ids=["uneven", "scalar", "words", "empty"],
)
def test_an_input_that_cannot_be_cut_is_refused(value, words):
    with pytest.raises(PipelineError, match=words):
        scatter(value, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([torch.tensor(1.0), torch.tensor(2.0)], "tensor 0 of 1 has no dimension"),
        ([torch.rand(2), (torch.rand(2),)], "microbatches 1 and 0 differ"),
        ([{"x": torch.rand(2), "n": 1}, {"x": torch.rand(2), "n": 2}], "microbatches 1 and 0 differ"),
        ([{"x": torch.rand(2)}, {"y": torch.rand(2)}], "microbatches 1 and 0 differ"),
        ([(torch.rand(2), Undecided()), (torch.rand(2), Undecided())], "microbatches 1 and 0 differ"),
        ([torch.rand(2, 3), torch.rand(2, 4)], r"shapes \[\(2, 3\), \(2, 4\)\]"),
        ([torch.rand(2), torch.tensor(1.0)], r"shapes \[\(2,\), \(\)\]"),
    ],
    ids=["scalar", "structure", "number", "keys", "array", "sizes", "dimensions"],
)
def test_outputs_that_cannot_be_put_together_are_refused(values, words):
    with pytest.raises(PipelineError, match=words):
        gather([Microbatch.of(value) for value in values])
