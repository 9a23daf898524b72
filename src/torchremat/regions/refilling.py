"""The saves of one recompute: each is compared with the forward's, and waits in its slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, UntypedStorage, nn

from torchremat._compat.autograd import retains_graph
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.modes import Began, count_dispatch_modes, is_traced_since, left_alone
from torchremat.errors import bug
from torchremat.regions.diagnosis.differences import Difference, Kind
from torchremat.regions.rules import last_needed
from torchremat.regions.selective.kept import memory_of
from torchremat.regions.settings import Settings
from torchremat.regions.slots import Key, Recomputable, waits, written_in_region
from torchremat.regions.values import ValueCheck
from torchremat.state.reading import WrittenTensors
from torchremat.tensors.held import holding
from torchremat.tensors.metadata import Metadata, agree, metadata_of
from torchremat.tensors.structure import join, split
from torchremat.tensors.versioned import Versioned

# NOTE [ What is written after it was saved ]
# An operation may save a tensor first and fill it afterwards, without a new version: `rrelu` saves its noise this way,
# the only one of torch's own operations. A recompute that stops in the hook of such a save would hand out uninitialised
# memory. The hook cannot recognize such a save, so a recompute does not stop at a save that could be one, but at the
# next save of another operation. Such a save could be a floating-point tensor, never written, that no gradient flows
# to, and that is as large as the tensor saved before or after it, to which a gradient flows (nor does the recompute
# stop at that one, if it is saved after). A tensor that shares its memory with an argument of the call existed before,
# and is filled: the recompute sees this when it saves the tensor. It does stop at an input of an inner region: no
# operation saves that, and everything saved before is filled when the input is taken.

# NOTE [ What is saved without being read ]
# Autograd saves an operator's inputs before the operator runs. A recompute that stops there has read nothing, and the
# mode that detects reads of written tensors has not seen it: so saved tensors are checked as well.


class Stop(BaseException):
    """Ends a recompute at its last needed tensor.

    Not an `Exception`: user code that swallows exceptions must not swallow it.
    """


class Refill:
    """The saves of one recompute, in their order.

    Args:
        region: The region.
        settings: How it behaves.
        key: The owner of the tensors; None if a tensor is asked for outside any backward.
        only: The number of the one slot that is asked for, or those of a part; None for all that are alive.
        detached: How a tensor loses its graph.
        returns: Whether the calls run to their end, for the output of the last one.

    Attributes:
        task: The owner, if it is a backward whose graph is not retained.
        needed: The number of the last save that is needed, -1 if none is.
        last: The save after which all needed tensors are filled.
        filled: The numbers of the saves that are filled.
        output: The output of the last call without its graph, if it is wanted.
        count: How many tensors have been saved.
        is_served: Whether all needed tensors are filled.
        is_stopped: Whether the recompute ends, for that or for a difference.
        difference: The first difference that was found.
        keeps: Whether the graph of the recompute returns its saved tensors. See Rule 6
        given: The memory of the arguments of the call that runs, if it matters.
        values: The check of values, if there is one.
        written: Tensors that the running call must not save. See NOTE [ What is saved without being read ].
        began: The modes in which the running call began.
    """

    __slots__ = (
        "_detached", "_ends_early", "_filled", "_found", "_fresh", "_metadata", "_slots", "began", "count",
        "difference", "filled", "given", "is_served", "is_stopped", "keeps", "key", "last", "needed", "only",
        "output", "region", "returns", "task", "values", "written",
    )  # fmt: skip

    def __init__(
        self,
        region: Recomputable,
        settings: Settings,
        key: Key | None,
        only: int | range | None,
        detached: Callable[[Tensor], Tensor] = Tensor.detach,
        *,
        returns: bool = False,
    ) -> None:
        self.region = region
        self.key = key
        self.task = key if isinstance(key, int) and not retains_graph() else None
        self._slots = slots = region.slots
        self._fresh = region.fresh
        self._detached = detached
        self._ends_early = settings.early_stop and not returns
        if isinstance(only, int):
            self.only, self.filled, self.needed = only, range(only, only + 1), only
        else:
            self.only = None
            self.filled = range(len(slots)) if only is None else only
            self.needed = last_needed(self.filled.stop, lambda index: waits(slots[index]()))
        self.last = self.needed
        self._filled: set[int] | None = None
        self.given: Sequence[UntypedStorage] = ()
        if region.fresh:
            self.last = self._last()
        self.returns = returns
        self.output: object = None
        self.count = 0
        self.keeps = region.runs_backward
        self._metadata = region.metadata if settings.check != "none" else None
        self.values: ValueCheck | None = None
        if region.fingerprints is not None:
            self.values = ValueCheck(region.name(0), region.fingerprints, region.metadata)
        self.written: WrittenTensors | None = None
        self.is_served = False
        self.is_stopped = False
        self.difference: Difference | None = None
        self.began: Began
        self._found: Versioned | None = None

    def detaches_by(self, alias: Callable[[Tensor], Tensor]) -> bool:
        """Let tensors lose their graph by `alias`, if no other operator runs here; return whether that is so."""
        if self.values is not None or self._detached not in (Tensor.detach, alias):
            return False
        self._detached = alias
        return True

    @outside_graphs  # code under dynamo calls it, compiled or not
    def pack(self, tensor: Tensor) -> object:
        """Take the next saved tensor: the hook of a recompute."""
        if self.is_stopped:
            return None  # user code has swallowed the stop
        if count_dispatch_modes() and is_traced_since(self.began):
            return left_alone(tensor)  # See NOTE [ What is traced in a region ]
        if self.written is not None:
            self.written.check(tensor)
        index = self.count
        self.count = index + 1
        slots = self._slots
        if index >= len(slots):
            return self._too_many()
        if self._metadata is not None:
            then = self._metadata[index]
            try:
                now = tensor.shape, tensor.dtype, tensor.device, tensor.stride()
            except RuntimeError:
                now = metadata_of(tensor)
            if then != now and not agree(then, now):
                return self._differs("metadata", index, now)
            if self.values is not None:
                found = self.values.differs(tensor, is_fresh=index in self._fresh)
                if found is not None:
                    return self._differs("values", found, self._metadata[found])
        if index in self.filled:
            # Without its `grad_fn`, which would keep the recomputed graph. See NOTE [ What is handed back to autograd ]
            value = tensor if tensor.is_leaf and type(tensor) is not nn.Parameter else self._detached(tensor)
            slot = slots[index]()
            if self.key is None:
                self._found = Versioned(value)
            elif slot is not None:
                slot.put(self.key, self.task, value)
        # The other cases: see NOTE [ What is written after it was saved ]
        if self.last > self.needed <= index + 1 and index in self._fresh and memory_of(tensor) in self.given:
            self._filled = {index} if self._filled is None else self._filled | {index}
            self.last = self._last()
        if index == self.last or (self.last > index >= self.needed and holding.now):
            self.is_served = True
            if self._ends_early or self.region.is_running:
                self.is_stopped = True
                raise Stop  # See Rule 5
        return self._detached(tensor) if self.keeps else None  # See Rule 6

    def skip(self, tensor: Tensor) -> object:
        """Count the next saved tensor, and neither compare nor keep it."""
        self.count += 1
        if self.region.is_running and self.count > len(self.region.metadata):
            self._stop()
        return tensor.detach() if self.keeps else None  # See Rule 6

    def _stop(self) -> None:
        self.is_stopped = True
        # A recompute that nobody needs runs on, as it would without a difference: others may wait for what it sends.
        if self.needed >= 0:
            raise Stop  # See Rule 5

    def found(self, region: Recomputable) -> Tensor:
        """Return the one tensor that was asked for without an owner.

        Raises:
            MutationError: It was written in place since it was saved.
        """
        assert self._found is not None
        if self._found.is_written:
            raise written_in_region(region, self.needed, self._found)
        return self._found.tensor

    def ended(self) -> Difference | None:
        """Return the difference that was found, or is found now that no further tensor is saved."""
        if self.values is not None and self.difference is None:
            found = self.values.differs_at_end()
            if found is not None:
                self.difference = self._difference("values", found, self.region.metadata[found])
            else:
                self.values.ended()
        return self.difference

    def counted(self, kind: Kind, saved_then: int) -> Difference:
        """Return the difference between the numbers of saved tensors."""
        return Difference(kind=kind, saved_then=saved_then, saved_now=self.count)

    def returned(self, output: object) -> None:
        """Take the output of the last call, without its graph, whose hooks refer to this object."""
        found: list[Tensor] = []
        template = split(output, found, [])
        self.output = join(template, [self._detached(one) for one in found])

    def _last(self) -> int:
        """Return the save after which all needed tensors are filled."""
        last = self.needed
        while self._fresh and self._may_be_filled_later(last):
            last += 1
        return last

    def _may_be_filled_later(self, index: int) -> bool:
        # See NOTE [ What is written after it was saved ]
        fresh, filled, metadata = self._fresh, self._filled or (), self.region.metadata
        pairs = [(index, index + 1), (index, index - 1), (index - 1, index)]
        return any(
            one in fresh
            and one not in filled
            and other not in fresh
            and 0 <= other < len(metadata)
            and metadata[one][:3] == metadata[other][:3]
            for one, other in pairs
        )

    def _too_many(self) -> None:
        if not self.region.is_running:
            self.difference = self.counted("too many", len(self._slots))
        self._stop()

    def _differs(self, kind: Kind, index: int, now: Metadata) -> None:
        # Not raised here: user code could catch it, and a rerun finds the error.
        self.difference = self._difference(kind, index, now)
        self._stop()

    def _difference(self, kind: Kind, index: int, now: Metadata) -> Difference:
        then = self.region.metadata[index]
        return Difference(kind=kind, index=index, then=then, now=now, saved_then=len(self._slots), saved_now=self.count)


def unpack(packed: object) -> Tensor:
    """Return a saved tensor of the recomputed graph; only a backward inside the region asks for it."""
    if isinstance(packed, Tensor):
        return packed
    raise bug(f"the graph of a recompute was asked for its saved tensor {packed}")
