"""Runs of sorted entries, in blocks: the index's values in LMDB.

A run is a number of entries, sorted, cut into blocks that each fill one page.
A search in a run takes one step of LMDB and one look into a block, and writing
a run costs a fraction of putting every entry on its own: see
``docs/decisions``. Layout of a block (the same table stands in
``docs/storage-format.md``):

======== ===== ===== ===========================================================
position bytes type  meaning
======== ===== ===== ===========================================================
key:
0        4     u32   run, big endian
4        20    bytes low: its first entry; zeros in the first block of a run
value:
0        4     u32   crc: CRC-32 of key and value, without these 4 bytes, little endian
4        20    bytes high: low of the next block; bytes of 255 in the last one
24       …     array entries, 1 to 202
======== ===== ===== ===========================================================

The blocks of a run cover all possible entries without gaps: any entry lies between low and high of
exactly one of them. So a block that is damaged, missing or found by an error of LMDB is always
noticed, also by a search without a result.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord
from mqmesh.storage.index.entries import ENTRY_SIZE, HASH_SIZE
from mqmesh.storage.lmdb.env import LmdbEnv, Pair

BLOCK_ENTRIES: Final = 202
"""Entries of a block; with 16 bytes of LMDB's they fill a page of 4 KiB."""

LOWEST: Final = bytes(ENTRY_SIZE)
BEYOND: Final = b"\xff" * ENTRY_SIZE
"""Place behind every entry: no record has room there."""

_RUN_SIZE: Final = 4
_FIRST_ENTRY: Final = 4 + ENTRY_SIZE
_PIECE: Final = BLOCK_ENTRIES * ENTRY_SIZE
_LAST_PLACE: Final = b"\xff" * (ENTRY_SIZE - HASH_SIZE)


def run_key(run: int, entry: bytes) -> bytes:
    """Return the key of the block that begins with an entry; sorts as runs and entries do."""
    return run.to_bytes(_RUN_SIZE, "big") + entry


def encode_run(
    run: int, entries: Sequence[bytes], *, low: bytes = LOWEST, high: bytes = BEYOND
) -> list[Pair]:
    """Blocks of a run, or of a stretch of it.

    Args:
        run: Number of the run, u32.
        entries: Sorted entries; a stretch may have none.
        low: Start of the stretch; not behind the first entry.
        high: End of the stretch; behind the last entry.

    Returns:
        Keys and values, sorted.
    """
    data = b"".join(entries)
    pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)] or [b""]
    lows = [low, *(piece[:ENTRY_SIZE] for piece in pieces[1:]), high]
    pairs = []
    for index, piece in enumerate(pieces):
        key = run_key(run, lows[index])
        content = lows[index + 1] + piece
        crc = crc32(content, crc32(key))
        pairs.append((key, crc.to_bytes(4, "little") + content))
    return pairs


def block_entries(pair: Pair) -> bytes:
    """Return the entries of a block, one behind the other.

    Raises:
        CorruptRecord: The block fails its checks.
    """
    key, value = pair
    if (
        len(key) != _RUN_SIZE + ENTRY_SIZE
        or len(value) < _FIRST_ENTRY
        or crc32(memoryview(value)[4:], crc32(key)) != int.from_bytes(value[:4], "little")
    ):
        raise CorruptRecord(f"index block {key.hex()} of {len(value)} bytes fails its checks")
    return value[_FIRST_ENTRY:]


def block_high(value: bytes) -> bytes:
    """Return the low of the next block."""
    return value[4:_FIRST_ENTRY]


class RunReader:
    """Reads the runs of one environment."""

    def __init__(self, env: LmdbEnv) -> None:
        """Takes the environment, which the caller still owns.

        Args:
            env: Environment that holds the runs.
        """
        self._env = env

    def places(self, run: int, wanted: bytes, *, below: int, most: int) -> list[int]:
        """Return the places of batches with a hash, last first.

        Args:
            run: Number of the run; it has entries.
            wanted: The hash.
            below: Only places before this one, u32.
            most: Stop at this number of places.

        Raises:
            CorruptRecord: The run is damaged.
            StorageError: The run cannot be read.
        """
        found: list[int] = []
        target = wanted + below.to_bytes(ENTRY_SIZE - HASH_SIZE, "big")
        while len(found) < most:
            key, value = self._block(run, target)
            found += _places(block_entries((key, value)), wanted, below)
            low = key[_RUN_SIZE:]
            if low[:HASH_SIZE] < wanted or low == LOWEST:
                break
            # The first entry of the block matches: there may be others in the block before.
            target = (int.from_bytes(low, "big") - 1).to_bytes(ENTRY_SIZE, "big")
        return found[:most]

    def _block(self, run: int, entry: bytes) -> Pair:
        """Return the block between whose low and high an entry lies."""
        target = run_key(run, entry)
        pair = self._env.at_or_before(target)
        if pair is None or pair[0][:_RUN_SIZE] != target[:_RUN_SIZE]:
            raise CorruptRecord(f"run {run} of the index has no block for {entry.hex()}")
        if entry >= block_high(pair[1]) and entry != BEYOND:
            raise CorruptRecord(f"run {run} of the index lacks the block for {entry.hex()}")
        return pair

    def entries(self, run: int, low: bytes, high: bytes) -> list[bytes]:
        """Return all entries of a run from ``low`` on and before ``high``, sorted.

        Raises:
            CorruptRecord: The run is damaged.
            StorageError: The run cannot be read.
        """
        found: list[bytes] = []
        position = low
        while position < high:
            key, value = self._block(run, position)
            data = block_entries((key, value))
            entries = [
                data[start : start + ENTRY_SIZE] for start in range(0, len(data), ENTRY_SIZE)
            ]
            if entries and (entries[0] < low or entries[-1] >= high):
                entries = [entry for entry in entries if low <= entry < high]
            found += entries
            position = block_high(value)
        return found

    def keys(self, run: int) -> list[bytes]:
        """Keys of all blocks of a run."""
        return self._env.keys(run_key(run, LOWEST), run_key(run, BEYOND), most=1 << 32)

    def lows(self, runs: Iterable[int]) -> list[bytes]:
        """Return the first entries of some runs' blocks, in no order: a sample of their entries."""
        return [key[_RUN_SIZE:] for run in runs for key in self.keys(run)]


def _places(entries: bytes, wanted: bytes, below: int) -> list[int]:
    found = []
    at = entries.find(wanted)
    while at >= 0:
        if at % ENTRY_SIZE:
            at = entries.find(wanted, at + 1)  # a false match, made of pieces of two entries
            continue
        place = int.from_bytes(entries[at + HASH_SIZE : at + ENTRY_SIZE], "big")
        if place < below:
            found.append(place)
        at = entries.find(wanted, at + ENTRY_SIZE)
    found.reverse()
    return found
