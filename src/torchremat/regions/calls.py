"""One call in a region: what it takes to make it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import Context, copy_context
from typing import TYPE_CHECKING
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from torchremat._compat.transforms import is_in_batch, outside_batches
from torchremat.ambient.generators import States, drawn, generator_states, restore
from torchremat.ambient.locks import EXCHANGING
from torchremat.ambient.registry import Captured, entries
from torchremat.ambient.surroundings import Surroundings, surroundings
from torchremat.errors import MutationError
from torchremat.regions.contents import Copies
from torchremat.regions.guards import Objects
from torchremat.regions.inputs import Source
from torchremat.regions.modules import ChangedStateError, ModuleState
from torchremat.regions.reach import function_of
from torchremat.regions.settings import Settings
from torchremat.regions.threads import thread
from torchremat.regions.visible import NOTHING, generators_reached, tensors_reached
from torchremat.tensors.metadata import version_of
from torchremat.tensors.structure import join, split

if TYPE_CHECKING:
    from torchremat.regions.operators import OperatorLog
    from torchremat.regions.selection import Selection

# What a call runs: the user's function, or something of ours around it. A body is run in a recompute as in the forward,
# so it must look up nothing that may have changed since.
Body = Callable[..., object]


class Call:
    """What one call needs to run again."""

    __slots__ = (
        "_captured",
        "_context",
        "_frozen",
        "_leaves",
        "_surroundings",
        "body",
        "generators",
        "log",
        "modules",
        "objects",
        "region",
        "selection",
        "slots",
        "sources",
        "template",
    )

    def __init__(
        self, body: Body, template: object, sources: list[Source], region: ReferenceType[object] | None = None
    ) -> None:
        self.body = body
        self.region = region  # weak, since the region owns its calls
        self.template = template
        self.sources = sources
        self.slots = -1  # how many slots the region has after the call; negative while it runs for the first time
        self.modules: ModuleState
        self.generators: States = {}
        self.objects: Objects | None = None
        self.log: OperatorLog | None = None  # of the forward, with `debug=True`
        self.selection: Selection | None = None  # what is kept by a policy, here or in a region inside
        self._surroundings: Surroundings
        self._context: Context
        self._captured: Captured | None = None
        self._leaves: list[tuple[Tensor, int]] = []
        self._frozen: dict[object, list[Frozen]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the call runs for the first time."""
        return self.slots < 0

    @property
    def name(self) -> str:
        """The name of its function."""
        function = function_of(self.body)
        return getattr(function, "__qualname__", None) or type(function).__name__

    @property
    def is_under_autocast(self) -> bool:
        """Whether autocast was on around the call."""
        return self._surroundings.casts

    def look(self, tensors: list[Tensor], modules: list[nn.Module], objects: list[object], settings: Settings) -> None:
        """Capture what the call is about to see and may change; all of it, as rule 6 may ask for it in the middle.

        Args:
            tensors: The tensors among its arguments.
            modules: The modules that run in it.
            objects: What else is among its arguments and could have state.
            settings: What to look at beside.
        """
        self._surroundings = surroundings()
        self._context = copy_context()
        named: list[nn.Module] = []
        if objects or settings.guard:
            self.objects = Objects(objects, settings.guard)
            named = self.objects.modules
        self.modules = ModuleState([*modules, *named], named) if modules or named else _NO_MODULES
        if modules is not NOTHING:
            reached = tensors_reached(self.body)
            # What does not require grad may be changed by every forward, as a counter is.
            self._leaves = [(one, one._version) for one in reached if one.requires_grad and one.is_leaf]
        if settings.preserve_rng:
            devices = _devices(tensors, modules, self.body) if _ACCELERATED else ()
            others: list[torch.Generator] = []
            if modules is not NOTHING:
                others += generators_reached(self.body) + self.modules.generators
            if self.objects is not None:
                others += self.objects.generators
            self.generators = generator_states(devices, others)
        if entries:
            self._captured = Captured()

    def settle(self) -> None:
        """Keep only what the call has changed."""
        if self.generators:
            self.generators = drawn(self.generators)
        if self.modules is not _NO_MODULES:
            self.modules.settle()
        if self.objects is not None and not self.objects.settle():
            self.objects = None

    def restored(self, *, without_gradients: bool = False) -> ExitStack | None:
        """Restore what the call may see besides its arguments; return what puts it back, None if all is as it was.

        Args:
            without_gradients: Whether the parameters' gradients are put aside meanwhile.

        Raises:
            ChangedStateError: A parameter or buffer was written in place.
        """
        for leaf, version in self._leaves:
            if leaf._version != version:
                raise ChangedStateError(
                    f"a leaf of shape {tuple(leaf.shape)} that it closes over", version, leaf._version
                )
        modules_are_here = self.modules is _NO_MODULES or self.modules.are_here()
        surroundings_are_here = self._surroundings.are_here()
        if (
            modules_are_here
            and surroundings_are_here
            and self.objects is None
            and self._captured is None
            and not self.generators
            and not without_gradients
        ):
            return None
        with ExitStack() as stack:
            if self.generators or self.objects is not None or self._captured is not None or without_gradients:
                stack.enter_context(EXCHANGING)
            if not surroundings_are_here:
                self._surroundings.restore(stack)
            if not modules_are_here:
                self.modules.restore(stack)
            if self.objects is not None:
                self.objects.restore(stack)
            if without_gradients:
                for tensor in (*self.modules.parameters(), *tensors_reached(self.body)):
                    if tensor.requires_grad and tensor.is_leaf:
                        stack.callback(setattr, tensor, "grad", tensor.grad)
                        tensor.grad = None
            if self.generators:
                if is_in_batch():
                    stack.enter_context(outside_batches())
                restore(self.generators, stack)
            if self._captured is not None:
                self._captured.restore(stack)
            return stack.pop_all()

    def run_again(self, copies: Copies, /, *args: object, **kwargs: object) -> object:
        """Run the call in a recompute: what it sets in context variables or has frozen is not set or frozen again.

        Args:
            copies: Of the containers in context variables, see NOTE [ What a recompute leaves behind ].
            args: As the forward's.
            kwargs: As the forward's.
        """
        context = self._context.copy()  # a context can be entered once at a time
        if context:
            looked_after = frozenset[int]() if self.objects is None else self.objects.containers
            for variable, value in self._context.items():
                own = copies.of(value, looked_after)
                if own is not value:
                    context.run(variable.set, own)
        if self._frozen is None and not thread.frozen:
            return context.run(self.body, *args, **kwargs)
        had = thread.frozen
        thread.frozen = {name: iter(kept) for name, kept in self._frozen.items()} if self._frozen else {}
        try:
            return context.run(self.body, *args, **kwargs)
        finally:
            thread.frozen = had

    def freeze(self, name: object, kept: Frozen) -> None:
        """Keep a value for the recomputes of the call; of those with one name, the order is kept."""
        if self._frozen is None:
            self._frozen = {}
        self._frozen.setdefault(name, []).append(kept)

    @property
    def frozen(self) -> list[Tensor]:
        """The tensors that it keeps past its arguments."""
        return [tensor for each in (self._frozen or {}).values() for one in each for tensor in one.tensors]


class Frozen:
    """A tensor, or a structure of tensors, that a call gets past its arguments and keeps.

    The tensors are aliases, see NOTE [ Why an alias ].
    """

    __slots__ = ("_kept", "_template")

    def __init__(self, value: object) -> None:
        tensors: list[Tensor] = []
        self._template = split(value, tensors, [])
        self._kept = [(tensor.detach(), tensor.requires_grad, version_of(tensor)) for tensor in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are kept."""
        return [tensor for tensor, _, _ in self._kept]

    def thaw(self, words: str) -> object:
        """Return the value for a recompute.

        Args:
            words: Where the forward got it, for messages.

        Raises:
            MutationError: A tensor was written in place.
        """
        found: list[Tensor] = []
        for tensor, requires_grad, then in self._kept:
            now = version_of(tensor)
            if now != then:
                raise MutationError(
                    f"the tensor of {words} was written in place after the forward had it: version {then} then, {now} "
                    "now. Use a clone, or write out of place."
                )
            alias = tensor.detach()
            found.append(alias.requires_grad_() if requires_grad else alias)
        return join(self._template, found)


_NO_MODULES = ModuleState([])


def _devices(tensors: list[Tensor], modules: Iterable[nn.Module], body: Body) -> list[torch.device]:
    """Return the devices, beside the CPU, that a call can draw random numbers on."""
    devices = {tensor.device for tensor in (*tensors, *tensors_reached(body))}
    for module in modules:
        devices.update(parameter.device for parameter in module.parameters())
    if torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return [device for device in devices if device.type not in ("cpu", "meta")]


# Whether this build of torch knows another device than the CPU; nothing is initialized by asking so.
_ACCELERATED = torch.accelerator.current_accelerator() is not None
