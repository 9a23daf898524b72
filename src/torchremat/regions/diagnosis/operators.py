"""The operator log: the operators that a region ran, their modules and lines, and the tensors that each one saved.

A dispatch mode sees the operators below autograd. Their origin is read from the Python stack, between the frame that
ran the region's body and the operator: so nothing is hooked, and nothing needs undoing.

Missing on purpose: the operators of compiled code. It runs eagerly under a mode, as `is_compiled` says.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage, nn

from torchremat._compat.autograd import noted_functions, saving_function
from torchremat._compat.dynamo import enters_compiled_code
from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types, sequence_number
from torchremat._compat.sharding import is_run_by_fsdp, shards_anything
from torchremat.frames import MODULE_CALL, OURS, TORCH, module_of, running
from torchremat.regions.selective.cache import written_by
from torchremat.regions.selective.op_info import op_info_of
from torchremat.state.code import function_of
from torchremat.tensors.held import holding
from torchremat.tensors.metadata import metadata_of, numbers_of, shape_of
from torchremat.tensors.structure import tensors_in
from torchremat.tensors.versioned import Versioned

if TYPE_CHECKING:
    from torchremat.tensors.metadata import Metadata

_FUNCTIONAL = nn.functional.__file__
_MACHINERY = tuple(
    str(Path(TORCH, *one.split("/"))) for one in ("_dynamo", "_compile.py", "_ops.py", "utils/_python_dispatch.py")
)
_CHECKPOINT = str(Path(TORCH, "utils", "checkpoint.py"))

# Hooks and regions call `detach` themselves, once or twice; it computes nothing. Nor do questions about the layout of a
# tensor, which a class in Python, such as a nested tensor, is asked by way of operators.
_SILENT = (
    *("aten.detach", "aten.alias", "prim.", "aten.sym_", "aten.size.", "aten.stride.", "aten.dim.", "aten.numel."),
    *("aten.storage_offset.", "aten.is_contiguous.", "aten.is_non_overlapping_", "aten.is_strides_like_"),
    *("aten._nested_tensor_size.", "aten._nested_tensor_st"),
)

# NOTE [ Which operator saves a tensor ]
# The hook gets a tensor and not the operator. An operator's node is made before it saves its inputs, and thus before
# the mode sees the operator; it saves its outputs afterwards. So a tensor that is saved while no node has been made
# since the last operator belongs to that operator, and a tensor saved after a new node belongs to the next operator.
# Nodes are numbered in the order in which they are made.


@dataclass(slots=True, eq=False)
class LoggedOperator:
    """One operator that ran.

    Attributes:
        name: As torch has it: `aten.mul.Tensor`; for a custom Function its name.
        function: The function of `torch.nn.functional` that called it, or "".
        module: The path of the innermost module that ran it, or "".
        source: File, line and function of the code that called it.
        inputs: Words for its input tensors.
        outputs: Words for its output tensors.
        reads: The data addresses of its input tensors.
        saves: The numbers of the tensors that autograd saved for it.
    """

    name: str
    function: str
    module: str
    source: Source
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    reads: tuple[int | None, ...] = ()
    saves: list[int] = field(default_factory=list[int])

    @property
    def key(self) -> tuple[object, ...]:
        """The part that two runs must have in common."""
        return (self.name, self.module, self.inputs, self.outputs)

    def __str__(self) -> str:
        saves = f" saves {', '.join(map(str, self.saves))}" if self.saves else ""
        where = f" in `{self.module}`" if self.module else ""
        return f"{self.title}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}{saves}{where} at {self.source}"

    @property
    def title(self) -> str:
        """Its name, with the function of `torch.nn.functional` that it is part of."""
        return f"{self.name} of F.{self.function}" if self.function else self.name


@dataclass(frozen=True, slots=True)
class Source:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        return f"{shown}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """The position of Python in the user's code.

    Attributes:
        source: The line of the user's code.
        module: The innermost module that runs there.
        function: The function of `torch.nn.functional` that was called there, or "".
        custom: The name of the custom Function that saves a tensor there, or None.
        is_compiled: Whether compiled code was called on the way there.
    """

    source: Source
    module: nn.Module | None
    function: str
    custom: str | None
    is_compiled: bool


_NOWHERE = Source("?", 0, "?")


class OperatorLog(EagerMode):
    """A log of the operators that run while a body runs in it.

    Args:
        names: The paths of modules, by id.
        digests: Whether to note a digest of each saved tensor's bytes, which waits for the device.
        restores: Whether to remember earlier tensors that are written, for `undo`.

    Attributes:
        operators: In the order in which they ran.
        metadata: Of the saved tensors, in order.
        savers: The operator that saved each of them; None while unknown.
        digests: Of the saved tensors, None for tensors without one.
        is_compiled: Whether compiled code ran, eagerly.
        storages: The storage address of each saved tensor.
        arguments: The addresses of the tensors that each body got.
        ends: How many tensors had been saved by the end of each body.
    """

    def __init__(
        self, names: Mapping[int, str], *, digests: bool = False, restores: bool = False, operators: bool = True
    ) -> None:
        super().__init__()
        self.names = names
        self.operators: list[LoggedOperator] = []
        self.metadata: list[Metadata] = []
        self.savers: dict[int, LoggedOperator] = {}
        self.digests: list[bytes | None] = []
        self.storages: list[int | None] = []
        self.is_compiled = False
        self._takes_digests = digests
        self._restores = restores
        self._sees_operators = operators
        self.arguments: list[list[int | None]] = []
        self.ends: list[int] = []
        self._root = ""  # the path of the module whose forward is the body: it is not on the stack
        self._is_paused = False
        self._made: WeakSet[UntypedStorage] = WeakSet()
        self._overwritten: list[tuple[UntypedStorage, UntypedStorage]] = []
        self._versions: list[Versioned] = []
        self._pending: list[int] = []
        self._sequence = -1
        self._outermost: FrameType | None = None
        self._beside_fsdp = shards_anything()

    def run(
        self, run: Callable[..., object], body: Callable[..., object], /, *args: object, **kwargs: object
    ) -> object:
        """Return the result of `run`, which is `body` or runs it, and log its operators.

        Args:
            run: Called with the arguments.
            body: The user's code.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        owner = getattr(function_of(body), "__self__", None)
        self._root = self.names.get(id(owner), "")
        self.arguments.append([_address(one) for one in tensors_in((args, kwargs))])
        self._outermost = sys._getframe()
        self._sequence = sequence_number()
        try:
            with noted_functions(), self if self._sees_operators else nullcontext():
                return run(*args, **kwargs)
        finally:
            self._outermost = None
            self.ends.append(len(self.metadata))

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        kwargs = kwargs or {}
        name = str(func)
        if self._is_paused or name.startswith(_SILENT):
            return func(*args, **kwargs)
        if self._beside_fsdp and is_run_by_fsdp(OperatorLog.run.__code__):
            return func(*args, **kwargs)  # it runs sometimes in the forward and sometimes in the recompute
        self._sequence = sequence_number()  # See NOTE [ Which operator saves a tensor ]
        place = self._place()
        operator = LoggedOperator(
            name, place.function, self.path(place.module), place.source, _shapes((args, dict(kwargs)))
        )
        self._settle(operator)
        self.operators.append(operator)
        if self._restores:
            self._remember(func, args, kwargs)
        result = func(*args, **kwargs)
        operator.reads = tuple(_address(one) for one in tensors_in((args, dict(kwargs))))
        operator.outputs = _shapes(result)
        if self._restores:
            self._made.update(_storages(result))
        self.ran(operator, place, func, args, kwargs, result)
        return result

    def ran(
        self,
        operator: LoggedOperator,
        place: SourcePlace,
        func: Operation,
        args: Args,
        kwargs: Mapping[str, object],
        result: object,
    ) -> None:
        """Record an operator that has run; for logs that record more than this one."""

    def saved(self, index: int, tensor: Tensor, place: SourcePlace) -> None:
        """Record where a tensor is saved; for logs that record more than this one."""

    def save(self, tensor: Tensor) -> None:
        """Record the next tensor that autograd saves."""
        index = len(self.metadata)
        metadata = metadata_of(tensor)
        self.metadata.append(metadata)
        self.digests.append(self._digest(tensor) if self._takes_digests else None)
        self.storages.append(_address(tensor))
        place = self._place(saving_function())
        self.saved(index, tensor, place)
        if holding.now:
            self.savers[index] = self._own("input of a region inside", place, index, metadata)
        elif place.custom is not None:
            self.savers[index] = self._own(place.custom, place, index, metadata)
        elif self.operators and sequence_number() == self._sequence:
            # See NOTE [ Which operator saves a tensor ]
            self.operators[-1].saves.append(index)
            self.savers[index] = self.operators[-1]
        else:
            self._pending.append(index)

    @property
    def newest_node(self) -> int:
        """The number of the last node that was made before the last operator."""
        return self._sequence - 1

    def undo(self) -> None:
        """Restore the values and versions of earlier tensors that were written."""
        for storage, before in reversed(self._overwritten):
            storage.copy_(before)
        for one in reversed(self._versions):
            one.reset()
        self._overwritten.clear()
        self._versions.clear()

    def _digest(self, tensor: Tensor) -> bytes | None:
        self._is_paused = True
        try:
            return _digest(tensor)
        finally:
            self._is_paused = False

    def _own(self, name: str, place: SourcePlace, index: int, metadata: Metadata) -> LoggedOperator:
        last = self.operators[-1] if self.operators else None
        if last is not None and last.name == name and last.source == place.source:
            last.saves.append(index)
            return last
        operator = LoggedOperator(
            name, "", self.path(place.module), place.source, (str(tuple(metadata[0])),), saves=[index]
        )
        self.operators.append(operator)
        return operator

    def _settle(self, operator: LoggedOperator) -> None:
        for index in self._pending:
            operator.saves.append(index)
            self.savers[index] = operator
        self._pending.clear()

    # ------------------------------------------------------------------------------------------------------- where

    def _place(self, custom: str | None = None) -> SourcePlace:
        source: Source | None = None
        within_torch: Source | None = None
        module: nn.Module | None = None
        function, is_compiled = "", False
        for frame in running():
            if frame is self._outermost:
                break
            code = frame.f_code
            if enters_compiled_code(code):
                self.is_compiled = is_compiled = True
            if code is MODULE_CALL:
                if module is None:
                    module = module_of(frame)
                continue
            if code.co_filename.startswith(OURS):
                continue
            if code.co_name == "save_inputs" and code.co_filename == _CHECKPOINT and source is None:
                custom = "checkpoint"  # which packs its inputs by itself, without a node
            if not code.co_filename.startswith(TORCH):
                source = source or _source(frame)
            elif source is None:
                if code.co_filename == _FUNCTIONAL and not function:
                    function = code.co_name
                if not code.co_filename.startswith(_MACHINERY):
                    within_torch = within_torch or _source(frame)
        return SourcePlace(source or within_torch or _NOWHERE, module, function, custom, is_compiled)

    def path(self, module: nn.Module | None) -> str:
        """Return the name of a module, or of the module whose forward is the body."""
        if module is None:
            return self._root
        return self.names.get(id(module), type(module).__name__)

    # ------------------------------------------------------------------------------------------------------ writes

    def _remember(self, func: Operation, args: Args, kwargs: Mapping[str, object]) -> None:
        written = written_by(op_info_of(func).writes, args, kwargs)
        self._versions += map(Versioned, written)
        for storage in _storages(written):
            if storage not in self._made:
                self._made.add(storage)
                self._overwritten.append((storage, storage.clone()))


def _source(frame: FrameType) -> Source:
    return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def _storages(value: object) -> list[UntypedStorage]:
    # Sparse tensors and some wrappers have none.
    return [one.untyped_storage() for one in tensors_in(value) if _address(one) is not None]


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def _shapes(value: object) -> tuple[str, ...]:
    return tuple(f"{str(one.dtype).removeprefix('torch.')}{[*numbers_of(shape_of(one))]}" for one in tensors_in(value))


def _digest(tensor: Tensor) -> bytes | None:
    """Return a digest of a tensor's bytes, None if its bytes cannot be read."""
    try:
        with torch.no_grad():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return hashlib.blake2b(data.tobytes(), digest_size=16).digest()
    except (NotImplementedError, RuntimeError, TypeError):
        return None
