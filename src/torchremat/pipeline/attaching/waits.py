"""The waits of a schedule for transfers, and their microbatches.

GPipe and 1F1B ask the stage which receives a microbatch needs, post them, perhaps with sends, and wait in the next
line. The other schedules keep posted receives in a dictionary until the microbatch's turn has come.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast
from weakref import ReferenceType, ref

from torchremat._compat.binding import Original, Patch
from torchremat._compat.pipelining import (
    LOOP,
    RECEIVES_OF_SCHEDULE,
    RECEIVES_OF_STAGE,
    SINGLE,
    TorchStage,
    Work,
    looping,
    name_of,
    stages_of,
)
from torchremat.pipeline.attaching.stages import Lookahead, SessionsOfStage
from torchremat.pipeline.event_recorder import Recorder

Direction = Literal["forward", "backward"]


class Waits:
    """Runs a look-ahead before waits for gradients, and records all waits for receives."""

    def __init__(self, stages: dict[int, SessionsOfStage], lookahead: Lookahead | None, recorder: Recorder) -> None:
        self._stages = stages
        self._lookahead = lookahead
        self._recorder = recorder
        self._next: tuple[Direction, int, int] | None = None  # the target of a single-stage schedule's next wait

    def patches(self, schedule: object) -> list[Patch]:
        """Replace the code in which the schedule waits, for as long as the patches last."""
        patches: list[Patch] = []
        if name_of(schedule) in SINGLE:
            for direction, name in RECEIVES_OF_STAGE.items():
                stage = stages_of(schedule)[0]
                patches.append(Patch(stage, name, _Receives(stage, name, cast("Direction", direction), self)))
            patches.append(
                Patch(schedule, LOOP, partial(_run_loop, ref(schedule), looping(schedule, self._wait_for_next)))
            )
            return patches
        for direction, name in RECEIVES_OF_SCHEDULE.items():
            own = cast("dict[tuple[int, int], list[Work]]", getattr(schedule, name))
            posted = _Posted(own, cast("Direction", direction), self)
            patches.append(Patch(schedule, name, posted, posted.give_back))
        return patches

    def forget(self) -> None:
        """Expect nothing: a step that has raised may have posted receives without waiting for them."""
        self._next = None

    def expect(self, direction: Direction, stage: int, microbatch: int) -> None:
        """Remember the target of the next wait."""
        self._next = direction, stage, microbatch

    def _wait_for_next(self, works: list[Work], wait: Callable[[list[Work]], None]) -> None:
        expected, self._next = self._next, None
        if expected is None:
            wait(works)
        else:
            self.wait(expected, works, lambda: wait(works))

    def wait(self, waits_for: tuple[Direction, int, int], works: list[Work], wait: Callable[[], object]) -> None:
        """Wait for a receive; before a wait for a gradient, run the look-ahead."""
        direction, stage, microbatch = waits_for
        if direction == "backward" and self._lookahead is not None:
            self._lookahead.run(self._stages[stage], microbatch, works)
        with self._recorder.event(stage, microbatch, "wait"):
            wait()


def _run_loop(schedule: ReferenceType[object], loop: Callable[..., object], *args: Any, **kwargs: Any) -> object:
    """Run a step: replaces `_step_microbatches`."""
    return loop(schedule(), *args, **kwargs)


class _Receives:
    """Replaces `get_bwd_recv_ops` or `get_fwd_recv_ops`: the schedule waits next for the receives that it asks for."""

    def __init__(self, stage: TorchStage, name: str, direction: Direction, waits: Waits) -> None:
        self._index = stage.stage_index
        self._receive = Original(stage, name)
        self._direction: Direction = direction
        self._waits = waits

    def __call__(self, microbatch: int) -> list[object]:
        """Return the receives of a microbatch."""
        receives = self._receive(microbatch)
        if receives:
            self._waits.expect(self._direction, self._index, microbatch)
        return receives


class _Posted(dict[tuple[int, int], "list[Work]"]):
    """Replaces `bwd_recv_ops` or `fwd_recv_ops`: the schedule is about to wait for the receives that it takes out."""

    def __init__(self, posted: dict[tuple[int, int], list[Work]], direction: Direction, waits: Waits) -> None:
        super().__init__(posted)
        self._own = posted
        self._direction: Direction = direction
        self._waits = waits

    def pop(self, key: tuple[int, int], *default: Any) -> Any:
        """Return transfers that run a look-ahead before they wait."""
        found = super().pop(key, *default)
        return [_Awaited((self._direction, *key), found, self._waits)] if found else found

    def give_back(self) -> None:
        """Put the remaining receives, none unless a step has raised, back into the original dictionary."""
        self._own.clear()
        self._own.update(self)


class _Awaited:
    """Several transfers as one, with the actions before the wait."""

    def __init__(self, waits_for: tuple[Direction, int, int], works: list[Work], waits: Waits) -> None:
        self._waits_for = waits_for
        self._works = works
        self._waits = waits

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> bool:
        self._waits.wait(self._waits_for, self._works, lambda: [work.wait() for work in self._works])
        return True
