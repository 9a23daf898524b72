"""What ran, and what of it is alive."""

from collections import Counter
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchremat.extend import only_watches


@only_watches
class Counted(TorchDispatchMode):
    """Counts operators by name, those of recomputes as well, and knows the memory that they have made."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.counts[str(func).split(".")[1]] += 1
        given = {id(one.untyped_storage()) for one in args if isinstance(one, torch.Tensor)}
        for one in output if isinstance(output, tuple | list) else [output]:
            if isinstance(one, torch.Tensor) and id(one.untyped_storage()) not in given:
                self.made[id(one.untyped_storage())] = ref(one.untyped_storage())
        return output

    def forwards(self):
        """The counts of operators that no formula of a backward uses, as far as the tests go."""
        return {
            name: count for name, count in self.counts.items() if not name.endswith("backward") and name != "detach"
        }

    def live_bytes(self, without=None):
        spared = None if without is None else without.untyped_storage()
        alive = [storage for one in self.made.values() if (storage := one()) is not None]
        return sum(one.nbytes() for one in alive if one is not spared)


def gradients(function, x, model=None, times=1):
    """The gradients of x and of a model's parameters, as numbers; all of several backward calls give the same."""
    inputs = [x, *(model.parameters() if model is not None else ())]
    loss = function(x).sum()
    found = [torch.autograd.grad(loss, inputs, retain_graph=time + 1 < times) for time in range(times)]
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))
    return [one.tolist() for one in found[0]]
