"""One recompute: a region's calls run again, for the tensors that autograd saves in them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, retains_graph, set_grad_mode
from torchremat._compat.compiled_autograd import in_compiled_backward
from torchremat._compat.graphs import outside_graphs
from torchremat._compat.modes import count_dispatch_modes, except_traced, is_traced_since, left_alone, modes_now
from torchremat.errors import MutationError, TorchrematError, UnsupportedError, bug
from torchremat.regions.diagnosis.differences import Difference, DivergedError, Kind
from torchremat.regions.rules import ended, last_needed, last_uses
from torchremat.regions.selective.forward import ChosenRecompute
from torchremat.regions.selective.kept import memory_of
from torchremat.regions.sessions import Session
from torchremat.regions.slots import waits, written_since
from torchremat.regions.threads import Now, thread
from torchremat.regions.values import ValueCheck
from torchremat.state.containers import ContainerCopies
from torchremat.state.reading import WrittenError, WrittenTensors
from torchremat.tensors.held import ChangedError, holding
from torchremat.tensors.metadata import Metadata, agree, metadata_of
from torchremat.tensors.packed import DIFFERENTIATED
from torchremat.tensors.structure import join, place_of, split

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack
    from torchremat.regions.calls import Call
    from torchremat.regions.diagnosis.operators import OperatorLog
    from torchremat.regions.inputs import Source
    from torchremat.regions.region import Region
    from torchremat.regions.settings import Observer
    from torchremat.regions.slots import Key

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

# NOTE [ What a recompute leaves behind ]
# User code may keep an output of a recompute, for example in a hook that collects outputs in a list found by a context
# variable. The graph of that output keeps the hooks of the recompute for its whole life, as autograd keeps both hooks
# of a saved tensor, and the inner regions. The hooks refer to a region, which refers to the context, and so to the
# list: a cycle through autograd, which the cycle collector does not see. So
#
#   1. a recompute finds copies of the containers in context variables, the same copies in all its calls, and when it
#      has run they hold their earlier contents again: an inner region may read them in its own recompute;
#   2. a recompute releases its region when it has run, as user code can keep an output in other places.


class _Stop(BaseException):
    """Ends a recompute at its last needed tensor.

    Not an `Exception`: user code that swallows exceptions must not swallow it.
    """


class RegionRecompute:
    """One run of a region's calls for the tensors that they save.

    Args:
        region: The region.
        key: The owner of the tensors; None if a tensor is asked for outside any backward.
        only: The number of the one slot that is asked for; None for all that are alive.
        log: Gets the operators.
        checks: Whether to stop at the first difference. If False, nothing is kept, and the calls always run to their
            end.
    """

    __slots__ = (
        "_found",
        "began",
        "checks",
        "copies",
        "count",
        "difference",
        "filled",
        "given",
        "is_served",
        "is_stopped",
        "keeps",
        "key",
        "last",
        "log",
        "metadata",
        "needed",
        "only",
        "region",
        "task",
        "values",
        "written",
    )

    def __init__(
        self,
        region: Region,
        key: Key | None,
        only: int | None,
        log: OperatorLog | None = None,
        *,
        checks: bool = True,
    ) -> None:
        self.region = region
        self.key = key
        self.task = key if isinstance(key, int) and not retains_graph() else None
        self.only = only
        slots = region.slots
        needed = -1
        if checks:
            needed = only if only is not None else last_needed(len(slots), lambda index: waits(slots[index]()))
        self.needed = self.last = needed
        self.filled: set[int] = set()
        self.given: list[UntypedStorage] = []  # the memory of the arguments of the call that runs, if it matters
        if region.fresh:
            self.last = self._last()
        self.count = 0
        self.metadata = region.metadata if region.settings.check != "none" else None
        self.values = None
        self.written: WrittenTensors | None = None  # see NOTE [ What is saved without being read ]
        if region.fingerprints is not None and checks:
            self.values = ValueCheck(region.name(0), region.fingerprints, region.metadata)
        self.keeps = region.runs_backward  # See Rule 6
        self.is_served = False
        self.is_stopped = False
        self.difference: Difference | None = None
        self.log = log
        self.checks = checks
        self.copies = ContainerCopies()  # See NOTE [ What a recompute leaves behind ], 1
        self._found: tuple[Tensor, int] | None = None

    def found(self, region: Region) -> Tensor:
        """Return the one tensor of a region that was asked for without an owner.

        Raises:
            MutationError: It was written in place since it was saved.
        """
        assert self._found is not None
        tensor, version = self._found
        if tensor._version != version:
            raise written_since(region, tensor, version, self.needed)
        return tensor

    def end(self) -> None:
        """Release the region. See NOTE [ What a recompute leaves behind ], 2."""
        del self.region, self.key

    def _last(self) -> int:
        """Return the save after which all needed tensors are filled."""
        region = self.region
        last = self.needed
        while region.fresh and self._may_be_filled_later(last):
            last += 1
        return last

    def _may_be_filled_later(self, index: int) -> bool:
        # See NOTE [ What is written after it was saved ]
        fresh, metadata = self.region.fresh, self.region.metadata
        pairs = [(index, index + 1), (index, index - 1), (index - 1, index)]
        return any(
            one in fresh
            and one not in self.filled
            and other not in fresh
            and 0 <= other < len(metadata)
            and metadata[one][:3] == metadata[other][:3]
            for one, other in pairs
        )

    def run(self) -> None:
        """Run the calls, and let the tensors that they save wait in their slots.

        Raises:
            DivergedError: They save other tensors than in the forward.
            MutationError: An input or parameter was changed in place since the forward.
        """
        region = self.region
        made = list(region.made)
        # One call passes nothing on.
        last_use = last_uses([call.sources for call in made]) if len(made) > 1 else None
        links: dict[Source, Tensor] = {}
        number = 0
        had_grad = torch.is_grad_enabled()
        if had_grad and not thread.now.recomputing and in_compiled_backward():
            raise UnsupportedError(DIFFERENTIATED)  # a graph that dynamo has given up, and runs as it is
        # See Rule 3; active hooks are covered by those of the recompute
        had = thread.begin(Now(thread.now.recomputing + 1))
        set_grad_mode(True)
        try:
            for number, call in enumerate(made):
                self._run_call(call, number, links)
                if self.is_stopped or call.is_running:
                    break  # a call in its first run has not saved everything yet, and may save nothing more
                if self.count != call.slots and self.checks:
                    raise DivergedError(number, self._counted("too few", call.slots))
                for source in () if last_use is None else ended(links, last_use, number):
                    del links[source]
        finally:
            set_grad_mode(had_grad)
            thread.end(had)
            if self.copies:
                self.copies.put_back()
        if self.values is not None and self.difference is None:
            found = self.values.differs_at_end()
            if found is not None:
                self.difference = self._difference("values", found, region.metadata[found])
            else:
                self.values.ended()
        if self.difference is not None:
            raise DivergedError(number, self.difference)
        if self.count <= self.needed:
            raise DivergedError(number, self._counted("too few", len(region.slots)))

    def _run_call(self, call: Call, number: int, links: dict[Source, Tensor]) -> None:
        region = self.region
        tensors = self._inputs(call, number, links)
        if self.last > self.needed:
            self.given = [memory for one in tensors if (memory := memory_of(one)) is not None]
        # As the template was made.
        args, kwargs = join(call.template, tensors)  # pyright: ignore[reportGeneralTypeIssues]
        del tensors
        output = None
        # The forward's own backward has left its gradients; the recompute's gradients are discarded. See Rule 6
        restored = call.restored(without_gradients=self.keeps)
        self.written = restored.written
        run, pack = partial(call.run_again, self.copies, restored.written), self.pack
        if self.log is not None:
            run, pack = partial(self.log.run, run, call.body), self._pack_logged
        observer = region.settings.observer if self.checks else None
        if observer is not None:
            observer.reruns(region, number)
            pack = partial(self._pack_told, observer, pack)
        replay = None
        if call.selection is not None and self.checks:
            # The recompute of an input pass serves the weight passes after it. See NOTE [ Selective recompute ], 5
            is_last = self.task is not None or (isinstance(self.key, Session) and self.key.recomputes_once)
            takes = is_last and self.only is None and not call.is_running
            replay = ChosenRecompute(call.selection, takes=takes, is_running=call.is_running)
            run, pack = partial(replay.run, run), replay.hook(pack)
        else:
            thread.now.inner = None  # left for another recompute or call to take over
        self.began = modes_now()
        push_saved_tensor_hooks(pack if pack == self.pack else except_traced(pack), self.unpack)
        try:
            output = run(*args, **kwargs)
        except _Stop:
            pass
        except (KeyboardInterrupt, SystemExit):
            raise
        except WrittenError as error:
            error.__traceback__ = None  # its frames have the region
            raise MutationError(call.words(error, region.name(number))) from None
        except BaseException as error:
            # The exception here need not be the `_Stop`: TorchScript makes a RuntimeError of it, user code anything.
            if not self.is_stopped:
                if isinstance(error, RuntimeError) and _WRITES_TO_LEAF in str(error):
                    raise MutationError(self._writes_to_input(number)) from error
                self._note(error, number)
                raise
        finally:
            pop_saved_tensor_hooks()
            self.given = []
            restored.close()
            if replay is not None:
                replay.check(region.name(number))
        for tensor in restored.wrote:
            name = call.name_of(tensor) or f"a tensor of shape {tuple(tensor.shape)}"
            raise MutationError(
                f"{region.name(number)}: its recompute wrote `{name}` in place, as its forward does, and a parameter "
                "or a large tensor is not copied before. So it is written twice. Write out of place, write to it "
                "outside of the region, or name the object or module that holds it in `guard=[...]`."
            )
        if observer is not None and not self.is_stopped:
            observer.returned(region, number, output)
        if number + 1 == len(region.made) or self.is_stopped:
            return
        del args, kwargs
        outputs: list[Tensor] = []
        split(output, outputs, [])
        for place, tensor in enumerate(outputs):
            # A link stays attached: a later call may write to it in place, and a leaf that requires grad refuses that.
            links[number, place] = tensor

    def _note(self, error: BaseException, number: int) -> None:
        """Add a note to an error of user code that it comes from a recompute, with the name of the innermost region."""
        if not (isinstance(error, TorchrematError) or any(_RAISED in note for note in getattr(error, "__notes__", ()))):
            error.add_note(f"{_RAISED} of {self.region.name(number)}, whose forward had not raised.")

    def _inputs(self, call: Call, number: int, links: dict[Source, Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for source in call.sources:
            if source not in links:
                if isinstance(source, tuple):
                    raise bug(f"call {number} links to output {source}, which the recompute does not have")
                try:
                    links[source] = self.region.inputs.held[source].unpack()
                except ChangedError as error:
                    raise MutationError(self._changed_input(call, number, len(found), error)) from None
                if self.region.settings.observer is not None and self.checks:
                    self.region.settings.observer.given(self.region, number, len(found), links[source])
            found.append(links[source])
        return found

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
        region = self.region
        slots = region.slots
        if index >= len(slots):
            self._too_many()
        if self.metadata is not None:
            then = self.metadata[index]
            try:
                now = tensor.shape, tensor.dtype, tensor.device, tensor.stride()
            except RuntimeError:
                now = metadata_of(tensor)
            if then != now and not agree(then, now):
                self._differs("metadata", index, now)
            if self.values is not None:
                found = self.values.differs(tensor, is_fresh=index in region.fresh)
                if found is not None:
                    self._differs("values", found, region.metadata[found])
        if self.only is None or index == self.only:
            # Without its `grad_fn`, which would keep the recomputed graph.
            value = tensor if tensor.is_leaf else region.detached(tensor)
            slot = slots[index]()
            if self.key is None:
                self._found = value, value._version
            elif slot is not None and slot.value is None:
                if self.task is None or (slot.task is not None and slot.task != self.task):
                    slot.put(self.key, value)
                else:
                    slot.tensor = value
                    slot.version = value._version
                    slot.task = self.task
        # The other cases: see NOTE [ What is written after it was saved ]
        if self.last > self.needed <= index + 1 and index in region.fresh and memory_of(tensor) in self.given:
            self.filled.add(index)
            self.last = self._last()
        if index == self.last or (self.last > index >= self.needed and holding.now):
            self.is_served = True
            if region.settings.early_stop or region.made[-1].is_running:
                self._stop()
        return region.detached(tensor) if self.keeps else None  # See Rule 6

    def _pack_told(self, observer: Observer, pack: Pack, tensor: Tensor) -> object:
        index = self.count
        try:
            return pack(tensor)
        finally:
            if self.count > index:
                observer.filled(self.region, index, tensor, ends=self.is_served)

    def _pack_logged(self, tensor: Tensor) -> object:
        assert self.log is not None
        if self.is_stopped:
            return None
        self.log.save(tensor)
        if self.checks:
            return self.pack(tensor)
        self.count += 1
        if self.region.made[-1].is_running and self.count > len(self.region.slots):
            self._stop()
        return tensor.detach() if self.keeps else None  # See Rule 6

    def _stop(self) -> NoReturn:
        self.is_stopped = True
        raise _Stop  # See Rule 5

    def unpack(self, packed: object) -> Tensor:
        """Return a saved tensor of the recomputed graph; only a backward inside the region asks for it."""
        if isinstance(packed, Tensor):
            return packed
        raise bug(f"the graph of a recompute was asked for its saved tensor {packed}")

    # ------------------------------------------------------------------------------------------------------ words

    def _too_many(self) -> NoReturn:
        if not self.region.made[-1].is_running:
            self.difference = self._counted("too many", len(self.region.slots))
        self._stop()

    def _differs(self, kind: Kind, index: int, now: Metadata) -> NoReturn:
        # Not raised here: user code could catch it, and a rerun finds the error.
        self.difference = self._difference(kind, index, now)
        self._stop()

    def _difference(self, kind: Kind, index: int, now: Metadata) -> Difference:
        region = self.region
        then = region.metadata[index]
        return Difference(
            kind=kind, index=index, then=then, now=now, saved_then=len(region.slots), saved_now=self.count
        )

    def _counted(self, kind: Kind, saved_then: int) -> Difference:
        return Difference(kind=kind, saved_then=saved_then, saved_now=self.count)

    def _writes_to_input(self, number: int) -> str:
        return (
            f"{self.region.name(number)}: an input that requires grad is written in place in the region. The recompute "
            "has a leaf in its place, which cannot be written. Write to a clone of the input."
        )

    def _changed_input(self, call: Call, number: int, place: int, error: ChangedError) -> str:
        found = place_of(call.template, place) or ""
        where = f"args{found[3:]}" if found.startswith("[0]") else f"kwargs{found[3:]}"
        return (
            f"{self.region.name(number)}: its input {where} was changed in place between forward and recompute: "
            f"version {error.before} then, {error.now} now. Recomputing would give wrong gradients. Make the change "
            "out of place, pass a clone, or run backward before it."
        )


_RAISED = "This was raised in the recompute"
# The words of autograd, for a leaf as for a view of one.
_WRITES_TO_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
