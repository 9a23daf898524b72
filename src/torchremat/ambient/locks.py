"""The lock around state that all threads of a process share and that a recompute swaps temporarily.

Two recomputes in two threads must not draw from each other's generator, nor put back each other's flags, buffers and
caches. State of a single thread, like autocast and modes, needs no lock.
"""

from __future__ import annotations

import threading

EXCHANGING = threading.RLock()
