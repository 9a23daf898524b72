"""A watched forward of the user's step: the saved tensors, where they are saved, and the operators that ran.

    run         under                                  gives
    1. logged   hooks, module calls, the operator log  everything, unless compiled code ran: then it ran eagerly
    2. warm     nothing                                nothing: compiles         (only after compiled code in 1)
    3. plain    hooks and module calls                 saves and their places    (only after compiled code in 1)

The hooks pack a small object that autograd alone owns. So the objects alive at the end of the forward are the tensors
that autograd keeps, without tensors that it saved and dropped on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks
from torchremat._compat.modes import except_traced
from torchremat._compat.transforms import beside_transforms, transforms_beside_hooks
from torchremat.errors import MutationError
from torchremat.measuring.modules import ModuleCall, ModuleCalls, module_calls, names_of
from torchremat.measuring.storages import StorageNumbers
from torchremat.regions.diagnosis.operators import LoggedOperator, OperatorLog, Source, SourcePlace
from torchremat.tensors.held import holding
from torchremat.tensors.metadata import Metadata, metadata_of, version_of
from torchremat.tensors.structure import split

if TYPE_CHECKING:
    from collections.abc import Generator

    from torchremat.measuring.runs import Subject

BeforeKind = Literal["parameter", "buffer", "input"]

# Operators whose result has the values of their first argument, possibly rounded to another dtype.
_COPIES = ("aten._to_copy.", "aten.clone.", "aten._reshape_copy.", "aten.lift_fresh_copy.")


class SavedPlaceholder:
    """The object that autograd holds in place of a tensor while a step is watched."""

    __slots__ = ("__weakref__", "index", "tensor", "version")

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index = index
        # Without its graph: an output that its own node saves would hold the node that holds it.
        self.tensor = tensor.detach()
        self.version = version_of(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Where a tensor was saved.

    Attributes:
        source: The line of code.
        module: The name of the innermost module that ran.
        call: The number of the innermost call of a module.
        custom: The name of the custom Function that saved it; "" if it was none.
        is_compiled: Whether compiled code was on the call stack.
        is_input: Whether a region holds it, as its input.
        storages: Its storages.
        position: The number of operators that had run.
    """

    source: Source
    module: str
    call: int | None
    custom: str
    is_compiled: bool
    is_input: bool
    storages: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanOperator:
    """An operator that ran, with the data that a policy may ask for.

    Attributes:
        operator: Its place in the log.
        function: The operator itself.
        call: The number of the innermost call of a module.
        arguments: Its arguments, with placeholders for tensors.
        tensors: The metadata of the tensors among the arguments.
        result: Its result, with placeholders for tensors.
        outputs: The metadata of the tensors in the result.
        storages: The storages of these tensors.
        casts_weight: Whether it is autocast's cast of a parameter, which policies are not asked about.
    """

    operator: LoggedOperator
    function: Callable[..., object]
    call: int | None
    arguments: object
    tensors: tuple[Metadata, ...]
    result: object
    outputs: tuple[Metadata, ...]
    storages: tuple[int, ...]
    casts_weight: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PriorTensor:
    """A tensor that existed before the step."""

    kind: BeforeKind
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A storage that an operator filled with the values of another one, at these versions."""

    source: int
    source_version: int
    version: int
    operator: LoggedOperator


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLog:
    """The record of a step, without any tensor.

    Attributes:
        roots: The names of models, which policies do not see.
        before: The storages that existed before the step.
        parameters: The storages of parameters among `before`.
        calls: The calls of modules, in the order in which they began.
        sizes: The bytes of storages, by number.
        operators: Operators that ran, in order; none if compiled code ran.
        saves: The tensors that autograd saved, in order, kept to the end or not.
        kept: For each entry of the report its storages, and the innermost module call that created it.
        is_compiled: Whether compiled code ran.
    """

    roots: frozenset[str]
    before: frozenset[int]
    parameters: frozenset[int]
    calls: list[ModuleCall]
    sizes: list[int]
    operators: list[RanOperator] = field(default_factory=list[RanOperator])
    saves: list[Save] = field(default_factory=list[Save])
    kept: tuple[tuple[tuple[int, ...], int | None], ...] = ()
    is_compiled: bool = False

    def around(self, call: int | None) -> Iterable[int]:
        """Yield a call, its caller, and so on outward."""
        while call is not None:
            yield call
            call = self.calls[call].parent

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Return the bytes of storages that the step made; storages in a store have negative numbers."""
        return sum(self.sizes[one] for one in storages if one >= 0 and one not in self.before)


class SaveLog(OperatorLog):
    """The operator log of a step whose graph is still alive, with the data for a report of its saved tensors.

    It has the operators unless compiled code ran.

    Attributes:
        step: The record so far.
        result: The result of the step.
        numbers: The storages.
        before: By storage, a tensor from before the step, and its kind: parameter, buffer or input.
        packed: The packed object of each saved tensor, as long as autograd holds it.
        copied: By storage, the source that it is a copy of.
        by_node: By the number of a node, the operator that created it.
        unpacks: How often autograd has asked for a tensor.
    """

    def __init__(
        self,
        models: tuple[nn.Module, ...],
        numbers: StorageNumbers,
        calls: ModuleCalls,
        before: Mapping[int, PriorTensor],
        *,
        operators: bool,
    ) -> None:
        super().__init__({id(module): name for module, name in names_of(models).items()}, operators=operators)
        self.step = StepLog(
            roots=frozenset(type(model).__name__ for model in models),
            before=frozenset(before),
            parameters=frozenset(number for number, one in before.items() if one.kind == "parameter"),
            calls=calls.calls,
            sizes=numbers.sizes,
        )
        self.numbers = numbers
        self.before = before
        self.result: object = None
        self.packed: list[ReferenceType[SavedPlaceholder]] = []
        self._calls = calls
        self.copied: dict[int, Copied] = {}
        self.by_node: dict[int, RanOperator] = {}
        self.unpacks = 0

    def take_result(self) -> object:
        """Return the step's result, and drop the reference to it."""
        result, self.result = self.result, None
        return result

    @property
    def has_compiled(self) -> bool:
        """Whether compiled code ran."""
        return self.is_compiled or any(save.is_compiled for save in self.step.saves)

    def pack(self, tensor: Tensor) -> SavedPlaceholder:
        """Pack a tensor that autograd saves: the hook."""
        packed = SavedPlaceholder(len(self.step.saves), tensor)
        self.packed.append(ref(packed))
        self.save(tensor)
        return packed

    def unpack(self, packed: SavedPlaceholder | Tensor) -> Tensor:
        """Unpack a tensor, for a backward that the step itself runs: the hook.

        Raises:
            MutationError: The tensor was written in place since.
        """
        if isinstance(packed, Tensor):
            return packed  # See NOTE [ What is traced in a region ]
        self.unpacks += 1
        now = version_of(packed.tensor)
        if now != packed.version:
            shape, where = tuple(packed.tensor.shape), self.step.saves[packed.index].source
            raise MutationError(
                f"a tensor of shape {shape} that autograd saved at {where} was written in place before the step's own "
                f"backward: it was at version {packed.version} and is at {now} now. Plain autograd refuses this as "
                "well; make the operation out of place."
            )
        return packed.tensor

    def saved(self, index: int, tensor: Tensor, place: SourcePlace) -> None:
        """Note where a tensor is saved."""
        self.step.saves.append(
            Save(
                source=place.source,
                module=self.path(place.module),
                call=self._calls.current,
                custom=place.custom or "",
                is_compiled=place.is_compiled,
                is_input=holding.now,
                storages=self.numbers.of(tensor),
                position=len(self.step.operators),
            )
        )

    def ran(
        self,
        operator: LoggedOperator,
        place: SourcePlace,
        func: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
    ) -> None:
        """Note an operator with all data that a policy may ask for."""
        tensors: list[Tensor] = []
        outputs: list[Tensor] = []
        arguments = split((args, dict(kwargs)), tensors, [])
        template = split(result, outputs, [])
        ran = RanOperator(
            operator=operator,
            function=func,
            call=self._calls.current,
            arguments=arguments,
            tensors=tuple(metadata_of(one) for one in tensors),
            result=template,
            outputs=tuple(metadata_of(one) for one in outputs),
            storages=self.numbers.of(outputs),
            casts_weight=_casts_weight(operator, tensors),
        )
        self.step.operators.append(ran)
        if torch.is_grad_enabled():  # without grad no nodes are created; foreign hooks run that way, inside an operator
            self.by_node.setdefault(self.newest_node, ran)
        if operator.name.startswith(_COPIES) and len(outputs) == 1 and tensors:
            sources, copies = self.numbers.of(tensors[0]), self.numbers.of(outputs)
            if len(sources) == len(copies) == 1 and sources != copies:
                self.copied[copies[0]] = Copied(
                    source=sources[0],
                    source_version=version_of(tensors[0]),
                    version=version_of(outputs[0]),
                    operator=operator,
                )


def _casts_weight(operator: LoggedOperator, tensors: list[Tensor]) -> bool:
    # A mode cannot see whether autocast is on: autocast is off while it casts.
    return (
        operator.name == "aten._to_copy.default" and bool(tensors) and tensors[0].requires_grad and tensors[0].is_leaf
    )


@contextmanager
def watched(subject: Subject, *, operators: bool) -> Generator[SaveLog]:
    """Run the forward of a step for the block; afterwards model, gradients, buffers and generators are as before.

    Args:
        subject: The step.
        operators: Whether operators are logged, and compiled code runs eagerly.

    """
    with subject.untouched(looks=operators):
        numbers = StorageNumbers()
        before = _before(subject, numbers)
        with module_calls(subject.models, numbers) as calls:
            log = SaveLog(subject.models, numbers, calls, before, operators=operators)

            def run() -> object:
                with transforms_beside_hooks():
                    push_saved_tensor_hooks(beside_transforms(except_traced(log.pack)), log.unpack)
                    try:
                        return subject.run()
                    finally:
                        pop_saved_tensor_hooks()

            log.result = log.run(run, subject.step)
        yield log


def _before(subject: Subject, numbers: StorageNumbers) -> dict[int, PriorTensor]:
    kinds: dict[BeforeKind, list[Tensor]] = {
        "parameter": [one for model in subject.models for one in model.parameters()],
        "buffer": [one for model in subject.models for one in model.buffers()],
        "input": list(subject.inputs),
    }
    found: dict[int, PriorTensor] = {}
    for kind, tensors in kinds.items():
        for tensor in tensors:
            for number in numbers.of(tensor):
                found.setdefault(number, PriorTensor(kind=kind, tensor=tensor))
    return found
