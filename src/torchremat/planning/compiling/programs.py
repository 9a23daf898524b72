"""The programs that Inductor writes for a forward and its backward: read line by line, and their live bytes counted.

Fused values are never in memory, values fused across a graph have longer live ranges than the graph shows, and copies
to other layouts are in no graph at all. All of that is decided once Inductor has written its programs, and can be read
from them without compiling a kernel: a line allocates a buffer, makes a view of one, calls a kernel or an operator, or
drops a name.

    buf0 = empty_strided_cpu((256, 64), (64, 1), torch.float32)      a storage
    buf1 = reinterpret_tensor(buf0, (64, 256), (1, 64), 0)           a view: the same storage
    buf2 = torch.ops.aten.some.default(buf1)                         an operator, which makes storages
    buf3 = buf2[0]                                                   one of them
    cpp_fused_add_0(buf3, buf0)                                      a kernel, which makes none
    del buf0                                                         dropped, if no other name has it

Missing on purpose: programs that call others (control flow in the graph, partitions of CUDA graphs).
"""

from __future__ import annotations

import ast
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchremat._compat.inductor import is_incoming
from torchremat._compat.wrappers import Wrapper, donated, extern_kernels, wrapper_of
from torchremat.errors import UnsupportedError
from torchremat.planning.compiling.graphs import JointReading
from torchremat.planning.compiling.trials import OF_TORCH, TensorShape, Trials, made_up

_OPERATORS = ("torch.ops.", "extern_kernels.", "aten.")


class Program:
    """The program that Inductor has written for a graph.

    Attributes:
        tensors: Shape, strides, dtype and device of each name that is a tensor.
        lines: In the order in which they run.
        origins: For each buffer the nodes of the graph that it was made for.

    Raises:
        UnsupportedError: It calls other programs.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self.tensors = {name: TensorShape(*one) for name, one in wrapper.tensors.items()}
        self.origins = wrapper.origins
        self._hints = wrapper.hints
        functions = [one for one in ast.walk(ast.parse(wrapper.code)) if isinstance(one, ast.FunctionDef)]
        self.lines = list(_flat(next((one.body for one in functions if one.name == "call"), [])))
        others = {one.name for one in functions}
        for call in self._calls():
            if isinstance(call.func, ast.Name) and call.func.id in others:
                raise UnsupportedError(f"the program calls another one, {call.func.id}.")

    def try_operators(self, trials: Trials) -> None:
        """Run the operators that the lines call, each by itself on zeros."""
        for call in filter(is_operator, self._calls()):
            if _is_torchs(call):
                trials.run(self.described(call), ast.unparse(call.func), partial(self._prepared, call))

    def described(self, call: ast.Call) -> str:
        """Return a call with shapes in place of tensors."""
        said = copy.deepcopy(call)
        for name in (one for one in ast.walk(said) if isinstance(one, ast.Name)):
            name.id = str(self.tensors.get(name.id) or self._hints.get(name.id, name.id))
        return ast.unparse(said)

    def number(self, value: ast.expr) -> Any:
        """Return the value of an expression of numbers and symbols."""
        return eval(_compiled(value), _meanings(), dict(self._hints))

    def parts(self, name: str) -> Iterable[tuple[int, str]]:
        """Return the names of the tensors that a line makes as `name`, by index: the name itself, if it makes one."""
        return self._taken.get(name, {0: name}).items()

    def _prepared(self, call: ast.Call) -> Callable[[], object]:
        """Return a call of an operator on zeros."""
        meanings, names = _meanings(), _ProgramNames(self.tensors, self._hints)
        function, *args = (eval(_compiled(one), meanings, names) for one in (call.func, *call.args))
        kwargs = {str(one.arg): eval(_compiled(one.value), meanings, names) for one in call.keywords}
        return partial(function, *args, **kwargs)

    @cached_property
    def _taken(self) -> dict[str, dict[int, str]]:
        found: dict[str, dict[int, str]] = {}
        for line in self.lines:
            match line:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Subscript(value=ast.Name(id=source), slice=ast.Constant(value=int(index))),
                ):
                    found.setdefault(source, {})[index] = name
                case _:
                    pass
        return found

    def _calls(self) -> Iterator[ast.Call]:
        return (one for line in self.lines for one in ast.walk(line) if isinstance(one, ast.Call))


def is_operator(call: ast.Call) -> bool:
    """Return whether the call is of an operator, not of a kernel of Inductor."""
    return ast.unparse(call.func).startswith(_OPERATORS)


def _is_torchs(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    return not name.startswith("torch.ops.") or name.split(".")[2] in OF_TORCH


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The lines in the order in which they run, including the bodies of `with` statements."""
    for line in body:
        if isinstance(line, ast.With):
            yield from _flat(line.body)
        else:
            yield line


def _compiled(value: ast.expr) -> Any:
    return compile(ast.Expression(value), "<program>", "eval")


class _ProgramNames(dict[str, object]):
    """The names of a program, with zeros for its tensors."""

    def __init__(self, tensors: dict[str, TensorShape], hints: Any) -> None:
        super().__init__(hints)
        self._tensors = tensors

    def __missing__(self, name: str) -> object:
        self[name] = made_up(self._tensors[name])
        return self[name]


def _meanings() -> dict[str, object]:
    """The globals of a program: the names by which it calls operators, and further arguments that it passes."""

    def view(tensor: Tensor, size: list[int], stride: list[int], _: int = 0) -> object:
        return made_up(TensorShape(size, stride, tensor.dtype, tensor.device))

    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "extern_kernels": extern_kernels(),
        "reinterpret_tensor": view,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
    }


# ----------------------------------------------------------------------------------------------------------- live bytes

_EMPTY = "empty_strided_"
_VIEW = "reinterpret_tensor"

_Held = frozenset[int]  # storages
_NOTHING: _Held = frozenset()


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The peak of a forward and its backward, and the bytes at each node.

    Attributes:
        peak_bytes: The most bytes live at once.
        forward: By the names of nodes of the forward, the most live bytes while one of their buffers is made or filled.
        backward: The same for the backward.
    """

    peak_bytes: int
    forward: Mapping[str, int]
    backward: Mapping[str, int]


def needs_of_programs(
    reading: JointReading, forward: GraphModule, backward: GraphModule, num_fwd_outputs: int, trials: Trials
) -> Needs:
    """Return the bytes that two graphs of a joint one need, as Inductor will run them.

    Args:
        reading: The joint graph, read.
        forward: The graph of the forward; its first results are the results of the compiled function.
        backward: The graph of the backward; its inputs have the names of the values that the forward saves.
        num_fwd_outputs: How many results are the function's. They are held until the backward has ended.
        trials: The operators that programs call and that have run; more may follow.

    Raises:
        UnsupportedError: A program does something unknown here.
    """
    inputs, results = _inputs(forward), [one.name if isinstance(one, Node) else "" for one in _results(forward)]
    written = wrapper_of(forward, [node.meta["val"] for node in inputs], visible=num_fwd_outputs)
    first = Program(written)
    strides = dict(zip(results, written.strides, strict=True))
    then = _inputs(backward)
    second = Program(
        wrapper_of(
            backward,
            [_restrided(node.meta["val"], strides.get(node.name)) for node in then],
            visible=len(_results(backward)),
            is_backward=True,
            donated=donated(forward, backward, num_fwd_outputs),
        )
    )
    with trials.recorded():
        first.try_operators(trials)
        second.try_operators(trials)
    memory = Memory(reading, trials)
    saved = dict(zip(results, memory.run(first, [_NOTHING for _ in inputs]), strict=True))
    heights = memory.heights
    memory.add(filter(is_incoming, then))
    memory.run(second, [saved.get(node.name, _NOTHING) for node in then])
    return Needs(peak_bytes=memory.peak_bytes, forward=heights, backward=memory.heights)


def _inputs(graph: GraphModule) -> list[Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def _results(graph: GraphModule) -> Sequence[object]:
    (output,) = graph.graph.find_nodes(op="output")
    return cast("Sequence[object]", output.args[0])


def _restrided(value: object, strides: tuple[int, ...] | None) -> object:
    """Saved values have the strides that the forward's program gives them."""
    if not isinstance(value, Tensor) or strides is None or value.stride() == strides:
        return value
    return value.as_strided(value.size(), strides)


class Memory:
    """The storages that programs make, while they run one after the other.

    The caller of a program passes it one reference for each input, which the program takes over, and receives a
    reference to each result. Parameters and inputs of the step are live all the time, and are not storages here.

    Attributes:
        peak_bytes: The peak so far.
        heights: Of the last program, the peak while a buffer of each node is made or filled.
    """

    def __init__(self, reading: JointReading, trials: Trials) -> None:
        self._reading = reading
        self._trials = trials
        self._live_bytes = self.peak_bytes = reading.joint.fixed_bytes
        self._sizes: list[int] = []
        self._holders: Counter[int] = Counter()
        self.heights: dict[str, int] = {}
        # Of the running program: the nodes of the line; storages by name, and by name and index for names with several
        # tensors.
        self._nodes: Sequence[str] = ()
        self._names: dict[str, _Held] = {}
        self._places: dict[tuple[str, int], _Held] = {}

    def add(self, nodes: Iterable[Node]) -> None:
        """Count tensors that are live from now on."""
        values = {value for node in nodes for value in self._reading.values_of(node)}
        self._live_bytes += sum(self._reading.joint.size_bytes[value] for value in values)

    def run(self, program: Program, inputs: Sequence[_Held]) -> list[_Held]:
        """Run a program, and return the storages that its results hold."""
        self._names, self._places, self.heights = {}, {}, {}
        for line in program.lines:
            match line:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                    self._names = dict(zip(map(ast.unparse, names), inputs, strict=True))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._nodes = program.origins.get(name, ())
                    self._assign(program, name, value)
                case ast.Delete(targets=targets):
                    for target in targets:
                        self._drop(ast.unparse(target))
                case ast.Expr(value=ast.Call() as call) if is_operator(call):
                    self._nodes = [node for name in _filled(call) for node in program.origins.get(name, ())]
                    self._reach(self._trials.high_bytes.get(program.described(call), 0))
                case ast.Expr() | ast.Assert() | ast.Pass():  # kernels among them
                    pass
                case ast.Return(value=ast.Tuple(elts=results)):
                    returned = [self._held(one) for one in results]
                    for held in returned:
                        self._hold(held)
                    for name in list(self._names):
                        self._drop(name)
                    return returned
                case _:
                    raise UnsupportedError(f"the program has a line of an unknown kind: {ast.unparse(line)}")
        raise UnsupportedError("the program returns nothing.")

    def _assign(self, program: Program, name: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Name(id=function), args=[size, stride, dtype, *_]) if function.startswith(_EMPTY):
                device = torch.device(function.removeprefix(_EMPTY))
                shape = TensorShape(program.number(size), program.number(stride), program.number(dtype), device)
                held = self._made([self._counted(shape)])
            case ast.Call() if is_operator(value):
                held = self._run(program, name, value)
            case ast.Call(func=function) if ast.unparse(function) != _VIEW and name in program.tensors:
                raise UnsupportedError(f"the program makes a tensor by {ast.unparse(function)}.")
            case _:
                held = self._held(value)
                self._hold(held)
        self._drop(name)
        self._names[name] = held

    def _held(self, value: ast.expr) -> _Held:
        """The storages that an expression has."""
        match value:
            case ast.Name(id=name):
                return self._names.get(name, _NOTHING)
            case ast.Call(func=ast.Name(id=function), args=[of, *_]) if function == _VIEW:
                return self._held(of)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(place))):
                return self._places.get((name, place), _NOTHING)
            case _:
                return _NOTHING

    def _run(self, program: Program, name: str, call: ast.Call) -> _Held:
        """Run an operator that allocates its results."""
        described = program.described(call)
        self._reach(self._trials.high_bytes.get(described, 0))
        if described in self._trials.results:
            places = _places(self._trials.results[described])
            held = self._made(self._trials.storage_bytes[described])
        else:  # the shapes come from Inductor
            parts = {place: program.tensors[part] for place, part in program.parts(name) if part in program.tensors}
            places = list(parts)
            held = self._made(self._counted(one) for one in parts.values())
        for place, storage in zip(places, sorted(held), strict=True):
            self._places[name, place] = frozenset({storage})
        return held

    def _counted(self, shape: TensorShape) -> int:
        """The bytes of a tensor, if it is on the device whose bytes count."""
        return shape.elements * shape.dtype.itemsize if shape.device.type == self._reading.device.type else 0

    def _made(self, sizes: Iterable[int]) -> _Held:
        """Make storages, each with one reference."""
        first = len(self._sizes)
        self._sizes += [self._reading.block(size) for size in sizes]
        made = frozenset(range(first, len(self._sizes)))
        self._hold(made)
        self._live_bytes += sum(self._sizes[first:])
        self._reach(0)
        return made

    def _reach(self, beside_bytes: int) -> None:
        """Note the live bytes now, plus temporary ones."""
        there = self._live_bytes + beside_bytes
        self.peak_bytes = max(self.peak_bytes, there)
        for node in self._nodes:
            self.heights[node] = max(self.heights.get(node, 0), there)

    def _hold(self, held: _Held) -> None:
        self._holders.update(held)

    def _drop(self, name: str) -> None:
        """Drop the reference of a name; a storage without references is freed."""
        for storage in self._names.pop(name, _NOTHING):
            self._holders[storage] -= 1
            if not self._holders[storage]:
                self._live_bytes -= self._sizes[storage]


def _filled(call: ast.Call) -> list[str]:
    """The names of an operator's `out` arguments."""
    return [one.value.id for one in call.keywords if one.arg == "out" and isinstance(one.value, ast.Name)]


def _places(result: object) -> list[int]:
    """The indices of the tensors in an operator's results."""
    results = cast("list[object]", result) if isinstance(result, list) else [result]
    return [place for place, one in enumerate(results) if isinstance(one, TensorShape)]
