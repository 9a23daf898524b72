"""Out-of-memory errors: how to detect them, read their numbers, and release the tensors that they hold.

torch has a class for device errors only. On the host its allocator raises a plain RuntimeError, and Python a
MemoryError.
"""

from __future__ import annotations

import re
import traceback
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from torchremat._compat.autograd import drop_left_nodes
from torchremat.measuring.tracebacks import chain_of
from torchremat.tensors.sizes import parse_bytes

# Messages of RuntimeErrors from torch and its libraries: the host's allocator; a driver call past the caching
# allocator; C++'s own error; a library without room for its workspace, or for its handle (cuBLAS then says "not
# initialized"); NCCL, which gives the driver's number 2; and a file that cannot be mapped.
_WORDS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|(CUDA|HIP|XPU|MPS|NPU)\b.{0,40}\bout of memory"
    r"|std::bad_alloc"
    r"|(CUBLAS|CUSOLVER|CUSPARSE|CUDNN|ROCBLAS|HIPBLAS)_STATUS_(\w*_)?ALLOC(ATION)?_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|Cuda failure (2\b|'out of memory')"
    r"|unable to mmap .*Cannot allocate memory",
    re.DOTALL,
)
_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+ ?(?:[KMGT]iB|bytes))")
_HELD = re.compile(r"([0-9.]+ ?(?:[KMGT]iB|bytes)) is allocated by PyTorch")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory of a device, or of the host, ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


def asked_bytes(error: BaseException) -> int | None:
    """Return the bytes of the failed request, to the digits of the message; None if the message has no number."""
    return _bytes_in(_ASKED, error)


def held_bytes(error: BaseException) -> int | None:
    """Return the bytes of the device that torch's allocator had in use at the error; None if the error does not say."""
    return _bytes_in(_HELD, error)


def _bytes_in(pattern: re.Pattern[str], error: BaseException) -> int | None:
    found = pattern.search(str(error))
    return None if found is None else parse_bytes(found[1].replace("bytes", "B"))


def let_go(error: BaseException) -> None:
    """Free what the failed code has left: the local variables of the frames of its traceback, and autograd's nodes.

    Lines and names stay readable. Frames that still run are left alone.
    """
    drop_left_nodes()
    for one in chain_of(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            try:
                frame.clear()
            except RuntimeError:
                continue  # it still runs; a dict of its variables would hold the error, which holds the frame
            # Before Python 3.13, a frame whose `f_locals` an error logger has read keeps a dict of its variables that
            # is not cleared. Reading it again brings it up to date.
            _ = frame.f_locals


class IfItFits(AbstractContextManager[None, bool]):
    """Ends a block where memory runs out in it, without an error, and frees what it has left."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        let_go(error)
        return True
