"""Function and dispatch modes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor

from torchremat._compat.binding import private
from torchremat._compat.dynamo import outside_graphs

_bind = partial(private, needed_for="restoring the modes around a recompute")
count_function_modes: Callable[[], int] = _bind("_C._len_torch_function_stack")
_function_mode: Callable[[int], object] = _bind("_C._get_function_stack_at")
push_function_mode: Callable[[object], None] = _bind("_C._push_on_torch_function_stack")
pop_function_mode: Callable[[], object] = _bind("_C._pop_torch_function_stack")
count_dispatch_modes: Callable[[], int] = _bind("_C._len_torch_dispatch_stack")
_dispatch_mode: Callable[[int], object] = _bind("_C._get_dispatch_stack_at")
push_dispatch_mode: Callable[[object], None] = _bind("_C._push_on_torch_dispatch_stack")
_pop_dispatch_mode: Callable[[object], object] = _bind("_C._pop_torch_dispatch_stack")
_mode_of_key: Callable[[Any], object] = _bind("_C._get_dispatch_mode")
set_infrastructure_mode: Callable[[object], None] = _bind("_C._set_dispatch_mode")
unset_infrastructure_mode: Callable[[object], object] = _bind("_C._unset_dispatch_mode")
# A block in which subclasses are treated as plain tensors, and results are plain.
without_torch_function: Callable[[], AbstractContextManager[None]] = _bind("_C.DisableTorchFunctionSubclass")
# A block in which no function mode sees anything either: for calls that have already passed through all of them.
past_torch_function: Callable[[], AbstractContextManager[None]] = _bind("_C.DisableTorchFunction")
without_modes: Callable[[], AbstractContextManager[object]] = _bind("utils._python_dispatch._disable_current_modes")
_KEYS: dict[str, object] = _bind("_C._TorchDispatchModeKey.__members__")


def has_modes() -> bool:
    """Return whether any function or dispatch mode is on."""
    return count_function_modes() > 0 or count_dispatch_modes() > 0


def function_modes() -> list[object]:
    """Return the function modes that are on in this thread, outermost first; a default device is one."""
    return [_function_mode(index) for index in range(count_function_modes())]


def infrastructure_modes() -> dict[object, object]:
    """Return the infrastructure dispatch modes of torch, by key: those that fake, trace and functionalize."""
    return {key: mode for key in _KEYS.values() if (mode := _mode_of_key(key)) is not None}


def dispatch_modes() -> list[object]:
    """Return the other dispatch modes that are on in this thread, outermost first."""
    kept_apart = list(map(id, infrastructure_modes().values()))
    modes = [_dispatch_mode(index) for index in range(count_dispatch_modes())]
    return [mode for mode in modes if id(mode) not in kept_apart]


def innermost_dispatch_mode() -> object | None:
    """Return the dispatch mode that sees operators first, None if there is none."""
    count = count_dispatch_modes()
    return _dispatch_mode(count - 1) if count else None


def take_dispatch_mode(kind: type) -> object | None:
    """Take the innermost dispatch mode off and return it if it is of a class; else None."""
    count = count_dispatch_modes()
    return _pop_dispatch_mode(None) if count and type(_dispatch_mode(count - 1)) is kind else None


def pop_dispatch_mode() -> object:
    """Take the innermost dispatch mode off, other than an infrastructure mode."""
    return _pop_dispatch_mode(None)


def is_recording() -> bool:
    """Return whether a mode is recording a graph: that of AOTAutograd, of `make_fx` or of an export."""
    return _mode_of_key(_KEYS["PROXY"]) is not None


def is_traced_with_fakes() -> bool:
    """Return whether operations see tensors without data, as when a graph is made for a compiler."""
    return _mode_of_key(_KEYS["FAKE"]) is not None


# NOTE [ What is traced in a region ]
# A higher-order operator (`torch.cond`, `scan`, `while_loop`, flex attention) traces the functions that it is given, in
# each call or only in the first: with tensors without data, under infrastructure modes. That is the operator's own work
# and not part of the region. So a tensor that autograd saves under other infrastructure modes than when the region
# began is saved as if no region existed: it has no slot, and is neither counted nor compared. Below autograd, its
# operators are visible to a mode. torch compiles these operators' functions even where they run eagerly, skips that
# under any mode, and then passes on functions that its own backward cannot differentiate. So modes of ours are off
# while such an operator runs: it is always recomputed, and never kept in parts.


Began = dict[object, object]
_NONE: Began = {}


def modes_now() -> Began:
    """Return the current infrastructure modes, for `is_traced_since`."""
    return infrastructure_modes() if count_dispatch_modes() else _NONE


def outside_traces() -> AbstractContextManager[object]:
    """Return a block in which operators see data, also while a trace without data or a recording runs."""
    return without_modes() if count_dispatch_modes() and infrastructure_modes() else nullcontext()


def is_traced_since(began: Began) -> bool:
    """Return whether the infrastructure modes differ from those then, given that dispatch modes are on."""
    # They are the outermost: looking for each takes far longer.
    return bool(began or not isinstance(_dispatch_mode(0), EagerMode)) and infrastructure_modes() != began


def left_alone(tensor: Tensor) -> Tensor:
    """Return the pack hook's result for a tensor that does not belong to the region."""
    # If a node held its own output itself, this would be a cycle through autograd.
    return tensor if tensor.is_leaf else tensor.detach()


def except_traced(pack: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Return a pack hook to push now that ignores traced tensors. See NOTE [ What is traced in a region ]."""
    return partial(_packed, modes_now(), pack)


@outside_graphs  # compiled code calls it, and dynamo would trace it from there
def _packed(began: Began, pack: Callable[[Tensor], object], tensor: Tensor) -> object:
    if count_dispatch_modes() and is_traced_since(began):
        return left_alone(tensor)
    return pack(tensor)


# The arguments of the method by which a mode sees what is called.
Operation: TypeAlias = Callable[..., object]
Types: TypeAlias = tuple[type, ...]
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = Mapping[str, object] | None

if TYPE_CHECKING:

    class DispatchMode:
        """A mode that sees every operator below autograd: torch's TorchDispatchMode, whose own types are incomplete."""

        def __enter__(self) -> Self: ...
        def __exit__(self, *error: object) -> None: ...
        def __torch_dispatch__(
            self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None
        ) -> object: ...

else:
    DispatchMode = _bind("utils._python_dispatch.TorchDispatchMode")

sequence_number: Callable[[], int] = _bind("autograd._get_sequence_nr")
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = _bind("_C._autograd._unsafe_set_version_counter")


class _Entered(threading.local):
    """The modes of ours that a thread has entered, innermost last."""

    def __init__(self) -> None:
        self.entered: list[EagerMode] = []


_eager = _Entered()


class _Eagerly:
    """Blocks in which compiled code runs eagerly, of any thread and in any order.

    torch's stance is one per process, and each of torch's blocks restores the stance that it found. If two overlap, the
    last to end would restore the stance that the first had set, and nothing would ever be compiled again. So the first
    block of ours sets the stance, and the last restores it. The flags by which torch's own modes signal that they are
    on have the same weakness; modes of ours leave these flags alone, since dynamo is told by the stance.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collected object may leave in here as well
        self._blocks = 0
        self._found: AbstractContextManager[object] | None = None

    def enter(self) -> None:
        # Nothing is compiled if dynamo is not loaded, and loading it takes seconds.
        dynamo = "torch._dynamo" in sys.modules
        with self._lock:
            if dynamo and self._found is None:
                self._found = torch.compiler.set_stance("force_eager")
            self._blocks += 1

    def leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0 and self._found is not None:
                found, self._found = self._found, None
                found.__exit__(None, None, None)


_eagerly = _Eagerly()


class EagerMode(DispatchMode):
    """A dispatch mode under which compiled code runs eagerly.

    dynamo does not trace under a mode. It would not simply run the code eagerly once, either: it marks the code as
    never to be compiled, so a model that was observed once would stay slow. Told beforehand to run eagerly, it marks
    nothing.
    """

    # Without this torch refuses to run a higher-order operator below a mode.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Where code runs eagerly, operators need not tell dynamo so one by one: that takes longer than most operators.
        return False

    def __enter__(self) -> Self:
        _eagerly.enter()
        push_dispatch_mode(self)
        _eager.entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        entered = _eager.entered
        if entered[-1] is self:
            entered.pop()
        else:  # others may have ended before
            del entered[max(index for index, one in enumerate(entered) if one is self)]
        pop_dispatch_mode()
        _eagerly.leave()


@contextmanager
def _apart(compilation: Callable[[], AbstractContextManager[object]]) -> Generator[object]:
    """Let a higher-order operator, which enters `compilation`, run without modes of ours.

    See NOTE [ What is traced in a region ].
    """
    left: list[tuple[EagerMode, bool]] = []
    for mode in reversed(_eager.entered.copy()):
        on = [_dispatch_mode(index) for index in range(count_dispatch_modes())]
        was_taken = all(one is not mode for one in on)  # for the rest of its block: torch still goes by it
        if was_taken:
            push_dispatch_mode(mode)
        elif on[-1] is not mode:
            break  # below a user's mode, for which torch compiles nothing either
        mode.__exit__(None, None, None)
        left.append((mode, was_taken))
    try:
        with compilation() as backend:
            yield backend
    finally:
        for mode, was_taken in reversed(left):
            mode.__enter__()
            if was_taken:
                pop_dispatch_mode()


# `setup_compilation_env` is entered by every such operator that compiles its functions where it runs eagerly.
_HIGHER_ORDER = "higher-order operators in regions"
private("_higher_order_ops.utils.setup_compilation_env", needed_for=_HIGHER_ORDER)
_module: Any = private("_higher_order_ops.utils", needed_for=_HIGHER_ORDER)
_module.setup_compilation_env = wraps(_module.setup_compilation_env)(partial(_apart, _module.setup_compilation_env))

_exclude: Callable[[object, bool], AbstractContextManager[None]] = _bind("_C._SetExcludeDispatchKeyGuard")
_VERSIONS = _bind("_C.DispatchKey.ADInplaceOrView")
_PYTHON = _bind("_C.DispatchKey.Python")
_is_excluded: Callable[[object], bool] = _bind("_C._dispatch_tls_is_dispatch_key_excluded")
_set_excluded: Callable[[object, bool], None] = _bind("_C._dispatch_tls_set_dispatch_key_excluded")


def alias_that_counts(tensor: Tensor) -> Tensor:
    """Return an alias made in `counting_versions()`, which takes longer to enter than this to run."""
    was_excluded = _is_excluded(_VERSIONS)
    _set_excluded(_VERSIONS, False)
    try:
        return tensor.detach()
    finally:
        _set_excluded(_VERSIONS, was_excluded)


def alias_past_modes(tensor: Tensor) -> Tensor:
    """Return an alias of a plain tensor without its graph, which no dispatch mode sees."""
    was_excluded = _is_excluded(_PYTHON)
    _set_excluded(_PYTHON, True)
    try:
        return tensor.detach()
    finally:
        _set_excluded(_PYTHON, was_excluded)


def counting_versions() -> AbstractContextManager[None]:
    """Return a context in a dispatch mode in which aliases count their versions together.

    Below autograd, where modes run, `detach` would give an alias its own version counter.
    """
    return _exclude(_VERSIONS, False)
