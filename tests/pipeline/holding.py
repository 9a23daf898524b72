"""Which bytes each stage of a pipe holds, also where all stages have one device."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

from torch import Tensor, UntypedStorage, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from torchremat.extend import only_watches
from torchremat.measuring.storages import address_of
from torchremat.pipeline import copying


class _Running(threading.local):
    """The stage that a thread runs: others copy meanwhile. And whether the mode has been entered for that alone."""

    stage: int | None = None
    entered = False


@only_watches
class StageBytes(TorchDispatchMode):
    """Counts the memory that is made while it is entered, by the stage that has got or computed it.

    Stages have to have memory of their own: see `own_memory`.

    Attributes:
        live: Bytes by stage, and by None for what is on its way between stages and what backward makes.
        peak_bytes: The most that there ever was of all of them.
    """

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.live: Counter[int | None] = Counter()
        self.peak_bytes = 0
        self._running = _Running()
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], int | None]] = {}
        for number, stage in enumerate(stages):
            stage.register_forward_pre_hook(lambda _, given, number=number: self._begin(number, given))
            stage.register_forward_hook(lambda *_: self._end(), always_call=True)

    def _begin(self, number: int, given: tuple[object, ...]) -> None:
        if self not in _get_current_dispatch_mode_stack():
            self._running.entered = True
            self.__enter__()
        self._running.stage = number
        self._own(given)

    def _end(self) -> None:
        self._running.stage = None
        if self._running.entered:
            self._running.entered = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        given = {address_of(storage) for storage in storages_in((args, kwargs))}
        for storage in storages_in(output):
            if address_of(storage) not in given and address_of(storage) not in self._known:
                self._add(storage, self._running.stage)
        if self._running.stage is not None:
            self._own((args, kwargs))
        return output

    def _own(self, value: object) -> None:
        """Say that the stage which runs has got what nobody has yet: copies that were made for it."""
        for storage in storages_in(value):
            known = self._known.get(address_of(storage))
            if known is not None and known[1] is None and self._running.stage is not None:
                self.live[None] -= storage.nbytes()
                self._add(storage, self._running.stage)

    def _add(self, storage: UntypedStorage, stage: int | None) -> None:
        size, place = storage.nbytes(), address_of(storage)

        def freed(_: object) -> None:
            self.live[self._known.pop(place)[1]] -= size

        self._known[place] = weakref.ref(storage, freed), stage
        self.live[stage] += size
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))


def storages_in(value: object) -> list[UntypedStorage]:
    return [one.untyped_storage() for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]


@contextmanager
def own_memory() -> Generator[None]:
    """Let every copy from stage to stage be one, also on the same device."""
    plainly = copying.copied
    copying.copied = lambda tensor, *_: tensor.clone()
    try:
        yield
    finally:
        copying.copied = plainly
