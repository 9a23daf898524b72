"""A tensor at a version, so that a write to it since is found."""

from __future__ import annotations

from torch import Tensor

from torchremat._compat.modes import set_versions
from torchremat.errors import MutationError
from torchremat.tensors.metadata import version_of


class Versioned:
    """A tensor, and the version that it had.

    Autograd compares the versions of the tensors that it keeps itself. Where hooks have packed a tensor it does not, so
    whatever keeps a tensor in its place has to.

    Args:
        tensor: The tensor. An inference tensor counts no writes.
        version: The version that it had; None for the version that it has.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None = None) -> None:
        self.tensor = tensor
        if version is None:
            version = -1 if tensor.is_inference() else tensor._version  # as `version_of`
        self.version = version

    @property
    def now(self) -> int:
        """The version that the tensor has now."""
        return version_of(self.tensor)

    @property
    def is_written(self) -> bool:
        """Whether the tensor was written in place since."""
        tensor = self.tensor
        return (-1 if tensor.is_inference() else tensor._version) != self.version

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            MutationError: It was written in place since.
        """
        if self.is_written:
            raise self.written()
        return self.tensor

    def written(self, tensor: Tensor | None = None) -> MutationError:
        """Return the error for a saved tensor that was written in place since, in autograd's own words.

        Args:
            tensor: The saved tensor, if this one only counts its writes.
        """
        tensor = self.tensor if tensor is None else tensor
        return MutationError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {self.now}; expected version {self.version} instead."
            " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True, check_nan=False)."
        )

    def reset(self) -> None:
        """Give the tensor the version that it had, once it has the values that it had."""
        if self.version >= 0:
            set_versions((self.tensor,), (self.version,))


def changed_input(what: str, then: int, now: int) -> MutationError:
    """Return the error for an input of a region that was written in place before it could be recomputed.

    Args:
        what: The words for the input.
        then: The version that it had.
        now: The version that it has.
    """
    return MutationError(
        f"{what} was changed in place between forward and recompute: version {then} then, {now} now. Recomputing would "
        "give wrong gradients. Make the change out of place, pass a clone, or run backward before it."
    )
