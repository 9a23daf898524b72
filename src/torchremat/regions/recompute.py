"""One recompute: a region's calls run again, for the tensors that autograd saves in them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, set_grad_mode
from torchremat._compat.compiled_autograd import in_compiled_backward
from torchremat._compat.modes import except_traced, modes_now
from torchremat.errors import MutationError, TorchrematError, UnsupportedError, bug
from torchremat.regions.calls import Call, Source
from torchremat.regions.diagnosis.differences import DivergedError
from torchremat.regions.diagnosis.operators import OperatorLog
from torchremat.regions.refilling import Refill, Stop, unpack
from torchremat.regions.restoring import Restored, run_again
from torchremat.regions.rules import ended, last_uses
from torchremat.regions.selective.forward import ChosenRecompute
from torchremat.regions.selective.kept import memory_of
from torchremat.regions.sessions import Session
from torchremat.regions.settings import Observer
from torchremat.regions.threads import Now, thread
from torchremat.state.containers import ContainerCopies
from torchremat.state.reading import WrittenError
from torchremat.tensors.held import ChangedError
from torchremat.tensors.packed import DIFFERENTIATED
from torchremat.tensors.structure import join, place_of, split
from torchremat.tensors.versioned import changed_input

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack

# NOTE [ What a recompute leaves behind ]
# User code may keep an output of a recompute, for example in a hook that collects outputs in a list found by a context
# variable. The graph of that output keeps the hooks of the recompute for its whole life, as autograd keeps both hooks
# of a saved tensor, and the inner regions. The hooks refer to a region, which refers to the context, and so to the
# list: a cycle through autograd, which the cycle collector does not see. So
#
#   1. a recompute finds copies of the containers in context variables, the same copies in all its calls, and when it
#      has run they hold their earlier contents again: an inner region may read them in its own recompute;
#   2. a recompute releases its region when it has run, as user code can keep an output in other places.


class RegionRecompute(Refill):
    """One run of a region's calls for the tensors that they save.

    Attributes:
        log: Gets the operators, if they are logged.
        checks: Whether to stop at the first difference. If False, nothing is kept, and the calls always run to their
            end.
        observer: Of the region, if it has one.
    """

    __slots__ = ("_copies", "checks", "log", "observer")

    def end(self) -> None:
        """Release the region. See NOTE [ What a recompute leaves behind ], 2."""
        del self.region, self.key, self.log, self.observer, self._copies

    def run(self, log: OperatorLog | None = None, observer: Observer | None = None, *, checks: bool = True) -> None:
        """Run the calls, and let the tensors that they save wait in their slots.

        Raises:
            DivergedError: They save other tensors than in the forward.
            MutationError: An input or parameter was changed in place since the forward.
        """
        self.log, self.observer, self.checks = log, observer, checks
        self._copies = ContainerCopies()  # See NOTE [ What a recompute leaves behind ], 1
        region = self.region
        calls = list(region.calls)
        # One call passes nothing on.
        last_use = last_uses([call.sources for call in calls]) if len(calls) > 1 else None
        links: dict[Source, Tensor] = {}
        number = 0
        had_grad = torch.is_grad_enabled()
        if had_grad and not thread.now.recomputing and in_compiled_backward():
            raise UnsupportedError(DIFFERENTIATED)  # a graph that dynamo has given up, and runs as it is
        # See Rule 3; active hooks are covered by those of the recompute
        had = thread.begin(Now(thread.now.recomputing + 1, is_partial=self.only is None and self.filled.start > 0))
        set_grad_mode(True)
        try:
            for number, call in enumerate(calls):
                self._run_call(call, number, links)
                if self.is_stopped or call.is_running:
                    break  # a call in its first run has not saved everything yet, and may save nothing more
                if self.count != call.slots and self.checks:
                    raise DivergedError(number, self.counted("too few", call.slots))
                for source in () if last_use is None else ended(links, last_use, number):
                    del links[source]
        finally:
            set_grad_mode(had_grad)
            thread.end(had)
            if self._copies:
                self._copies.put_back()
        difference = self.difference if self.values is None else self.ended()
        if difference is not None:
            raise DivergedError(number, difference)
        if self.count <= self.needed:
            raise DivergedError(number, self.counted("too few", len(region.metadata)))

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
        restored = Restored(call, without_gradients=self.keeps)
        self.written = restored.written
        own = self.pack
        run, pack = partial(run_again, call, self._copies, restored.written), own
        if self.log is not None:
            run, pack = partial(self.log.run, run, call.body), partial(self._pack_logged, self.log)
        if self.observer is not None:
            self.observer.reruns(region, number)
            pack = partial(self._pack_told, pack)
        if pack is not own:
            pack = except_traced(pack)
        replay = None
        if call.selection is not None and self.checks:
            # The recompute of an input pass serves the weight passes after it. See NOTE [ Selective recompute ], 5
            is_last = self.task is not None or (isinstance(self.key, Session) and self.key.recomputes_once)
            takes = is_last and self.only is None and not thread.now.is_partial and not call.is_running
            replay = ChosenRecompute(call.selection, takes=takes, is_running=call.is_running)
            run, pack = partial(replay.run, run), replay.hook(pack, self)
        else:
            thread.now.inner = None  # left for another recompute or call to take over
        self.began = modes_now()
        push_saved_tensor_hooks(pack, unpack)
        try:
            output = run(*args, **kwargs)
            if self.observer is not None and not self.is_stopped:
                self.observer.returned(region, number, output)
        except Stop:
            pass
        except (KeyboardInterrupt, SystemExit):
            raise
        except WrittenError as error:
            error.__traceback__ = None  # its frames have the region
            raise MutationError(call.words(error, region.name(number))) from None
        except BaseException as error:
            # The exception here need not be the `Stop`: TorchScript makes a RuntimeError of it, user code anything.
            if not self.is_stopped:
                if isinstance(error, RuntimeError) and _WRITES_TO_LEAF in str(error):
                    raise MutationError(self._writes_to_input(number)) from error
                self._note(error, number)
                raise
        finally:
            pop_saved_tensor_hooks()
            self.given = ()
            restored.close()
            if replay is not None:
                replay.check(region, number)
        for tensor in restored.wrote:
            name = call.name_of(tensor) or f"a tensor of shape {tuple(tensor.shape)}"
            raise MutationError(
                f"{region.name(number)}: its recompute wrote `{name}` in place, as its forward does, and a "
                "parameter or a large tensor is not copied before. So it is written twice. Write out of place, write "
                "to it outside of the region, or name the object or module that holds it in `guard=[...]`."
            )
        if number + 1 == len(region.calls) or self.is_stopped:
            if self.returns:
                self.returned(output)
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
                    links[source] = self.region.held[source].unpack()
                except ChangedError as error:
                    raise self._changed_input(call, number, len(found), error) from None
                if self.observer is not None:
                    self.observer.given(self.region, number, len(found), links[source])
            found.append(links[source])
        return found

    def _pack_told(self, pack: Pack, tensor: Tensor) -> object:
        region, observer, index = self.region, self.observer, self.count
        assert observer is not None
        try:
            return pack(tensor)
        finally:
            if self.count > index:
                observer.filled(region, index, tensor, ends=self.is_served)

    def _pack_logged(self, log: OperatorLog, tensor: Tensor) -> object:
        if self.is_stopped:
            return None
        log.save(tensor)
        return self.pack(tensor) if self.checks else self.skip(tensor)

    # ------------------------------------------------------------------------------------------------------ words

    def _writes_to_input(self, number: int) -> str:
        return (
            f"{self.region.name(number)}: an input that requires grad is written in place in the region. The "
            "recompute has a leaf in its place, which cannot be written. Write to a clone of the input."
        )

    def _changed_input(self, call: Call, number: int, place: int, error: ChangedError) -> MutationError:
        found = place_of(call.template, place) or ""
        where = f"args{found[3:]}" if found.startswith("[0]") else f"kwargs{found[3:]}"
        return changed_input(f"{self.region.name(number)}: its input {where}", error.before, error.now)


_RAISED = "This was raised in the recompute"
# The words of autograd, for a leaf as for a view of one.
_WRITES_TO_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
