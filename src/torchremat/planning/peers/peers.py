"""The processes that communicate in a step, and their agreements.

Each process has a budget of its own, and all have the same plan: a region that one process recomputes and another does
not would exchange tensors, gather parameters, or reduce gradients, in another order. So they agree, in this order, on

    a request      the options; the tightest of their budgets
    a profile      the most bytes of any process, the most seconds
    a plan         the plan of the process with the largest step, and so all points of a frontier
    what they do   the same plan, when it is put on the models and in the first step under it
    a measurement  the most bytes of any process, the differences of all
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from typing import Literal, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchremat._compat.collectives import Ranks, exchanges_noted, is_distributed, ranks_of
from torchremat.errors import StepError, UnsupportedError, first_of
from torchremat.planning.peers.messages import Messages

T = TypeVar("T")

# NOTE [ Who plans together ]
#
# The step decides, not the class of a wrapper:
#
#   1. The groups that are known without a run: that of DistributedDataParallel, the meshes of parameters, buffers and
#      inputs that are DTensors, and what the user says by `group=`.
#   2. The groups that a run of the step communicates in, in its forward, its backward, and the step of its optimizer.
#   3. Who shares a group plans together, and so, joined, do all who are connected by groups.
#
# Each process knows its own groups alone, and all members of a group see it in the same run. So after a run, before
# anything is decided by what it showed, each leaves its groups in the store of torch.distributed for the other members
# of each group, and reads theirs, and those of the members of these, until no group is new. A process whose step does
# not communicate asks nobody.

SAME_STEP = (
    "Processes that communicate have one plan: give them batches of the same kind, and the stages of a pipeline to "
    "`torchremat.pipeline.plan_stages`."
)

Group: TypeAlias = ProcessGroup | Literal["step"] | None
"""Who plans together: the processes of a group, those that the step shows, or None for this process alone."""

# How often this process has met others, by their ranks: the same number in each of them. Anew with each process group.
_meetings: WeakKeyDictionary[ProcessGroup, dict[Ranks, int]] = WeakKeyDictionary()


class Peers:
    """This process alone, and the processes that join it. See NOTE [ Who plans together ].

    All of them call the same methods in the same order.

    Args:
        doing: What they do together, for messages.
        stays_alone: Whether no other may join.

    Attributes:
        ranks: The ranks of all, in order; none while this process is alone.
    """

    def __init__(self, doing: str = "planning", *, stays_alone: bool = False) -> None:
        self.ranks: Ranks = ()
        self._stays_alone = stays_alone
        self._doing = doing
        self._channel = ""  # of the messages of these processes
        self._read: list[str] = []  # own messages that all will have read when all have come once more
        self._turns = self._calls = 0

    @property
    def are_several(self) -> bool:
        """Whether other processes have to agree."""
        return bool(self.ranks)

    @cached_property
    def _messages(self) -> Messages:
        return Messages()

    def join(self, groups: Iterable[Ranks]) -> bool:
        """Let the other members of some groups join, and all who are connected with them; return whether any did.

        Raises:
            StepError: One of them does not come.
            UnsupportedError: This process was to stay alone.
        """
        if self._stays_alone:
            _check_alone(groups)
        met = _meetings.setdefault(cast("ProcessGroup", dist.group.WORLD), {}) if is_distributed() else {}
        new: dict[Ranks, int] = {}
        for group in groups:
            if len(group) > 1 and not {*self.ranks}.issuperset(group):
                new[group] = met.get(group, 0)
        if self.are_several:
            new = {group: number for told in self.all(lambda: new) for group, number in told.items()}
        if not new:
            return False
        rank, known = dist.get_rank(), {*self.ranks, dist.get_rank()}
        left = [f"{group}/{number}/{rank}" for group, number in new.items() if rank in group]
        for key in left:
            self._messages.put(key, (known, new))
        joined = dict(new)
        open_groups = [*joined]
        try:
            while open_groups:
                group = open_groups.pop()
                asked = {one: f"{group}/{joined[group]}/{one}" for one in group if one not in known}
                for found in self._messages.get(asked, left={}, doing=self._doing).values():
                    others, theirs = cast("tuple[set[int], dict[Ranks, int]]", found)
                    known |= others
                    open_groups += [*(theirs.keys() - joined.keys())]
                    joined |= theirs
        except BaseException:
            for key in left:  # so that nobody who comes later takes it for the next meeting
                self._messages.drop(key)
            raise
        met.update((group, number + 1) for group, number in new.items() if rank in group)
        self._channel = sha256(repr(sorted(joined.items())).encode()).hexdigest()[:16]
        self.ranks, self._turns = tuple(sorted(known)), 0
        self._read += left
        return True

    @contextmanager
    def together(self) -> Generator[None]:
        """Tell the others if this process leaves the block by an error: none waits in vain."""
        self._calls += 1
        try:
            yield
        except BaseException as error:
            if self.are_several:
                self._messages.put(self._left(dist.get_rank()), f"{type(error).__name__}: {error}")
            raise

    def _left(self, rank: int) -> str:
        return f"{self._channel}/left/{self._calls}/{rank}"

    def all(self, work: Callable[[], T]) -> list[T]:
        """Run some work in each process, and return all results; an error in one is raised in all.

        Args:
            work: Its result can be pickled.
        """
        if not self.are_several:
            return [work()]
        rank, messages = dist.get_rank(), self._messages
        self._turns += 1
        keys = {one: f"{self._channel}/{self._turns}/{one}" for one in self.ranks}
        try:
            mine = work()
        except Exception as error:
            messages.put(keys[rank], (None, _told(error)))
            raise
        own = keys.pop(rank)
        messages.put(own, (mine, None))
        found = messages.get(keys, left={one: self._left(one) for one in keys}, doing=self._doing)
        for key in self._read:
            messages.drop(key)
        self._read = [own]
        told = {one: cast("tuple[T, _Error | None]", each) for one, each in found.items()}
        for one, (_, error) in told.items():
            if error is not None:
                kind, words = error
                raise (kind or RuntimeError)(f"in process {one} (this is {rank}): {words}")
        return [mine if one == rank else told[one][0] for one in self.ranks]

    def meet(self, work: Callable[[], T]) -> T:
        """Run some work in each process, let whoever it communicates with join, and return its result here.

        An error is raised only when they have joined, since they may be waiting for this process.

        Raises:
            StepError: It communicates with a process that does not plan; before it waits for that one.
            UnsupportedError: This process was to stay alone.
        """
        found: list[T] = []
        failed: Exception | None = None
        groups = set[Ranks]()

        def seen(group: Ranks) -> None:
            groups.add(group)
            self._await(group)

        with self._present():
            try:
                with exchanges_noted(seen):
                    self.all(lambda: found.append(work()))
            except Exception as error:
                if self.are_several:
                    raise  # all know
                failed = error
            if not self.join(groups) and failed is None:
                return found[0]

            def result() -> T:
                if failed is not None:
                    raise failed
                return found[0]

            return self.each(result)

    @contextmanager
    def _present(self) -> Generator[None]:
        """Let processes that have not joined see that this one is in the block."""
        if not is_distributed():
            yield
            return
        key = f"present/{dist.get_rank()}"
        self._messages.put(key, None)
        try:
            yield
        finally:
            self._messages.drop(key)

    def _await(self, group: Ranks) -> None:
        """Wait until the members of a group are present, wherever they are in their steps."""
        if self._stays_alone:
            _check_alone([group])
        strangers = {rank: f"present/{rank}" for rank in group if rank not in (dist.get_rank(), *self.ranks)}
        if strangers:
            self._messages.get(strangers, left={}, doing=self._doing)

    def each(self, work: Callable[[], T]) -> T:
        """Run some work in each process, and return its result here; an error in one is raised in all."""
        found: list[T] = []
        self.all(lambda: found.append(work()))
        return found[0]

    def everywhere(self, check: Callable[[], bool]) -> bool:
        """Return whether something holds in each process."""
        return all(self.all(check))

    @property
    def place(self) -> int:
        """The index of this process's result among those of `all`."""
        return self.ranks.index(dist.get_rank()) if self.ranks else 0

    def at(self, place: int, work: Callable[[], T]) -> T:
        """Run some work in the process at a place, and return the result in each; an error is raised in all."""
        return cast("T", self.all(lambda: work() if place == self.place else None)[place])

    def check_equal(self, what: str, value: str, advice: str) -> None:
        """Raise in all processes if a value differs between them.

        Args:
            what: What it is, for the message.
            value: The value, as shown in the message.
            advice: What to do.

        Raises:
            StepError: It differs.
        """
        told = self.all(lambda: value)
        for one, theirs in zip(self.ranks, told, strict=False):
            if theirs != told[0]:
                raise StepError(
                    f"{self._doing}: {what} of process {one} is {theirs}, and that of process {self.ranks[0]} is "
                    f"{told[0]}. {advice}"
                )


_Error: TypeAlias = tuple[type[Exception] | None, str]


def _told(error: Exception) -> _Error:
    """Return an error that other processes can raise: constructors of errors that are not ours are unknown."""
    if type(error).__module__.startswith(__name__.partition(".")[0]):
        return type(error), str(error)
    return None, f"{type(error).__name__}: {error}"


def peers_of(known: Iterable[Ranks], group: Group = "step", doing: str = "planning") -> Peers:
    """Return this process with the others that plan with it, as far as is known before a run.

    Args:
        known: The groups that are known without a run.
        group: The user's word.
        doing: What they do together, for messages.

    Raises:
        StepError: One of them does not come.
        UnsupportedError: This process is to be alone, and communicates.
    """
    peers = Peers(doing, stays_alone=group is None)
    peers.join([*known, ranks_of(group)] if isinstance(group, ProcessGroup) else known)
    return peers


def check_group(group: object) -> None:
    """Raise an UnsupportedError if this says in no way who plans together."""
    if group is not None and group != "step" and not isinstance(group, ProcessGroup):
        raise UnsupportedError(
            f'group={group!r}: expected a ProcessGroup, "step" for the processes that the step communicates with, or '
            "None for this process alone."
        )


def _check_alone(groups: Iterable[Ranks]) -> None:
    others = sorted({rank for group in groups for rank in group if len(group) > 1})
    if others:
        raise UnsupportedError(
            "this process is to plan alone, as with group=None and in `guard`, and its step "
            f"communicates among the processes {first_of([*map(str, others)], 8)}. With plans of their own they would "
            "exchange tensors in different orders. Call `torchremat.plan` or `fit` in all of them, without group=None."
        )


def check_same_calls(names: Sequence[Sequence[str]]) -> None:
    """Raise a StepError where the modules that some processes called are not the same."""
    for rank, one in enumerate(names):
        if one != names[0]:
            raise StepError(
                f"process {rank} called other modules in the step than process 0: {', '.join(one)}, against "
                f"{', '.join(names[0])}. {SAME_STEP}"
            )
