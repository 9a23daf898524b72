"""A dict whose keys are held weakly and compared by identity, as torch has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchremat._compat.binding import private

if TYPE_CHECKING:
    from weakref import WeakKeyDictionary as WeakIdentityDict
else:
    # A module may have an `==` of its own, which compares its parameters. A dict with plain keys compares by identity
    # first, and one with weak keys does not.
    WeakIdentityDict = private("utils.weak.WeakIdKeyDictionary", needed_for="keeping notes about modules")

__all__ = ["WeakIdentityDict"]
