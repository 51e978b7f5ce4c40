"""Rows of tables: pairs of bytes in the order of their keys, derived from the log."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Protocol

Pair = tuple[bytes, bytes]


class TableRows(Protocol):
    """Keeper of pairs of bytes, which is empty whenever it has lost any.

    All methods but ``close`` raise ``CorruptRecord`` or ``StorageError`` when the rows cannot be
    read or written; ``reset`` recovers from that. One thread at a time.
    """

    def begin(self) -> None:
        """Open the rows for a role that begins; a second call does no harm."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, None if there is none."""

    def range(self, start: bytes, stop: bytes, *, most: int) -> list[Pair]:
        """Return pairs with keys at or behind ``start`` and before ``stop``, in order."""

    def write(self, puts: Sequence[Pair], deletes: Iterable[bytes] = ()) -> None:
        """Put and delete pairs: all or nothing. Each key is given once; ``puts`` are sorted.

        Raises:
            DiskFull: No room; nothing was written.
        """

    def reset(self) -> None:
        """Forget everything."""

    def abandon(self) -> None:
        """Release the files as the end of the process does."""

    def close(self) -> None:
        """Make all rows durable, and release the files; may be called again."""


class MemoryRows:
    """Rows in memory, for brokers that keep nothing on disk."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._keys: list[bytes] = []

    def begin(self) -> None:
        """Implement ``TableRows.begin``."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Implement ``TableRows.get_many``."""
        return [self._values.get(key) for key in keys]

    def range(self, start: bytes, stop: bytes, *, most: int) -> list[Pair]:
        """Implement ``TableRows.range``."""
        first = bisect_left(self._keys, start)
        found = self._keys[first : min(bisect_left(self._keys, stop), first + most)]
        return [(key, self._values[key]) for key in found]

    def write(self, puts: Sequence[Pair], deletes: Iterable[bytes] = ()) -> None:
        """Implement ``TableRows.write``."""
        for key in deletes:
            if self._values.pop(key, None) is not None:
                del self._keys[bisect_left(self._keys, key)]
        for key, value in puts:
            if key not in self._values:
                insort(self._keys, key)
            self._values[key] = value

    def reset(self) -> None:
        """Implement ``TableRows.reset``."""
        self._values.clear()
        self._keys.clear()

    def abandon(self) -> None:
        """Implement ``TableRows.abandon``."""

    def close(self) -> None:
        """Implement ``TableRows.close``: the rows stay until the process ends."""
