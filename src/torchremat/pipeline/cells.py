"""One microbatch on one stage: its computation, as a region or not, and a recompute ahead of its gradient.

A region recomputes when a node of it asks for a saved tensor, and that node runs when its gradient is there. If the
gradient comes from another device, the time of its copy is lost. So a node without work of its own is placed behind the
copy:

      forward:    region ---- Wait 1 ---- Recompute 2 ---- Copy 3 ----> next device

      backward:   the gradient's copy is enqueued (3), the recompute is enqueued (2), and only then the device waits for
                  the copy (1): the stream of the region, on which the recompute was enqueued before.

Recomputed tensors belong to the running backward, or to its session; a second backward recomputes again.

Source: torchgpipe (see `dependency`), sections 2.1 and 3.1; its pair of Functions runs the region's backward itself,
which allows one backward, of one output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from torchremat._compat.autograd import current_graph_task
from torchremat.errors import MutationError
from torchremat.pipeline.dependency import Passing, pass_all
from torchremat.pipeline.microbatch import Microbatch
from torchremat.pipeline.skip import CellTracker, SkipLayout, use_skip_tracker
from torchremat.pipeline.skip.layouts import Key
from torchremat.regions.region import Region
from torchremat.regions.sessions import active_session
from torchremat.regions.settings import Settings
from torchremat.regions.transforms import new_region
from torchremat.tensors.versioned import Versioned


class Recompute(Passing):
    """In backward, recomputes a region."""


def _recompute(region: ReferenceType[Region], around: Callable[[], AbstractContextManager[None]]) -> None:
    alive = region()
    if alive is None:  # its graph has been freed, and autograd raises the error
        return
    with around():
        session = active_session()
        alive.recompute_for(session or current_graph_task())
        if session is None:
            # A popped skip is mostly joined with another tensor, and the result is saved in its place.
            alive.let_go()


def precede(
    region: Region, tensors: Sequence[Tensor], around: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[Tensor]:
    """Return a region's results behind a node that recomputes it, in `around()`, before their gradients are there."""
    return pass_all(Recompute, partial(_recompute, ref(region), around), tensors)


def run_cell(
    module: nn.Module, layout: SkipLayout, stage: int, given: Microbatch, settings: Settings | None, label: str
) -> tuple[Microbatch, Region | None]:
    """Run the layers of a stage on a microbatch, in a region if there are settings for one.

    `given` is the input of the stage, with the skips that the stage pops, and is emptied. Returned is the output, with
    the skips that are stashed for later stages, and the region.

    Raises:
        MutationError: The layers wrote to an input that shares its memory with another one.
    """
    aliases = _aliases(given.tensors)
    value, skips = cast("tuple[object, dict[Key, object]]", given.take())
    region = None
    if settings is None or not torch.is_grad_enabled():
        tracker = CellTracker(layout, stage, skips)
        # From here on only the tracker has the skips: the code that pops one can free it.
        del skips
        output = _run(module, tracker, value)
    else:
        region = new_region(settings, label)
        output = region.call(partial(_run_tracked, module, layout, stage), (value, skips), {}, [module])
    if any(one.is_written for one in aliases):
        raise MutationError(
            f"stage {stage} was given {len(aliases)} tensors that share memory, and wrote to one of them in place. "
            "Autograd does not see this across stages, so gradients would be wrong. Make the change out of place, or "
            "pass a clone."
        )
    return Microbatch.of(output), region


def _aliases(tensors: Sequence[Tensor]) -> list[Versioned]:
    """Return the tensors in the graph that share their memory with another one, at their versions."""
    if not torch.is_grad_enabled() or len(tensors) < 2:
        return []
    inside = [tensor for tensor in tensors if tensor.requires_grad and tensor.layout == torch.strided]
    shared = Counter(tensor.untyped_storage().data_ptr() for tensor in inside if not tensor.is_nested)
    return [
        Versioned(tensor)
        for tensor in inside
        if not tensor.is_nested and tensor.numel() and shared[tensor.untyped_storage().data_ptr()] > 1
    ]


def _run_tracked(
    module: nn.Module, layout: SkipLayout, stage: int, value: object, skips: dict[Key, object]
) -> tuple[object, dict[Key, object]]:
    # A function of explicit skips: popped skips are inputs of the region and stashed skips are outputs, so the graph
    # leads from one to the other directly, and a recompute finds its inputs.
    return _run(module, CellTracker(layout, stage, skips), value)


def _run(module: nn.Module, tracker: CellTracker, value: object) -> tuple[object, dict[Key, object]]:
    with use_skip_tracker(tracker):
        output = module(value)
    return output, tracker.outgoing
