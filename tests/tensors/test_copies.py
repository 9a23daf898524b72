"""Copies that stay views of one another."""

import torch

from torchremat.tensors.copies import again


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
