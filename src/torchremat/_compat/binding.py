"""How a private name of torch is bound, and an attribute of code that is not ours replaced for a while."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch

from torchremat.errors import VersionError

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
"""The release of torch that is installed: `(2, 13)`."""
NEWEST = (2, 14)
"""The newest release of torch that all tests have been run with."""

# The request to users of another torch; docs/supported-versions.md says the same.
SUPPORTED = "torchremat supports torch 2.11 to 2.14; install one of these."


def private(*paths: str, needed_for: str, since: tuple[int, int] | None = None) -> Any:
    """Return the object at the first of `paths` below `torch` that exists; the caller declares its type.

    Args:
        paths: Attribute paths without the leading `torch.`, for example `"_C._current_graph_task_id"`. A name that
            differs between torch versions has several paths, the newest first.
        needed_for: The feature that fails without it, in a user's words.
        since: A release that has it, if not all supported releases do.

    Raises:
        VersionError: This torch has none of these names.
    """
    for path in paths:
        found: Any = torch
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


_ABSENT = object()


@contextmanager
def overridden(owners: Iterable[object], /, **values: object) -> Generator[None]:
    """Give modules, classes or other objects some attributes of their own in a block, and what they had after it."""
    had = [(one, name, vars(one).get(name, _ABSENT)) for one in owners for name in values]
    try:
        for one, name, _ in had:
            setattr(one, name, values[name])
        yield
    finally:
        for one, name, before in had:
            if before is not _ABSENT:
                setattr(one, name, before)
            elif name in vars(one):
                delattr(one, name)
