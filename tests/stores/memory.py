"""A store of the tests: clones in memory, counted."""

import weakref

from logs import Log


class Memory:
    """Holds clones.

    Attributes:
        live: The handles that exist.
        log: What was done, "put", "get" or "prefetch", with the bytes.
    """

    def __init__(self):
        self.live = weakref.WeakSet()
        self.log = Log()

    def put(self, tensor):
        assert tensor.is_contiguous() and tensor.numel() and tensor.grad_fn is None and not tensor.requires_grad
        handle = MemoryHandle(self, tensor)
        self.live.add(handle)
        self.log.append(("put", tensor.nbytes))
        return handle

    def bytes(self, what):
        return sum(count for kind, count in self.log if kind == what)

    def times(self, what):
        return sum(kind == what for kind, _ in self.log)


class MemoryHandle:
    def __init__(self, store, tensor):
        self.store = store
        self.tensor = tensor.clone()

    @property
    def stored_bytes(self):
        return self.tensor.nbytes

    def get(self):
        self.store.log.append(("get", self.stored_bytes))
        return self.tensor.clone()

    def prefetch(self):
        self.store.log.append(("prefetch", self.stored_bytes))
