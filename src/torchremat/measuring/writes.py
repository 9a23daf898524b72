"""The tensors that a step writes, except gradients and buffers: a teacher's weights, a queue in a list, its own batch.

    written tensors                                how the write is seen              how it is undone
    any, in the intercepted run                    an operator is about to write      it is copied first, and restored
    the same, in later runs                        it was written before              copied before the run, restored
    small tensors that are not parameters          it is small                        likewise
    leaves with user hooks in backward, and        they exist                         likewise
    tensors of their shapes that hooks reach
    tensors that communication hooks keep          likewise                           likewise
    `.data`, set to other memory                   the storage is another one         the leaf has its own again
    the same, of a parameter that a store has      it is not what came from there     an error that names it
    anything else                                  its version has moved              an error that names it

Copying all weights would double their memory, so most are only watched. Missing on purpose: writes through `.data` or
NumPy in a backward, unless a hook of a leaf makes them.
"""

from __future__ import annotations

import functools
import gc
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import taken_bytes
from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types
from torchremat.ambient.global_state import only_looks_on
from torchremat.ambient.hidden import hidden, hiding
from torchremat.errors import StepError, first_of
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.storages import address_of, storages_in, tensors_in
from torchremat.regions.selective.cache import written_by
from torchremat.regions.selective.op_info import OpInfo, op_info_of
from torchremat.state.backups import SMALL_BYTES
from torchremat.state.code import is_library
from torchremat.state.reach import reach
from torchremat.state.world import Reaching
from torchremat.stores.parameter_moves import memory_watched
from torchremat.stores.stored_parameters import StoredParameter, parameter_in
from torchremat.tensors.copies import same_bits
from torchremat.tensors.parts import is_wrapper, parts_of
from torchremat.tensors.versioned import Versioned


class Known:
    """The writes of a step known from its runs so far.

    Attributes:
        runs: The number of completed runs.
        has_looked: Whether the writes of one of them were intercepted.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.has_looked = False
        self._written: dict[int, Tensor] = {}
        self._sparse: dict[int, Tensor] = {}
        self._stand_ins: dict[int, tuple[str, int]] = {}  # by address: type of device, and bytes

    def note_sparse(self, leaves: Iterable[Tensor]) -> None:
        """Note the gradients of leaves whose gradients may be sparse. See NOTE [ Sparse gradients ]."""
        self._sparse.update((id(one), one.grad) for one in leaves if one.grad is not None)

    def note_stand_ins(self, gradients: Iterable[Tensor]) -> None:
        """Note the gradients that an optimizer finds when it steps alone, and that no step begins with."""
        # The device of a fake's storage is not its own.
        found = [(one.device.type, one.untyped_storage()) for one in tensors_in(list(gradients))]
        self._stand_ins = {address_of(storage): (kind, taken_bytes(storage)) for kind, storage in found}

    def sparse_gradient(self, leaf: Tensor) -> Tensor:
        """Return a copy of the noted gradient of a leaf; one without rows if none is noted."""
        found = self._sparse.get(id(leaf))
        if found is None:
            return torch.zeros_like(leaf, layout=torch.sparse_coo, requires_grad=False)
        return found.detach().clone()

    def made_bytes(self, device: torch.device, inputs: Iterable[Tensor]) -> int:
        """Return the bytes on a device of the gradients that a step makes, and an optimizer finds that steps alone.

        Of sparse gradients those of the last run, without the indices that are inputs of the step.
        """
        there = {address_of(one) for one in storages_in(list(inputs))}
        found = {address_of(one): (one.device.type, one.nbytes()) for one in storages_in(list(self._sparse.values()))}
        found = {key: one for key, one in found.items() if key not in there} | self._stand_ins
        return sum(size for kind, size in found.values() if kind == device.type)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that were written."""
        self._written.update((id(one), one) for one in tensors)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor was written in a run before."""
        return id(tensor) in self._written


class Writes:
    """The tensors that a step may write in one run.

    Args:
        worlds: The objects that it can reach.
        buffers: The buffers among them that other code restores.
        hooked: Further tensors that hooks may write in a backward, see `hooked`.
        known: The writes known from earlier runs.
        names: Gives the name of a tensor for a message.
        looks: Whether to intercept operators in this run, unless an earlier run did.

    Attributes:
        looking: Has to see the operators of this run before they run; None if it need not.
    """

    def __init__(
        self,
        worlds: Sequence[Reaching],
        buffers: Iterable[Tensor],
        hooked: Sequence[Tensor],
        *,
        known: Known,
        names: Callable[[Tensor], str],
        looks: bool,
    ) -> None:
        theirs = set(map(id, buffers))
        # A tensor with a graph is an output of the step, freed when the step makes the next one.
        tensors = [one for world in worlds for one in world.tensors]
        watched = {id(one): one for one in (*tensors, *hooked) if id(one) not in theirs and one.is_leaf}
        stored = [one for one in watched.values() if type(one) is StoredParameter]
        plain = [one for one in watched.values() if is_plain(one)]
        free = {id(one) for world in worlds for one in (*world.loose, *(own for *_, own in world.state))}
        at_once = {*map(id, hooked), *(id(one) for one in plain if id(one) in free and one.nbytes <= SMALL_BYTES)}
        self._known = known
        self._names = names
        self._watched = [Versioned(one) for one in watched.values()]
        with hiding():
            self._places = [Place(one) for one in plain]
        self._copies = HostCopies(one for one in (*plain, *stored) if id(one) in at_once or known.has(one))
        self.looking = Looking(plain, self._copies, stored) if looks and not known.has_looked else None

    @contextmanager
    def undone(self) -> Generator[None]:
        """Restore tensors that are written in the block; see above.

        Raises:
            StepError: A tensor was written that is not copied.
        """
        try:
            with memory_watched() as watch:
                yield
            self._known.has_looked |= self.looking is not None
        finally:
            with uninterrupted(), hiding():
                for place in self._places:
                    place.put_back()
                self._known.add(self._copies.put_back())
                if self.looking is not None:
                    self._known.add(self.looking.seen.values())
        lost = [one.tensor for one in self._watched if one.is_written and not self._has_put_back_parts(one)]
        lost += [one for one in watch.replaced.values() if not self._copies.has(one)]
        if lost:
            raise StepError(
                f"the step has written in place to {first_of(list(map(self._names, lost)))}, which was not copied, so "
                "it is not what it was before this call. A step that is planned or measured is run several times: let "
                "it write to buffers (`register_buffer`), or write outside of it, after its backward."
            )

    def _has_put_back_parts(self, wrapper: Versioned) -> bool:
        if not is_wrapper(wrapper.tensor) or not all(map(self._copies.has, parts_of(wrapper.tensor))):
            return False
        wrapper.reset()
        return True


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own class, which an assignment to `.data` may replace."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_strided and type(tensor) in (Tensor, nn.Parameter) and not is_wrapper(tensor)


class Place:
    """The memory of a tensor, which an assignment to `.data` replaces.

    Args:
        tensor: A tensor that `is_plain`.
    """

    __slots__ = ("_address", "_alias", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._alias = tensor.detach()
        self._address = address_of(tensor.untyped_storage())

    def put_back(self) -> None:
        """Give the tensor its memory again."""
        if address_of(self.tensor.untyped_storage()) != self._address or self.tensor.shape != self._alias.shape:
            self.tensor.data = self._alias


class HostCopies:
    """Copies of tensors in host memory, to restore them.

    Args:
        tensors: Tensors to copy immediately.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._copies: dict[int, tuple[Versioned, Tensor]] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Copy another tensor, unless it is copied already or has no values."""
        if id(tensor) not in self._copies and not tensor.is_meta:
            with hiding():
                self._copies[id(tensor)] = Versioned(tensor), tensor.detach().to("cpu", copy=True)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is copied."""
        return id(tensor) in self._copies

    def put_back(self) -> list[Tensor]:
        """Restore the values and versions of the tensors; return the tensors that had changed."""
        written: list[Tensor] = []
        for had, copied in self._copies.values():
            tensor = had.tensor
            # Writes through `.data` or NumPy leave the version alone.
            if not had.is_written and same_bits(tensor.detach().to("cpu"), copied):
                continue
            written.append(tensor)
            tensor.data.copy_(copied)
            had.reset()
        return written


class Looking(EagerMode):
    """Copies a watched tensor before an operator writes to it: as a mode, or told of each operator by one.

    Args:
        tensors: The watched tensors.
        copies: Gets the copies.
        stored: Parameters that are watched as well, wherever their memory is by then.

    Attributes:
        seen: By id, the tensors that operators have written, be it with the values that they had. In a mode the version
            of what a `_foreach` operator writes does not move.
    """

    def __init__(self, tensors: Iterable[Tensor], copies: HostCopies, stored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}
        self._copies = copies
        self._watched: defaultdict[int, list[Tensor]] = defaultdict(list)
        for one in tensors:
            self._watched[address_of(one.untyped_storage())].append(one)
        self._stored = set(map(id, stored))

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        """Run an operator."""
        named = kwargs or {}
        self.see(op_info_of(func), args, named)
        return func(*args, **named)

    def see(self, op_info: OpInfo, args: Args, kwargs: Mapping[str, object]) -> None:
        """Copy what an operator that is about to run writes to."""
        if op_info.writes and not hidden.now:
            # The class of a wrapper writes to its parts where no mode sees it.
            for written in chain.from_iterable(map(parts_of, written_by(op_info.writes, args, kwargs))):
                if written.layout is torch.strided:
                    storage = written.untyped_storage()
                    came_in = None if _undoing else parameter_in(storage)
                    also = [came_in] if came_in is not None and id(came_in) in self._stored else []
                    for one in (*self._watched.get(address_of(storage), ()), *also):
                        self.seen[id(one)] = one
                        self._copies.add(one)


_undoing: list[None] = []


@contextmanager
def undoing() -> Generator[None]:
    """Say that the block itself undoes what it writes to parameters: those of stores are not to be copied for it."""
    _undoing.append(None)
    try:
        yield
    finally:
        _undoing.pop()


def hooked(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves with user hooks in backward, and tensors of their shapes that these hooks reach."""
    found: dict[int, Tensor] = {}
    hooks: list[object] = []
    with hiding(), torch.enable_grad():
        for leaf in leaves:
            own = hooks_of(leaf)
            if own:
                found[id(leaf)] = leaf
                hooks += own
    if hooks:
        world = Reaching()
        reach(world, hooks, are_whole=True)
        shapes = {one.shape for one in found.values()}
        found.update((id(one), one) for one in world.tensors if one.shape in shapes)
    return list(found.values())


def tensors_of(hooks: Sequence[object]) -> list[Tensor]:
    """Return the tensors that communication hooks keep, which they write in threads where no mode sees it."""
    world = Reaching()
    reach(world, hooks, are_whole=True)
    return world.loose


def hooks_of(leaf: Tensor) -> list[object]:
    """Return the hooks of a leaf that run in backward, in grad mode; without those of torch, ours, and observers."""
    tables: list[object] = [leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)]
    if is_plain(leaf):
        # Its node is reached through a view, as by `torch.autograd.graph.get_gradient_edge`, which takes twice as long.
        node = cast("torch.autograd.graph.Node", leaf.view_as(leaf).grad_fn).next_functions[0][0]
        # No other way shows the hooks of a node, and this one works only while no graph has the node: no view either.
        tables += gc.get_referents(node)
    hooks = [hook for own in tables if isinstance(own, dict) for hook in cast("dict[int, object]", own).values()]
    return [hook for hook in hooks if not (only_looks_on(hook) or is_library(_module_of(hook)))]


def _module_of(hook: object) -> str | None:
    while isinstance(hook, functools.partial):
        hook = cast("functools.partial[object]", hook).func
    found = getattr(hook, "__module__", None) or getattr(type(hook), "__module__", None)
    return found if isinstance(found, str) else None
