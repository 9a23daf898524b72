"""Why a recompute differed from its forward: causes that a rerun gives evidence of, the likeliest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchremat.regions.diagnosis.differences import Difference
from torchremat.regions.diagnosis.operators import LoggedOperator
from torchremat.regions.diagnosis.reruns import DEFAULT, NUMPY, PYTHON, Rerun, rerun
from torchremat.regions.recording import Recording
from torchremat.tensors.metadata import Metadata, agree
from torchremat.tensors.structure import place_of

_MOST = 3  # causes in a message
_OF_TRAINING = ("dropout", "batch_norm", "bernoulli")
_READS_DATA = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.unique")
_LOW = (torch.float16, torch.bfloat16)


class Cause(NamedTuple):
    """Why a recompute differed from its forward, as a sentence without a full stop, and what to do."""

    fact: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.fact}. {self.remedy}"


def likely_causes(
    recording: Recording, call: int, difference: Difference, found: Rerun, operator: LoggedOperator | None
) -> list[Cause]:
    """Return the likely causes, the likeliest first; none if nothing gives evidence of one.

    Args:
        recording: What the region noted of its forward.
        call: The number of the call that differs.
        difference: The difference that was found.
        found: The rerun of the region.
        operator: The operator of the recompute that saved the first differing tensor, None if no operator did.
    """
    causes = [*_changes(found), *_draws(recording, found)]
    searches = [_training, _precision, _differs_each_time, _written, _branch, _compiled]
    # That it saves other tensors has hardly another cause; that a value differs may have many.
    searches.insert(len(searches) if difference.kind == "values" else 0, _scripted)
    for search in searches:
        if search is _written and causes:
            continue  # it names everything read there; given a better cause it would blame innocent code
        causes += search(recording, call, difference, found, operator)
    return causes[:_MOST]


def seen_cause(recording: Recording) -> Cause | None:
    """Return a visible side effect of a region that no recompute puts back; None if it has none."""
    found = rerun(recording)
    return next(iter([*_changes(found), *_draws(recording, found)]), None)


def _changes(found: Rerun) -> Iterator[Cause]:
    if not found.changes:
        return
    change, *others = found.changes
    inner = f"{change.name}["
    more = [f"`{one.name}`" for one in others if not one.name.startswith((inner, f"{change.name}."))][:2]
    yield Cause(
        f"`{change.name}` changes each time that the region runs: {change.before} before, {change.after} after"
        f"{', and so do ' + ' and '.join(more) if more else ''}. It is not put back for the recompute",
        "Name it, or the object that holds it if it is a plain value, in `guard=[...]`, pass it as an argument, or "
        "change it outside of the region.",
    )


def _draws(recording: Recording, found: Rerun) -> Iterator[Cause]:
    for name in found.draws:
        if name in (PYTHON, NUMPY):
            entry = "python_random" if name == PYTHON else "numpy_random"
            yield Cause(
                f"the region draws from {name}, which a recompute restores only if `torchremat.extend.{entry}` is "
                "registered",
                "Register it, or draw before the region and pass what was drawn.",
            )
        elif not recording.calls[0].preserves_rng:
            yield Cause(f"the region draws from {name}, and `preserve_rng=False`", "Leave that option at True.")
        elif not name.startswith(DEFAULT):
            yield Cause(f"the region draws from {name}, which it does not get as an argument", "Pass it as one.")


def _scripted(
    recording: Recording, call: int, difference: Difference, found: Rerun, operator: LoggedOperator | None
) -> Iterator[Cause]:
    del recording, call, operator
    if found.reach.scripted:
        after = "may round otherwise" if difference.kind == "values" else "saves other tensors"
        yield Cause(
            f"`{found.reach.scripted[0]}` is scripted, and TorchScript rewrites its code in the first two calls, after "
            f"which it {after}",
            "Run a forward and a backward once without the region, in train mode and with inputs of such shapes.",
        )


def _training(
    recording: Recording, call: int, difference: Difference, found: Rerun, operator: LoggedOperator | None
) -> Iterator[Cause]:
    del call
    if found.unseen and difference.kind != "values":
        for modules in ([one] for one in found.unseen[:4]):
            if _all_agree(recording.metadata, rerun(recording, flipped=modules).log.metadata):
                name = type(modules[0]).__name__
                now = "train" if modules[0].training else "eval"
                yield Cause(
                    f"train/eval was flipped: a {name}, which the region cannot see, is in {now} mode now and was not "
                    "in the forward; run in the other mode, it saves what the forward saved",
                    "Pass the module as an argument, or flip it after backward.",
                )
                return
    logs = [one.log for one in recording.calls if one.log is not None]
    if logs:
        forward = _random_operators([one for log in logs for one in log.operators])
        recompute = _random_operators(found.log.operators)
        for titles, side in ((forward - recompute, "forward"), (recompute - forward, "recompute")):
            if titles:
                yield Cause(
                    f"{sorted(titles)[0]} ran in the {side} alone: a `training` flag was another in the forward",
                    "Pass the module or the flag as an argument.",
                )
                return
    drew = any(name.startswith(DEFAULT) for name in found.draws) and recording.calls[0].preserves_rng
    title = operator.title if operator is not None else ""
    if drew or (any(word in title for word in _OF_TRAINING) and difference.kind != "values"):
        unseen = ", ".join(type(one).__name__ for one in found.unseen[:3])
        yield Cause(
            "dropout, batch norm or another random operator ran in the recompute alone: a `training` flag was another "
            f"in the forward{f', perhaps of {unseen}, which the region cannot see' if unseen else ''}",
            "Pass the module or the flag as an argument.",
        )


def _all_agree(then: list[Metadata], now: list[Metadata]) -> bool:
    return len(then) == len(now) and all(map(agree, then, now))


def _random_operators(operators: list[LoggedOperator]) -> set[str]:
    return {one.title for one in operators if any(word in one.title for word in _OF_TRAINING)}


def _precision(
    recording: Recording, call: int, difference: Difference, found: Rerun, operator: LoggedOperator | None
) -> Iterator[Cause]:
    del call, operator
    then, now = difference.then, difference.now
    if difference.kind in ("too many", "too few"):
        pairs = zip(recording.metadata, found.log.metadata, strict=False)
        then, now = next(((a, b) for a, b in pairs if not agree(a, b)), (None, None))
    if then is None or now is None or then[1] == now[1]:
        return
    dtypes = (then[1], now[1])
    if any(one in _LOW for one in dtypes):
        yield Cause(
            f"autocast: the forward saved {dtypes[0]}, the recompute {dtypes[1]}. Autocast around the region is "
            "restored; one that the function turns on by a flag is not",
            "Pass the flag as an argument, and keep it.",
        )
    else:
        yield Cause(
            f"the dtype: the forward saved {dtypes[0]}, the recompute {dtypes[1]}. A default dtype or a flag that the "
            "function reads has changed",
            "Name the dtype in the code, or pass it as an argument.",
        )


def _written(
    recording: Recording, call: int, difference: Difference, found: Rerun, operator: LoggedOperator | None
) -> Iterator[Cause]:
    if difference.kind != "values" or difference.index is None or difference.index >= len(found.log.storages):
        return
    log, index = found.log, difference.index
    where = {tensor.untyped_storage().data_ptr(): f"the parameter or buffer `{name}`" for name, tensor in _plain(found)}
    if call < len(log.arguments):
        for place, address in enumerate(log.arguments[call]):
            if address is not None:
                where[address] = f"the input {argument_name(recording, call, place)}"
    saved = log.storages[index]
    past = "was written between forward and recompute past its version counter (`.data`, NumPy)"
    if saved in where:
        yield Cause(f"{where[saved]} {past}", "Write to it after backward.")
    else:
        # Tensors read since the last saved tensor that agrees, and not known to agree themselves.
        ran = log.operators
        last = log.savers.get(index - 1)
        start = ran.index(last) if last in ran else 0
        end = ran.index(operator) if operator in ran else len(ran)
        if operator is not None and saved not in operator.reads:
            end += 1  # its output was saved
        read = dict.fromkeys(address for one in ran[start:end] for address in one.reads)
        names = [where[address] for address in read if address in where and address not in log.storages[:index]]
        if names:
            yield Cause(
                f"{' or '.join(names[:2])} {past}, or the function reads something else that has changed and that a "
                "region cannot see",
                "Write to it after backward, and pass what else is read as an argument.",
            )


def _plain(found: Rerun) -> list[tuple[str, Tensor]]:
    tensors = found.reach.parameters()
    return [(name, one) for name, one in tensors if type(one) in (Tensor, nn.Parameter) and one.layout == torch.strided]


def _differs_each_time(
    recording: Recording, call: int, difference: Difference, found: Rerun, operator: LoggedOperator | None
) -> Iterator[Cause]:
    del call, operator
    index, log = difference.index, found.log
    match difference.kind:
        case "metadata":
            again = None if index is None or index >= len(log.metadata) else log.metadata[index]
            differs = again is None or difference.now is None or not agree(difference.now, again)
        case "too many":
            differs = len(log.metadata) <= difference.saved_then
        case "too few":
            differs = len(recording.calls) == 1 and len(log.metadata) != difference.saved_now
        case "values":
            differs = rerun(recording).log.digests != log.digests
    if differs and found.error is None and not found.changes and not found.draws:
        yield Cause(
            "each run does something else: two runs after the forward differ as well",
            "Look for a counter, an iterator, the time or another global that the function reads"
            + (", or for a kernel that is not deterministic." if difference.kind == "values" else "."),
        )


def _branch(
    recording: Recording, call: int, difference: Difference, found: Rerun, operator: LoggedOperator | None
) -> Iterator[Cause]:
    del recording, call
    if difference.kind == "values":
        return
    operators = found.log.operators
    end = operators.index(operator) if operator in operators else len(operators)
    reads = [one for one in operators[:end] if one.name.startswith(_READS_DATA)]
    if reads:
        last = reads[-1]
        yield Cause(
            f"a branch on data: {last.name} at {last.source} reads a value into Python before the difference, and "
            "the value differs now",
            "Find what changed it (a write through `.data`, a random draw, a kernel that is not deterministic), or "
            "decide before the region and pass the decision.",
        )


def _compiled(
    recording: Recording, call: int, difference: Difference, found: Rerun, operator: LoggedOperator | None
) -> Iterator[Cause]:
    del recording, call, operator
    if found.reach.compiled and difference.kind != "values":
        yield Cause(
            f"`{found.reach.compiled[0]}` is compiled, and the recompute may have met another of its graphs than the "
            "forward did, such as one for shapes that vary",
            "Mark what varies by `torch._dynamo.mark_dynamic()` before the first call, or let "
            "`torch._C._dynamo.eval_frame._set_lru_cache(False)` keep the order in which graphs are tried.",
        )


def argument_name(recording: Recording, call: int, place: int) -> str:
    """Return the words for a tensor among the arguments of a call: `args[0]`, `kwargs['mask']`."""
    found = place_of(recording.calls[call].template, place) or "[0]"
    return f"args{found[3:]}" if found.startswith("[0]") else f"kwargs{found[3:]}"
