"""The pool on plain memory, with events that fire when the test wants them to."""

import time
from types import SimpleNamespace

import pytest
import torch

from torchremat.stores import pinned
from torchremat.stores.base import content_of
from torchremat.stores.pinned import Pool

MIB = 2**20


class Fires:
    def __init__(self, fired=False, at_query=None):
        self.fired = fired
        self.at_query = at_query
        self.queries = 0

    def query(self):
        self.queries += 1
        return self.fired or self.queries == self.at_query


class Machine:
    """Memory that counts what was asked for, and has no more than so much."""

    def __init__(self, most=1 << 40):
        self.sizes = []
        self.most = most

    def __call__(self, size):
        if sum(self.sizes) + size > self.most:
            raise RuntimeError("CUDA error: out of memory")
        self.sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)


def test_sizes_are_exact_within_chunks_that_are_powers_of_two():
    machine = Machine()
    pool = Pool(1024 * MIB, machine)

    places = [pool.take(33 * MIB), pool.take(31 * MIB), pool.take(70 * MIB), pool.take(58 * MIB)]

    assert None not in places
    assert machine.sizes == [64 * MIB, 128 * MIB]
    assert pool.pinned_bytes == 192 * MIB


def test_a_place_is_a_tensor_of_any_kind():
    pool = Pool(64 * MIB, Machine())
    tensors = [torch.randn(3, 5), torch.randn(7, dtype=torch.complex128), torch.ones((), dtype=torch.bfloat16)]

    places = [pool.take(tensor.nbytes) for tensor in tensors]
    views = [place.tensor(content_of(tensor)) for place, tensor in zip(places, tensors, strict=True)]
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor.view(-1))

    assert all(torch.equal(view, tensor.view(-1)) for view, tensor in zip(views, tensors, strict=True))


def test_a_place_is_used_again_when_its_copies_have_ended():
    machine, event = Machine(), Fires()
    pool = Pool(64 * MIB, machine)
    first = pool.take(64 * MIB)
    first.used(event)
    pool.give(first)

    assert pool.take(64 * MIB) is None  # after a while
    event.fired = True
    assert pool.take(64 * MIB) is not None
    assert machine.sizes == [64 * MIB]


def test_who_takes_waits_for_a_copy_that_is_about_to_end():
    event = Fires(at_query=3)
    pool = Pool(64 * MIB, Machine())
    first = pool.take(64 * MIB)
    first.used(event)
    pool.give(first)

    assert pool.take(64 * MIB) is not None
    assert event.queries == 3


def test_nobody_waits_where_nothing_is_about_to_be_free(monkeypatch):
    def sleep(_):
        raise AssertionError("it waits")

    monkeypatch.setattr(pinned, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    pool = Pool(64 * MIB, Machine())
    place = pool.take(64 * MIB)

    assert pool.take(1) is None
    assert place is not None


@pytest.mark.parametrize(("limit", "sizes"), [(10 * MIB, [8 * MIB]), (100 * MIB, [64 * MIB]), (3, [])])
def test_the_limit_holds_for_what_is_pinned(limit, sizes):
    machine = Machine()
    pool = Pool(limit, machine)

    places = [pool.take(MIB) for _ in range(200)]

    assert machine.sizes == sizes
    assert sum(place is not None for place in places) == sum(sizes) // MIB


def test_unused_chunks_go_where_a_larger_one_is_needed():
    machine = Machine()
    pool = Pool(128 * MIB, machine)
    places = [pool.take(60 * MIB) for _ in range(2)]
    for place in places:
        pool.give(place)
    del places, place

    assert pool.take(100 * MIB) is not None
    assert machine.sizes == [64 * MIB, 64 * MIB, 128 * MIB]
    assert pool.pinned_bytes == 128 * MIB


def test_a_system_that_pins_no_more():
    pool = Pool(1024 * MIB, Machine(most=64 * MIB))

    assert pool.take(64 * MIB) is not None
    assert pool.take(1) is None


def test_events_that_have_fired_are_forgotten():
    pool = Pool(64 * MIB, Machine())
    place = pool.take(1)

    for _ in range(100):
        place.used(Fires(True))
    place.used(Fires())

    assert not place.is_left()
    assert len(place._uses) == 1
