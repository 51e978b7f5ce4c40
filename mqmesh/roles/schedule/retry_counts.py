"""Counts of messages that wait for a retry, by consumer group: a part of the timetable's pairs.

Keys, beside those of the timetable; numbers are big endian:

==== =================================== ===========================================
     key                                 value
==== =================================== ===========================================
``r`` group, a byte 0, place u64, chunk   messages of the chunk that wait, u32
      u32
``t`` group                               messages of the group that wait, u64
==== =================================== ===========================================

A group stands in ASCII. Changes are written with those of the timetable, in one transaction.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from mqmesh.protocol.schedule import WaitingRetries

LOADED_AT_ONCE: Final = 10_000

_CHUNK: Final = struct.Struct(">QI")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
_FIRST_TOTAL: Final = b"t"
_END_TOTAL: Final = b"u"

Pair = tuple[bytes, bytes]
ChunkId = tuple[int, int]
"""Place and number of a chunk."""


class Pairs(Protocol):
    """Store of the table's pairs; ``storage.lmdb.env.LmdbEnv`` is one."""

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key."""

    def at_or_before(self, key: bytes) -> Pair | None:
        """Return the pair with the last key that is not behind the one given."""

    def range(self, start: bytes, stop: bytes, *, most: int) -> list[Pair]:
        """Pairs from ``start`` to before ``stop``."""

    def write(self, puts: Sequence[Pair], deletes: Iterable[bytes] = ()) -> None:
        """Writes all of it, or nothing; deletes come first."""


class RetryCounts:
    """Messages that wait for a retry, by consumer group.

    Args:
        pairs: Store of the timetable's pairs.

    Attributes:
        waiting: Number of waiting messages, by group; groups without any are left out.
    """

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self.waiting: dict[str, int] = {}
        self._unsaved: set[str] = set()
        start = _FIRST_TOTAL
        while found := pairs.range(start, _END_TOTAL, most=LOADED_AT_ONCE):
            for key, value in found:
                self.waiting[key[1:].decode("ascii")] = _U64.unpack(value)[0]
            start = found[-1][0] + b"\0"
        self._unreported = dict.fromkeys(self.waiting)

    def put(self, group: str, chunk_id: ChunkId, count: int, puts: list[Pair]) -> None:
        """Sets how many messages of a new chunk wait."""
        puts.append((_key(group, chunk_id), _U32.pack(count)))
        self._change(group, count)

    def replace(
        self, group: str, chunk_id: ChunkId, count: int, puts: list[Pair], deletes: list[bytes]
    ) -> None:
        """Sets how many messages of a chunk are left; 0 removes it."""
        key = _key(group, chunk_id)
        before = self._pairs.get(key)
        if count:
            puts.append((key, _U32.pack(count)))
        else:
            deletes.append(key)
        self._change(group, count - (_U32.unpack(before)[0] if before else 0))

    def save(self, puts: list[Pair], deletes: list[bytes]) -> None:
        """Adds what the next write of the timetable has to write."""
        for group in self._unsaved:
            key = b"t" + group.encode("ascii")
            count = self.waiting.get(group, 0)
            if count:
                puts.append((key, _U64.pack(count)))
            else:
                deletes.append(key)
        self._unsaved.clear()

    def report(self, most: int) -> list[WaitingRetries]:
        """Takes numbers that changed since they were reported, of so many groups at most.

        Those of a table that was opened a moment ago were never reported.
        """
        found: list[WaitingRetries] = []
        while self._unreported and len(found) < most:
            group, _ = self._unreported.popitem()
            found.append(WaitingRetries(group, self.waiting.get(group, 0), self._oldest(group)))
        return found

    def _oldest(self, group: str) -> int:
        start = b"r%s\0" % group.encode("ascii")
        pairs = self._pairs.range(start, start[:-1] + b"\1", most=1)
        return int(_CHUNK.unpack(pairs[0][0][len(start) :])[0]) if pairs else -1

    def _change(self, group: str, grown: int) -> None:
        count = self.waiting.get(group, 0) + grown
        if count > 0:
            self.waiting[group] = count
        else:
            self.waiting.pop(group, None)
        self._unsaved.add(group)
        self._unreported[group] = None


def _key(group: str, chunk_id: ChunkId) -> bytes:
    return b"r%s\0%s" % (group.encode("ascii"), _CHUNK.pack(*chunk_id))
