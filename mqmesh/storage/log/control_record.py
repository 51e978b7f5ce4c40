"""Markers: the records of the commit log that are no batches.

Layout, little endian (the same table stands in ``docs/storage-format.md``):

======== ===== ====== ==========================================================
position bytes type   meaning
======== ===== ====== ==========================================================
0        4     bytes  magic, ``MQM1``
4        4     u32    crc: CRC-32 of byte 8 to the end
8        8     u64    commitlog_offset: where the marker begins in the log
16       4     u32    total_size: marker and data
20       2     u16    kind, see ``ControlKind``
22       2     bytes  reserved, 0
24       4     u32    epoch
28       4     u32    store_id
32       8     i64    store_timestamp, ms
40       8     bytes  store_check: by the store's key over bytes 8 to 39 and the data; else 0
48       …     data   depends on the kind
======== ===== ====== ==========================================================

Data of the kind ``GROUP``:

======== ===== ====== ==========================================================
position bytes type   meaning
======== ===== ====== ==========================================================
0        4     u32    size: bytes of the batches behind
4        4     u32    count: number of these batches, at least 1
======== ===== ====== ==========================================================
"""

import enum
import re
import struct
from typing import Final

import msgspec

from mqmesh.batch.payload import Buffer
from mqmesh.batch.store_check import NO_CHECK, StoreCheck
from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord, StorageError

CONTROL_RECORD_MAGIC: Final = b"MQM1"
CONTROL_RECORD_SIZE: Final = 48
"""Size of a control record without data; every segment keeps room for one at its end."""
MAX_CONTROL_DATA: Final = 4096
NOT_OURS: Final = "it does not have this store's check"
"""Reason given for bytes that look like a record, but were not written there by this store."""

GROUP_DATA: Final = struct.Struct("<II")
"""Data of the control record in front of a group: bytes and number of its batches."""
GROUP_MARKER_SIZE: Final = CONTROL_RECORD_SIZE + GROUP_DATA.size

_MARKER = struct.Struct("<4sIQIH2sIIq8s")
_GROUP_MARKER: Final = re.compile(
    b"(?=%s.{12}%s)" % (CONTROL_RECORD_MAGIC, struct.pack("<IH", GROUP_MARKER_SIZE, 4)), re.DOTALL
)
_FIELDS: Final = slice(8, 40)
_CRC_START: Final = 8

assert _MARKER.size == CONTROL_RECORD_SIZE


class ControlKind(enum.IntEnum):
    """Kind of a control record. On disk: never renumbered."""

    END = 1
    """The log goes on in the next segment."""
    EPOCH = 2
    """An epoch begins here; leftovers of older epochs are void. Its leader gives the data."""
    TOPIC_DELETED = 3
    """All queues of the topic in the data (UTF-8) were deleted here."""
    GROUP = 4
    """All batches behind it count, or none does. The data have the layout ``GROUP_DATA``."""


class ControlRecord(msgspec.Struct, frozen=True, gc=False):
    """A marker that passed its checks."""

    commitlog_offset: int
    total_size: int
    kind: ControlKind
    epoch: int
    store_id: int
    store_timestamp: int
    data: bytes


def encode_control_record(
    kind: ControlKind,
    *,
    commitlog_offset: int,
    epoch: int,
    store_id: int,
    store_timestamp: int,
    data: bytes = b"",
    store_check: StoreCheck | None = None,
) -> bytes:
    """Writes a marker.

    Args:
        kind: Kind of the marker.
        commitlog_offset: Commit-log offset at which the marker begins.
        epoch: Epoch of the log.
        store_id: Identity of the store.
        store_timestamp: Current time, ms.
        data: Data of the kind; up to ``MAX_CONTROL_DATA`` bytes.
        store_check: Check of the store; None leaves zeros.

    Returns:
        Layout: marker, ``CONTROL_RECORD_SIZE + len(data)`` bytes.
    """
    assert len(data) <= MAX_CONTROL_DATA
    size = CONTROL_RECORD_SIZE + len(data)
    fields = _MARKER.pack(
        CONTROL_RECORD_MAGIC,
        0,
        commitlog_offset,
        size,
        kind,
        b"\0\0",
        epoch,
        store_id,
        store_timestamp,
        NO_CHECK,
    )[_FIELDS]
    check = NO_CHECK if store_check is None else store_check(fields + data)
    checked = fields + check + data
    return CONTROL_RECORD_MAGIC + crc32(checked).to_bytes(4, "little") + checked


def group_markers(data: bytes, start: int) -> list[int]:
    """Return the positions of bytes that claim to be a group's marker at that place.

    Args:
        data: Bytes of the log.
        start: Commit-log offset of the first byte.
    """
    found = (match.start() for match in _GROUP_MARKER.finditer(data))
    return [at for at in found if data[at + 8 : at + 16] == (start + at).to_bytes(8, "little")]


def decode_control_record(
    buffer: Buffer, position: int = 0, *, store_check: StoreCheck | None = None
) -> ControlRecord:
    """Reads and checks a marker.

    Args:
        buffer: Bytes that should hold a marker.
        position: Position at which the marker should begin.
        store_check: Check of the store that must have written the marker; None for any store.

    Raises:
        CorruptRecord: No good marker begins there.
        StorageError: The marker is good, but its kind is unknown: a later program wrote it.
    """
    if len(buffer) - position < CONTROL_RECORD_SIZE:
        raise CorruptRecord(f"{len(buffer) - position} bytes are too few for a marker")
    magic, crc, offset, size, kind, _, epoch, store_id, timestamp, check = _MARKER.unpack_from(
        buffer, position
    )
    if magic != CONTROL_RECORD_MAGIC:
        raise CorruptRecord(f"no marker here: magic {magic!r}")
    if (
        not CONTROL_RECORD_SIZE
        <= size
        <= min(CONTROL_RECORD_SIZE + MAX_CONTROL_DATA, len(buffer) - position)
    ):
        raise CorruptRecord(f"marker of impossible size {size}")
    checked = bytes(memoryview(buffer)[position + _CRC_START : position + size])
    if crc32(checked) != crc:
        raise CorruptRecord(f"marker checksum is {crc32(checked):#010x}, not {crc:#010x}")
    data = checked[CONTROL_RECORD_SIZE - _CRC_START :]
    # The check comes before the kind: a forged marker proves nothing about later programs.
    if (
        store_check is not None
        and store_check(checked[: _FIELDS.stop - _CRC_START] + data) != check
    ):
        raise CorruptRecord(NOT_OURS)
    try:
        known = ControlKind(kind)
    except ValueError:
        raise StorageError(
            f"the marker at {offset} is of kind {kind}, which this program does not know; it "
            f"leaves the store alone"
        ) from None
    if known is ControlKind.GROUP and len(data) != GROUP_DATA.size:
        raise CorruptRecord(f"the marker of a group has {len(data)} bytes of data")
    return ControlRecord(offset, size, known, epoch, store_id, timestamp, data)
