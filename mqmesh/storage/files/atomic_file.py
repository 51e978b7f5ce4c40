"""Small documents that are either the old or the new one after any crash.

A document is saved beside the last one, made durable, and then takes its name. The last one stays
as ``<name>.bak``; for the first document that is a second name of itself. The first line carries a
checksum, so an empty or half written file is noticed after a power cut. Such a file is kept aside
as ``<name>.damaged-<n>`` for an investigation, and never counts as a missing document: that would
mean consumer offsets of 0 for everyone.

Layout of the file (also in ``docs/storage-format.md``): one ASCII line, then
the document's own bytes::

    mqmesh-document 1 crc32=0a1b2c3d size=123

``crc32`` is the CRC-32 of the document's bytes, 8 hex digits; ``size`` their number.
"""

import errno
import logging
import os
import re
from pathlib import Path
from typing import Final

from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord, DiskFull, StorageError, TooManyOpenFiles
from mqmesh.private_files import FILE_MODE

log = logging.getLogger(__name__)

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean: try again when there is room."""
NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Error numbers that mean: try again when something else was closed."""

_HEADER: Final = re.compile(rb"mqmesh-document 1 crc32=([0-9a-f]{8}) size=(\d{1,12})\n")
_MOST_HEADER_BYTES: Final = 128
# For reading, too: if a file system allocates no room, the C library reads the existing bytes.
_WRITABLE: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def storage_error(error: OSError, what: str) -> StorageError:
    """Return the error of mqmesh's own tree for one of the system's.

    Args:
        error: Error that a system call raised.
        what: Action that failed, the beginning of a sentence.
    """
    kind = StorageError
    if error.errno in NO_ROOM:
        kind = DiskFull
    elif error.errno in NO_DESCRIPTORS:
        kind = TooManyOpenFiles
    return kind(f"{what}: {error.strerror or error}")


def sync_directory(directory: Path) -> None:
    """Makes names that were added to or removed from a directory durable.

    Raises:
        OSError: The sync failed.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save_document(path: Path, document: bytes, *, room_bytes: int = 0) -> bool:
    """Replaces a document by a new one, all or nothing, durably.

    Args:
        path: File of the document; the directory exists.
        document: Any bytes.
        room_bytes: Room to allocate for the next document: if it is longer by no more than this, it
            can be saved on a full disk, too; 0 allocates no room ahead.

    Returns:
        False if that room could not be allocated.

    Raises:
        DiskFull: No room; the old document is still there.
        StorageError: The document could not be written; the old one is still there.
    """
    header = f"mqmesh-document 1 crc32={crc32(document):08x} size={len(document)}\n"
    content = header.encode() + document
    new = path.with_name(path.name + ".new")
    try:
        # Not truncated before: it may have the room that was allocated for it.
        with open(os.open(new, _WRITABLE, FILE_MODE), "wb", buffering=0) as file:
            os.fchmod(file.fileno(), FILE_MODE)
            _write_all(file.fileno(), content)
            os.ftruncate(file.fileno(), len(content))
            os.fsync(file.fileno())
        is_first = not path.exists()
        if not is_first:
            # A second name for the old one, so that at no moment the document has no name.
            spare = path.with_name(path.name + ".old")
            spare.unlink(missing_ok=True)
            os.link(path, spare)
            os.replace(spare, _backup(path))
        os.replace(new, path)
        if is_first and not _backup(path).exists():
            # The first document has no former one; a second name outlives a deletion, too. It comes
            # last: a kill must not leave it to the file that the next save writes into.
            os.link(path, _backup(path))
        sync_directory(path.parent)
        return not room_bytes or take_room(path, len(content) + room_bytes)
    except OSError as error:
        raise storage_error(error, f"{path} could not be saved") from error


def take_room(path: Path, size: int) -> bool:
    """Allocates room on the disk for the next save of a document.

    Args:
        path: File of the document; the directory exists.
        size: Number of bytes.

    Returns:
        False if the disk has less room.

    Raises:
        StorageError: The file for the next document cannot be opened.
    """
    try:
        fd = os.open(path.with_name(path.name + ".new"), _WRITABLE, FILE_MODE)
        try:
            os.fchmod(fd, FILE_MODE)
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in NO_ROOM:
            return False
        raise storage_error(error, f"no room could be taken for {path}") from error
    return True


def load_document(path: Path) -> bytes | None:
    """Reads a document, or its backup when it is damaged or missing.

    Returns:
        The document; None only if none was ever saved.

    Raises:
        CorruptRecord: A document was saved, but no readable copy is left; the damaged files
            are kept aside.
        StorageError: The document could not be read.
    """
    try:
        for candidate in (path, _backup(path)):
            try:
                document = _parse(candidate.read_bytes())
            except FileNotFoundError:
                continue
            if document is not None:
                if candidate != path:
                    log.warning("%s is missing or damaged, its backup was read instead", path)
                return document
            aside = keep_aside(candidate)
            log.error("%s is damaged, it was kept aside as %s", candidate, aside.name)
        damaged = sorted(p.name for p in path.parent.glob(f"{path.name}*.damaged-*"))
    except OSError as error:
        raise storage_error(error, f"{path} could not be read") from error
    if damaged:
        raise CorruptRecord(
            f"{path} and its backup are damaged, see {', '.join(damaged)} beside it; put a good "
            f"copy in its place, or remove those files to start without it"
        )
    return None


def peek_document(path: Path) -> bytes | None:
    """Reads a document, or its backup, as ``load_document`` does, but changes nothing.

    Returns:
        The document; None if no readable one is there.

    Raises:
        StorageError: The document could not be read.
    """
    for candidate in (path, _backup(path)):
        try:
            document = _parse(candidate.read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, f"{candidate} could not be read") from error
        if document is not None:
            return document
    return None


def keep_aside(path: Path) -> Path:
    """Renames a damaged file to ``<name>.damaged-<n>`` so that it is never read again.

    Returns:
        The new path.

    Raises:
        OSError: The file could not be renamed.
    """
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, aside)
    sync_directory(path.parent)
    return aside


def _backup(path: Path) -> Path:
    return path.with_name(path.name + ".bak")


def _parse(content: bytes) -> bytes | None:
    match = _HEADER.match(content[:_MOST_HEADER_BYTES])
    if match is None:
        return None
    document = content[match.end() :]
    if len(document) != int(match[2]) or crc32(document) != int(match[1], 16):
        return None
    return document


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
