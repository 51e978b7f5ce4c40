"""One LMDB environment: the only module that uses the library.

The content of an index can always be made again from the commit log, so environments run without
syncs (``sync=False``) unless requested; a caller that needs a durable environment calls ``sync``.
They run without LMDB's own lock file as well: a lock on the directory admits one process only, and
no reading transaction ever outlives a call of this module. So there are no stale readers, and the
map can grow between any two calls.
``writemap`` is never used: on a full disk it raises a signal instead of an error. LMDB 0.9
keeps no checksums of its pages; the values must carry checksums of their own. LMDB also trusts the
references between pages, so a forged file can make it read outside of its map.
``has_sound_pages`` detects such files.
"""

import errno
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import lmdb
from lmdb import verify

from mqmesh.errors import CorruptRecord, DiskFull, StorageError
from mqmesh.private_files import FILE_MODE, make_folder
from mqmesh.storage.files.atomic_file import NO_ROOM, storage_error
from mqmesh.units import GIB

log = logging.getLogger(__name__)

DATA_FILE: Final = "data.mdb"
MOST_MAP_BYTES: Final = 256 * GIB
"""Limit of an environment's size; it is address space, not memory."""

_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PanicError,
    lmdb.IncompatibleError,
    lmdb.BadTxnError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
)

Pair = tuple[bytes, bytes]


def has_sound_pages(path: Path) -> bool:
    """Return True when LMDB may read a file that another process has written.

    Every page is read and compared with all that lead to it, by Python code that cannot be
    misled: it takes 0.2 s for 100 MB. No process may write to the file afterwards.

    Args:
        path: ``DATA_FILE`` of an environment.

    Raises:
        StorageError: The file cannot be read.
    """
    try:
        return not verify.verify(str(path), subdir=False)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    except (verify.VerifyError, struct.error, ArithmeticError, LookupError, RecursionError):
        return False  # its tree cannot even be walked


class LmdbEnv:
    """Pairs of bytes in the order of their keys. One thread at a time.

    Attributes:
        grown: Number of times that the map was enlarged since the opening.
    """

    def __init__(
        self, directory: Path, *, map_size: int, durable: bool = False, read_only: bool = False
    ) -> None:
        """Opens an environment, making it if need be.

        Args:
            directory: Directory of the environment alone; made if need be.
            map_size: Room for data in bytes; it grows by itself.
            durable: Every write is on disk when it returns, and no power cut damages the
                file. Without this, a power cut may damage all of the file.
            read_only: The environment exists, and is only read.

        Raises:
            CorruptRecord: The file is no sound environment.
            DiskFull: There is no room to make the environment.
            StorageError: The environment cannot be opened.
        """
        self._directory = directory
        self._cursor: lmdb.Cursor | None = None
        self.grown = 0
        try:
            if not read_only:
                make_folder(directory)
            # Existing data must fit, whatever the configuration says by now.
            map_size = max(map_size, 2 * self.file_bytes)
            self._env = lmdb.open(
                str(directory),
                map_size=map_size,
                sync=durable,
                metasync=durable,
                readahead=False,
                lock=False,
                readonly=read_only,
                max_dbs=0,
                mode=FILE_MODE,
            )
        except (lmdb.Error, OSError) as error:
            raise self._error(error, "cannot be opened") from error
        self._check_size()

    def _check_size(self) -> None:
        # Beyond the end of a file that was cut, the map answers with SIGBUS instead of data.
        pages = self._env.info()["last_pgno"] + 1
        wanted = pages * self._env.stat()["psize"]
        found = self.file_bytes
        if pages > 2 and found < wanted:
            self._env.close()
            raise CorruptRecord(f"{self._path} has {found} bytes, {wanted} are in use")

    @property
    def file_bytes(self) -> int:
        """Size of the environment's file, 0 if it does not exist yet."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def _path(self) -> Path:
        return self._directory / DATA_FILE

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, None if there is none.

        Raises:
            CorruptRecord, StorageError: The value cannot be read.
        """
        try:
            with self._env.begin() as transaction:
                return transaction.get(key)
        except lmdb.Error as error:
            raise self._error(error, "cannot be read") from error

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Return the value of each key, None if there is none, in one transaction.

        Raises:
            CorruptRecord, StorageError: The values cannot be read.
        """
        try:
            with self._env.begin() as transaction:
                return [transaction.get(key) for key in keys]
        except lmdb.Error as error:
            raise self._error(error, "cannot be read") from error

    def at_or_before(self, key: bytes) -> Pair | None:
        """Return the pair with the last key that is not behind a given one, None if there is none.

        Raises:
            CorruptRecord, StorageError: The pair cannot be read.
        """
        cursor = self._cursor
        if cursor is None:
            with self.reading():
                return self.at_or_before(key)
        try:
            if cursor.set_range(key):
                found = cursor.key() == key or cursor.prev()
            else:
                found = cursor.last()
            return cast(Pair, cursor.item()) if found else None
        except lmdb.Error as error:
            raise self._error(error, "cannot be read") from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which all calls of ``at_or_before`` share one transaction.

        A search reads hundreds of blocks, and a transaction costs as much as one look-up.
        Nothing may be written meanwhile.

        Raises:
            CorruptRecord, StorageError: The environment cannot be read.
        """
        if self._cursor is not None:
            yield
            return
        try:
            transaction = self._env.begin()
        except lmdb.Error as error:
            raise self._error(error, "cannot be read") from error
        with transaction, transaction.cursor() as self._cursor:
            try:
                yield
            finally:
                self._cursor = None

    def range(self, start: bytes, stop: bytes, *, most: int) -> list[Pair]:
        """Pairs whose keys lie at or behind ``start`` and before ``stop``.

        Args:
            start: First key.
            stop: Key behind the last one.
            most: Largest number of pairs to return.

        Raises:
            CorruptRecord, StorageError: The pairs cannot be read.
        """
        found: list[Pair] = []
        try:
            with self._env.begin() as transaction, transaction.cursor() as cursor:
                more = cursor.set_range(start)
                while more and len(found) < most:
                    pair = cursor.item()
                    if pair[0] >= stop:
                        break
                    found.append(pair)
                    more = cursor.next()
        except lmdb.Error as error:
            raise self._error(error, "cannot be read") from error
        return found

    def keys(self, start: bytes, stop: bytes, *, most: int) -> list[bytes]:
        """Return keys only, else like ``range``."""
        found: list[bytes] = []
        try:
            with self._env.begin() as transaction, transaction.cursor() as cursor:
                more = cursor.set_range(start)
                while more and len(found) < most:
                    key = cursor.key()
                    if key >= stop:
                        break
                    found.append(key)
                    more = cursor.next()
        except lmdb.Error as error:
            raise self._error(error, "cannot be read") from error
        return found

    def write(self, puts: Sequence[Pair], deletes: Iterable[bytes] = ()) -> None:
        """Puts and deletes pairs in one transaction: all of it or nothing.

        Nothing is durable before ``sync``, unless the environment was opened as durable, but
        written pairs survive the death of the process. After any error but ``DiskFull`` close the
        environment: the content of its file is then unknown.

        Args:
            puts: Pairs; for keys that are there already, new values. Quickest when sorted.
            deletes: Keys; one that is not there does no harm.

        Raises:
            DiskFull: No room; nothing was written.
            CorruptRecord, StorageError: The environment cannot be written.
        """
        deletes = list(deletes)
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    for key in deletes:
                        transaction.delete(key)
                    with transaction.cursor() as cursor:
                        cursor.putmulti(puts)
                return
            except lmdb.MapFullError:
                # The transaction is over, so nothing prevents a larger map.
                self._grow()
            except lmdb.Error as error:
                raise self._error(error, "cannot be written") from error

    def _grow(self) -> None:
        wanted = 2 * self._env.info()["map_size"]
        if wanted > MOST_MAP_BYTES:
            raise DiskFull(f"{self._path} would grow beyond {MOST_MAP_BYTES} bytes")
        try:
            self._env.set_mapsize(wanted)
        except lmdb.Error as error:
            raise self._error(error, "cannot grow") from error
        self.grown += 1
        log.info("%s gets room for %d bytes", self._path, wanted)

    def sync(self) -> None:
        """Makes everything written durable.

        Raises:
            StorageError: It failed; the content of the file is unknown, so remove it.
        """
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise self._error(error, "cannot be synced") from error

    def copy(self, directory: Path) -> None:
        """Writes a compact copy of the environment, of one moment.

        Args:
            directory: Directory of the copy; it exists, and is empty.

        Raises:
            CorruptRecord, DiskFull, StorageError: The environment cannot be copied.
        """
        try:
            self._env.copy(str(directory), compact=True)
        except (lmdb.Error, OSError) as error:
            raise self._error(error, f"cannot be copied to {directory}") from error

    def close(self) -> None:
        """Closes the environment; may be called again."""
        self._env.close()

    def _error(self, error: lmdb.Error | OSError, what: str) -> StorageError:
        if isinstance(error, _DAMAGE):
            return CorruptRecord(f"{self._path} {what}: {error}")
        number = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
        if number in NO_ROOM or isinstance(error, lmdb.DiskError):
            return DiskFull(f"{self._path} {what}: {os.strerror(errno.ENOSPC)}")
        return StorageError(f"{self._path} {what}: {error}")
