"""What a region noted of its forward, as data.

A recompute and its diagnosis read a `Recording`; neither knows the region.
"""

from __future__ import annotations

from torchremat.regions.calls import Call
from torchremat.regions.inputs import Inputs
from torchremat.regions.values import Fingerprints
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import Metadata


class Recording:
    """Everything that the recomputes of a region need and are compared with.

    Saved tensors are numbered in the order of the forward.

    Args:
        label: The words for the region in messages, None for the name of its function.
        fingerprints: Gets those of the saved tensors, None if their values are not compared.
        held_tensor: How an input is held.

    Attributes:
        calls: In the order in which they ran.
        inputs: Of the calls.
        metadata: Of the saved tensors.
        fresh: The saved tensors that may be filled later, see NOTE [ What is written after it was saved ].
        runs_backward: Whether a backward ran in the forward. See Rule 6.
    """

    __slots__ = ("calls", "fingerprints", "fresh", "inputs", "label", "metadata", "runs_backward")

    def __init__(
        self, label: object, fingerprints: Fingerprints | None = None, held_tensor: type[HeldTensor] = HeldTensor
    ) -> None:
        self.label = label
        self.calls: list[Call] = []
        self.inputs = Inputs(held_tensor)
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
        self.inputs.held.clear()

    def call_of(self, index: int) -> int:
        """Return the number of the call that saved a tensor."""
        return next((i for i, call in enumerate(self.calls) if index < call.slots), len(self.calls) - 1)

    def name(self, call: int) -> str:
        """Return the words for a call of the region in a message."""
        if self.label is not None:
            return f"region {self.label}"
        return f"region of {self.calls[call].name}"
