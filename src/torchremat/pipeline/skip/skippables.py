"""Modules that stash and pop skips: tensors, or structures of tensors, that bypass the modules between.

A module declares the skips that it stashes and pops: only so is the route of each skip between stages known before a
model runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, ClassVar, cast

from torch import nn

from torchremat.errors import SkipError, SkippableError
from torchremat.pipeline.skip.layouts import Key, Namespace, words_of
from torchremat.pipeline.skip.trackers import current_skip_tracker
from torchremat.regions.patches import is_wrapped


@dataclass(frozen=True, slots=True, eq=False)
class Stash:
    """The command to put a skip away."""

    name: str
    value: object


@dataclass(frozen=True, slots=True, eq=False)
class Pop:
    """The command to take a skip."""

    name: str


def stash(name: str, value: object) -> Stash:
    """Return the command to put a skip away, which a forward yields.

    Args:
        name: One of the names that the module declares in `stash`.
        value: A tensor, None, or any nesting of tuples, lists and dicts of these.
    """
    return Stash(name, value)


def pop(name: str) -> Pop:
    """Return the command to take a skip, which a forward yields; the yield gives the value back.

    Args:
        name: One of the names that the module declares in `pop`.
    """
    return Pop(name)


class Skippable(nn.Module):
    """A module that stashes and pops; its subclasses are made by `skippable`.

    Attributes:
        module_cls: The class that was decorated.
        stashable_names: The names that it stashes.
        poppable_names: The names that it pops.
        module: The instance of that class.
        namespaces: The namespaces of the names that have one.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace | None] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Return the recipe that makes the module again when it is copied or unpickled."""
        cls = type(self)
        if _resolve(cls) is cls:
            return super().__reduce_ex__(protocol)
        # `skippable(...)(Cls)`, which is bound to an unknown name.
        made_by = cls.module_cls, sorted(cls.stashable_names), sorted(cls.poppable_names)
        return _remake, made_by, self.__getstate__()

    def stashable(self) -> Iterator[Key]:
        """Yield namespace and name of each skip that it stashes, in the order of names."""
        return ((self.namespaces.get(name), name) for name in sorted(self.stashable_names))

    def poppable(self) -> Iterator[Key]:
        """Yield namespace and name of each skip that it pops, in the order of names."""
        return ((self.namespaces.get(name), name) for name in sorted(self.poppable_names))

    def isolate(self, namespace: Namespace | None, *, only: Iterable[str] | None = None) -> Skippable:
        """Move names into a namespace, so that they meet no others of the same name, and return the module itself.

        Args:
            namespace: The namespace; None for the namespace of names without one.
            only: The names; all if None.

        Raises:
            SkippableError: A name is not declared, or `namespace` is not a namespace.
        """
        if not (namespace is None or isinstance(namespace, Namespace)):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
            raise SkippableError(f"isolate({namespace!r}): expected a Namespace or None.")
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else _names("only", only)
        if names - declared:
            raise SkippableError(
                f"isolate(only=...): {words_of(names - declared)} is not declared by {type(self).__name__}, which has "
                f"{words_of(declared) or 'no names'}."
            )
        self.namespaces.update(dict.fromkeys(names, namespace))
        return self

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module, with the skips that it pops from the current tracker, and hand over the ones it stashes.

        Raises:
            SkipError: It stashes or pops otherwise than declared.
            SkippableError: It yields something that is not a command.
        """
        tracker = current_skip_tracker()
        popped = {key[1]: tracker.load(*key) for key in self.poppable()}
        commands = _Commands(self, popped)
        output = self.module(*args, **kwargs)
        if isinstance(output, GeneratorType):
            if is_wrapped(self.module):
                raise SkippableError(
                    f"{type(self).__name__}: the module inside, `.module`, is wrapped, and its forward is a generator, "
                    "which would run outside of the region. Wrap the skippable module itself."
                )
            output = commands.run(cast("Generator[object, object, object]", output))
        commands.check()
        for key in self.stashable():
            tracker.save(*key, commands.stashed[key[1]])
        return output


class _Commands:
    """The commands of one forward."""

    def __init__(self, module: Skippable, popped: dict[str, object]) -> None:
        self._module = module
        self._popped = popped
        self.stashed: dict[str, object] = {}

    def run(self, commands: Generator[object, object, object]) -> object:
        """Run a forward and obey its commands; an error of a command is raised at its yield."""
        answer: object = None
        error: Exception | None = None
        while True:
            try:
                command = commands.send(answer) if error is None else commands.throw(error)
            except StopIteration as stop:
                return stop.value
            answer = error = None
            try:
                answer = self._obey(command)
            except (SkipError, SkippableError) as found:
                error = found

    def _obey(self, command: object) -> object:
        module = self._module
        if isinstance(command, Stash):
            if command.name not in module.stashable_names:
                raise self._undeclared(command.name, module.stashable_names, "stash", "stashable")
            if command.name in self.stashed:
                raise SkipError(f"{self._where}: {command.name!r} has been stashed already in this forward.")
            self.stashed[command.name] = command.value
            return None
        if isinstance(command, Pop):
            if command.name not in module.poppable_names:
                raise self._undeclared(command.name, module.poppable_names, "pop", "poppable")
            if command.name not in self._popped:
                raise SkipError(f"{self._where}: {command.name!r} has been popped already in this forward.")
            return self._popped.pop(command.name)
        raise SkippableError(
            f"{command!r} is not a command from @skippable; {self._where} may yield stash(name, value) and pop(name)."
        )

    def _undeclared(self, name: str, declared: frozenset[str], argument: str, kind: str) -> SkipError:
        return SkipError(
            f"{name!r} has not been declared as {kind}; {self._where} declares {words_of(declared) or 'none'}. Declare "
            f"it: @skippable({argument}=[...])."
        )

    def check(self) -> None:
        """Check that every declared stash and pop has run.

        Raises:
            SkipError: One has not.
        """
        missing = self._module.stashable_names - self.stashed.keys()
        faults = [f"{words_of(missing)} must be stashed but have not"] if missing else []
        if self._popped:
            faults.append(f"{words_of(frozenset(self._popped))} must be popped but have not")
        if faults:
            raise SkipError(f"{self._where}: {'; '.join(faults)}.")

    @property
    def _where(self) -> str:
        return type(self._module).__name__


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Return a decorator for module classes whose `forward` stashes and pops skips.

    The forward is a generator: it yields `stash(name, value)`, and `pop(name)`, whose value comes back from the yield.
    A forward without `yield` is fine as long as nothing is declared.

    >>> import torch
    >>> from torch import nn
    >>> from torchremat.pipeline import skip
    >>> @skip.skippable(stash=["a"])
    ... class Stash(nn.Module):
    ...     def forward(self, x):
    ...         yield skip.stash("a", x * 10)
    ...         return x + 1
    >>> @skip.skippable(pop=["a"])
    ... class Pop(nn.Module):
    ...     def forward(self, x):
    ...         a = yield skip.pop("a")
    ...         return x + a
    >>> nn.Sequential(Stash(), Pop())(torch.ones(2))
    tensor([12., 12.])

    Args:
        stash: The names of the skips that the module stashes.
        pop: The names of the skips that it pops.

    Raises:
        SkippableError: The names are invalid, or the decorated object is not a module class.
    """
    stashable, poppable = _names("stash", stash), _names("pop", pop)

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
            raise SkippableError(f"@skippable is for subclasses of nn.Module, got {module_cls!r}.")
        attributes = {
            "__module__": module_cls.__module__,
            "__qualname__": module_cls.__qualname__,
            "__doc__": module_cls.__doc__,
            "module_cls": module_cls,
            "stashable_names": stashable,
            "poppable_names": poppable,
        }
        made = cast("type[Skippable]", type(module_cls.__name__, (Skippable,), attributes))
        if _resolve(module_cls) is not module_cls:
            # A decorator is about to take its name; a pickle finds it here then.
            module_cls.__qualname__ += ".module_cls"
        return made

    return decorate


def _names(argument: str, names: object) -> frozenset[str]:
    if isinstance(names, type):
        raise SkippableError("@skippable needs its names: @skippable(stash=[...], pop=[...]).")
    found = [] if isinstance(names, str) or not isinstance(names, Iterable) else list(cast("Iterable[object]", names))
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(one, str) for one in found):
        raise SkippableError(f"{argument}={names!r}: expected a list of names, such as {argument}=['a'].")
    return frozenset(cast("list[str]", found))


def _resolve(cls: type) -> object:
    """Return the object that the name of a class refers to."""
    found: object = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def _remake(module_cls: type[nn.Module], stash: list[str], pop: list[str]) -> Skippable:
    names = frozenset(stash), frozenset(pop)
    known = [one for one in Skippable.__subclasses__() if one.__dict__.get("module_cls") is module_cls]
    made = [one for one in known if (one.stashable_names, one.poppable_names) == names]
    cls = made[0] if made else skippable(stash, pop)(module_cls)
    return cls.__new__(cls)
