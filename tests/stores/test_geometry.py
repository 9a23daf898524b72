import pytest
import torch

from torchremat.stores.geometry import TensorPlace, missing

BASE = torch.zeros(8, 8)  # rows of 32 bytes


@pytest.mark.parametrize(
    ("tensor", "span", "gaps"),
    [
        (BASE, (0, 256), False),
        (BASE.t(), (0, 256), False),
        (BASE[2:4], (64, 128), False),
        (BASE[:, 3], (12, 240), True),
        (BASE[:, 2:4], (8, 240), True),
        (BASE[::2], (0, 224), True),
        (BASE[1:2].expand(8, 8), (32, 64), False),
        (BASE[1:2, ::2].expand(8, 4), (32, 60), True),
        (BASE[0].unfold(0, 3, 1), (0, 32), False),
        # Windows with gaps in between overlap as well, so that nothing may be written through their strides.
        (BASE.view(-1).as_strided((3, 3), (4, 3)), (0, 60), False),
        (BASE[3, 3], (108, 112), False),
        (BASE.double()[1], (64, 128), False),
        (BASE[5:6, 4:5], (176, 180), False),
    ],
    ids=range(13),
)
def test_where_a_tensor_lies(tensor, span, gaps):
    place = TensorPlace(tensor)

    assert (place.start, place.stop) == span
    assert place.has_gaps is gaps


def test_repeats_are_taken_once():
    assert TensorPlace(BASE[:1].expand(5, 8)).without_repeats == (1, 8)


def test_what_is_missing():
    assert missing(0, 10, []) == [(0, 10)]
    assert missing(0, 10, [(8, 12), (2, 4)]) == [(0, 2), (4, 8)]
    assert missing(3, 9, [(0, 10)]) == []
    assert missing(3, 9, [(0, 3), (9, 12)]) == [(3, 9)]
