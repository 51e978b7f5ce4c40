"""File of the embedded coordinator: records and session names that outlive a restart.

Every write is one transaction that is on disk when it returns. Layout of ``data.mdb`` (also in
``docs/storage-format.md``), one LMDB environment:

========================= ======================================================================
key                       value
========================= ======================================================================
``h``                     msgpack array: how many records there are
``r``, key in UTF-8       msgpack array: version, value
``s``, session in ASCII   msgpack array: key, owner, ttl in ms, presence, process or nil, which is
                          an array: host, pid, start
========================= ======================================================================

Each value has a prefix, little endian: the CRC-32 u32 of the key and of all bytes that follow, then
the format's version u8, 1. A file that lacks a part, or has one that does not fit, is damaged. A
damaged file does not prove that a record never existed.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord
from mqmesh.host import ProcessMark
from mqmesh.storage.lmdb.env import DATA_FILE, LmdbEnv, Pair, has_sound_pages
from mqmesh.units import MIB

FORMAT_VERSION: Final = 1
MAP_BYTES: Final = 16 * MIB
MOST_PAIRS: Final = 1_000_000
"""Limit of pairs; a file with more belongs to no coordinator."""

_PREFIX: Final = struct.Struct("<IB")
_HEAD: Final = b"h"
_RECORD: Final = b"r"
_SESSION: Final = b"s"

_T = TypeVar("_T")


class KeptRecord(msgspec.Struct, array_like=True, frozen=True):
    """A record on disk.

    Attributes:
        version: Version of the record, from 1 on.
        value: Value of the record.
    """

    version: int
    value: bytes


class KeptSession(msgspec.Struct, array_like=True, frozen=True):
    """A session on disk.

    Attributes:
        key: Key of the record that the session belongs to.
        owner: Number of the owner, among those of the key.
        ttl_ms: Time after the last renewal at which the session ends, ms.
        presence: Presence that the owner gave at the session's begin.
        process: Process of the owner.
    """

    key: str
    owner: int
    ttl_ms: int
    presence: bytes
    process: ProcessMark | None


class _CoordinatorHead(msgspec.Struct, array_like=True, frozen=True):
    record_count: int


class KeptChange(msgspec.Struct, frozen=True):
    """Records and sessions that are written together.

    Attributes:
        records: Records by key.
        sessions: Sessions by name.
        ended: Names of sessions that have ended.
    """

    records: dict[str, KeptRecord] = {}
    sessions: dict[str, KeptSession] = {}
    ended: tuple[str, ...] = ()


class CoordinatorFile:
    """The file of an embedded coordinator.

    Args:
        directory: Directory of the file alone; made if need be.

    Attributes:
        records: Records at the time of opening, by key.
        sessions: Sessions at the time of opening, by name.

    Raises:
        CorruptRecord: The file is damaged; nothing was changed.
        DiskFull: There is no room to make the file.
        StorageError: The file cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / DATA_FILE
        # An empty file is left by a process that was killed while it made the file.
        if path.exists() and path.stat().st_size and not has_sound_pages(path):
            raise CorruptRecord(f"{path} is damaged: its pages contradict one another")
        self._path = path
        self._env = LmdbEnv(directory, map_size=MAP_BYTES, durable=True)
        try:
            pairs = self._env.range(b"\0", b"\xff", most=MOST_PAIRS)
            self.records, self.sessions = _read(pairs, path)
        except BaseException:
            self._env.close()
            raise
        self._known = set(self.records)
        if not pairs:
            self._env.write([_pair(_HEAD, _CoordinatorHead(0))])

    def write(self, change: KeptChange) -> None:
        """Writes all of a change, or nothing; it is on disk when this returns.

        Raises:
            DiskFull: No room; nothing was written.
            StorageError: The content of the file is unknown; close it.
        """
        known = self._known | change.records.keys()
        puts = encode_pairs(change, record_count=len(known))
        self._env.write(puts, [_SESSION + name.encode() for name in change.ended])
        self._known = known

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._env.close()


def encode_pairs(change: KeptChange, *, record_count: int) -> list[Pair]:
    """Return the pairs that a change puts into the file, by key.

    Args:
        change: Records and sessions to write; an ended session leaves no pair.
        record_count: Number of records in the file after the change.
    """
    pairs = [_pair(_HEAD, _CoordinatorHead(record_count))]
    pairs += [_pair(_RECORD + key.encode(), one) for key, one in change.records.items()]
    pairs += [_pair(_SESSION + name.encode(), one) for name, one in change.sessions.items()]
    return sorted(pairs)


def _pair(key: bytes, value: msgspec.Struct) -> Pair:
    payload = bytes((FORMAT_VERSION,)) + msgspec.msgpack.encode(value)
    return key, struct.pack("<I", crc32(key + payload)) + payload


def _read(
    pairs: Sequence[Pair], path: Path
) -> tuple[dict[str, KeptRecord], dict[str, KeptSession]]:
    records: dict[str, KeptRecord] = {}
    sessions: dict[str, KeptSession] = {}
    head: _CoordinatorHead | None = None
    for key, data in pairs:
        name = _name(key, path)
        if key == _HEAD:
            head = _value(_CoordinatorHead, key, data, path)
        elif key[:1] == _RECORD:
            records[name] = _value(KeptRecord, key, data, path)
        elif key[:1] == _SESSION:
            sessions[name] = _value(KeptSession, key, data, path)
        else:
            raise CorruptRecord(f"{path} is damaged: {key!r} is no key of it")
    if pairs and head is None:
        raise CorruptRecord(f"{path} is damaged: its head is missing")
    if head is not None and head.record_count != len(records):
        raise CorruptRecord(
            f"{path} is damaged: it has {len(records)} records of {head.record_count}"
        )
    return records, sessions


def _name(key: bytes, path: Path) -> str:
    try:
        return key[1:].decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord(f"{path} is damaged: {key!r} is no key of it") from error


def _value(kind: type[_T], key: bytes, data: bytes, path: Path) -> _T:
    if len(data) <= _PREFIX.size:
        raise CorruptRecord(f"{path} is damaged: {key!r} has {len(data)} bytes")
    check, version = _PREFIX.unpack_from(data)
    if check != crc32(key + data[4:]):
        raise CorruptRecord(f"{path} is damaged: the checksum of {key!r} does not fit")
    if version != FORMAT_VERSION:
        raise CorruptRecord(
            f"{path} has format version {version}; this program reads {FORMAT_VERSION} only"
        )
    try:
        return msgspec.msgpack.decode(data[_PREFIX.size :], type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"{path} is damaged: {key!r} cannot be understood: {error}") from error
