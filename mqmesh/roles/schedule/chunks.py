"""Waiting runs of one stored batch, cut into chunks: the values of the timetable.

A run is consecutive messages of a batch that are due at the same time. The runs of a batch
are put in the order of their times and cut into chunks of a few, so that a batch whose
messages are due at many times is not rewritten as a whole each time that one is.

A chunk as stored, little endian: 16 bytes a run, due i64 (ms), first ordinal u32, message
count u32, by due time.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from mqmesh.errors import CorruptRecord

CHUNK_RUNS: Final = 64
_RUN: Final = struct.Struct("<qII")

DueRun = tuple[int, int, int]
"""Due time, first ordinal, number of messages."""


def runs_of(due_times: Sequence[int], message_count: int) -> list[DueRun]:
    """Return the runs of a batch, by due time.

    Args:
        due_times: One for all messages, or one each.
        message_count: Messages of the batch.
    """
    if len(due_times) == 1:
        return [(due_times[0], 0, message_count)]
    runs: list[DueRun] = []
    first = 0
    for ordinal in range(1, len(due_times) + 1):
        if ordinal == len(due_times) or due_times[ordinal] != due_times[first]:
            runs.append((due_times[first], first, ordinal - first))
            first = ordinal
    runs.sort()
    return runs


def cut(runs: Sequence[DueRun]) -> list[Sequence[DueRun]]:
    """Chunks of runs that are in order."""
    return [runs[start : start + CHUNK_RUNS] for start in range(0, len(runs), CHUNK_RUNS)]


def encode_chunk(runs: Iterable[DueRun]) -> bytes:
    """Return a chunk as stored."""
    return b"".join([_RUN.pack(*run) for run in runs])


def decode_chunk(data: bytes) -> list[DueRun]:
    """Takes a chunk apart.

    Raises:
        CorruptRecord: The size of the data does not fit.
    """
    if not data or len(data) % _RUN.size:
        raise CorruptRecord(f"a chunk of the timetable has {len(data)} bytes")
    return list(_RUN.iter_unpack(data))


def without(runs: Iterable[DueRun], first: int, count: int) -> list[DueRun]:
    """Return the runs that are left without some messages of the batch."""
    end = first + count
    left: list[DueRun] = []
    for run in runs:
        due, start, size = run
        stop = start + size
        if stop <= first or start >= end:
            left.append(run)
            continue
        if start < first:
            left.append((due, start, first - start))
        if stop > end:
            left.append((due, end, stop - end))
    return left
