import pytest
import torch

from torchremat import MutationError
from torchremat.tensors.versioned import Versioned


def test_a_write_is_found_in_the_words_of_autograd():
    x = torch.zeros(2, 3, requires_grad=True)
    y = x.exp()
    saved = Versioned(y.detach())
    assert saved.get() is saved.tensor

    y.add_(1)

    assert saved.is_written
    assert (saved.version, saved.now) == (0, 1)
    words = r"modified by an inplace operation: \[torch.FloatTensor \[2, 3\]\]?.* is at version 1; expected version 0"
    with pytest.raises(MutationError, match=words):
        saved.get()
    with pytest.raises(RuntimeError, match=words):
        y.sum().backward()


def test_a_version_can_be_given():
    tensor = torch.zeros(2).add_(1)

    assert Versioned(tensor, 0).is_written
    assert not Versioned(tensor, 1).is_written


def test_reset_hides_a_write_that_was_undone():
    tensor = torch.zeros(2)
    saved = Versioned(tensor)
    tensor.add_(1).sub_(1)

    saved.reset()

    assert (tensor._version, saved.is_written) == (0, False)


def test_an_inference_tensor_counts_no_writes():
    with torch.inference_mode():
        saved = Versioned(torch.zeros(2))
        saved.tensor.add_(1)

    saved.reset()

    assert (saved.version, saved.is_written) == (-1, False)
