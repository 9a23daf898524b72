import random
from itertools import pairwise

from torchremat.stores.extents import Extent, Extents
from turns import in_turn


def test_the_smallest_free_extent_that_fits_is_taken():
    extents = Extents()
    extents.grow(100)
    a, b, c, d, e = (extents.take_one(size) for size in (30, 5, 20, 5, 40))
    for each in (a, c, e):
        extents.give(each)

    taken = extents.take_one(15)

    assert taken == [Extent(35, 15)]
    assert extents.free() == [Extent(0, 30), Extent(50, 5), Extent(60, 40)]
    assert (b, d) == ([Extent(30, 5)], [Extent(55, 5)])


def test_neighbours_become_one():
    extents = Extents()
    extents.grow(30)
    a, b, c = (extents.take_one(10) for _ in range(3))

    extents.give(a)
    extents.give(c)
    assert extents.free() == [Extent(0, 10), Extent(20, 10)]

    extents.give(b)
    assert extents.free() == [Extent(0, 30)]


def test_the_end_grows_into_what_is_free_before_it():
    extents = Extents()
    extents.grow(10)
    taken = extents.take_one(4)

    assert extents.tail_bytes == 6
    extents.grow(5)
    assert extents.free() == [Extent(4, 11)]

    assert extents.take_one(11) == [Extent(4, 11)]
    assert extents.tail_bytes == 0
    extents.give(taken)
    assert extents.tail_bytes == 0


def test_several_extents_are_taken_if_none_is_large_enough():
    extents = Extents()
    extents.grow(60)
    parts = [extents.take_one(10) for _ in range(6)]
    for index in (0, 2, 3):
        extents.give(parts[index])

    assert extents.take_one(25) is None
    assert extents.take_any(25) == [Extent(20, 20), Extent(0, 5)]
    assert extents.take_any(6) is None
    assert extents.free() == [Extent(5, 5)]


@in_turn("seed", range(20))
def test_against_a_set_of_bytes(seed):
    chance, extents, taken, free = random.Random(seed), Extents(), [], set()

    for _ in range(400):
        action = chance.choice(["grow", "one", "any", "give", "give"])
        size = chance.randrange(1, 40)
        if action == "grow":
            free |= set(range(extents.end, extents.end + size))
            extents.grow(size)
        elif action == "give" and taken:
            given = taken.pop(chance.randrange(len(taken)))
            free |= {byte for extent in given for byte in range(extent.start, extent.end)}
            extents.give(given)
        elif action in ("one", "any"):
            got = extents.take_one(size) if action == "one" else extents.take_any(size)
            if got is None:
                assert action == "one" or len(free) < size
                continue
            bytes_of = [byte for extent in got for byte in range(extent.start, extent.end)]
            assert len(bytes_of) == len(set(bytes_of)) == size
            assert free.issuperset(bytes_of)
            free -= set(bytes_of)
            taken.append(got)
        runs = extents.free()
        assert {byte for extent in runs for byte in range(extent.start, extent.end)} == free
        assert all(left.end < right.start for left, right in pairwise(runs))
        assert extents.free_bytes == len(free)
