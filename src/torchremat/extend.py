"""The public interface for extending the library with your own ambient state, stores and policies.

More state that a recompute must see again, in addition to what the library knows of:

from torchremat import extend

extend.register(extend.numpy_random)  # from now on a recompute draws NumPy's numbers again

class Recipe:
    name = "the FP8 recipe"

    def capture(self):
        return recipe.scale

    def restore(self, state):
        recipe.scale = state  # not in place: autograd may have saved it

extend.register(Recipe())

A store is an object with the one method of `Store`. A policy is a function with the arguments of `Policy` that answers
with `SAVE`, `RECOMPUTE` or `stored_in(store)`.
"""

from torchremat.ambient.global_state import only_watches
from torchremat.ambient.registry import Ambient, numpy_random, python_random, register, registered, unregister
from torchremat.regions.decisions import RECOMPUTE, SAVE, Answer, Decision, OperatorContext, Window, stored_in
from torchremat.regions.decisions import AnyPolicy as Policy
from torchremat.state.guarded import Guarded
from torchremat.tensors.handles import Handle, Store

__all__ = [
    "RECOMPUTE",
    "SAVE",
    "Ambient",
    "Answer",
    "Decision",
    "Guarded",
    "Handle",
    "OperatorContext",
    "Policy",
    "Store",
    "Window",
    "numpy_random",
    "only_watches",
    "python_random",
    "register",
    "registered",
    "stored_in",
    "unregister",
]
