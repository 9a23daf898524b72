"""Small gradients, which wait for others and step together with them.

A part of a step costs 100 to 200 microseconds of Python, however small its parameters are: biases and norms are two
thirds of a transformer's parameters, and a thousandth of its bytes. So what is complete waits until some bytes have
come together, or until the backward ends; a large gradient takes along what waits, and waits for nothing.

Parts are the same in each step, since gradients are complete in the same order. Gradients of different devices and
streams do not wait for each other; neither do those of a backward and of another one inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from weakref import WeakMethod

import torch
from torch import Tensor

from torchremat._compat.accelerators import Stream
from torchremat._compat.autograd import current_graph_task, enter_backward
from torchremat._compat.streams import current_stream, use_stream, wait_stream

# Of the bytes of all parameters. A plan counts what may wait, so it is as small as what a plan promises is exact.
_SHARE = 1000


# The backward, the device and its stream.
_Place = tuple[int, torch.device, Stream | None]


@dataclass(slots=True)
class _Together:
    parameters: list[Tensor]
    nbytes: int


class WaitingGradients:
    """Parameters with a complete gradient that have not stepped yet.

    Args:
        most_bytes: So many bytes of gradients do not wait any more.
        step: Makes the part of the step of what waits at the end of a backward; its owner owns this.
    """

    def __init__(self, most_bytes: int, step: WeakMethod[Callable[[Sequence[Tensor]], None]]) -> None:
        self.most_bytes = most_bytes
        self._step = step
        self._lock = Lock()  # autograd runs a thread for each device
        self._waiting: dict[_Place, _Together] = {}
        self._backwards: set[int] = set()  # whose end steps on what waits

    def add(self, parameter: Tensor, *, waits: bool) -> Sequence[Tensor]:
        """Return a parameter with all that waited, to step now; nothing if it may wait, and waits."""
        task, device = current_graph_task(), parameter.device
        stream = None if device.type == "cpu" else current_stream(device)
        place = task, device, stream
        with self._lock:
            part = self._waiting.get(place)
            if part is None:
                part = self._waiting[place] = _Together([], 0)
            part.parameters.append(parameter)
            part.nbytes += parameter.nbytes
            waits = waits and task >= 0 and part.nbytes < self.most_bytes
            if not waits:
                del self._waiting[place]
            # Also if nothing waits yet: what parts do at the end of the backward comes after the last of them.
            enter_backward(self._backwards, self._end)
        return () if waits else part.parameters

    def _end(self, task: int) -> None:
        with self._lock:
            parts = {place: self._waiting.pop(place) for place in list(self._waiting) if place[0] == task}
        step = self._step()
        if step is None:
            return
        for (_, device, stream), part in parts.items():
            # As in the backward, so that gradients are freed on the stream of their memory.
            with use_stream(stream):
                step(part.parameters)
            if stream is not None:
                wait_stream(current_stream(device), stream)

    def forget(self) -> None:
        """Forget what waits since a backward has failed: its gradients are in `.grad`, as without this library."""
        with self._lock:
            self._waiting.clear()
            self._backwards.clear()


def share_of(parameters: Iterable[Tensor]) -> int:
    """Return how many bytes of gradients wait, unless the user says it: a thousandth of the parameters'."""
    return sum(one.nbytes for one in parameters) // _SHARE


def counted(parameters: Iterable[Tensor], most_bytes: int) -> set[int]:
    """Return the ids of parameters whose gradients together are as large as all that waits at any time, or larger."""
    found: set[int] = set()
    left: dict[torch.device, int] = {}
    for one in sorted(parameters, key=lambda one: one.nbytes):
        if one.nbytes < most_bytes and left.setdefault(one.device, most_bytes) > 0:
            left[one.device] -= one.nbytes
            found.add(id(one))
    return found
