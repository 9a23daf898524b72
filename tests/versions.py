"""What a supported torch lacks, for the tests that need it; docs/supported-versions.md says the same."""

import pytest
import torch

from torchremat._compat.binding import RELEASE

# Torch 2.13 and newer have all of it.
IS_OLD = RELEASE < (2, 13)

NEEDS_SAVED_TENSORS = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_make_saved_tensor"), reason="this torch cannot make a SavedTensor"
)
NEEDS_OWN_SENDS = pytest.mark.skipif(
    IS_OLD, reason="this torch, as 2.11, sends between stages that meet in one process, which gloo cannot do"
)
NEEDS_SPLIT_FUNCTIONS = pytest.mark.skipif(
    IS_OLD, reason="this torch, as 2.11, cannot split the backward of a custom Function into inputs and weights"
)


def skip_unless(mark):
    """Skip now what a mark would skip."""
    if mark.args[0]:
        pytest.skip(mark.kwargs["reason"])
