"""Storages and what is known about each."""

from weakref import ref

import pytest
import torch

from probes.memory import StorageMap, StorageNumbers


def test_views_have_the_number_of_their_storage():
    numbers = StorageNumbers()
    x, y = torch.randn(4, 4), torch.randn(2)

    assert numbers.of([x, x.t(), y, x[1:]]) == (0, 1)
    assert numbers.of(x.view(-1)) == (0,)
    assert numbers.sizes == [64, 8]


def test_a_number_is_never_given_again():
    numbers = StorageNumbers()
    seen = set()

    for _ in range(50):
        seen.update(numbers.of(torch.randn(1000)))  # the allocator gives the same memory each time

    assert seen == set(range(50))


def test_what_has_grown_has_its_new_size():
    numbers = StorageNumbers()
    x = torch.randn(4)
    numbers.of(x)

    x.untyped_storage().resize_(64)
    numbers.of(x)

    assert numbers.sizes == [64]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11 alone says so
def test_sparse_tensors_are_their_parts():
    numbers = StorageNumbers()
    indices, values = torch.tensor([[0, 1], [1, 0]]), torch.randn(2)
    sparse = torch.sparse_coo_tensor(indices, values, (2, 2), check_invariants=True)
    compressed = torch.eye(3).to_sparse_csr()

    assert numbers.of(values) == (0,)
    assert len(numbers.of(sparse)) == 2 and 0 in numbers.of(sparse)
    assert len(numbers.of(compressed)) == 3


def test_numbers_hold_nothing():
    numbers = StorageNumbers()
    x = torch.randn(4)
    storage = x.untyped_storage()
    numbers.of(x)

    del numbers
    del x

    assert storage.nbytes() == 16  # and no callback has failed


class Owner:
    def __init__(self):
        self.died, self.map = [], StorageMap(self.dies)

    def dies(self, value):
        self.died.append(value)


def test_a_value_goes_with_its_storage_and_is_told_as_it_is_then():
    owner, x, y = Owner(), torch.ones(3), torch.ones(3)
    owner.map[x.untyped_storage()], owner.map[y.untyped_storage()] = "a", "b"
    owner.map[x.view(3, 1).untyped_storage()] = "c"

    assert owner.map.get(x.untyped_storage()) == "c"
    assert owner.map.at(y.untyped_storage()._cdata) == "b"
    assert x.untyped_storage() in owner.map and torch.ones(1).untyped_storage() not in owner.map
    del x

    assert owner.died == ["c"]
    assert [one.data_ptr() for one in owner.map.storages()] == [y.data_ptr()]


def test_a_map_that_is_cleared_or_gone_tells_nothing():
    owner, x, y = Owner(), torch.ones(3), torch.ones(3)
    died = owner.died
    owner.map[x.untyped_storage()] = "a"
    owner.map.clear()
    del x
    owner.map[y.untyped_storage()] = "b"
    del owner, y

    assert died == []


def test_an_owner_goes_at_once():
    owner = Owner()
    gone = ref(owner)
    del owner

    assert gone() is None
