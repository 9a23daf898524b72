"""The door for those who extend the library: what a recompute must see again, beside what it knows of.

from torchremat import extend

extend.register(extend.numpy_random)  # from now on a recompute draws NumPy's numbers again

class Recipe:
    name = "the FP8 recipe"

    def capture(self):
        return recipe.scale

    def restore(self, state):
        recipe.scale = state  # not in place: autograd may have saved it

extend.register(Recipe())
"""

from torchremat.ambient.registry import Ambient, numpy_random, python_random, register, registered, unregister
from torchremat.ambient.surroundings import only_watches
from torchremat.regions.guards import Guarded
from torchremat.saved.handles import Handle, Store

__all__ = [
    "Ambient",
    "Guarded",
    "Handle",
    "Store",
    "numpy_random",
    "only_watches",
    "python_random",
    "register",
    "registered",
    "unregister",
]
