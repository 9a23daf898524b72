"""Steps that call modules in their own threads, as a `Pipe` does, or two towers in a pool.

The history of a device's allocator covers all threads. torch's profiler, which records the CPU's allocator, covers only
the thread that started it and autograd's own, and modes see one thread alone. A report of such a step would be too low,
so it is refused.
"""

from __future__ import annotations

import threading

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import UnsupportedError


class OwnThread:
    """The thread that created it, for one run of a step there."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._elsewhere: str | None = None

    def note(self, module: str) -> None:
        """Note that a module, by its name, is called in this thread."""
        if module and self._elsewhere is None and not self.is_here():
            self._elsewhere = module

    def is_here(self) -> bool:
        """Return whether the current thread is the recorded one, or one of autograd's, which Python has not started."""
        return threading.get_ident() == self._thread or threading.current_thread().name.startswith("Dummy-")

    def check(self, device: torch.device) -> None:
        """Raise an error if a module was called in another thread whose allocations on a device are not recorded.

        Raises:
            UnsupportedError: One was.
        """
        if self._elsewhere is not None and accelerator_of(device).records == "profiler":
            raise _in_threads(f"`{self._elsewhere}`", f"What other threads allocate on {device}, torch does not tell")

    def check_here(self, name: str) -> None:
        """Raise an error if the current thread, which calls a module to plan, is not the recorded one.

        Raises:
            UnsupportedError: It is not.
        """
        if not self.is_here():
            raise _in_threads(name, "A plan follows one thread")


def _in_threads(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the step calls {name} in a thread of its own. {why}, so the figures of the step would be wrong. Let the "
        "step call its modules in one thread; the stages of a `Pipe` are planned and measured by "
        "`torchremat.pipeline.plan_stages`."
    )
