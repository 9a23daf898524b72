"""The carriers of skips between stages: a skip goes directly from the stage that stashes it to the one that pops it.

The holders of one microbatch's skip that stage S stashes and stage T pops, each with its own device, with stage M
between them. "S" and "T" mean the tensors that autograd saves in the cells, which hold the skip if their backward needs
it:

    event                 portal has   bytes at the source are held by   bytes at the target are held by
    forward of S          source       portal; S, unless recomputed      nothing
    forward of M          source       portal; S, unless recomputed      nothing
    copy                  copy         S, unless recomputed              portal
    forward of T          nothing      S, unless recomputed              T; its inputs, if recomputed
    recompute of T        nothing      S, unless recomputed              T; its inputs
    backward of T, M      nothing      S, unless recomputed              nothing
    recompute of S        nothing      S                                 nothing
    backward of S         nothing      nothing                           nothing

A stage between never holds anything. Skips that a recompute of S stashes are dropped with the recompute: no portal sees
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from torchremat._compat.accelerators import Stream
from torchremat._compat.streams import current_stream
from torchremat.errors import MutationError, SkipError, bug
from torchremat.pipeline.copying import copy_all, wait_all
from torchremat.pipeline.ordering import Ordering
from torchremat.pipeline.skip.layouts import Key, SkipLayout
from torchremat.tensors.metadata import version_of
from torchremat.tensors.structure import join, split, tensors_in

_EMPTY = object()


class Portal:
    """Carries one skip of one microbatch. The table above shows what it holds, and when.

    Args:
        value: The skip: any structure of tensors and other objects.
        source: The stage that it comes from.
        target: The stage that it goes to.
    """

    __slots__ = ("_value", "_versions", "source", "target")

    def __init__(self, value: object, source: int, target: int) -> None:
        self._value = value
        self._versions = list(map(version_of, tensors_in(value)))
        self.source = source
        self.target = target

    def copy(self, source_stream: Stream, target_stream: Stream, ordering: Ordering) -> None:
        """Copy the skip to the device of `target_stream`, as a part of the graph.

        The two devices compute on their current streams: the copy waits for the source's stream, and the target's
        stream waits for the copy. Tensors that do not require grad are copied outside the graph.

        Args:
            source_stream: Copies at its source.
            target_stream: Copies at its target.
            ordering: The edges of the step.

        Raises:
            MutationError: It was written in place since.
            SkipError: It has been taken.
        """
        tensors: list[Tensor] = []
        template = split(self.take(), tensors, [])
        self._check(tensors)
        tensors = wait_all(tensors, current_stream(source_stream.device), source_stream)
        tensors = copy_all(ordering.leaving(self.target, tensors), source_stream, target_stream)
        tensors = ordering.arrived(self.source, tensors)
        tensors = wait_all(tensors, target_stream, current_stream(target_stream.device))
        self._value = join(template, tensors)

    def _check(self, tensors: list[Tensor]) -> None:
        # On one device the stages between may have aliases of it, and their writes are not in its graph.
        for then, tensor in zip(self._versions, tensors, strict=True):
            if version_of(tensor) != then:
                raise MutationError(
                    f"the skip from stage {self.source} to stage {self.target} shares its memory with what a stage "
                    f"between them has written in place: a tensor of shape {tuple(tensor.shape)} was at version {then} "
                    f"when it was stashed, and is at {version_of(tensor)} now. Make that operation out of place, or "
                    "stash a clone."
                )

    def take(self) -> object:
        """Return the skip, and release it from the portal.

        Raises:
            SkipError: It has been taken before.
        """
        value, self._value = self._value, _EMPTY
        if value is _EMPTY:
            raise SkipError(
                f"the skip from stage {self.source} to stage {self.target}: tensor in portal has been removed; it can "
                "be taken once."
            )
        return value


class PortalTracker:
    """The portals of one microbatch.

    Args:
        layout: Source and target stage of each skip.
    """

    def __init__(self, layout: SkipLayout) -> None:
        self._layout = layout
        self._portals: dict[Key, Portal] = {}

    def stashed(self, stage: int, outgoing: Mapping[Key, object]) -> None:
        """Take the skips that leave a stage."""
        for key, value in outgoing.items():
            source, target = self._layout.routes.get(key, (stage, stage))
            if source != stage or target == stage:
                raise bug(f"{key[1]!r} leaves stage {stage}, but its route is from {source} to {target}")
            self._portals[key] = Portal(value, source, target)

    def copy_to(self, stage: int, streams_of: Callable[[int], tuple[Stream, Stream]], ordering: Ordering) -> None:
        """Copy the skips that a stage pops.

        Args:
            stage: The stage.
            streams_of: Returns, for the stage that a skip comes from, the streams that copy at both ends.
            ordering: The edges of the step.

        Raises:
            SkipError: One has not been stashed.
        """
        for source, key in self._layout.copies_to(stage):
            self._portal(source, key).copy(*streams_of(source), ordering)

    def incoming(self, stage: int) -> dict[Key, object]:
        """Return the skips that a stage pops and another one has stashed, and release them.

        Raises:
            SkipError: One has not been stashed, or has been taken.
        """
        return {key: self._portal(source, key).take() for source, key in self._layout.copies_to(stage)}

    def _portal(self, source: int, key: Key) -> Portal:
        if key not in self._portals:
            raise SkipError(f"{key[1]!r} has not been stashed by stage {source}.")
        return self._portals[key]
