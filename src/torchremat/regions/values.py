"""The check of values: a recompute must save the same bits as the forward.

On the CPU a difference is found in the recompute, before any gradient is computed from it. On other devices the host
does not wait for fingerprints: they are compared when the backward has ended, and by then the gradients are written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchremat._compat.autograd import at_end_of_backward, current_graph_task
from torchremat.errors import CheckpointError
from torchremat.frames import user_frame
from torchremat.tensors.fingerprints import alike, differing, fingerprint
from torchremat.tensors.metadata import Metadata


class Fingerprints:
    """The fingerprints of one run's saved tensors, by number of the tensor.

    A tensor that may be written without a new version after it was saved gets its fingerprint when two more tensors are
    saved, or the run has ended: see NOTE [ What is written after it was saved ].

    Args:
        state: Tensors that may have other values in each run, such as running statistics.
    """

    __slots__ = ("_state", "_waiting", "count", "found")

    def __init__(self, state: Iterable[Tensor] = ()) -> None:
        self.count = 0
        self._state = {one.data_ptr() for one in state if type(one) is Tensor}
        self.found: dict[int, Tensor] = {}
        self._waiting: list[tuple[int, Tensor]] = []

    def add(self, tensor: Tensor, *, is_fresh: bool) -> list[int]:
        """Take the next saved tensor; return the numbers of the tensors whose fingerprints are now known."""
        index, self.count = self.count, self.count + 1
        done = self.settle(before=index - 1)
        if is_workspace(tensor) or (self._state and tensor.data_ptr() in self._state):
            return done
        if is_fresh:
            self._waiting.append((index, tensor))
            return done
        self.found[index] = fingerprint(tensor)
        return [*done, index]

    def settle(self, before: int | None = None) -> list[int]:
        """Do the same for waiting tensors, all or those before a number."""
        due = [one for one in self._waiting if before is None or one[0] < before]
        if due:
            self._waiting = self._waiting[len(due) :]
            self.found.update((index, fingerprint(tensor)) for index, tensor in due)
        return [index for index, _ in due]

    def cut(self, count: int) -> None:
        """Forget all but the first `count` saved tensors."""
        self.count = count
        self._waiting = []
        self.found = {index: one for index, one in self.found.items() if index < count}


def is_workspace(tensor: Tensor) -> bool:
    """Return whether a kernel keeps a tensor for its own backward: a row of bytes, some of which it never writes.

    Kernels of recurrent layers do so, in oneDNN and in cuDNN, and kernels of batch norm on CUDA.
    """
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


@dataclass(frozen=True, slots=True)
class _Pending:
    """A saved tensor whose fingerprints have not been compared yet."""

    index: int
    metadata: Metadata
    then: Tensor
    now: Tensor
    line: str


class ValueCheck:
    """Compares the fingerprints of one recompute with those of its forward.

    Args:
        name: The words for the region in messages.
        then: The fingerprints of the forward.
        metadata: The metadata of the saved tensors, by number.
    """

    __slots__ = ("_lines", "_metadata", "_name", "_now", "_pending", "_then")

    def __init__(self, name: str, then: Fingerprints, metadata: list[Metadata]) -> None:
        self._name = name
        self._then = then
        self._metadata = metadata
        self._now = Fingerprints()
        self._lines: list[str] = []
        self._pending: list[_Pending] = []

    def differs(self, tensor: Tensor, *, is_fresh: bool) -> int | None:
        """Take the next saved tensor; return the number of a tensor, this or earlier, now found to differ."""
        self._lines.append(_user_line() if waits(tensor) else "")
        return self._first_of(self._now.add(tensor, is_fresh=is_fresh))

    def differs_at_end(self) -> int | None:
        """Return the number of a tensor that is found to differ at the end of the run."""
        return self._first_of(self._now.settle())

    def _first_of(self, indices: list[int]) -> int | None:
        for index in indices:
            then, now = self._then.found.get(index), self._now.found[index]
            if then is None:
                continue  # saved by a forward that still runs
            if waits(now):
                self._pending.append(_Pending(index, self._metadata[index], then, now, self._lines[index]))
            elif not alike(then, now):
                return index
        return None

    def ended(self) -> None:
        """Compare the pending tensors when the running backward has ended; outside of any backward, at once."""
        if not self._pending:
            return
        if current_graph_task() == -1:
            self.judge()
        else:
            at_end_of_backward(self.judge)

    def judge(self) -> None:
        """Compare the pending tensors, and wait for the result.

        Raises:
            CheckpointError: A tensor differs.
        """
        pending, self._pending = self._pending, []
        differ = differing([one.then for one in pending], [one.now for one in pending])
        if not any(differ):
            return
        first = pending[differ.index(True)]
        shape, dtype, device, _ = first.metadata
        raise CheckpointError(
            f"{self._name}: tensor {first.index} of {len(self._metadata)} that autograd saves, of shape "
            f"{tuple(shape)}, {dtype}, {device}, has other values in the recompute than in the forward, the first of "
            f"{sum(differ)} that differ. It is saved {first.line}. The gradients of this backward are written and "
            "wrong: do not step on them. Look for state that the forward changes, or a draw of `random` or NumPy (see "
            "torchremat.extend.register). Atomic additions on CUDA differ by rounding from run to run as well: see "
            "torch.use_deterministic_algorithms."
        )


def waits(tensor: Tensor) -> bool:
    """Return whether reading a tensor on the host would wait for its device."""
    return tensor.device.type not in ("cpu", "meta")


def _user_line() -> str:
    """Return the position of the innermost frame that is neither torch's nor ours."""
    frame = user_frame()
    if frame is None:
        return "in code that is not Python's"
    return f"in {frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}"
