"""`offload_optimizer`: the state of an optimizer in a store.

NOTE [ What a failure leaves of the state ]
    the store has no room        the tensor stays in memory, as saved tensors do; a strict store raises, and what it
                                 refused is in memory
    a write fails                the same: a store holds a tensor until it is written
    a read fails                 `StoreError`: the parameter has not stepped. A note on the error says which parameters
                                 have made this step; values and state of each belong together
    the step itself raises       the same, and the note says that the parameter may be in the middle of it
    the process is killed        the state is gone, as with memory; a store leaves no files. The next process loads a
                                 checkpoint
So the state of a parameter is that of before its step or of after it. A store is no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ref

from torchremat.errors import UnsupportedError
from torchremat.measuring.optimizers import Optimizer
from torchremat.optimizing.entries import StateMover
from torchremat.optimizing.partial_steps import PartialSteps, partial_steps
from torchremat.stores.base import check_store
from torchremat.tensors.handles import Store


class OptimizerOffload:
    """The state of an optimizer in a store; see `offload_optimizer`, which makes it.

    A context manager: at its end, or with `remove()`, all state is in memory again.

    Attributes:
        store: The store.
    """

    def __init__(self, steps: PartialSteps, optimizer: Optimizer, mover: StateMover) -> None:
        self.store = mover.store
        self._steps = steps
        self._mover = mover
        self._optimizer = ref(optimizer)
        self._hooks = [
            optimizer.register_state_dict_post_hook(_full),
            optimizer.register_load_state_dict_post_hook(self._put_away),
        ]

    def _put_away(self, optimizer: Optimizer) -> None:
        self._mover.begin(optimizer.state)

    def remove(self) -> None:
        """Bring all state back, and let it stay. May be called twice.

        Raises:
            StoreError: A tensor cannot be brought back; the others are unchanged.
            UnsupportedError: A step is open: a backward has released gradients, and `optimizer.step()` did not follow.
        """
        if self._steps.mover is not self._mover:
            return
        self._steps.check_closed("remove()")
        optimizer = self._optimizer()
        if optimizer is not None:
            self._mover.give_back(optimizer.state)
        for hook in self._hooks:
            hook.remove()
        self._steps.mover = None
        self._steps.end()

    def __enter__(self) -> OptimizerOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<OptimizerOffload of {self._steps.name} to {self.store!r}>"


def _full(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states: Mapping[object, object] = state_dict["state"]
    full = {key: dict(one) if isinstance(one, dict) else one for key, one in states.items()}
    return {**state_dict, "state": full}


def offload_optimizer(optimizer: Optimizer, store: Store, *, min_bytes: int = 2**15) -> OptimizerOffload:
    """Keep the state of an optimizer in a store, and bring each parameter's state back for its part of the step.

    The training loop stays as it is, and each step is bit for bit the plain one, unless the store is lossy.
    `optimizer.step()` works in slices: the state of the next one comes in while one steps, and the last one's goes out.
    With `release_gradients` the slices are single parameters, in the backward. `state_dict()`, `load_state_dict()` and
    any other code see the full state. See NOTE [ What a failure leaves of the state ] for failures.

    >>> import torch
    >>> from torchremat import Host
    >>> model = torch.nn.Linear(8192, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> host = Host()
    >>> with offload_optimizer(optimizer, host):
    ...     model(torch.ones(3, 8192)).sum().backward()
    ...     optimizer.step()
    ...     host.statistics.stored_bytes  # two averages of 8192 floats
    65536

    Args:
        optimizer: A plain one, not one around others. Its step may have been called before.
        store: Such as `Host()`, `Disk()` or `Tiers(...)`. `Compressed` with a lossy codec makes the state lossy.
        min_bytes: Smaller tensors stay in memory: those of biases and norms take longer to hand over than to write.

    Raises:
        UnsupportedError: The step of this optimizer cannot be made in parts; `store` is not a store; its state is in
            one already.
        StoreError: The store is strict, and has no room for the state that exists.
    """
    check_store(store)
    steps = partial_steps(optimizer)
    if steps.mover is not None:
        raise UnsupportedError(
            f"offload_optimizer: the state of this {steps.name} is in {steps.mover.store!r} already."
        )
    mover = StateMover(store, min_bytes)
    try:
        steps.check_closed("offload_optimizer")
        mover.begin(optimizer.state)
    except BaseException:
        mover.give_back(optimizer.state)
        steps.end()
        raise
    steps.mover = mover
    return OptimizerOffload(steps, optimizer, mover)
