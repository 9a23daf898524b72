"""The lock around what all threads of a process share and a recompute exchanges for its time.

Two recomputes in two threads must not draw from each other's generator, nor put back each other's flags, buffers and
caches. What belongs to one thread alone, as autocast and modes do, needs no lock.
"""

from __future__ import annotations

import threading

EXCHANGING = threading.RLock()
