"""Rows of tables: what is kept of one key, and where. Pure.

Tables are derived from the log, so nothing here is the truth. Layout of ``tables/data.mdb``, also
in ``docs/storage-format.md``; numbers in keys are big endian, so that they are in order:

================================= ================================================================
key                               value
================================= ================================================================
``h``                             ``RowsHead``
``t``, topic in UTF-8             ``TableHead``
``c``                             ``RowCounts``; only after an orderly end of a role
``g``, number u32                 nothing: rows of that number are of a table that is gone
``r``, number u32, key in UTF-8   ``Row``
``x``, due u64, number u32, key   nothing: when the value expires, or the tombstone goes
================================= ================================================================

Before each value that is not empty stands the CRC-32 u32, little endian, of the key and all that
follows; the rest is a msgpack array.
"""

import struct
from typing import Final, TypeVar

import msgspec

from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord
from mqmesh.units import KIB

ROWS_VERSION: Final = 2
MOST_INLINE_BYTES: Final = 4 * KIB
"""Longer values stay in the log alone."""
PUT: Final = 0
"""Number of ``KvOperation.PUT``; all above are tombstones."""

HEAD_KEY: Final = b"h"
COUNTS_KEY: Final = b"c"
TABLE_PREFIX: Final = b"t"
GONE_PREFIX: Final = b"g"
ROW_PREFIX: Final = b"r"
DUE_PREFIX: Final = b"x"

_CRC = struct.Struct("<I")
_NUMBER = struct.Struct(">cI")
_DUE = struct.Struct(">cQI")

_T = TypeVar("_T")


class Revision(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One revision of a key, without its value.

    Attributes:
        revision: From 1.
        place: Commit-log offset of the batch that has it: of the table's topic, or carried.
        stored_ms: When it was stored first, wall clock, ms.
        operation: ``OPERATIONS``, by number.
        expires_ms: 0 for never; of a tombstone, when the row goes.
        size: Bytes of the value.
    """

    revision: int
    place: int
    stored_ms: int
    operation: int = PUT
    expires_ms: int = 0
    size: int = 0

    def is_live(self, now_ms: int) -> bool:
        """Return whether a reader gets a value; wall clock."""
        return self.operation == PUT and not 0 < self.expires_ms <= now_ms


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The revisions of a key.

    Attributes:
        revisions: Newest first, at least one.
        value: Of the newest one, if it is short; None for a longer one, and for a tombstone.
    """

    revisions: list[Revision]
    value: bytes | None = None

    @property
    def newest(self) -> Revision:
        """The newest revision."""
        return self.revisions[0]


class RowsHead(msgspec.Struct, array_like=True, frozen=True):
    """Head of all tables of a store.

    Attributes:
        version: Of the layout.
        store_id: Of the log that they are derived from.
        next_number: Of the next table.
        carried: Queue offset of the first message of the carried topic that they do not have.
        carried_mark: Of the message before, see ``mark_of``.
    """

    version: int
    store_id: int
    next_number: int = 1
    carried: int = 0
    carried_mark: tuple[int, int] = (-1, 0)


class TableHead(msgspec.Struct, array_like=True, frozen=True):
    """Head of one table.

    Attributes:
        number: Of its rows.
        table_id: ``Topic.table_id``.
        applied: Queue offset of the first message that the rows do not have.
        mark: Of the message before.
    """

    number: int
    table_id: int
    applied: int = 0
    mark: tuple[int, int] = (-1, 0)


class RowCounts(msgspec.Struct, array_like=True, frozen=True):
    """Counts that a scan of all rows would give.

    Attributes:
        segments: Number and bytes of revisions by segment of the log.
        keys: Live keys by number of the table.
        sizes: Bytes of keys and values of all revisions, by number of the table.
    """

    segments: dict[int, tuple[int, int]]
    keys: dict[int, int]
    sizes: dict[int, int]


_encoder = msgspec.msgpack.Encoder()
_row_decoder = msgspec.msgpack.Decoder(Row)


def row_key(number: int, key: bytes) -> bytes:
    """Return where a key's row stands."""
    return _NUMBER.pack(ROW_PREFIX, number) + key


def row_start(number: int) -> bytes:
    """Return the first place of rows of a table; those of the next number end it."""
    return _NUMBER.pack(ROW_PREFIX, number)


def read_row_key(place: bytes) -> tuple[int, bytes]:
    """Return number of the table and key of a ``row_key``."""
    return int(_NUMBER.unpack_from(place)[1]), place[_NUMBER.size :]


def gone_key(number: int) -> bytes:
    """Return where it stands that a table is gone."""
    return _NUMBER.pack(GONE_PREFIX, number)


def gone_number(key: bytes) -> int:
    """Return the number in a ``gone_key``."""
    return int(_NUMBER.unpack(key)[1])


def due_key(due_ms: int, number: int, key: bytes) -> bytes:
    """Return where it stands that something is due."""
    return _DUE.pack(DUE_PREFIX, due_ms, number) + key


def due_of(place: bytes, row: Row) -> bytes:
    """Return the ``due_key`` of the row at a ``row_key``."""
    return due_key(row.newest.expires_ms, *read_row_key(place))


def read_due(found: bytes) -> tuple[int, bytes]:
    """Return number of the table and key of a ``due_key``."""
    return int(_DUE.unpack_from(found)[2]), found[_DUE.size :]


def due_until(now_ms: int) -> bytes:
    """Return the end of what is due by now, wall clock."""
    return _DUE.pack(DUE_PREFIX, now_ms + 1, 0)


def pack(key: bytes, value: msgspec.Struct) -> bytes:
    """Encode the value of a key."""
    data = _encoder.encode(value)
    return _CRC.pack(crc32(data, crc32(key))) + data


def unpack_row(key: bytes, data: bytes) -> Row:
    """Decode a row.

    Raises:
        CorruptRecord: It is damaged.
    """
    body = data[4:]
    if data[:4] != _CRC.pack(crc32(body, crc32(key))):
        raise CorruptRecord(f"a row of a table is damaged: the checksum of {key!r} does not fit")
    return _row_decoder.decode(body)


def unpack(key: bytes, data: bytes, kind: type[_T]) -> _T:
    """Decode a head.

    Raises:
        CorruptRecord: It is damaged.
    """
    try:
        if _CRC.unpack_from(data)[0] == crc32(memoryview(data)[4:], crc32(key)):
            return msgspec.msgpack.decode(memoryview(data)[4:], type=kind)
    except (struct.error, msgspec.MsgspecError):
        pass
    raise CorruptRecord(f"the tables are damaged: {key!r} does not fit")


def with_revision(
    row: Row | None, revision: Revision, value: bytes | None, history: int
) -> Row | None:
    """Return a row with one revision more, or one at another place.

    Args:
        row: Before; None for a key without one.
        revision: Of the log, in any order.
        value: Of it; looked at only where it is the newest one.
        history: Revisions that are kept.

    Returns:
        The row; None if it stays as it was.
    """
    short = value if revision.operation == PUT and revision.size <= MOST_INLINE_BYTES else None
    if row is None:
        return Row([revision], short)
    revisions = row.revisions
    if revision.revision > revisions[0].revision:
        return Row([revision, *revisions[: history - 1]], short)
    for at, known in enumerate(revisions):
        if known.revision == revision.revision:
            if known.place >= revision.place:
                return None
            value = row.value if at or revision.operation == PUT else None
            return Row([*revisions[:at], revision, *revisions[at + 1 :]], value)
        if known.revision < revision.revision:
            break
    else:
        at = len(revisions)
    if at >= history:
        return None
    return Row([*revisions[:at], revision, *revisions[at : history - 1]], row.value)
