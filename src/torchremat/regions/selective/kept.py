"""One kept output of an operator: in place, in a store, or as autograd's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import cast

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.modes import alias_that_counts
from torchremat.errors import MutationError
from torchremat.regions.decisions import Decision
from torchremat.stores.in_catalog import InCatalog
from torchremat.stores.weak_bytes import Counter
from torchremat.tensors.copies import apart
from torchremat.tensors.metadata import version_of


class WatchedMemory:
    """A kept output that has to know whether its memory was written.

    Attributes:
        others: The counters of aliases with their own version counter. See NOTE [ Selective recompute ], 4
    """

    __slots__ = ("others",)

    def __init__(self, others: list[Counter] | None = None) -> None:
        self.others = others

    def watch(self, counter: Counter) -> None:
        """Watch one more alias."""
        self.others = [counter] if self.others is None else [*self.others, counter]

    @property
    def has_moved(self) -> bool:
        """Whether any of the aliases was written."""
        return self.others is not None and any(one.has_moved for one in self.others)


class KeptValue(WatchedMemory):
    """A tensor that is kept as an alias, at a version: an operator's output, or the content of a slot.

    Attributes:
        tensor: The tensor, written since or not.
    """

    __slots__ = ("_version", "tensor")  # not a `Versioned`: every kept output makes two of these

    def __init__(self, tensor: Tensor) -> None:
        self.others = None
        self.tensor = tensor
        self._version = version_of(tensor)

    def get(self) -> Tensor | None:
        """Return the tensor, None if it was written in place since."""
        tensor = self.tensor
        is_written = version_of(tensor) != self._version or (self.others is not None and self.has_moved)
        return None if is_written else tensor

    def alias(self) -> Tensor | None:
        """Return an alias of the tensor for a recompute, None if it was written in place since."""
        tensor = self.get()
        if tensor is None:
            return None
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            return tensor.detach()
        # Its memory is unknown, so no code would copy it before the recompute writes to a view of it.
        return alias_that_counts(tensor)

    def renew(self) -> None:
        """Take the tensor as it is now, after writes that are known not to concern it."""
        self._version = version_of(self.tensor)

    def copy_for_write(self) -> None:
        """Keep a copy instead, since the memory is about to be written."""
        self.tensor = apart(self.tensor)
        self.renew()
        self.others = None


class StoredOutput(WatchedMemory):
    """A tensor that waits in a store.

    Attributes:
        packed: The catalog's record of it.
        decision: The decision to put it there. While it lives, the store has this one catalog.
    """

    __slots__ = ("decision", "packed")

    def __init__(self, packed: InCatalog, decision: Decision, others: list[Counter] | None = None) -> None:
        super().__init__(others)
        self.packed = packed
        self.decision = decision

    def get(self) -> Tensor | None:
        """Return the tensor, None if it was written in place since and before the store had it."""
        if self.has_moved:
            return None
        try:
            return self.packed.get()
        except MutationError:
            return None


class Offloaded:
    """The kept outputs in stores that share some memory.

    Attributes:
        decisions: The decisions to put the memory there; the last one is for tensors that autograd saves of it.
        outputs: Operator outputs in that memory.
        others: See `WatchedMemory`.
    """

    __slots__ = ("decisions", "others", "outputs")

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.outputs: list[StoredOutput] = []
        self.others: list[Counter] = []


def are_apart(one: Tensor, other: Tensor) -> bool:
    """Return whether two strided tensors of one storage lie before and after one another."""
    (begin, end), (its_begin, its_end) = sorted(map(_span, (one, other)))
    return end <= its_begin or begin == end or its_begin == its_end


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def mapped(value: object, function: Callable[[object], object]) -> object:
    """Return an output with a function applied to each part of it."""
    if type(value) is tuple:
        return tuple([mapped(one, function) for one in cast("tuple[object, ...]", value)])
    if type(value) is list:
        return [mapped(one, function) for one in cast("list[object]", value)]
    return function(value)


def has_tensors(output: object) -> bool:
    """Return whether an operator's output contains tensors."""
    if isinstance(output, tuple | list):
        return any(map(has_tensors, cast("list[object]", output)))
    return isinstance(output, Tensor)


def tensors_in(output: object) -> list[Tensor]:
    """Return the tensors in an operator's output, or in one of its arguments."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, list | tuple):
        return [*chain.from_iterable(map(tensors_in, cast("list[object]", output)))]
    return []


def memory_of(tensor: Tensor) -> UntypedStorage | None:
    """Return the memory of a tensor; None if its kind exposes no storage."""
    if tensor._is_zerotensor():  # zero tangents of forward mode: a storage with a size and no memory
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
