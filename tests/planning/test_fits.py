"""Figures at shapes that nobody has run: exact where the points determine them, refused where they do not."""

import numpy as np
import pytest

from torchremat.planning.shapes.fits import cover, rounded


def fitted(points, figure, shape):
    """The figure at a shape, from those at points."""
    found = cover(points, shape, exact=True)
    return float(found.weights @ np.array([figure(*points[index]) for index in found.points], float))


def test_three_lengths_determine_a_quadratic():
    points = [(4, 16, 4, 16), (4, 64, 4, 64), (4, 128, 4, 128)]

    def figure(b, t, *_):
        return 1000 + 256 * b * t + 4 * b * t * t

    for length in (16, 20, 100, 128, 500):
        assert fitted(points, figure, (4, length, 4, length)) == pytest.approx(figure(4, length), rel=1e-9)


def test_six_shapes_determine_batch_and_length():
    points = [(1, 16), (2, 16), (4, 16), (1, 48), (4, 48), (3, 100)]

    def figure(b, t):
        return 7 + 100 * b + 30 * t + 256 * b * t + 4 * b * t * t

    for shape in ((2, 30), (4, 100), (1, 90), (8, 128)):
        assert fitted(points, figure, shape) == pytest.approx(figure(*shape), rel=1e-9)


@pytest.mark.parametrize(
    ("points", "shape"),
    [
        ([(4, 16), (4, 64)], (4, 100)),  # two lengths are no quadratic, and 100 is above both
        ([(4, 16), (4, 64), (4, 128)], (5, 64)),  # five sequences, where there were four
        ([(4, 16), (4, 64), (4, 128)], (2, 64)),  # a half of what is known: worth a profile
        ([(i, i + 1) for i in range(2, 9)], (3, 30)),  # batch and length on a line, and a shape beside it
        ([(16, 16), (64, 64), (128, 128)], (40, 100)),  # two sizes that were always equal
        ([(300,), (301,), (302,)], (90_000,)),  # so near together that noise would be megabytes
    ],
)
def test_what_the_points_do_not_determine(points, shape):
    assert cover(points, shape) is None


def test_a_shape_is_planned_as_the_largest_of_its_class():
    points = [(4, 16), (4, 64), (4, 128)]

    assert [cover(points, (4, length)).shape for length in (15, 17, 100, 125, 257)] == [
        (4, 15),
        (4, 18),
        (4, 104),
        (4, 128),
        (4, 288),
    ]


def test_a_class_does_not_reach_beyond_what_is_known():
    assert cover([(20,), (50,), (101,)], (100,)).shape == (101,)


def test_a_ragged_batch_is_planned_as_a_whole_one():
    found = cover([(4, 16), (4, 64), (4, 128)], (3, 60))

    assert found.shape == (4, 60)


def test_one_point_stands_for_what_is_little_smaller():
    assert cover([(4, 100)], (3, 60)).shape == (4, 100)
    assert cover([(4, 100)], (3, 50)) is None


def test_points_that_agree_in_a_dimension_are_enough():
    """Four points for batch and length are two too few; the three of one batch size determine the length."""
    points = [(4, 16), (4, 64), (4, 128), (2, 40)]

    assert cover(points, (4, 100)).points == (0, 1, 2)
    assert cover(points, (3, 100)).shape == (4, 104)
    assert cover(points, (2, 100)) is None


def test_weights_beyond_the_points_make_room_for_noise():
    points = [(4, 16), (4, 64), (4, 128)]

    inside, beyond = (cover(points, (4, length), exact=True).noise_bytes for length in (64, 512))

    assert inside == 512
    assert 10_000 < beyond < 100_000


def test_no_sizes_at_all():
    assert cover([()], ()).shape == ()
    assert cover([(0, 5)], (0, 5)).shape == (0, 5)


def test_eight_classes_in_each_octave():
    assert len({rounded(size) for size in range(257, 513)}) == 8
    assert all(size <= rounded(size) <= size * 1.125 for size in range(1, 2000))
