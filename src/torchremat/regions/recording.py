"""What a region noted of its forward, as data. A recompute and its diagnosis read it."""

from __future__ import annotations

from weakref import ReferenceType, ref

from torch import Tensor

from torchremat.regions.calls import Call, Source
from torchremat.regions.rules import external_inputs
from torchremat.regions.values import Fingerprints
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import Metadata, version_of
from torchremat.tensors.structure import tensors_in


class Recording:
    """Everything that the recomputes of a region need and are compared with.

    Saved tensors are numbered in the order of the forward.

    Args:
        label: The words for the region in messages, None for the name of its function.
        fingerprints: Gets those of the saved tensors, None if their values are not compared.

    Attributes:
        calls: In the order in which they ran.
        held: The tensors that the calls were given from outside, each once.
        metadata: Of the saved tensors.
        fresh: The saved tensors that may be filled later, see NOTE [ What is written after it was saved ].
        runs_backward: Whether a backward ran in the forward. See Rule 6.
    """

    __slots__ = ("_known", "calls", "fingerprints", "fresh", "held", "label", "metadata", "runs_backward")

    # How an input is held: torch.func needs other functions.
    held_tensor: type[HeldTensor] = HeldTensor

    def __init__(self, label: object, fingerprints: Fingerprints | None = None) -> None:
        self.label = label
        self.calls: list[Call] = []
        self.held: list[HeldTensor] = []
        # Tensors that the calls were given or have returned so far, by id, each with its version.
        self._known: dict[int, tuple[ReferenceType[Tensor], int, Source]] = {}
        self.metadata: list[Metadata] = []
        self.fresh: set[int] = set()
        self.fingerprints = fingerprints
        self.runs_backward = False

    @property
    def is_running(self) -> bool:
        """Whether its last call runs for the first time."""
        return self.calls[-1].slots < 0

    def cut(self, calls: int, saves: int) -> None:
        """Forget all but the first calls and saved tensors, since a call has raised."""
        del self.calls[calls:], self.metadata[saves:]
        self.fresh = {index for index in self.fresh if index < saves}
        if self.fingerprints is not None:
            self.fingerprints.cut(saves)

    def clear(self) -> None:
        """Release everything that is needed to run again; facts about the saved tensors stay."""
        self.calls.clear()
        self.held.clear()

    def call_of(self, index: int) -> int:
        """Return the number of the call that saved a tensor."""
        return next((i for i, call in enumerate(self.calls) if index < call.slots), len(self.calls) - 1)

    def name(self, call: int) -> str:
        """Return the words for a call of the region in a message."""
        if self.label is not None:
            return f"region {self.label}"
        return f"region of {self.calls[call].name}"

    def take(self, tensors: list[Tensor], *, last: bool) -> list[Source]:
        """Return the sources of the next call's arguments, and hold tensors that no earlier call was given or returned.

        Args:
            tensors: The tensors among its arguments.
            last: Whether no further call follows, so that nothing needs to be remembered.
        """
        known, every = self._known, self.held
        sources: list[Source] = []
        if last and not known:  # as below where nothing is known, for the only call of a region, as most are
            numbers: dict[int, int] = {}
            for tensor in tensors:
                number = numbers.setdefault(id(tensor), len(every))
                if number == len(every):
                    every.append(self.held_tensor(tensor))
                sources.append(number)
            return sources
        given = {id(tensor): tensor for tensor in tensors}
        for key in given.keys() & known.keys() if known else ():
            seen, version, _ = known[key]
            # After `h.add_(1)` between two calls `h` is the same object with another value.
            if seen() is not given[key] or version != version_of(given[key]):
                del known[key]
        for key in external_inputs(given, known):
            held = self.held_tensor(given[key])
            known[key] = (ref(given[key]), held.version, len(every))
            every.append(held)
        sources += [known[id(tensor)][2] for tensor in tensors]
        if last:
            known.clear()
        return sources

    def made(self, output: object, number: int) -> None:
        """Remember the output of call `number`, which later calls may be given."""
        for place, tensor in enumerate(tensors_in(output)):
            version = version_of(tensor)
            if version >= 0:
                self._known[id(tensor)] = (ref(tensor), version, (number, place))
