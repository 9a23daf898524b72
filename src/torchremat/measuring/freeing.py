"""The saved bytes that regions would free, with or without a policy; decided from a log, nothing runs again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from torchremat.errors import PolicyError, UnsupportedError, first_of
from torchremat.measuring.saving import RanOperator, Save, StepLog
from torchremat.regions.decisions import AnyPolicy, Decision, OperatorContext, decision_of
from torchremat.regions.selective.op_info import op_info_of
from torchremat.tensors.metadata import RAGGED, Metadata, numbers_of
from torchremat.tensors.structure import join

# NOTE [ What a policy would keep ]
# A region keeps its inputs. Of the operator results that its policy saves, it keeps the ones that a recompute asks for:
# all up to the last saved tensor that must be recomputed. Such a result may alias other tensors, as a view or written
# in place; of these the region keeps the tensors that autograd saves. The same holds for its inputs and for parameters.


# A call is split into its inner calls if its own code saves at most this share of the bytes saved in it,
_MOST_GLUE = 0.1
# and if it holds more than this share of the bytes that the whole forward saves.
_LEAST_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Freed:
    """The bytes kept for autograd that regions would free.

    Attributes:
        before_bytes: Kept without the regions.
        kept_bytes: Kept with the regions; bytes that they store elsewhere do not count.
        input_bytes: The part of it that is inputs of regions.
        stored_bytes: Bytes that the policy would store elsewhere.
        operators: How many operators the policy was asked about.
        chosen: How many of these operators' results it would save or store.
    """

    before_bytes: int
    kept_bytes: int
    input_bytes: int
    stored_bytes: int = 0
    operators: int = 0
    chosen: int = 0

    @property
    def freed_bytes(self) -> int:
        """Bytes that would no longer be kept in place; negative if a policy keeps more than autograd does."""
        return self.before_bytes - self.kept_bytes


def freed(log: StepLog, policy: Callable[..., object] | None, blocks: Sequence[str]) -> Freed:
    """Return the freed bytes; see `SavedReport.freed_by`.

    Args:
        log: The log of the step.
        policy: Called for each operator in a region.
        blocks: Names of the modules whose calls are regions.
    """
    if policy is not None:
        _check(log, policy)
    regions = _regions(log, blocks)
    inside = [next((one for one in log.around(call) if one in regions), None) for _, call in log.kept]
    before = {one for storages, _ in log.kept for one in storages}
    stays = {one for (storages, _), region in zip(log.kept, inside, strict=True) if region is None for one in storages}
    inputs = {one for index in regions for one in log.calls[index].inputs}
    kept, stored = set[int](), set[int]()
    operators = chosen = 0
    if policy is not None:
        for region in sorted(regions):
            saved = {
                one for (storages, _), of in zip(log.kept, inside, strict=True) if of == region for one in storages
            }
            found = _PolicyChoice(log, region, saved, policy)
            found.run()
            kept |= found.kept
            stored |= found.stored
            operators += found.operators
            chosen += found.chosen
    stays |= inputs | kept
    return Freed(
        before_bytes=log.bytes_of(before),
        kept_bytes=log.bytes_of(stays),
        input_bytes=log.bytes_of(inputs),
        stored_bytes=log.bytes_of(stored - stays),
        operators=operators,
        chosen=chosen,
    )


def _check(log: StepLog, policy: Callable[..., object]) -> None:
    if log.is_compiled:
        raise UnsupportedError("compiled code ran in the step, and no policy sees the operators in it.")
    if getattr(policy, "reads_names", False):
        raise UnsupportedError(f"{policy!r:.80} goes by the names of tensors, which a report does not know.")


def _regions(log: StepLog, blocks: Sequence[str]) -> set[int]:
    """Return the calls that would be regions, without calls inside another one."""
    regions = {index for index, call in enumerate(log.calls) if call.name in blocks and call.has_grad}
    missing = set(blocks) - {log.calls[index].name for index in regions}
    if missing:
        called = list(dict.fromkeys(call.name for call in log.calls if call.has_grad))
        raise PolicyError(
            f"the step calls no module {', '.join(map(repr, sorted(missing)))} with grad mode on; it calls "
            f"{first_of(list(map(repr, called)), 8) or 'none'}."
        )
    return {index for index in regions if not any(one in regions for one in log.around(log.calls[index].parent))}


def blocks_of(log: StepLog) -> tuple[str, ...]:
    """Return the names of the modules that a model calls one after the other and that free bytes as regions."""
    inside: list[set[int]] = [set() for _ in log.calls]  # saved in a call, at any depth
    own: list[set[int]] = [set() for _ in log.calls]
    for storages, call in log.kept:
        if call is not None:
            own[call].update(storages)
        for one in log.around(call):
            inside[one].update(storages)
    children: dict[int | None, list[int]] = {}
    for index, call in enumerate(log.calls):
        if call.has_grad:
            children.setdefault(call.parent, []).append(index)
    total = log.bytes_of({one for storages, _ in log.kept for one in storages})

    def parts(call: int) -> list[int]:
        within = children.get(call, [])
        whole = log.bytes_of(inside[call])
        is_root = log.calls[call].parent is None
        is_shell = whole > _LEAST_SHARE * total and log.bytes_of(own[call]) <= _MOST_GLUE * whole
        if not within or not (is_root or is_shell):
            return [call]
        return [one for child in within for one in parts(child)]

    names = dict.fromkeys(log.calls[one].name for root in children.get(None, []) for one in parts(root))
    return tuple(name for name in names if freed(log, None, [name]).freed_bytes > 0)


class _PolicyChoice:
    """One region under a policy. See NOTE [ What a policy would keep ].

    Attributes:
        kept: The storages that the policy keeps.
        stored: The storages that it stores elsewhere.
    """

    def __init__(self, log: StepLog, region: int, saved: set[int], policy: Callable[..., object]) -> None:
        self.kept: set[int] = set()
        self.stored: set[int] = set()
        self.operators = 0
        self.chosen = 0
        self._log = log
        self._region = region
        self._saved = saved
        self._policy = cast("AnyPolicy", policy)
        self._served = set(log.calls[region].inputs) | log.parameters  # storages that need no recompute
        self._results: list[tuple[int, tuple[int, ...], Decision]] = []
        self._end = 0

    def run(self) -> None:
        """Ask the policy about each operator, in between the saves."""
        log = self._log
        saves = [one for one in log.saves if self._region in log.around(one.call)]
        operators = [(i, one) for i, one in enumerate(log.operators) if self._region in log.around(one.call)]
        for rank, ran in operators:
            while saves and saves[0].position <= rank:
                self._save(saves.pop(0))
            self._ask(rank, ran)
        for save in saves:
            self._save(save)
        for rank, storages, decision in self._results:
            if rank < self._end:
                (self.kept if decision.kind == "save" else self.stored).update(storages)

    def _save(self, save: Save) -> None:
        if not self._served.issuperset(save.storages):
            self._end = save.position

    def _ask(self, rank: int, ran: RanOperator) -> None:
        op_info = op_info_of(ran.function)
        if op_info.is_ignored or ran.casts_weight:
            return
        self.operators += 1
        decision = self._decision(ran)
        if decision.kind == "recompute":
            return
        self.chosen += 1
        self._served.update(ran.storages)
        if op_info.is_kept:
            self._results.append((rank, ran.storages, decision))
        (self.kept if decision.kind == "save" else self.stored).update(self._saved.intersection(ran.storages))

    def _decision(self, ran: RanOperator) -> Decision:
        call = join(ran.arguments, _without_values(ran.tensors))
        args, kwargs = cast("tuple[tuple[Any, ...], dict[str, Any]]", call)
        context = OperatorContext(_ModulesByName(self._log, ran))
        context.op_output = join(ran.result, _without_values(ran.outputs))
        return decision_of(self._policy(context, ran.function, *args, **kwargs), self._policy)


class _ModulesByName:
    """The modules that ran an operator, for policies that ask."""

    def __init__(self, log: StepLog, ran: RanOperator) -> None:
        self._log = log
        self._ran = ran

    def running(self) -> Iterator[str]:
        """Yield the paths of the modules that were running, innermost first."""
        return map(self._path, self._log.around(self._ran.call))

    def known(self) -> list[str]:
        """Return the paths of all modules that were called."""
        return [self._path(one) for one in range(len(self._log.calls))]

    def _path(self, call: int) -> str:
        name = self._log.calls[call].name
        return "" if name in self._log.roots else name


# No meta tensor has a quantized dtype.
_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


def _without_values(tensors: tuple[Metadata, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    for shape, own, _, strides in tensors:
        sizes, dtype = numbers_of(shape), _INTEGERS.get(own, own)
        if RAGGED in sizes:  # the lengths of its items are values too
            found.append(torch.empty([1 if one == RAGGED else one for one in sizes], dtype=dtype, device="meta"))
        elif isinstance(strides, tuple):
            found.append(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
        else:
            found.append(torch.empty(shape, dtype=dtype, device="meta"))
    return found
