"""The watchers of a call's operators: the policy is asked in the forward, and a recompute gets kept outputs.

See NOTE [ Selective recompute ].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.autograd import is_accumulating
from torchremat._compat.collectives import answer_of, wait_for
from torchremat._compat.modes import Operation
from torchremat.ambient.generators import get_generator, set_generator
from torchremat.errors import CheckpointError, PolicyError
from torchremat.regions.decisions import RECOMPUTE, SAVE, Decision, ModuleNames, OperatorContext, Window, decision_of
from torchremat.regions.selective.cache import SeenWindow, Selection, written_by
from torchremat.regions.selective.kept import memory_of, tensors_in
from torchremat.regions.selective.op_info import OpInfo, known_op_info, op_info_of
from torchremat.regions.selective.windows import Args, Kwargs, Watching

_EVERYTHING = (Window(last=cast("int", math.inf)),)


class Collecting(Watching):
    """The forward of a call: a policy is asked about every operator.

    Args:
        selection: Gets the kept outputs, by its policy.
        names: The modules of the region.
        preserve_rng: Whether a recompute has to draw the same numbers as the forward.
    """

    def __init__(self, selection: Selection, names: ModuleNames, preserve_rng: bool) -> None:
        super().__init__(selection)
        asked = selection.asked
        assert asked is not None
        self._policy = asked.policy
        self._windows = _EVERYTHING if asked.asks_in is None else asked.asks_in
        self._last: float = -1  # of the window
        self._shift = 0  # from the numbers of operators that were seen to those of all
        self._decisions = asked.decisions
        self._names = names
        self._context: OperatorContext | None = None
        self._preserve_rng = preserve_rng
        self._keeps_pairs: bool | None = None
        self._produced: WeakKeyDictionary[UntypedStorage, _Produced] | None = (
            WeakKeyDictionary() if asked.reads_names else None
        )

    def _window(self, place: int) -> Window | None:
        return self._windows[place] if place < len(self._windows) else None

    def _open(self, window: Window) -> None:
        super()._open(window)
        start = len(self.selection.operators)
        self._last, self._shift = window.last, window.first - start
        self.selection.windows.append(SeenWindow(window.on, window.sees, start))

    def operator(self, operator: Operation, args: Args, kwargs: Kwargs) -> object:
        """Run an operator."""
        if self.is_done:
            return self.unasked(operator, args, kwargs)
        op_info = known_op_info.get(id(operator)) or op_info_of(operator)
        decisions = self._decisions
        decision = None if decisions is None else decisions.get(op_info)
        selection = self.selection
        operators = selection.operators
        if decision is RECOMPUTE and op_info.is_plain and self._produced is None:
            if op_info.is_counted:
                operators.append(op_info)  # as below, at less cost
            output = op_info.run(*args, **kwargs)
            if op_info.says_fresh:
                selection.watch(output)
            return output
        if op_info.is_ignored or (op_info.accumulates and is_accumulating(self.around)):
            return op_info.run(*args, **kwargs)
        index = len(operators)
        if op_info.is_counted:
            operators.append(op_info)
        written = ()
        if op_info.writes:
            written = written_by(op_info.writes, args, kwargs)
            selection.protect(written)
        output = op_info.run(*args, **kwargs)
        if op_info.says_fresh:
            selection.watch(output)
        if decision is None:
            decision = self._ask(index + self._shift, operator, output, *args, **kwargs)
            if decisions is not None:
                decisions[op_info] = decision
        if op_info.is_paired:
            self._check_pairs(op_info, decision)
        if decision is not RECOMPUTE:
            # Tensors made in inference mode have no versions.
            is_kept = op_info.is_kept and not torch.is_inference_mode_enabled()
            if is_kept and op_info.receives and decision is SAVE:
                selection.keep_received(index, list(written))
            elif is_kept and not op_info.receives and not _is_view(output, args, kwargs):
                if op_info.communicates and decision is not SAVE:
                    wait_for(output)
                draws = self._generator(output, kwargs) if op_info.is_random and self._preserve_rng else None
                selection.keep(index, output, decision, draws)
            else:
                for tensor in (*written, *tensors_in(output)):
                    selection.keep_memory(tensor, decision)
        if self._produced is not None and not torch.is_inference_mode_enabled():
            self._note(index, op_info, output, written)
        if len(operators) + self._shift > self._last:
            selection.windows[-1].end = len(operators)
            self._close()
        return output

    def _ask(self, index: int, operator: object, output: object, /, *args: object, **kwargs: object) -> Decision:
        context = self._context
        if context is None:
            context = self._context = OperatorContext(self._names)
        context.ordinal = index
        context.op_output = output
        answer = self._policy(context, operator, *args, **kwargs)
        context.op_output = None
        if answer is False:
            return RECOMPUTE
        return decision_of(answer, self._policy)

    def _check_pairs(self, op_info: OpInfo, decision: Decision) -> None:
        """Raise unless sends and receives are kept all or none. See NOTE [ What other processes have sent ]."""
        keeps = decision is SAVE
        if keeps and not op_info.is_kept:
            raise PolicyError(
                f"{op_info.name} cannot be kept: which process has sent what it received is known only when it runs. "
                "Name the source, or let the policy keep neither sends nor receives."
            )
        if self._keeps_pairs is not None and self._keeps_pairs is not keeps:
            raise PolicyError(
                f"the policy keeps {'' if keeps else 'no '}{op_info.name}, unlike another send or receive of this "
                "region. If one runs again and the other does not, a process waits for ever. Keep all or none, as "
                'save_operators("c10d.send", "c10d.recv_") does.'
            )
        self._keeps_pairs = keeps

    def _generator(self, output: object, kwargs: Kwargs) -> torch.Generator | torch.device:
        given = kwargs.get("generator")
        if given is not None:
            return cast("torch.Generator", given)
        device = tensors_in(output)[0].device
        return torch.default_generator if device.type == "cpu" else device

    # ------------------------------------------------------------------------------------------------------- names

    def named(self, operator: object, tensor: Tensor, name: str) -> None:
        """Ask about a named tensor."""
        if self._produced is None:
            return
        decision = self._ask(len(self.selection.operators), operator, tensor, tensor, name)
        memory = memory_of(tensor)
        if decision.kind == "recompute" or memory is None:
            return
        selection = self.selection
        found = self._produced.get(memory)
        if found is None or found.number in selection.kept or tensor._version != found.version:
            selection.keep_memory(tensor, decision)
            return
        # The operator's output, of which the tensor is a view.
        output = tensor.detach()
        if output.dtype != found.dtype:
            output = output.view(found.dtype)
        selection.keep(found.number, output.as_strided(found.shape, found.strides, found.offset), decision, None)

    def _note(self, index: int, op_info: OpInfo, output: object, written: Iterable[Tensor]) -> None:
        assert self._produced is not None
        for tensor in (*written, *tensors_in(output)):
            memory = memory_of(tensor)
            if memory is None or (not op_info.is_kept and not written and memory in self._produced):
                continue  # a view of another operator's output
            if op_info.is_kept and not written and not op_info.is_random and isinstance(output, Tensor):
                self._produced[memory] = _Produced(
                    index, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor._version
                )
            else:
                self._produced.pop(memory, None)


def _is_view(output: object, args: Args, kwargs: Kwargs) -> bool:
    """Return whether an operator has returned memory of its arguments without declaring it."""
    found = [memory for one in tensors_in(output) if (memory := memory_of(one)) is not None]
    for value in (*args, *kwargs.values()) if kwargs else args:
        for tensor in (value,) if type(value) is Tensor else tensors_in(value):
            if memory_of(tensor) in found:
                return True
    return False


class _Produced(NamedTuple):
    """An operator's only output, which may get a name later."""

    number: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    version: int


class Replaying(Watching):
    """A recompute of a call: kept outputs take the place of running their operators.

    Args:
        selection: The kept outputs.
        takes: Whether this is the last recompute, so that kept outputs are removed. See NOTE [ Selective recompute ],
            5.
        is_running: Whether the forward still runs, so that the recompute may get further than it.
    """

    def __init__(self, selection: Selection, *, takes: bool, is_running: bool = False) -> None:
        super().__init__(selection)
        self._operators = selection.operators
        self._kept = selection.kept
        self._takes = takes
        self._is_running = is_running
        self._count = 0
        self._end: int | None = None  # of the window
        selection.begin(takes=takes)
        self.difference: str | None = None

    def _window(self, place: int) -> SeenWindow | None:
        windows = self.selection.windows
        return windows[place] if place < len(windows) else None

    def _open(self, window: SeenWindow) -> None:
        super()._open(window)
        self._count, self._end = window.start, window.end

    def operator(self, operator: Operation, args: Args, kwargs: Kwargs) -> object:
        """Run an operator, or return its kept output."""
        index = self._count
        selection = self.selection
        operators = self._operators
        if self.is_done:
            return self.unasked(operator, args, kwargs)
        op_info = operators[index] if index < len(operators) else None
        if op_info is None or op_info.operator is not operator:
            op_info = op_info_of(operator)
            if not (
                self.difference
                or not op_info.is_counted
                or (self._is_running and index >= len(operators))
                or (op_info.accumulates and is_accumulating(self.around))
            ):
                self.difference = selection.difference(index, operator)
            return op_info.run(*args, **kwargs)
        if op_info.accumulates and is_accumulating(self.around):
            return op_info.run(*args, **kwargs)
        self._count = index + 1
        if index + 1 == self._end:
            self._close()
        kept = self._kept.get(index)
        if kept is not None:
            output = kept.again(selection)
            if output is None or self._takes:
                selection.drop(index)
            if output is not None:
                if kept.draws is not None:
                    self._move(*kept.draws)
                return self._receive(op_info, output, args, kwargs) if op_info.receives else output
            if op_info.communicates:
                raise CheckpointError(
                    f"{op_info.name}: what it received is kept by a policy, and has been written in place since the "
                    "region has ended. To run it again on this process alone would leave the others waiting. Write to "
                    "a copy, or let the policy not keep it."
                )
        if op_info.writes:
            selection.protect(written_by(op_info.writes, args, kwargs))
        return op_info.run(*args, **kwargs)

    def _receive(self, op_info: OpInfo, kept: object, args: Args, kwargs: Kwargs) -> object:
        """Give a collective's arguments what they received in the forward, and return what it returns."""
        received = cast("list[Tensor]", kept)
        written = written_by(op_info.writes, args, kwargs)
        is_same = [(one.shape, one.dtype) for one in written] == [(one.shape, one.dtype) for one in received]
        if not is_same or any(memory_of(one) is memory_of(value) for one, value in zip(written, received, strict=True)):
            older = "into memory that is older than the region, and may have been received into since"
            raise CheckpointError(
                f"{op_info.name}: what it received is kept by a policy, and the recompute receives "
                f"{older if is_same else 'other shapes'}. Receive into a tensor that the region itself makes, or let "
                "the policy not keep it."
            )
        self.selection.protect(written)
        for tensor, value in zip(written, received, strict=True):
            tensor.data.copy_(value)  # it moves no version, as the collective has not
        place, name = op_info.writes[0] if op_info.writes else (0, "")
        return answer_of(op_info.operator, args[place] if place < len(args) else kwargs.get(name), written)

    def _move(self, generator: torch.Generator | torch.device, state: Tensor) -> None:
        """Set a generator to the state after an operator that does not run again."""
        # See NOTE [ Selective recompute ], 6
        if self.moved is not None and generator not in self.moved:
            self.moved[generator] = get_generator(generator)
        set_generator(generator, state)

    def named(self, operator: object, tensor: Tensor, name: str) -> None:
        """No-op: the forward has decided."""

    def check(self, region: str) -> None:
        """Raise if the recompute has run other operators than the forward."""
        if self.difference is not None:
            raise CheckpointError(
                f"{region}: {self.difference}. Outputs are kept by a policy, and would have been given to the wrong "
                "operators. The function does not do the same twice: look for a branch on data or on state that has "
                "changed, a cache that the forward filled, a hook on modules that was not there in both, or remove the "
                "policy."
            )
