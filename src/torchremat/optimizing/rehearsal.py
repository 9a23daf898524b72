"""A part of a step that is run to be measured: the same memory comes and goes, and nothing is trained.

To plan and to measure, a step is run several times. With gradients that are released in the backward, or state in a
store, its bytes are known only if the parts of the optimizer's step run in it too. So each part runs as it would, and
is undone at once: values and state from copies, which lie in memory that no allocator of torch sees.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torchremat._compat.autograd import preserved_versions
from torchremat.ambient.hidden import hiding
from torchremat.errors import UnsupportedError
from torchremat.measuring.writes import undoing
from torchremat.state.containers import copied, make
from torchremat.tensors.parts import parts_of

T = TypeVar("T")

_HOLDERS = (list, dict)  # of which an optimizer makes its state
_CONSTANTS = (int, float, str, bool, tuple, type(None))

_markers: list[Callable[[str], object]] = []
_notes: list[Callable[[Tensor, Tensor], object]] = []


@contextmanager
def _listed(calls: list[T], call: T) -> Generator[None]:
    calls.append(call)
    try:
        yield
    finally:
        calls.remove(call)


@contextmanager
def marked_rehearsal() -> Generator[None]:
    """Let `marking_rehearsals` know that the block rehearses a part of a step."""
    for mark in _markers:
        mark("a part begins")
    try:
        yield
    finally:
        for mark in _markers:
            mark("a part ends")


@contextmanager
def marking_rehearsals(mark: Callable[[str], T]) -> Generator[list[T]]:
    """Yield a list that gets two marks of each part that is rehearsed in the block: before it, and after it."""
    marks: list[T] = []

    def marker(label: str) -> None:
        marks.append(mark(label))

    with _listed(_markers, marker):
        yield marks


def noting_gradients(note: Callable[[Tensor, Tensor], object]) -> AbstractContextManager[None]:
    """Return a context in which `note(parameter, gradient)` is called before a rehearsal frees a gradient."""
    return _listed(_notes, note)


def note_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Show a gradient that is about to be freed to `noting_gradients`."""
    for note in _notes:
        note(parameter, gradient)


def without_state(state: dict[Any, Any], parameters: Iterable[Tensor]) -> dict[Tensor, bool]:
    """Return the parameters that have no state yet, with whether code that looked for it has left an empty entry."""
    return {parameter: parameter in state for parameter in parameters if not state.get(parameter)}


def drop_state(state: dict[Any, Any], made: Mapping[Tensor, bool]) -> None:
    """Drop the state that steps have made since `without_state` has returned `made`."""
    for parameter, has_entry in made.items():
        if has_entry:
            state[parameter] = {}
        else:
            state.pop(parameter, None)


@contextmanager
def gradient_of_zeros(parameter: Tensor) -> Generator[None]:
    """Let a parameter have a gradient of zeros in the block."""
    gradient, parameter.grad = parameter.grad, torch.zeros_like(parameter, requires_grad=False)
    try:
        yield
    finally:
        parameter.grad = gradient


@contextmanager
def put_back_after(state: dict[Any, Any], parameters: Sequence[Tensor]) -> Generator[None]:
    """Put back what a step in the block does to some parameters, and to state that they had.

    Raises:
        UnsupportedError: Their state has objects that cannot be copied one by one.
    """
    entries_of = {one: cast("dict[Any, Any]", copied(state[one])) for one in parameters if state.get(one)}
    values = list(_values_within(entries_of.values()))
    unknown = [value for value in values if not isinstance(value, (Tensor, *_HOLDERS, *_CONSTANTS))]
    if unknown:
        raise UnsupportedError(
            f"the state of the optimizer holds a {type(unknown[0]).__name__}, so its step cannot be run to be "
            "measured. Plan and measure first, then release gradients or move state."
        )
    tensors = [value for value in (*parameters, *values) if isinstance(value, Tensor)]
    parts = [part for tensor in tensors for part in parts_of(tensor)]
    contents = [(holder, copied(holder)) for holder in values if isinstance(holder, _HOLDERS)]
    with torch.no_grad(), preserved_versions((*tensors, *parts)), undoing():
        write_back = [_copy_bytes(part) for part in parts]
        try:
            yield
        finally:
            with hiding():  # a copy of what a step is about to write would have these values
                for write in write_back:
                    write()
            for parameter, entries in entries_of.items():
                make(state[parameter], entries)  # by now it may be another dict
            for holder, items in contents:
                make(holder, items)


def _values_within(entries: Iterable[dict[Any, Any]]) -> Iterator[object]:
    """Yield the values in dicts, and, of lists, tuples and dicts among them, what they hold: Shampoo's statistics."""
    waiting: list[object] = [value for entry in entries for value in entry.values()]
    seen = set[int]()
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, (tuple, *_HOLDERS)) and id(value) not in seen:
            seen.add(id(value))
            waiting += dict.values(cast("dict[Any, Any]", value)) if isinstance(value, dict) else cast("Any", value)


def _copy_bytes(tensor: Tensor) -> Callable[[], object]:
    """Copy a tensor's bytes to memory that belongs to no tensor; return what writes them back."""
    storage = torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    there = storage.cpu().numpy() if storage.device.type != "cpu" else storage.numpy().copy()
    return lambda: storage.copy_(torch.from_numpy(there))
