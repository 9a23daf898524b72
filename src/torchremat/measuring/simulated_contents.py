"""The contents of storages without data: two tensors are equal if one is a copy of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from torchremat.measuring.storages import StorageMap, tensors_in

_ATEN = torch.ops.aten
_COPIES = (_ATEN.clone.default, _ATEN.detach.default, _ATEN.copy_.default)
# Torch's schemas do not declare the statistics that these write: their arguments 3 and 4, if 5 is True.
_NORMS = (_ATEN.native_batch_norm.default, _ATEN.cudnn_batch_norm.default, _ATEN.miopen_batch_norm.default)


class Contents:
    """The contents of each storage, as a number that copies share: it answers the library's own comparisons."""

    def __init__(self) -> None:
        self._numbers = StorageMap[int]()
        self._values = 0

    def of(self, value: object) -> int:
        """Return the number of a tensor's contents."""
        tensor = cast("Tensor", value)
        known = self._numbers.get(tensor.untyped_storage())
        return self._set(tensor) if known is None else known

    def ran(
        self, func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> None:
        """Note the storages that an operator has written, and the contents of copies."""
        if func in _COPIES:
            source = args[1] if func is _ATEN.copy_.default else args[0]
            self._numbers[cast("Tensor", result).untyped_storage()] = self.of(source)
            return
        written = [args[place] for place in (3, 4)] if func in _NORMS and args[5] else _written(func, args, kwargs)
        for tensor in tensors_in(written):
            self._set(tensor)

    def _set(self, tensor: Tensor) -> int:
        self._values += 1
        self._numbers[tensor.untyped_storage()] = self._values
        return self._values


_MUTATED: dict[object, tuple[tuple[int, str], ...]] = {}


def _written(func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[object]:
    """Return the arguments that an operator writes to, as its schema says."""
    places = _MUTATED.get(func)
    if places is None:
        schema = getattr(func, "_schema", None)
        arguments = () if schema is None else enumerate(schema.arguments)
        places = tuple((i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write)
        _MUTATED[func] = places
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
