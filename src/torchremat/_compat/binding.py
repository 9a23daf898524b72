"""How a private name of torch is bound."""

from __future__ import annotations

import torch

from torchremat.errors import VersionError


def private(path: str, *, needed_for: str) -> object:
    """Return the object at `path` below `torch`.

    Args:
        path: Attribute path without the leading `torch.`, for example `"_C._current_graph_task_id"`.
        needed_for: What fails without it, in the words of a user.

    Raises:
        VersionError: This torch has no such name.
    """
    found: object = torch
    for name in path.split("."):
        if not hasattr(found, name):
            raise VersionError(
                f"torch {torch.__version__} has no `torch.{path}`, which {needed_for} needs. torchremat supports "
                "torch 2.11 to 2.13; install one of these."
            )
        found = getattr(found, name)
    return found
