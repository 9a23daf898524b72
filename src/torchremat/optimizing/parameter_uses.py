"""What uses the parameters of an offload now: calls of modules, the optimizer's step, other threads, streams."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from torchremat._compat.accelerators import Stream
from torchremat._compat.streams import current_stream, record_stream, use_stream
from torchremat.stores.base import settle
from torchremat.tensors.handles import Handle


class ParameterUses:
    """Uses during which a parameter must not leave, though other code does not hold its values.

    Operators hold what they are given only while they save it for a backward. So what a thread works on, without a
    graph, no other thread may put away.

    Attributes:
        claims: In how many calls of modules and parts of the optimizer's step a parameter takes part, by its id, over
            all threads. Each ends its own claims.
    """

    def __init__(self) -> None:
        self.claims: Counter[int] = Counter()
        # What each thread has read last, outside of modules, and before that, if it could not leave then.
        self._read: dict[int, list[Tensor]] = {}
        self._streams: dict[int, Stream] = {}

    def forbid(self, parameter: Tensor) -> bool:
        """Return whether a parameter must not leave now."""
        own = (threading.get_ident(), _BACKWARD)
        others = [one for reader, read in self._read.items() if reader not in own for one in read]
        return self.claims[id(parameter)] > 0 or any(one is parameter for one in others)

    def read(self, parameter: Tensor, *, in_backward: bool) -> list[Tensor]:
        """Take note of what this thread, or a backward, reads; return what it has read before, and can leave now.

        A node that reads several holds them until it has run.
        """
        key = _BACKWARD if in_backward else threading.get_ident()
        read = self._read.get(key, [])
        before: list[Tensor] = [one for one in read if one is not parameter and type(one) is nn.Parameter]
        self._read[key] = [*before[1 - _MOST_READ :], parameter]
        return before

    def done_reading(self) -> list[Tensor]:
        """Return what was read by this thread, the backward, and threads that have ended."""
        others = {one.ident for one in threading.enumerate()} - {threading.get_ident()}
        return [one for reader in list(self._read) if reader not in others for one in self._read.pop(reader)]

    def on_this_stream(self, parameter: Tensor) -> None:
        """Take note of the stream that uses a parameter from now on."""
        if parameter.device.type != "cpu":
            stream = current_stream(parameter.device)
            if self._streams.get(id(parameter), stream) != stream:
                record_stream(parameter.detach(), stream)
            self._streams[id(parameter)] = stream

    def stream_of(self, parameter: Tensor) -> Stream | None:
        """Return the stream that has used a parameter last, None on the host."""
        if id(parameter) not in self._streams:
            self.on_this_stream(parameter)
        return self._streams.get(id(parameter))

    def forget(self, parameter: Tensor) -> None:
        """Take note that a parameter has left, or is another one than its id said before."""
        self._streams.pop(id(parameter), None)

    def clear(self) -> None:
        """Forget all."""
        for held in (self.claims, self._read, self._streams):
            held.clear()


_MOST_READ = 8  # at once, by a node; more are those of which other code holds the memory
_BACKWARD = -1  # it has threads of its own, and leaves nothing that they have read


class Leaving(NamedTuple):
    """Values that a store reads.

    Attributes:
        handle: The store's claim.
        values: The values.
        stream: Their stream, which may reuse their memory.
    """

    handle: Handle
    values: Tensor
    stream: Stream | None

    @property
    def is_on_this_stream(self) -> bool:
        """Whether this stream owns the memory, and so can go on using it."""
        return self.stream is None or self.stream == current_stream(self.values.device)


def settle_all(leaving: Iterable[Leaving]) -> None:
    """Let each stream wait until the store has read what it owns."""
    for one in leaving:
        with use_stream(one.stream):
            settle(one.handle)
