"""A step without data: copies of model, step and optimizer that hold fakes, and the machine that they run on.

The user's own objects are never converted. Modules and optimizers are deep-copied, with a fake for each tensor; a step
is rebuilt with copies of the objects that it visibly holds (see `measuring.step`). A tensor that a step finds elsewhere
is replaced when an operator meets it.

All fakes claim to be on the CPU, whatever device is described: without CUDA torch cannot run autograd on others. So
operators are those of the CPU, except the ones that `OnCuda` replaces.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchremat._compat.fakes import autocast_of_cuda, fake_mode
from torchremat._compat.modes import Args, Kwargs, Operation
from torchremat.errors import DeviceError, StepError, UnsupportedError
from torchremat.frames import PACKAGES
from torchremat.measuring.callers import reads_data
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.modules import has_compiled
from torchremat.measuring.optimizers import optimizers_in, parameters_of, with_wrapped
from torchremat.measuring.runs import Subject, subject_of
from torchremat.measuring.simulation import SimulatedRecorder, Simulation
from torchremat.measuring.step import global_names
from torchremat.measuring.storages import address_of
from torchremat.planning.devices.cuda import OnCuda
from torchremat.planning.devices.device import Device, device_of, is_described
from torchremat.planning.devices.kernels import Kernels, notice
from torchremat.planning.devices.machines import Here, Machine
from torchremat.planning.devices.overheads import Overheads
from torchremat.planning.layout import check_bare
from torchremat.planning.profiles.tracing import Step
from torchremat.tensors.parts import is_wrapper

_CPU = torch.device("cpu")
T = TypeVar("T")


class Fakes:
    """Makes fakes of tensors, the same fake for the same tensor, and copies of objects that hold tensors."""

    def __init__(self) -> None:
        self.mode = fake_mode(allow_non_fake_inputs=True)
        self._memo: dict[int, object] = {}
        self._bases: dict[int, Tensor] = {}
        self._kept: list[object] = []  # so that no id and no address is reused

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the fake of a tensor; fakes of views are views.

        Raises:
            UnsupportedError: It has no plain memory.
        """
        found = self._memo.get(id(tensor))
        if found is None:
            found = self._memo[id(tensor)] = self._made(tensor)
            self._kept.append(tensor)
        return cast("Tensor", found)

    def _made(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedError(
                f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} cannot be planned without running it. "
                "Plan where the step can run, without on='meta'."
            )
        if is_wrapper(tensor):
            raise UnsupportedError(
                f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}: tensors that wrap others cannot be planned "
                "without running them. Plan where the step can run, without on='meta'."
            )
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        with self.mode, torch.no_grad():
            base = self._bases.get(address_of(storage))
            if base is None:
                base = torch.empty(storage.nbytes() // size, dtype=tensor.dtype, device=_CPU)
                self._bases[address_of(storage)] = base
                self._kept.append(storage)
            if base.dtype is not tensor.dtype:
                base = base.view(tensor.dtype)
            fake = base.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset())).detach()
            if not tensor.is_leaf:
                return fake
            made = nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake
            made.requires_grad_(tensor.requires_grad)
            if tensor.grad is not None and tensor.grad.layout is torch.strided:
                made.grad = torch.empty_like(made, requires_grad=False)
            return made

    def met(self, tensor: Tensor) -> Tensor:
        """Return the fake of a tensor that an operator has met.

        Raises:
            UnsupportedError: It requires grad, so backward would write to the user's own tensor.
        """
        if tensor.requires_grad:
            raise UnsupportedError(
                f"the step uses a tensor of shape {tuple(tensor.shape)} that requires grad and that belongs neither "
                "to the model nor to the objects that the step holds visibly (closure, defaults, arguments of a "
                "partial, attributes, globals that its own code names). Let the step take it from one of these, so "
                "that it is replaced and not written to."
            )
        return self.tensor(tensor)

    def module(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module that holds fakes."""
        return self._copied(module, [*module.parameters(), *module.buffers()])

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return a copy of an optimizer of the fakes, and of the optimizer that it wraps."""
        return self._copied(
            optimizer, parameters_of(with_wrapped(optimizer)), whole=[optimizer, *optimizers_in(optimizer)]
        )

    @uninterrupted()
    def _copied(self, value: T, tensors: Iterable[Tensor], whole: Sequence[torch.optim.Optimizer] = ()) -> T:
        for tensor in tensors:
            self.tensor(tensor)
        memo = cast("dict[int, Any]", self._memo)
        try:
            with _Copying(self):
                # An optimizer's own deepcopy keeps only its state and options, and puts torch's hooks on its class.
                whole = [one for one in whole if not hasattr(one, "__deepcopy__") and id(one) not in memo]
                memo.update((id(one), object.__new__(type(one))) for one in whole)
                self._kept += whole
                for one in whole:
                    # Functions are not copied: functions that others have put there refer to the user's own optimizer.
                    own = {key: held for key, held in vars(one).items() if key != "step" and not key.endswith("_hooks")}
                    empty = {key: OrderedDict[int, object]() for key in vars(one) if key.endswith("_hooks")}
                    vars(memo[id(one)]).update(copy.deepcopy(own, memo) | empty)
                return copy.deepcopy(value, memo)
        except UnsupportedError:
            raise
        except Exception as error:
            raise StepError(
                f"a plan without running is made on a copy, and {type(value).__name__} cannot be copied: {error}. "
                "Give it a `__deepcopy__`, or plan where the step can run, without on='meta'."
            ) from error

    def value(self, value: object) -> object:
        """Return a value with its modules and tensors replaced by copies; itself if it has none."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        found = value
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, dict):
            table = cast("dict[object, object]", value)
            items = {key: self.value(item) for key, item in table.items()}
            if any(items[key] is not item for key, item in table.items()):
                found = copy.copy(table)
                found.update(items)
        elif isinstance(value, list | tuple | set | frozenset):
            parts = list(cast("list[object]", value))
            made = [self.value(part) for part in parts]
            if any(a is not b for a, b in zip(parts, made, strict=True)):
                named = isinstance(value, tuple) and hasattr(value, "_fields")
                kind = cast("Callable[..., object]", type(cast("object", value)))
                found = kind(*made) if named else kind(made)
        self._memo[id(value)] = found
        self._kept.append(value)
        return found

    def step(self, step: Callable[..., object]) -> Callable[..., object]:
        """Return a step that holds copies; itself if it holds nothing."""
        if isinstance(step, nn.Module):
            return self.module(step)
        if isinstance(step, functools.partial):
            partial = cast("functools.partial[object]", step)
            keywords = {key: self.value(one) for key, one in partial.keywords.items()}
            return functools.partial(self.step(partial.func), *map(self.value, partial.args), **keywords)
        if isinstance(step, MethodType):
            return MethodType(self.step(step.__func__), self._owner(step.__self__))
        if isinstance(step, FunctionType):
            return self._function(step)
        return cast("Callable[..., object]", self._owner(step))

    def _owner(self, owner: object) -> object:
        if isinstance(owner, nn.Module):
            return self.module(owner)
        held = getattr(owner, "__dict__", None)
        if not isinstance(held, dict):
            return owner
        changed = {
            key: made for key, one in cast("dict[str, object]", held).items() if (made := self.value(one)) is not one
        }
        if not changed:
            return owner
        found = copy.copy(owner)
        found.__dict__.update(changed)
        return found

    def _function(self, function: FunctionType) -> FunctionType:
        made = FunctionType(
            function.__code__,
            {**function.__globals__, **self._globals(function)},
            function.__name__,
            cast("tuple[object, ...] | None", self.value(function.__defaults__)),
            tuple(map(self._cell, function.__closure__)) if function.__closure__ else None,
        )
        made.__kwdefaults__ = cast("dict[str, object] | None", self.value(function.__kwdefaults__))
        made.__dict__.update(function.__dict__)
        return made

    def _globals(self, function: FunctionType) -> dict[str, object]:
        names = [name for name in global_names(function.__code__) if name in function.__globals__]
        return {name: self.value(function.__globals__[name]) for name in names}

    def _cell(self, cell: CellType) -> CellType:
        try:
            held = cast("object", cell.cell_contents)
        except ValueError:  # a cell that was never assigned
            return cell
        found = self.value(held)
        return cell if found is held else CellType(found)


class _Copying(TorchFunctionMode):
    """Lets `copy.deepcopy` make fakes of the tensors that it finds."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, func: Operation, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        # A parameter that belongs to no module copies itself by a clone of its data.
        if func is Tensor.__deepcopy__ or func is Tensor.clone:
            return self._fakes.tensor(cast("Tensor", args[0]))
        return func(*args, **(kwargs or {}))


class DescribedMachine:
    """A machine that is only described."""

    is_here = False

    def __init__(self, device: Device) -> None:
        self.description = device
        self.device = _CPU
        self.name = device.name
        self.fakes = Fakes()
        self.kernels = Kernels(device)
        self.simulation = Simulation(self.kernels, self.fakes.met)
        self.generator_bytes = torch.get_rng_state().nbytes if device.type == "cpu" else 0

    @property
    def notice(self) -> str:
        """See `Machine`."""
        return notice(self.description, self.kernels.unknown) if self.kernels.unknown else ""

    def subject(
        self, model: nn.Module, step: Callable[..., object], optimizer: torch.optim.Optimizer | None
    ) -> tuple[nn.Module, Subject]:
        """Return copies, which hold fakes, of everything that a step touches.

        Raises:
            PlanError: The model has wrapped modules already.
            StepError: See `subject_of`; or something cannot be copied.
            UnsupportedError: Modules are compiled.
        """
        given = subject_of(step, model, optimizer, needs_model=True, needs_values=False)
        if any(map(has_compiled, (model, *given.models))):
            raise UnsupportedError(
                "on='meta': modules of the model are compiled, and what compiled code allocates is not known without "
                "running it. Plan where the step can run, without on='meta', or plan the model before it is compiled."
            )
        check_bare(model)
        copied = self.fakes.module(model)
        for other in given.models:
            self.fakes.module(other)
        own = None if optimizer is None else self.fakes.optimizer(optimizer)
        if own is not None and self.description.type == "cuda":
            _default_to_foreach(own)
        return copied, subject_of(self.fakes.step(step), copied, own, needs_model=True)

    @contextmanager
    def entered(self) -> Generator[None]:
        """See `Machine`."""
        with self.simulation.interrupted_between_operators(), ExitStack() as stack:
            stack.enter_context(self.fakes.mode)
            stack.enter_context(self.simulation)
            if self.description.type == "cuda":
                stack.enter_context(OnCuda())
                stack.enter_context(autocast_of_cuda())
            try:
                yield
            except RuntimeError as error:
                if "numpy() is not supported" not in str(error):
                    raise
                frames = traceback.extract_tb(error.__traceback__)
                own = [one for one in frames if not one.filename.startswith(PACKAGES)][-1:]
                place = "".join(f"{one.filename}:{one.lineno}, in `{one.name}`" for one in own)
                raise StepError(reads_data(place, "reads values (`.numpy()`)")) from error

    def record(self) -> AbstractContextManager[SimulatedRecorder]:
        """See `Machine`."""
        return self.simulation.record()

    @contextmanager
    def logged(self) -> Generator[SimulatedRecorder]:
        """See `Machine`."""
        with self.entered(), self.record() as recorder:
            yield recorder

    def stepping(self) -> AbstractContextManager[object]:
        """See `Machine`."""
        return self.simulation.scalars(1.0)

    def capacity_bytes(self) -> int | None:
        """See `Machine`."""
        return self.description.memory_bytes

    def free_bytes(self) -> int | None:
        """See `Machine`."""
        return None

    def forward_seconds(self, subject: Subject) -> None:
        """See `Machine`."""
        return

    def overheads(self) -> Overheads:
        """See `Machine`."""
        return self.description.overheads


def _default_to_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer process all parameters at once unless told otherwise: on CUDA that is its default."""
    for group in cast("list[dict[str, object]]", optimizer.param_groups):
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable", False)


def placed(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device | str | Path | Device | None,
    on: Literal["meta"] | None,
) -> tuple[Machine, nn.Module, Subject]:
    """Return the machine to profile on, with the model and the subject that run there.

    Raises:
        DeviceError: The device is not known, is described although the step runs here, or lacks something.
        StepError: See `subject_of`.
        PlanError: With `on="meta"`: the model has wrapped modules already.
        UnsupportedError: `on` is neither None nor `"meta"`; or with it modules are compiled.
    """
    if on is None:
        subject = subject_of(step, model, optimizer, needs_model=True)
        return Here(subject.device(torch_device(device))), model, subject
    if on != "meta":
        raise UnsupportedError(f"on={on!r}: allowed are None, to run the step, and 'meta', to run nothing.")
    elsewhere = DescribedMachine(device_of(device))
    return elsewhere, *elsewhere.subject(model, step, optimizer)


def torch_device(device: torch.device | str | Path | Device | None) -> torch.device | str | None:
    """Return a device of torch's; descriptions are rejected.

    Raises:
        DeviceError: It is a description.
    """
    if is_described(device):
        raise DeviceError(
            f"device={device!r} describes a device to plan for without running, and that needs on='meta' in `plan`, "
            "`frontier` or `Planner`."
        )
    return cast("torch.device | str | None", device)
