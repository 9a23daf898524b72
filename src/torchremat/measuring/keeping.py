"""`saved`: one forward of a step, and a list of the tensors that autograd keeps at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from torchremat.errors import StepError
from torchremat.measuring.arguments import Step, model_and_step, model_first
from torchremat.measuring.inventory import Inventory
from torchremat.measuring.runs import Subject, subject_of
from torchremat.measuring.saved_report import SavedReport
from torchremat.measuring.saving import SaveLog, watched
from torchremat.measuring.step import found_loss, loss_of
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.regions.diagnosis.operators import LoggedOperator
from torchremat.regions.footprints import abandon
from torchremat.tensors.graphs import nodes_of, slots_of
from torchremat.tensors.metadata import Metadata


@without_our_frames
@model_first
def saved(model: nn.Module | Step, step: Step | None = None) -> SavedReport:
    """Run the forward of a training step and return the tensors that autograd keeps at its end.

    The forward runs once, or three times if it has compiled code; backward does not run. Gradients, buffers,
    generators, training flags and hooks are restored as by `measure`, also if the step raises, and nothing of the step
    stays in memory.

    Args:
        model: The model. Modules that the step itself holds count as well. If it holds all of them, pass the step
            alone.
        step: Called as `step(model)`, or as `step()` if no model is given. Returns the loss: a scalar tensor, an
            object with a `.loss`, or a dict with a `"loss"`. If it does not require grad, the report is empty and
            says so.

    Raises:
        StepError: The step returns no loss, runs backward itself, saves other tensors when its compiled code runs
            again, or the model has parameters without values.
        UnsupportedError: The step runs a transform of `torch.func` that refuses saved-tensor hooks.
    """
    subject = subject_of(*model_and_step(model, step), None)
    with watched(subject, operators=True) as log:
        if not log.is_compiled:
            return _report(log, log.savers)
        eager = [
            (save_metadata, log.savers.get(index))
            for index, (save, save_metadata) in enumerate(zip(log.step.saves, log.metadata, strict=True))
            if not save.is_compiled
        ]
    with subject.untouched():
        # Before any hook is set: dynamo may compile different code with hooks in place.
        root = _root(subject.run())
        abandon([] if root is None else [root])
        del root
    return _compiled_report(subject, eager)


def _compiled_report(subject: Subject, eager: list[tuple[Metadata, LoggedOperator | None]]) -> SavedReport:
    """Return the report of a run with compiled code; operators outside of compiled code come from another run."""
    with watched(subject, operators=False) as log:
        outside = [index for index, save in enumerate(log.step.saves) if not save.is_compiled]
        if [log.metadata[index] for index in outside] != [metadata for metadata, _ in eager]:
            raise StepError(
                f"the step saves {len(outside)} tensors outside of compiled code, and {len(eager)}, or others, when it "
                "runs again. A report needs a step that does the same each time."
            )
        savers = {index: saver for index, (_, saver) in zip(outside, eager, strict=True) if saver is not None}
        return _report(log, savers)


def _root(result: object) -> Tensor | None:
    """Return the loss, or None if it does not require grad."""
    loss = found_loss(result)
    return None if isinstance(loss, Tensor) and not loss.requires_grad else loss_of(result)


def _report(log: SaveLog, savers: Mapping[int, LoggedOperator]) -> SavedReport:
    root = _root(log.take_result())
    report = report_of(log, savers, [] if root is None else [root])
    if log.unpacks and not (report.entries or report.regions or report.unknown):
        raise StepError(
            "the step has run backward itself, so nothing is kept any more. Return the loss without calling backward."
        )
    return report


def report_of(log: SaveLog, savers: Mapping[int, LoggedOperator], roots: Sequence[Tensor]) -> SavedReport:
    """Return the report of a watched forward; no backward can go through its regions afterwards.

    Args:
        log: The log of the forward; the caller must hold no more of its result than a training step does.
        savers: The operators that have saved something, by the number of the save, where known.
        roots: The tensors that backward starts from.
    """
    alive = {one.index: one for packed in log.packed if (one := packed()) is not None}
    slots = [slot for node in nodes_of(roots) for slot in slots_of(node)]
    report = Inventory(log, savers).report(alive, slots, requires_grad=bool(roots))
    abandon(roots)
    return report
