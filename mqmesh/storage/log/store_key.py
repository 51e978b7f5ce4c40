"""The key of a store: with it a log record proves that this store wrote it at its place.

Clients can know everything else in a record: they see offsets, the epoch and the store's id in the
batches that they pull, so the body of a message can hold bytes that look like a record in the right
place. They cannot know the check that the key makes for a place without a record. The check covers
the place, the epoch and the checksum of the rest, so a check that a client has seen is useless
anywhere else.

The key is made with the store. It leaves its directory only for replicas, which share it. It is
kept in two files, ``store-key`` and ``store-key.copy``, readable by their owner only. Layout,
little endian (the same table stands in ``docs/storage-format.md``):

======== ===== ===== =========================================================
position bytes type  meaning
======== ===== ===== =========================================================
0        4     bytes magic, ``MQK1``
4        4     u32   crc: CRC-32 of bytes 8 to 39
8        32    bytes key: random
======== ===== ===== =========================================================
"""

import contextlib
import hashlib
import logging
import os
import struct
from pathlib import Path
from typing import Final

from mqmesh.batch.store_check import CHECK_SIZE
from mqmesh.checksum import crc32
from mqmesh.errors import StorageError
from mqmesh.storage.files.atomic_file import storage_error, sync_directory

log = logging.getLogger(__name__)

MAGIC: Final = b"MQK1"
NAMES: Final = ("store-key", "store-key.copy")
KEY_SIZE: Final = 32

_LAYOUT = struct.Struct(f"<4sI{KEY_SIZE}s")


class StoreKey:
    """Makes keyed checks: BLAKE2b with a key, and one purpose for batches and one for markers."""

    __slots__ = ("_batches", "_markers", "_secret")

    def __init__(self, secret: bytes) -> None:
        """Takes a key.

        Args:
            secret: Key of ``KEY_SIZE`` random bytes.
        """
        assert len(secret) == KEY_SIZE
        self._secret = secret
        # The hashes are begun once and copied: that is a third cheaper than to begin anew.
        self._batches = _keyed(secret, b"mqmesh batch")
        self._markers = _keyed(secret, b"mqmesh marker")

    @classmethod
    def random(cls) -> "StoreKey":
        """Make a new key."""
        return cls(os.urandom(KEY_SIZE))

    def batch_check(self, fields: bytes) -> bytes:
        """Return the check of a batch, over the fields of ``mqmesh.batch.store_check``."""
        state = self._batches.copy()
        state.update(fields)
        return state.digest()

    def marker_check(self, fields: bytes) -> bytes:
        """Return the check of a control record, for ``encode_control_record``."""
        state = self._markers.copy()
        state.update(fields)
        return state.digest()

    def proof(self) -> bytes:
        """Returns a proof, 8 bytes, that its owner has the key; it does not reveal the key."""
        return _keyed(self._secret, b"mqmesh proof").digest()

    @property
    def secret(self) -> bytes:
        """The key, ``KEY_SIZE`` bytes, for a replica: its owner can forge records."""
        return self._secret

    def encode(self) -> bytes:
        """Encode the content of a key file."""
        return _LAYOUT.pack(MAGIC, crc32(self._secret), self._secret)


def open_store_key(directory: Path, *, is_new: bool) -> StoreKey:
    """Read the key of a store that is being opened; remake a lost copy from the other one.

    Args:
        directory: Directory of the store.
        is_new: The store has no log, so it may be given a key.

    Raises:
        StorageError: Both files are lost, or they differ; or they cannot be read or written.
    """
    found = _read_all(directory)
    key = StoreKey.random() if is_new and not _exists(directory) else _one_of(directory, found)
    for name, data in found.items():
        if data is None:
            if any(found.values()):
                log.warning("%s is lost and made anew from its copy", directory / name)
            _write(directory / name, key.encode())
    return key


def read_store_key(directory: Path) -> StoreKey:
    """Read the key of a store; changes nothing.

    Args:
        directory: Directory of the store.

    Raises:
        StorageError: Both files are lost, or they differ; or they cannot be read.
    """
    return _one_of(directory, _read_all(directory))


def save_store_key(directory: Path, key: StoreKey) -> None:
    """Writes the key of a store that is being made.

    Args:
        directory: Directory of the store.
        key: The key.

    Raises:
        StorageError: The files cannot be written.
    """
    for name in NAMES:
        _write(directory / name, key.encode())


def _one_of(directory: Path, found: dict[str, bytes | None]) -> StoreKey:
    good = {data for data in found.values() if data is not None}
    names = " and ".join(str(directory / name) for name in NAMES)
    if not good:
        raise StorageError(
            f"the store's key is lost: {names} are missing or damaged. Without it nobody can say "
            f"its records from forged ones; put one of the files back from a backup"
        )
    if len(good) > 1:
        raise StorageError(f"{names} hold different keys; remove the one that is not of this store")
    return StoreKey(good.pop())


def _exists(directory: Path) -> bool:
    return any((directory / name).exists() for name in NAMES)


def _read_all(directory: Path) -> dict[str, bytes | None]:
    return {name: _read(directory / name) for name in NAMES}


def _read(path: Path) -> bytes | None:
    """Read the key in a file; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    if len(data) != _LAYOUT.size:
        return None
    magic, crc, secret = _LAYOUT.unpack(data)
    return secret if magic == MAGIC and crc == crc32(secret) else None


def _write(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".new")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(new, path)
        sync_directory(path.parent)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be written") from error


def _keyed(secret: bytes, purpose: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(key=secret, digest_size=CHECK_SIZE, person=purpose)
