"""Records of the schedule topic: its messages that need not wait there any more.

Each is a message in a queue of its own (``delayed_batch.RECORD_QUEUE``), stored in one write with,
and behind, the messages that were delivered or rewritten. So the log alone shows the waiting
messages, even if the timetable is lost. Its body, little endian (also on disk):

======== ===== ==== ============================================================
position bytes type meaning
======== ===== ==== ============================================================
0        1     u8   action: 1 delivered, 2 cancelled, 3 rolled forward
1        16·n  …    runs: commitlog_offset u64, first ordinal u32, messages u32
======== ===== ==== ============================================================
"""

import enum
import struct
from collections.abc import Iterable
from typing import Final

from mqmesh.errors import CorruptBatch

_RUN: Final = struct.Struct("<QII")

Run = tuple[int, int, int]
"""Commit-log offset of a batch, ordinal of the first message, number of messages."""


class ScheduleAction(enum.IntEnum):
    """Action on messages that wait. On disk and on the wire: never renumbered."""

    DELIVER = 1
    """Write them to their real queue."""
    CANCEL = 2
    """Forget them."""
    ROLL = 3
    """Write them to the end of the schedule topic: retention is near."""


def encode_runs(runs: Iterable[Run]) -> bytes:
    """Encode runs for the wire and for records."""
    return b"".join([_RUN.pack(*run) for run in runs])


def decode_runs(data: bytes | memoryview) -> list[Run]:
    """Decode runs.

    Raises:
        CorruptBatch: The size does not fit.
    """
    if len(data) % _RUN.size:
        raise CorruptBatch(f"{len(data)} bytes are no runs of {_RUN.size} bytes each")
    return list(_RUN.iter_unpack(data))


def encode_record(action: ScheduleAction, runs: Iterable[Run]) -> bytes:
    """Encode the body of a record."""
    return bytes((action,)) + encode_runs(runs)


def decode_record(body: bytes | memoryview) -> tuple[int, list[Run]]:
    """Return the action, as a number that may be unknown, and the places of its messages.

    Raises:
        CorruptBatch: The body is no record.
    """
    if not body:
        raise CorruptBatch("an empty record")
    return body[0], decode_runs(body[1:])
