"""How a private name of torch is bound."""

from __future__ import annotations

import torch

from torchremat.errors import VersionError

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
"""The release of torch that is installed: `(2, 13)`."""
NEWEST = (2, 14)
"""The newest release of torch that all tests have been run with."""

# What is asked of whoever has another torch; docs/supported-versions.md says the same.
SUPPORTED = "torchremat supports torch 2.11 to 2.14; install one of these."


def private(*paths: str, needed_for: str, since: tuple[int, int] | None = None) -> object:
    """Return the object at one of `paths` below `torch`, the first that there is.

    Args:
        paths: Attribute paths without the leading `torch.`, for example `"_C._current_graph_task_id"`. What one torch
            version calls otherwise than another has several, the newest first.
        needed_for: What fails without it, in the words of a user.
        since: A release that has it, where not all that are supported do.

    Raises:
        VersionError: This torch has no such name.
    """
    for path in paths:
        found: object = torch
        for name in path.split("."):
            if not hasattr(found, name):
                break
            found = getattr(found, name)
        else:
            return found
    advice = SUPPORTED
    if since is not None and since > RELEASE:
        advice = f"Torch {since[0]}.{since[1]} has it; install that, or a newer one."
    raise VersionError(f"torch {torch.__version__} has no `torch.{paths[0]}`, which {needed_for} needs. {advice}")
