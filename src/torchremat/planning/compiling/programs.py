"""Reads the programs that Inductor writes for a forward and its backward, line by line.

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
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from torchremat._compat.wrappers import Wrapper, extern_kernels
from torchremat.errors import UnsupportedError
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
