"""Processes that begin with torch imported: forked from a server that has done so once, and has done nothing else.

A process of its own takes five seconds of a core for it, and the suite starts dozens. What is tried is what runs then;
how a process begins from nothing is tried by `test_packages`.
"""

import os
import runpy
import sys
from dataclasses import dataclass

from torch import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["pytest", "torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "torchremat"]
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended, and what it wrote."""

    code: int | None
    out: str
    err: str


def run_main(program, *arguments, folder, timeout):
    """Run a Python file as a program.

    Args:
        program: Its path.
        arguments: What stands behind it on the command line.
        folder: Where what it writes may be kept.
        timeout: Seconds after which it is ended, and an error raised.
    """
    files = [folder / "out", folder / "err"]
    process = CONTEXT.Process(target=_main, args=([str(program), *arguments], files))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{program} runs for more than {timeout} s")
    out, err = (file.read_text() for file in files)
    return Ended(code=process.exitcode, out=out, err=err)


def _main(argv, files):
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    # As Python does it for a file on its command line.
    sys.argv, sys.path[0] = argv, os.path.dirname(argv[0])
    runpy.run_path(argv[0], run_name="__main__")
