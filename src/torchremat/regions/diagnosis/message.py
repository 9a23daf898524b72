"""The message for a recompute that differs from its forward: what differs, in which operator, why, and what to do.

The forward has left the metadata of its saved tensors, and with `debug=True` its operator log. The operators of the
recompute are found by running the region once more: see `reruns`. None of this runs unless a check fails.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

import torch

from torchremat.regions.calls import Call
from torchremat.regions.diagnosis.captures import Reach
from torchremat.regions.diagnosis.causes import likely_causes
from torchremat.regions.diagnosis.differences import Difference, named, words
from torchremat.regions.diagnosis.operators import LoggedOperator, OperatorLog
from torchremat.regions.diagnosis.reruns import Rerun, rerun
from torchremat.regions.recording import Recording
from torchremat.tensors.metadata import Metadata, agree

_CAST = "aten._to_copy.default"
_CONTEXT = 3  # operators of a log that are shown before the logs part
_SHOWN = 12  # and after
_COMPARED = 200  # saved tensors that are aligned after the first difference
_UNKNOWN = (
    "Likely cause: not found. Something that the function reads and a region cannot see was different in the "
    "recompute: an iterator that has moved on, an attribute of a Python module, a file, the time. Read it before the "
    "region and pass it as an argument, or change it after backward."
)
_NO_DEBUG = "To see the operators of both runs, pass `debug=True`."
_HEADER = (
    "An error happened while unpacking tensors; dumping logs of latest computation because you passed `debug=True` to "
    "`torch.utils.checkpoint.checkpoint()`\n"
    "You are seeing this error because you passed `debug=True` to checkpoint, or switched it on for all."
)


class Divergence(NamedTuple):
    """Where two lists of saved tensors part: those from `first` up to `then` and `now` correspond to each other."""

    first: int
    then: int
    now: int


def log_of(recording: Recording, call: Call) -> OperatorLog:
    """Return an empty log for a call of a region."""
    return OperatorLog(Reach([call], recording.label).names)


def explain(recording: Recording, call: int, difference: Difference, log: OperatorLog | None = None) -> str:
    """Return the whole message for a difference between a recompute and its forward.

    Args:
        recording: What the region noted of its forward.
        call: The number of the call that differs.
        difference: The difference that was found.
        log: The operators of the recompute up to the difference, if they were logged.
    """
    lines = _facts(recording, call, difference)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # A process that runs more collectives than the others hangs.
        lines.append(
            "The region was not run again to find the operator: torch.distributed is initialized, and other processes "
            "would wait for its collectives."
        )
    else:
        try:
            found = rerun(recording)
            operator = _saver(recording, difference, found.log)[1]
            lines += [*_operator(recording, difference, found), *_causes(recording, call, difference, found, operator)]
            log = found.log
        except Exception as error:  # noqa: BLE001  the facts are worth more than a perfect message
            lines.append(f"Running the region again to find the operator failed: {_line(error)}")
    logs = _logs_of(recording, log)
    lines += _shown(logs) if logs is not None else [_NO_DEBUG]
    return "\n".join(lines)


def _causes(
    recording: Recording, call: int, difference: Difference, found: Rerun, operator: LoggedOperator | None
) -> list[str]:
    causes = likely_causes(recording, call, difference, found, operator)
    return [f"{'Or' if place else 'Likely cause'}: {one}" for place, one in enumerate(causes)] or [_UNKNOWN]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:160]


def _facts(recording: Recording, call: int, difference: Difference) -> list[str]:
    name = recording.name(call)
    counts = [
        f"Number of tensors saved during forward: {difference.saved_then}",
        f"Number of tensors saved during recomputation: {difference.saved_now}.",
    ]
    match difference.kind:
        case "too few":
            first = "A different number of tensors was saved during the original forward and recomputation."
            return [f"{name}: {first}", *counts]
        case "too many":
            first = "trying to save more tensors during recomputation than during the original forward pass."
            return [f"{name}: {first}", counts[0]]
        case "metadata":
            first = "Recomputed values for the following tensors have different metadata than during the forward pass."
            lines = [f"{name}: {first}", f"tensor at position {difference.index}:"]
            if difference.then is not None and difference.now is not None:
                strides = difference.then[:3] == difference.now[:3]
                lines += [
                    f"saved metadata: {named(difference.then, strides=strides)}",
                    f"recomputed metadata: {named(difference.now, strides=strides)}",
                ]
            return lines
        case "values":
            of = f"tensor {difference.index} of {difference.saved_then}"
            what = f", {words(difference.then)}" if difference.then else ""
            return [
                f"{name}: {of} that autograd saves{what}, has other values in the recompute than in the forward.",
                "The gradients of this backward are wrong. Do not step on them.",
            ]


# ---------------------------------------------------------------------------------------------------- which operator


def _saver(
    recording: Recording, difference: Difference, log: OperatorLog
) -> tuple[Divergence | None, LoggedOperator | None]:
    """Return where the saved tensors part, and the recompute's operator that saved the first differing one."""
    if difference.kind == "values":
        index = difference.index if difference.index is not None else -1
        return Divergence(index, index + 1, index + 1), log.savers.get(index)
    found = _diverged(recording, log)
    if found is None or found.now == found.first:
        return found, None
    return found, log.savers.get(found.first)


def _diverged(recording: Recording, log: OperatorLog) -> Divergence | None:
    start = 0
    for call, now_end in zip(recording.calls, log.ends, strict=False):
        then_end = len(recording.metadata) if call.is_running else call.slots
        found = diverged(recording.metadata[start:then_end], log.metadata[start:now_end])
        if found is not None:
            return Divergence(*(start + one for one in found))
        start = then_end
    return None


def diverged(then: Sequence[Metadata], now: Sequence[Metadata]) -> Divergence | None:
    """Return where two lists of metadata part, None if they do not.

    >>> a, b, c = [(torch.Size([size]), torch.float32, torch.device("cpu"), (1,)) for size in (1, 2, 3)]
    >>> diverged([a, b, c], [a, c])
    Divergence(first=1, then=2, now=1)
    """
    pairs = zip(then, now, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if not agree(a, b)), min(len(then), len(now)))
    if first == len(then) == len(now):
        return None
    # Strides may differ a little and still agree; they do not decide which tensors correspond.
    rest = [[one[:3] for one in side[first : first + _COMPARED]] for side in (then, now)]
    if rest[0][:1] == rest[1][:1]:
        return Divergence(first, first + 1, first + 1)
    for tag, _, then_end, _, now_end in SequenceMatcher(None, *rest, autojunk=False).get_opcodes():
        if tag != "equal":
            return Divergence(first, first + then_end, first + now_end)
    return Divergence(first, len(then), len(now))


def _operator(recording: Recording, difference: Difference, found: Rerun) -> list[str]:
    where, operator = _saver(recording, difference, found.log)
    lines: list[str] = []
    if found.error is not None:
        lines.append(f"Run once more to find the operator, the region raised {found.error}")
        if where is None or where.first >= len(found.log.metadata):
            return lines  # it did not come as far
    logs = _logs_of(recording, found.log)
    if logs is not None and not logs.first == len(logs.then) == len(logs.now):
        lines += _parted(logs)
    elif where is None:
        lines.append("Run once more to find the operator, the region saved what the forward had saved.")
    elif operator is not None:
        lines += ["First operator that differs, as the recompute runs it:", *_described(operator)]
        if difference.kind in ("too many", "too few"):
            lines.append(_saved(recording, found.log, where))
    else:
        last = found.log.savers.get(where.first - 1)
        if last is None:
            lines.append("The recompute leaves out the first tensors that the forward saved.")
        else:
            lines += ["The recompute leaves something out. The last operator that both ran:", *_described(last)]
        lines.append(_saved(recording, found.log, where))
    if found.log.is_compiled:
        lines.append("Part of the region is compiled; to find the operator it ran eagerly, and may save other tensors.")
    return lines


def _described(operator: LoggedOperator) -> list[str]:
    source = operator.source
    where = f" in `{operator.module}`" if operator.module else ""
    code = linecache.getline(source.file, source.line).strip()
    return [
        f"    {operator.title}({', '.join(operator.inputs)[:160]}){where}",
        f"    at {source}" + (f": `{code[:120]}`" if code else ""),
    ]


def _saved(recording: Recording, log: OperatorLog, where: Divergence) -> str:
    sides: list[str] = []
    for name, metadata, end in (("forward", recording.metadata, where.then), ("recompute", log.metadata, where.now)):
        these = [words(one) for one in metadata[where.first : end]]
        shown = "; ".join(these[:2]) + (f"; {len(these) - 2} more" if len(these) > 2 else "")
        sides.append(f"the {name} saved {shown}" if these else f"the {name} saved nothing")
    return f"There, from saved tensor {where.first} on, {sides[0]}, {sides[1]}."


# ------------------------------------------------------------------------------------------------------------- logs


class _Logs(NamedTuple):
    """The operators of a forward and a recompute, which are the same before number `first`."""

    then: list[LoggedOperator]
    now: list[LoggedOperator]
    first: int


def _logs_of(recording: Recording, recompute: OperatorLog | None) -> _Logs | None:
    logs = [call.log for call in recording.calls if call.log is not None]
    if not logs:
        return None
    then = [one for log in logs for one in log.operators]
    now = [] if recompute is None else recompute.operators
    if any(call.is_under_autocast for call in recording.calls):
        # Which casts run depends on the contents of autocast's cache, which is no error; the cast tensors show it as
        # well.
        then, now = ([one for one in side if one.name != _CAST] for side in (then, now))
    pairs = zip(then, now, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a.key != b.key), min(len(then), len(now)))
    return _Logs(then, now, first)


def _parted(logs: _Logs) -> list[str]:
    lines = ["First operator that differs:"]
    for name, operators in (("forward", logs.then), ("recompute", logs.now)):
        if logs.first < len(operators):
            first, *more = _described(operators[logs.first])
            lines += [f"    the {name} ran {first.strip()}", *more]
        else:
            lines.append(f"    the {name} ran none")
    return lines


def _shown(logs: _Logs) -> list[str]:
    lines = [_HEADER]
    for header, operators in (("the original forward", logs.then), ("recomputation", logs.now)):
        lines += ["", f"Operations executed during {header}:", ""]
        start = max(0, logs.first - _CONTEXT)
        if start:
            lines.append(f"  ... {start} operators that both ran")
        for number, one in enumerate(operators[start : logs.first + _SHOWN], start):
            lines.append(f"{'> ' if number == logs.first else '  '}{one}")
        rest = len(operators) - logs.first - _SHOWN
        if rest > 0:
            lines.append(f"  ... {rest} more")
        elif logs.first >= len(operators):
            lines.append("> none")
    if logs.first == len(logs.then) == len(logs.now):
        lines += ["", "Both ran the same operators with the same shapes."]
    return lines
