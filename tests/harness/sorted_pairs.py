"""Pairs of bytes in memory: the twin of an LMDB environment, for tests."""

import bisect
from collections.abc import Iterable, Sequence

Pair = tuple[bytes, bytes]


class SortedPairs:
    """Pairs sorted by key, as in ``storage.lmdb_env.LmdbEnv``, without a file.

    Attributes:
        writes: Transactions so far.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._keys: list[bytes] = []
        self.writes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: bytes) -> bytes | None:
        """Implement ``LmdbEnv.get``."""
        return self._values.get(key)

    def at_or_before(self, key: bytes) -> Pair | None:
        """Implement ``LmdbEnv.at_or_before``."""
        index = bisect.bisect_right(self._keys, key)
        if not index:
            return None
        found = self._keys[index - 1]
        return found, self._values[found]

    def range(self, start: bytes, stop: bytes, *, most: int) -> list[Pair]:
        """Implement ``LmdbEnv.range``."""
        first = bisect.bisect_left(self._keys, start)
        last = min(bisect.bisect_left(self._keys, stop), first + most)
        return [(key, self._values[key]) for key in self._keys[first:last]]

    def write(self, puts: Sequence[Pair], deletes: Iterable[bytes] = ()) -> None:
        """Implement ``LmdbEnv.write``."""
        self.writes += 1
        for key in deletes:
            if key in self._values:
                del self._values[key]
                del self._keys[bisect.bisect_left(self._keys, key)]
        for key, value in puts:
            if key not in self._values:
                bisect.insort(self._keys, key)
            self._values[key] = value
