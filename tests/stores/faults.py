"""Calls of the system that fail when a test wants them to."""

from __future__ import annotations

import errno
import os
import threading


class Calls:
    """Stands in for a function of `os`: counts its calls, and lets some of them fail, stop or do less.

    Attributes:
        fail: Given the number of a call, from 1 on, what it raises instead; None to let it pass.
        most: How many bytes a call moves at most.
        gate: Calls wait until it is set.
    """

    def __init__(self, function):
        self.function = function
        self.count = 0
        self.fail = lambda number: None
        self.most = None
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)

    def __call__(self, descriptor, data, place):
        self.count += 1
        number = self.count
        self.arrived.release()
        assert self.gate.wait(60)
        error = self.fail(number)
        if error is not None:
            try:
                raise error
            finally:
                del error  # else its traceback has this frame, which has it: a cycle, with the tensors of all frames
        if self.most is not None and isinstance(data, list):
            data = [data[0][: self.most]]
        elif self.most is not None:
            data = data[: self.most]
        return self.function(descriptor, data, place)

    def wait(self):
        """Wait until one more call has begun."""
        assert self.arrived.acquire(timeout=60)


def no_space(number):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken(number):
    return OSError(errno.EIO, os.strerror(errno.EIO))


class Others:
    """What stores of other tests have that are still there, held by a traceback, say."""

    descriptors = frozenset()
    threads = frozenset()


def begin():
    """Begin a test: what is there now is nobody's business."""
    Others.descriptors, Others.threads = frozenset(), frozenset()
    Others.descriptors, Others.threads = frozenset(descriptors()), frozenset(workers())


def descriptors():
    """The descriptors of files without a name that the test has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing itself
            continue
        if target.endswith("(deleted)") and int(name) not in Others.descriptors:
            found.append(int(name))
    return found


def workers():
    """The threads of the stores of the test."""
    found = [thread for thread in threading.enumerate() if thread.name.startswith("torchremat disk")]
    return [thread for thread in found if thread not in Others.threads]


def threads():
    return [thread.name for thread in workers()]


def left():
    """The threads that do not end by themselves."""
    for thread in workers():
        thread.join(timeout=60)
    return threads()
