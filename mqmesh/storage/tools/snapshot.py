"""A snapshot of a store: a directory with a manifest, and the files that the manifest lists.

Layout of the directory, also in ``docs/storage-format.md``::

    manifest.json             written last: a directory without it is no snapshot
    commitlog/<20 digits>     segments of the log; the last one ends where the snapshot does
    index/<20 digits>.sealed/ the index of a segment: data.mdb and seal
    index/<20 digits>.live/   a copy of one that was still being filled: data.mdb
    config/*.json             topics, consumer groups and their offsets
    store-key                 the key that proves records to be the store's: a secret, mode 0600
    queue-table               bounds of queues, deleted topics, last batches of producers
    epochs                    the epochs of the log, and where each began
    log-beginning             the beginning of the log that retention allowed

A snapshot may come from elsewhere, so nothing in it is trusted: only paths of the forms above
are opened, never a link, and each file must have the size that the manifest gives. Records are
checked as always when they are read. There are no absolute paths in it, so it may be moved.
"""

import os
import re
import shutil
import stat
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec

from mqmesh.checksum import crc32
from mqmesh.errors import ConfigError, CorruptRecord, StorageError
from mqmesh.message import check_group
from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.lmdb.env import DATA_FILE, has_sound_pages
from mqmesh.storage.log.segments import Segment, SegmentList
from mqmesh.units import MAX_OFFSET, MIB

FORMAT: Final = 2
MANIFEST: Final = "manifest.json"
UNFINISHED: Final = ".new"
"""Ending of the name of a directory whose snapshot is still being made."""
MOST_MANIFEST_BYTES: Final = 64 * MIB
PIECE_BYTES: Final = 8 * MIB
"""Size of the pieces in which files are copied and checked."""


_CHECKSUM = re.compile(rb'\A\{\s*"checksum": ?"([0-9a-f]{8})"')
_NO_CHECKSUM: Final = b"00000000"


class FileKind(StrEnum):
    """Kind of a snapshot's file. The values are on disk and never change."""

    SEGMENT = "segment"
    INDEX = "index"
    CONFIG = "config"
    STATE = "state"


_FORMS: Final = {
    FileKind.SEGMENT: re.compile(r"commitlog/\d{20}\Z"),
    FileKind.INDEX: re.compile(r"index/\d{20}\.(sealed/(data\.mdb|seal)|live/data\.mdb)\Z"),
    FileKind.CONFIG: re.compile(r"config/[a-z_]{1,64}\.json\Z"),
    FileKind.STATE: re.compile(r"(queue-table|epochs|log-beginning|store-key(\.copy)?)\Z"),
}
_Offset = Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
_Word = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Text = Annotated[str, msgspec.Meta(max_length=255)]


class SnapshotFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file.

    Attributes:
        path: Path below the snapshot's directory, with ``/`` between its parts.
        size: Size in bytes.
        kind: Kind of the file.
        crc32: CRC-32 of the file; None for segments, whose records have checksums of their own.
    """

    path: _Text
    size: _Offset
    kind: FileKind
    crc32: _Word | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Source and files of a snapshot. A field may be added, none may change its meaning.

    Attributes:
        format: ``FORMAT``.
        mqmesh_version: Version of the program that made it.
        cluster_name: Cluster of the broker.
        broker_name: Name of the broker.
        broker_id: Id of the broker.
        store_id: Identity of the store, in every record.
        epoch: Epoch of the log at its end.
        start_offset: Commit-log offset where its log begins.
        end_offset: Commit-log offset behind its last record.
        created_ms: Wall clock of its creation.
        files: All files but the manifest.
        archive: Archive that takes it in and deletes it then; empty for none.
    """

    format: int = FORMAT
    mqmesh_version: _Text
    cluster_name: _Text
    broker_name: _Text
    broker_id: Annotated[int, msgspec.Meta(ge=0)]
    store_id: _Word
    epoch: _Word
    start_offset: _Offset
    end_offset: _Offset
    created_ms: Annotated[int, msgspec.Meta(ge=0)]
    files: list[SnapshotFile]
    archive: Annotated[str, msgspec.Meta(max_length=4_096)] = ""

    @property
    def log_bytes(self) -> int:
        """Bytes of log in the snapshot."""
        return self.end_offset - self.start_offset

    @property
    def disk_bytes(self) -> int:
        """Size of all files; those that are shared with the store take no room of their own."""
        return sum(file.size for file in self.files)


class _FormatOnly(msgspec.Struct, frozen=True):
    format: int


def segments_of(directory: Path, manifest: Manifest) -> SegmentList:
    """Return the segments that a manifest lists, for reading.

    Args:
        directory: Directory of the snapshot.
        manifest: Manifest of the snapshot.
    """
    return SegmentList(
        Segment(int(Path(file.path).name), file.size, str(directory / file.path))
        for file in manifest.files
        if file.kind is FileKind.SEGMENT
    )


def seal_manifest(text: bytes) -> bytes:
    """Put the checksum into the JSON of a manifest.

    Args:
        text: A JSON object. Its first field becomes ``checksum``, 8 hex digits: the CRC-32 of
            the text with zeros in their place.
    """
    match = _CHECKSUM.match(text)
    if match is None:
        text = b'{"checksum":"%s",%s' % (_NO_CHECKSUM, text[1:])
        match = _CHECKSUM.match(text)
        assert match is not None
    start, end = match.span(1)
    blank = text[:start] + _NO_CHECKSUM + text[end:]
    return text[:start] + b"%08x" % crc32(blank) + text[end:]


def load_manifest(directory: Path) -> Manifest:
    """Reads a snapshot's manifest, and checks kind and size of every file that it lists.

    Args:
        directory: Directory of the snapshot.

    Raises:
        ConfigError: The directory is no snapshot, or of a later format.
        CorruptRecord: The manifest is damaged or lists files that no snapshot has, or a file is
            missing, no plain file, or of another size.
        StorageError: The manifest cannot be read.
    """
    path = directory / MANIFEST
    try:
        if path.stat().st_size > MOST_MANIFEST_BYTES:
            raise CorruptRecord(f"{path} has more than {MOST_MANIFEST_BYTES} bytes")
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"not a snapshot: {directory} has no {MANIFEST}") from None
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    try:
        found = msgspec.json.decode(text, type=_FormatOnly).format
        if found != FORMAT:
            raise ConfigError(
                f"{directory} is a snapshot of format {found}; this mqmesh reads {FORMAT}"
            )
        if _CHECKSUM.match(text) is None or seal_manifest(text) != text:
            raise CorruptRecord(f"{path} fails its checksum")
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"{path} cannot be decoded: {error}") from error
    _check(directory, manifest)
    return manifest


def _check(directory: Path, manifest: Manifest) -> None:
    seen: set[str] = set()
    ends: list[tuple[int, int]] = []
    for file in manifest.files:
        if not _FORMS[file.kind].match(file.path) or file.path in seen:
            raise CorruptRecord(
                f"{directory / MANIFEST} lists {file.path!r}, which is no file of ours"
            )
        seen.add(file.path)
        _check_file(directory, file)
        if file.kind is FileKind.SEGMENT:
            start = int(file.path[-20:])
            ends.append((start, start + file.size))
    ends.sort()
    start = ends[0][0] if ends else manifest.end_offset
    end = ends[-1][1] if ends else manifest.end_offset
    overlap = any(before[1] > after[0] for before, after in pairwise(ends))
    if overlap or (start, end) != (manifest.start_offset, manifest.end_offset):
        raise CorruptRecord(
            f"{directory / MANIFEST} says that the log goes from {manifest.start_offset} to "
            f"{manifest.end_offset}, its segments from {start} to {end}"
            f"{', and some overlap' if overlap else ''}"
        )
    try:
        check_group(manifest.broker_name)
    except ConfigError as error:
        raise CorruptRecord(f"{directory / MANIFEST} names no broker: {error}") from error


def _check_file(directory: Path, file: SnapshotFile) -> None:
    path = directory
    try:
        for part in file.path.split("/"):
            path = path / part
            found = os.lstat(path)
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise CorruptRecord(f"{path} is no plain file, so it is not read")
    except FileNotFoundError:
        raise CorruptRecord(f"{path} is missing in the snapshot") from None
    except OSError as error:
        raise storage_error(error, f"{path} cannot be looked at") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
        raise CorruptRecord(f"{path} has {found.st_size} bytes instead of {file.size}")


def is_sound(directory: Path, file: SnapshotFile) -> bool:
    """Return True when a file has the manifest's checksum, or the manifest has none for it.

    A forged snapshot has matching checksums. The pages of an index must therefore be sound as
    well: LMDB trusts them.

    Raises:
        StorageError: The file cannot be read.
    """
    path = directory / file.path
    if file.crc32 is not None and checksum_of(path) != file.crc32:
        return False
    return path.name != DATA_FILE or has_sound_pages(path)


def checksum_of(path: Path) -> int:
    """Compute the CRC-32 of a file.

    Raises:
        StorageError: The file cannot be read.
    """
    crc = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                crc = crc32(piece, crc)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    return crc


def list_snapshots(root: Path) -> list[tuple[Path, Manifest | StorageError | ConfigError]]:
    """List the snapshots in a directory, oldest first, and the errors of those that are unreadable.

    Args:
        root: Directory of snapshots, or a snapshot itself.

    Raises:
        ConfigError: There is no such directory.
    """
    try:
        if (root / MANIFEST).exists():
            directories = [root]
        else:
            directories = sorted(p.parent for p in root.glob(f"*/{MANIFEST}"))
        if not root.is_dir():
            raise ConfigError(f"{root} is not there, or no directory")
    except OSError as error:
        raise storage_error(error, f"{root} cannot be read") from error
    found: list[tuple[Path, Manifest | StorageError | ConfigError]] = []
    for directory in directories:
        try:
            found.append((directory, load_manifest(directory)))
        except (StorageError, ConfigError) as error:
            found.append((directory, error))
    found.sort(key=lambda row: row[1].created_ms if isinstance(row[1], Manifest) else 0)
    return found


def broker_of(name: str) -> str:
    """Return the broker in ``<broker>.<UTC time>.<position>``; its name may have dots, too."""
    return name.removesuffix(UNFINISHED).rsplit(".", 2)[0]


def delete_snapshot(directory: Path) -> None:
    """Removes a snapshot; first its manifest, so that the leftovers of a crash are no snapshot.

    Raises:
        ConfigError: The directory is no snapshot.
        StorageError: The snapshot cannot be removed.
    """
    path = directory / MANIFEST
    if not path.is_file() or directory.is_symlink():
        raise ConfigError(f"not a snapshot: {directory} has no {MANIFEST}")
    try:
        # Under another name the directory never counts as a snapshot, whatever a crash leaves.
        gone = directory.with_name(directory.name + UNFINISHED)
        directory.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        raise storage_error(error, f"{directory} cannot be removed") from error
