import random

import numpy as np
import pytest

from torchremat.stores.disk_file import BLOCK_BYTES, Checksum


def checksum(array):
    found = Checksum(array.size)
    for start in range(0, array.size, BLOCK_BYTES):
        found.add(array[start : start + BLOCK_BYTES])
    return found.number


def data(size, seed=0):
    return np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8)


def by_hand(array):
    padded = array.tobytes() + bytes(-array.size % 512)
    words = [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)]
    sectors = [sum(words[i : i + 64]) for i in range(0, len(words), 64)]
    weighted = sum((2 * i + 1) * sector for i, sector in enumerate(sectors))
    return (array.size * 6364136223846793005 + weighted) % 2**64


@pytest.mark.parametrize("size", [3, 512, 1024, 5001])
def test_plain_integers_say_the_same(size):
    array = data(size)

    assert checksum(array) == by_hand(array)


@pytest.mark.parametrize("size", [1, 7, 8, 511, 512, 513, 5000])
def test_each_flipped_bit_is_seen(size):
    array = data(size)
    before = checksum(array)

    for position in range(0, 8 * size, max(1, size // 60)):
        array[position // 8] ^= 1 << position % 8
        assert checksum(array) != before
        array[position // 8] ^= 1 << position % 8
    assert checksum(array) == before


@pytest.mark.parametrize("size", [4096, BLOCK_BYTES + 1024])
def test_sectors_that_are_exchanged_lost_or_cut_off_are_seen(size):
    array = data(size)
    before = checksum(array)
    chance = random.Random(size)
    sectors = size // 512

    for _ in range(20):
        left, right = chance.sample(range(sectors), 2)
        other = array.copy()
        other[512 * left : 512 * left + 512] = array[512 * right : 512 * right + 512]
        assert checksum(other) != before
        other[512 * right : 512 * right + 512] = array[512 * left : 512 * left + 512]
        assert checksum(other) != before
        other = array.copy()
        other[512 * left : 512 * left + 512] = 0
        assert checksum(other) != before
    assert checksum(array[:-1]) != before
    assert checksum(array[:-512]) != before


def test_zeros_of_different_lengths_differ():
    assert len({checksum(np.zeros(size, dtype=np.uint8)) for size in range(1000)}) == 1000


def test_bytes_anywhere_in_memory():
    array = data(10_000)

    for start in range(9):
        assert checksum(array[start : start + 5000]) == checksum(array[start : start + 5000].copy())
