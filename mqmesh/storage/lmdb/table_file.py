"""File of a broker's tables: an LMDB environment without syncs, which the log makes again.

The file outlives the death of the process, which loses nothing that was written. A power cut may
damage any page, so the file is valid only during the life of the system that wrote it, or after an
orderly stop; ``use`` beside it records which. In any other case the table begins empty.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import CorruptRecord, StorageError, StoreClosed
from mqmesh.private_files import make_folder
from mqmesh.storage.files.atomic_file import load_document, save_document, storage_error
from mqmesh.storage.lmdb.env import LmdbEnv, Pair
from mqmesh.units import MIB

USE_FILE: Final = "use"
MAP_BYTES: Final = 64 * MIB


class TableFileUse(msgspec.Struct, array_like=True, frozen=True):
    """Use of the file, on disk as msgpack.

    Attributes:
        boot_id: Boot id of the system that writes the file.
        is_clean: The file was closed in order, and synced.
    """

    boot_id: bytes
    is_clean: bool


class TableFile:
    """Rows of tables on disk; implements ``TableRows``.

    Args:
        directory: Directory of the file alone; made together with the first table.
        boot_id: Boot id of the running system; zeros if it has none.
    """

    def __init__(self, directory: Path, boot_id: bytes) -> None:
        self._directory = directory
        self._boot_id = boot_id
        self._env: LmdbEnv | None = None

    def begin(self) -> None:
        """Implement ``TableRows.begin``."""
        if self._env is not None:
            return
        if not self._is_sound():
            self._remove()
        try:
            make_folder(self._directory)
        except OSError as error:
            raise storage_error(error, f"{self._directory} cannot be made") from error
        # On the disk before anything is written: from then on a power cut makes the file invalid.
        self._note_use(is_clean=False)
        try:
            self._env = LmdbEnv(self._directory, map_size=MAP_BYTES)
        except CorruptRecord:
            self._remove()
            make_folder(self._directory)
            self._note_use(is_clean=False)
            self._env = LmdbEnv(self._directory, map_size=MAP_BYTES)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Implement ``TableRows.get_many``."""
        return self._open().get_many(keys)

    def range(self, start: bytes, stop: bytes, *, most: int) -> list[Pair]:
        """Implement ``TableRows.range``."""
        return self._open().range(start, stop, most=most)

    def write(self, puts: Sequence[Pair], deletes: Iterable[bytes] = ()) -> None:
        """Implement ``TableRows.write``."""
        self._open().write(puts, deletes)

    def reset(self) -> None:
        """Implement ``TableRows.reset``."""
        self.abandon()
        self._remove()
        self.begin()

    def close(self) -> None:
        """Implement ``TableRows.close``."""
        if self._env is None:
            return
        try:
            self._env.sync()
            self.abandon()
            self._note_use(is_clean=True)
        except StorageError:
            # The file is invalid then, and is made again from the log.
            self.abandon()

    def _open(self) -> LmdbEnv:
        if self._env is None:
            raise StoreClosed("the tables of this broker are closed")
        return self._env

    def abandon(self) -> None:
        """Implement ``TableRows.abandon``."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _is_sound(self) -> bool:
        try:
            document = load_document(self._directory / USE_FILE)
        except StorageError:
            return False
        if document is None:
            return False
        try:
            use = msgspec.msgpack.decode(document, type=TableFileUse)
        except msgspec.MsgspecError:
            return False
        return use.is_clean or (any(use.boot_id) and use.boot_id == self._boot_id)

    def _note_use(self, *, is_clean: bool) -> None:
        document = msgspec.msgpack.encode(TableFileUse(self._boot_id, is_clean))
        save_document(self._directory / USE_FILE, document)

    def _remove(self) -> None:
        if not self._directory.exists():
            return
        try:
            shutil.rmtree(self._directory)
        except OSError as error:
            raise storage_error(error, f"{self._directory} cannot be removed") from error
