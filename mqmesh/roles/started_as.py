"""Start mode of a role in its data folder before, so that a later start cannot forget it.

The document ``started-as.json`` is a JSON object of the fields of ``StartedAs`` (also in
``docs/storage-format.md``). Version 1. A folder without it has never had anything to remember.
"""

from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import ConfigError, CorruptRecord
from mqmesh.private_files import make_folder
from mqmesh.security.config import SecurityConfig
from mqmesh.storage.files.atomic_file import load_document, save_document

NAME: Final = "started-as.json"
VERSION: Final = 1


class StartedAs(msgspec.Struct, frozen=True, kw_only=True):
    """Start mode that is remembered. The names of its fields are on disk and never change.

    Attributes:
        secured: The role ran with security on.
        follows: The store is a follower's, in a group whose master is set (ha.mode manual).
        version: Version of the document.
    """

    secured: bool = False
    follows: bool = False
    version: int = VERSION


def read_started_as(folder: Path) -> StartedAs:
    """Reads the document of a data folder.

    Returns:
        The defaults if there is none.

    Raises:
        CorruptRecord: The document is malformed, or of another version.
    """
    document = load_document(folder / NAME)
    if document is None:
        return StartedAs()
    try:
        found = msgspec.json.decode(document, type=StartedAs)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"{folder / NAME} cannot be read: {error}") from error
    if found.version != VERSION:
        raise CorruptRecord(
            f"{folder / NAME} has version {found.version}; this program reads {VERSION}"
        )
    return found


def check_security(before: StartedAs, folder: Path, security: SecurityConfig) -> None:
    """Refuses to open a role that was secured before to every client.

    Args:
        before: Start mode that the folder remembers.
        folder: Data folder of the role.
        security: The settings of this start.

    Raises:
        ConfigError: Security was on, is off now, and ``--insecure`` was not given.
    """
    if before.secured and not security.enable and not security.insecure:
        raise ConfigError(
            f"{folder} was used with security on, and without it everybody who reaches this "
            "process may do everything: set security.enable = true with key_file and "
            "access_list_file, or start it with --insecure"
        )


def remember_start(
    before: StartedAs, folder: Path, security: SecurityConfig, *, follows: bool = False
) -> None:
    """Saves the start mode for later starts; nothing if it is saved already.

    Args:
        before: Start mode that the folder remembers.
        folder: Data folder of the role, held by this process.
        security: The settings of this start.
        follows: See ``StartedAs``.

    Raises:
        OSError, StorageError: The document cannot be written.
    """
    now = StartedAs(secured=before.secured or security.enable, follows=follows)
    if now != before:
        make_folder(folder)
        save_document(folder / NAME, msgspec.json.encode(now))


def begin_in(folder: Path, security: SecurityConfig) -> None:
    """Checks and remembers the start of a role that has no replicas.

    Args:
        folder: Data folder of the role, held by this process.
        security: The settings of this start.

    Raises:
        ConfigError: See ``check_security``.
        StorageError, CorruptRecord: The document cannot be read or written.
    """
    before = read_started_as(folder)
    check_security(before, folder, security)
    remember_start(before, folder, security)
