"""Seals the index of a segment that is full: all its runs become one, synced and checked.

The work has many short steps, and its memory is bounded by the size of a step. Nothing counts
before the new directory has its final name; a crash in between costs the work.

A sealed directory has, beside LMDB's file, a document ``seal`` with the size and the CRC-32 of that
file, which never changes again. So after a failure a damaged file is distinguished from a good one
before LMDB reads it.
"""

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord
from mqmesh.storage.files.atomic_file import (
    load_document,
    save_document,
    storage_error,
    sync_directory,
)
from mqmesh.storage.index.blocks import encode_run
from mqmesh.storage.index.merge import stretches
from mqmesh.storage.index.part import HEAD_KEY, IDS, KEYS, IndexPart, SortedRun, encode_head
from mqmesh.storage.lmdb.env import DATA_FILE
from mqmesh.units import MIB

SEAL_FILE: Final = "seal"
CHECK_BYTES: Final = 8 * MIB
"""Bytes checked in one step."""

_RUN: Final = 1


class Seal(msgspec.Struct, frozen=True):
    """Size and checksum of a sealed environment's file.

    Attributes:
        size: Size in bytes.
        crc32: CRC-32 of the file.
    """

    size: int
    crc32: int


def seal_part(source: IndexPart, directory: Path, *, map_size: int) -> Iterator[None]:
    """Makes the sealed twin of a part that is complete, a step each time it is resumed.

    Args:
        source: A part without texts, which must not change meanwhile.
        directory: Directory of the twin; it does not exist yet.
        map_size: First size of the map, in bytes.

    Raises:
        DiskFull: No room.
        CorruptRecord: The source is damaged.
        StorageError: The source cannot be read, or the twin cannot be made.
    """
    head = source.head
    assert head.complete
    assert not head.texts
    numbers = [run.number for run in head.runs]
    runs = [SortedRun(_RUN, source.entry_count, 0, head.through, IDS | KEYS)] if numbers else []
    sealed = msgspec.structs.replace(head, boot_id=b"", runs=runs, next_run=_RUN + 1)
    target = IndexPart.create(directory, sealed, map_size=map_size)
    try:
        count = 0
        for low, high, entries in stretches(source.reader, numbers):
            count += len(entries)
            target.env.write(encode_run(_RUN, entries, low=low, high=high))
            yield
        if count != source.entry_count:
            raise CorruptRecord(f"{count} of {source.entry_count} index entries were found")
        target.env.write([(HEAD_KEY, encode_head(sealed))])
        target.env.sync()
    finally:
        target.close()
    yield
    seal = yield from _measure(directory / DATA_FILE)
    save_document(directory / SEAL_FILE, msgspec.json.encode(seal))
    sync_directory(directory)


def load_seal(directory: Path) -> Seal:
    """Load the seal of a directory.

    Raises:
        CorruptRecord: The seal is damaged or missing.
        StorageError: The seal cannot be read.
    """
    document = load_document(directory / SEAL_FILE)
    try:
        if document is not None:
            return msgspec.json.decode(document, type=Seal)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"the seal in {directory} cannot be decoded: {error}") from error
    raise CorruptRecord(f"{directory} has no seal")


def check_seal(directory: Path) -> Iterator[None]:
    """Compares a sealed file with its seal, a step each time it is resumed.

    Raises:
        CorruptRecord: The file is not the one that was sealed.
        StorageError: The file cannot be read.
    """
    seal = load_seal(directory)
    found = yield from _measure(directory / DATA_FILE)
    if found != seal:
        raise CorruptRecord(f"{directory / DATA_FILE} is not the file that was sealed")


def _measure(path: Path) -> Generator[None, None, Seal]:
    """Make the seal of a file as it is now."""
    crc = size = 0
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            while data := os.pread(fd, CHECK_BYTES, size):
                size += len(data)
                crc = crc32(data, crc)
                yield
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    return Seal(size, crc)
