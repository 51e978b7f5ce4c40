"""A bar on the terminal, for long work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mqmesh.storage.interface import OnProgress, RecoveryProgress

OnUpdate = Callable[..., Any]
"""Called with changed values: ``completed``, ``total``, ``description``."""


@contextmanager
def bar_of(*columns: str | ProgressColumn, total: float | None = None) -> Iterator[OnUpdate | None]:
    """Draws a bar while its block runs; None if standard error is no terminal.

    Args:
        columns: Parts of the line beside the bar; texts may name ``{task.description}``.
        total: Value that is the whole; None while that is unknown.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    # Else it takes standard output along to where it draws itself.
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
    with bar:
        task = bar.add_task("", total=total)
        yield lambda **changes: bar.update(task, **changes)


@contextmanager
def message_bar(title: str, total: int | None = None) -> Iterator[OnUpdate | None]:
    """Draws a bar of messages; None if standard error is no terminal."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with bar_of(*columns, total=total) as update:
        yield update


@contextmanager
def share_bar(title: str) -> Iterator[OnUpdate | None]:
    """Draws a bar with a share in percent; None if standard error is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with bar_of(*columns) as update:
        if update is not None:
            update(description=title)
        yield update


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """Draws a bar of bytes if standard error is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with bar_of(*columns) as update:

        def on_progress(progress: RecoveryProgress) -> None:
            if update is not None:
                update(
                    description=progress.step,
                    completed=progress.done_bytes,
                    total=progress.total_bytes,
                )

        yield on_progress
