"""How far planning is, as a bar of rich in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from torchremat.planning.searches.progress import Phase, Progress

try:
    from rich import progress as rich_progress
    from rich.console import Console, RenderableType
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "progress_bar needs rich, which is not installed. Install it with: pip install 'torchremat[cli]'", name="rich"
    ) from error

# Nobody waits for what is done sooner.
_HIDDEN_S = 1.0

# Drawing takes time from the step that is measured, so it is seldom.
_PER_SECOND = 4

_WORDS: dict[Phase, str] = {
    "profiling": "running the step",
    "options": "parts to keep",
    "tables": "tables",
    "judging": "candidates",
    "polishing": "polish",
    "certificate": "certificate",
}


class _Bar(rich_progress.Progress):
    """One task, which is not to be seen until it has taken a second."""

    def get_renderables(self) -> Iterable[RenderableType]:
        if any((task.elapsed or 0.0) > _HIDDEN_S for task in self.tasks):
            yield from super().get_renderables()


@contextmanager
def progress_bar(
    console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Generator[Callable[[Progress], None]]:
    """Return what shows a bar in a terminal while it is called; pass it as `progress`, and leave to remove the bar.

    The bar appears after a second. Where there is no terminal, nothing is written.

    Args:
        console: Where to draw; stderr if not given.
        clock: Seconds that go by.
    """
    place = Console(stderr=True) if console is None else console
    columns = (
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("planning: {task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TextColumn("{task.fields[best]}", markup=False),
        rich_progress.TimeElapsedColumn(),
    )
    with _Bar(
        *columns,
        console=place,
        get_time=clock,
        refresh_per_second=_PER_SECOND,
        transient=True,
        disable=not place.is_interactive,
    ) as bar:
        number = bar.add_task("", total=None, best="")

        def show(progress: Progress) -> None:
            best = "" if progress.slowdown is None else f"best {progress.slowdown:.2f} x plain"
            bar.tasks[0].total = None if progress.share is None else 1.0  # `update` has no way to say None
            bar.update(number, description=_WORDS[progress.phase], completed=progress.share or 0.0, best=best)

        yield show
