"""Interface of engines that write the tables of an archive."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from mqmesh.storage.tools.snapshot_reading import Snapshot

from .selection import Selection
from .steps import Ingest
from .tables import LogStretch


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a step of an ingest.

    Attributes:
        done: Bytes of log that were read, or tasks of Spark that are done.
        total: Bytes or tasks in all.
        messages: Messages that were read; None where they are not counted.
    """

    done: int
    total: int
    messages: int | None = None


OnProgress = Callable[[Progress], None]


class Engine(Protocol):
    """Writer of an archive's tables; each goes on with tables of another one."""

    def note(self, archive: str, row: Ingest) -> None:
        """Adds a row to the table of ingests."""

    def write_messages(
        self, archive: str, snapshot: Snapshot, stretch: LogStretch, wanted: Selection
    ) -> None:
        """Writes the messages of a stretch, and the position behind it, in one commit."""

    def write_keys(self, archive: str, stretch: LogStretch) -> None:
        """Writes the keys of a stretch's messages, and the position behind it, in one commit."""

    def is_passing(self, error: Exception) -> bool:
        """Returns True if another try may succeed: of another commit meanwhile, or a slow start."""
