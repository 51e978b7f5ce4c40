"""A bar on the terminal, for what takes long."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mqmesh.storage.interface import OnProgress, RecoveryProgress


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """Draws a bar if standard error is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda progress: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=None)

        def on_progress(progress: RecoveryProgress) -> None:
            bar.update(
                task,
                description=progress.step,
                completed=progress.done_bytes,
                total=progress.total_bytes,
            )

        yield on_progress
