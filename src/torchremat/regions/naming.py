"""Names for tensors, by which a policy knows them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchremat.errors import UnsupportedError
from torchremat.regions.selective.mode import SeenBy
from torchremat.regions.threads import thread


def name(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor`, which policies know by `name` from now on.

    Put it where the tensor is made, in the model's code: `qkv = name(self.qkv(x), "qkv")`. The answer of a policy that
    reads names holds for the whole operator that made the tensor. Without such a policy, and in compiled functions,
    `name` is a no-op.

    Args:
        tensor: Any tensor, the result of a custom Function included.
        name: One name may be used for several tensors.

    Raises:
        UnsupportedError: `tensor` is not a tensor, or `name` is not a string.

    >>> import torch
    >>> from torchremat import checkpointed
    >>> from torchremat.policies import save_only_these_names
    >>> block = checkpointed(lambda x: name(x.exp(), "e").sin(), policy=save_only_these_names("e"))
    >>> block(torch.zeros(1, requires_grad=True)).sum().backward()  # `exp` runs once
    """
    if torch.compiler.is_dynamo_compiling():
        return tensor
    if not isinstance(tensor, Tensor) or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise UnsupportedError(f"name(tensor, name): expected a tensor and a string, got {tensor!r} and {name!r}.")
    run = thread.now.selecting
    if run is not None:
        with SeenBy(None):
            run.named(_NAME, tensor, name)
    return tensor


_NAME = name
