"""Writes the messages of an archive by Spark, on this machine or a cluster.

Each task writes files of its part of the log, and the driver commits those of the tasks that
succeeded. ``vacuum`` removes files of others, such as those of a task that ran twice.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from mqmesh.storage.tools.snapshot_reading import Snapshot

from .addition import Addition
from .engine import OnProgress, Progress
from .failures import NOT_STARTED
from .local_engine import LocalEngine, selection_of
from .message_files import SCHEMA, do_task
from .partition_files import NewFile
from .selection import Selection, plan
from .settings import load_settings
from .tables import MESSAGES, LogStretch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_EVERY_S: Final = 0.5


class SparkEngine(LocalEngine):
    """Engine whose messages are read and written by tasks of Spark."""

    def __init__(self, spark: "SparkSession", on_progress: OnProgress | None = None) -> None:
        """Takes the session; arguments as of ``ingest``."""
        super().__init__(on_progress)
        self._spark = spark

    def write_messages(
        self, archive: str, snapshot: Snapshot, stretch: LogStretch, wanted: Selection
    ) -> None:
        """Writes the messages of a stretch, and the position behind it, in one commit."""
        addition = Addition(archive, MESSAGES, SCHEMA, stretch)
        wanted = selection_of(stretch, wanted)
        tasks = plan(str(snapshot.directory.absolute()), wanted)
        write = partial(
            do_task,
            wanted=wanted,
            place=addition.place,
            broker=stretch.broker,
            file_bytes=load_settings(archive).file_bytes,
        )
        with self._shown():
            context = self._spark.sparkContext
            found = context.parallelize(tasks, max(len(tasks), 1)).map(write).collect()
        addition.commit([file for files in found for file in _decode(files)])

    def is_passing(self, error: Exception) -> bool:
        """Returns True if another try may succeed: of another commit meanwhile, or a slow start."""
        return super().is_passing(error) or NOT_STARTED in str(error)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Reports the tasks of the stage that runs, while its block runs."""
        if self._on_progress is None:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._report, args=(over, self._on_progress))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _report(self, over: threading.Event, on_progress: OnProgress) -> None:
        tracker = self._spark.sparkContext.statusTracker()
        while not over.wait(_LOOK_EVERY_S):
            for stage in tracker.getActiveStageIds():
                found = tracker.getStageInfo(stage)
                if found is not None:
                    on_progress(Progress(done=found.numCompletedTasks, total=found.numTasks))


def _decode(files: bytes) -> list[NewFile]:
    return msgspec.json.decode(files, type=list[NewFile])
