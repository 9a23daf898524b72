"""Copies that stay views of one another, and that are compared bit for bit."""

import pytest
import torch

from torchremat.tensors.copies import again, same_bits


def test_copies_have_values_and_storages_of_their_own():
    a, b = torch.arange(3.0), torch.arange(4.0).requires_grad_()

    c, d = again([a, b])

    assert c.tolist() == [0, 1, 2] and d.tolist() == [0, 1, 2, 3]
    assert c.data_ptr() != a.data_ptr() and d.data_ptr() != b.data_ptr()
    assert not d.requires_grad


def test_views_stay_views():
    flat = torch.arange(6.0)

    whole, column, same = again([flat, flat.view(2, 3)[:, 1], flat])
    whole += 10

    assert column.tolist() == [11, 14] and same.tolist() == whole.tolist()
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]


def test_other_values():
    flat = torch.zeros(4)

    whole, half = again([flat, flat[:2]], [torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 2])])

    assert whole.tolist() == [1, 2, 3, 4] and half.tolist() == [1, 2]
    assert half.data_ptr() == whole.data_ptr()


def test_sparse_and_empty_tensors():
    sparse = torch.eye(2).to_sparse()

    one, other, empty, nothing = again([sparse, sparse, torch.empty(0), torch.empty(0, 3)])

    assert one.to_dense().tolist() == other.to_dense().tolist() == [[1, 0], [0, 1]]
    assert empty.shape == (0,) and nothing.shape == (0, 3)


NAN, OTHER_NAN = 0x7FC00000, 0x7FC00001


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor(NAN, dtype=torch.int32).view(torch.float32), torch.tensor(OTHER_NAN).int().view(torch.float32)),
        (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64).conj()),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.eye(2).to_sparse(), torch.diag(torch.tensor([1.0, 2.0])).to_sparse()),
        (torch.eye(2).to_sparse(), torch.eye(2)),
    ],
    ids=["zeros", "nans", "imaginary zeros", "shapes", "types", "sparse", "layouts"],
)
def test_bits_that_differ(one, other):
    assert same_bits(one, one.clone()) and same_bits(other, other.clone())

    assert not same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.uint16, torch.complex128])
def test_bits_of_a_transposed_tensor(dtype):
    tensor = torch.randn(4, 3).to(dtype)

    assert same_bits(tensor.T, tensor.T.contiguous())
