"""`torchgpipe.skip`: modules that stash and pop skips."""

from torchremat.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

# In torchgpipe's order.
__all__ = ["skippable", "stash", "pop", "verify_skippables", "Namespace"]
