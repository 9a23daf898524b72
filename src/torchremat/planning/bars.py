"""The progress of planning as a bar of rich in a terminal, shown unless the caller passes an observer or False."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from torchremat.planning.searches.search_budget import Observer, Phase, Progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Work that ends sooner needs no bar.
_HIDDEN_S = 2.0

# Drawing takes time from the measured step, so it is rare.
_PER_SECOND = 4

_WORDS: dict[Phase, str] = {
    "profiling": "running the step",
    "options": "parts to keep",
    "tables": "tables",
    "judging": "candidates",
    "polishing": "polish",
    "certificate": "certificate",
    "verifying": "verifying: running steps",
}


@contextmanager
def progress_bar(
    console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Generator[Callable[[Progress], None]]:
    """Yield an observer that shows a bar in a terminal; pass it as `progress`, and leave the block to remove the bar.

    The bar appears after two seconds. Without a terminal, nothing is written.

    Args:
        console: Where to draw; stderr if not given.
        clock: Returns the current time in seconds.

    Raises:
        ModuleNotFoundError: rich is not installed.
    """
    try:
        from rich import progress as rich_progress
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "progress_bar needs rich, which is not installed. Install it with: pip install 'torchremat[cli]'",
            name="rich",
        ) from error

    class ProgressBar(rich_progress.Progress):
        """One task, which is invisible until it has taken two seconds."""

        def get_renderables(self) -> Iterable[RenderableType]:
            if any((task.elapsed or 0.0) > _HIDDEN_S for task in self.tasks):
                yield from super().get_renderables()

    place = Console(stderr=True) if console is None else console
    columns = (
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TextColumn("{task.fields[best]}", markup=False),
        rich_progress.TimeElapsedColumn(),
    )
    with ProgressBar(
        *columns,
        console=place,
        get_time=clock,
        refresh_per_second=_PER_SECOND,
        transient=True,
        disable=not place.is_interactive,
        # Output that a step prints stays on its own stream, which may be a file.
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        number = bar.add_task("", total=None, best="")

        def show(progress: Progress) -> None:
            best = "" if progress.slowdown is None else f"best {progress.slowdown:.2f} x plain"
            bar.tasks[0].total = None if progress.share is None else 1.0  # `update` cannot set None
            bar.update(number, description=_told(progress.phase), completed=progress.share or 0.0, best=best)

        yield show


def _told(phase: Phase) -> str:
    return _WORDS[phase] if phase == "verifying" else f"planning: {_WORDS[phase]}"


@contextmanager
def shown(progress: Observer | Literal[False] | None) -> Generator[Observer | Literal[False] | None]:
    """Yield the observer of the progress of planning: the given one, or a bar if stderr is a terminal.

    No bar is shown without rich, next to another display of rich, and in all but the first of several processes.

    Args:
        progress: An observer, False for none, or None for the default.
    """
    with ExitStack() as stack:
        yield _bar(stack) if progress is None else progress


def _bar(stack: ExitStack) -> Observer | None:
    if sys.stderr is None or not sys.stderr.isatty() or not _is_first_process():  # pyright: ignore[reportUnnecessaryComparison]: pythonw has none
        return None
    try:
        from rich.errors import LiveError
    except ModuleNotFoundError:
        return None
    try:
        return stack.enter_context(progress_bar())
    except LiveError:
        return None


def _is_first_process() -> bool:
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not together or torch.distributed.get_rank() == 0
