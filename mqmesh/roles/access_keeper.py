"""Security of a role: its keys, and the access list on disk and in force."""

import datetime
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from mqmesh.errors import ConfigError, MessageIllegal, MQMeshError
from mqmesh.private_files import open_private
from mqmesh.protocol.admin import (
    MAX_LIST_CHARACTERS,
    AccessListInfo,
    GetAccessListRequest,
    UpdateAccessListRequest,
)
from mqmesh.protocol.command import EMPTY_REPLY, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.request import Request
from mqmesh.roles.dispatch import Handler
from mqmesh.security.access_list import AccessList, read_access_list, write_access_list
from mqmesh.security.config import SecurityConfig
from mqmesh.security.guard import Guard
from mqmesh.security.keys import KeyRing, load_credentials
from mqmesh.storage.files.atomic_file import storage_error, sync_directory
from mqmesh.transport.endpoints import endpoint_of

LOOK_MS: Final = 1_000
"""Interval at which the file of the access list is read: a removed user is out that soon."""

_log = logging.getLogger(__name__)


def open_ring(config: SecurityConfig, common: Iterable[str] = ()) -> KeyRing | None:
    """Return the keys of a role; None if security is off.

    Args:
        config: Settings.
        common: Addresses of name servers and coordinators, which share one key. Any other
            server has the role's own key, or one that a name server names.

    Raises:
        ConfigError: The key file cannot be used.
    """
    if not config.enable:
        return None
    own = load_credentials(Path(config.key_file))
    ring = KeyRing(own, own.public_key)
    for address in common:
        ring.learn(endpoint_of(address), *own.namesrv_keys)
    return ring


def open_guard(config: SecurityConfig) -> Guard | None:
    """Return the guard of a role that others connect to; None if security is off.

    Raises:
        ConfigError: The list is missing, or cannot be used.
    """
    if not config.enable:
        return None
    if not config.access_list_file:
        raise ConfigError(
            "security.enable needs security.access_list_file; without it nobody may do anything"
        )
    path = Path(config.access_list_file)
    return Guard(read_access_file(path), _today, path, audited=config.audit_log)


class AccessKeeper:
    """Keeper of a role's access list: follows its file, and takes what administrators send.

    Args:
        guard: Guard with the list in force.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._path = guard.path
        self._seen = self._mark()
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.GET_ACCESS_LIST: self._get,
            RequestCode.UPDATE_ACCESS_LIST: self._update,
        }
        self._changed = False

    def take_changes(self) -> bool:
        """Returns True if another list is in force since the last call, or another day began."""
        mark = self._mark()
        if mark != self._seen:
            self._seen = mark
            self._read_again()
        changed, self._changed = self._changed, False
        return self._guard.look_at_date() or changed

    @property
    def version(self) -> int:
        """Version of the list in force."""
        return self._guard.access_list.version

    def catch_up(self, text: str) -> None:
        """Takes the newer list of a name server: this role was away when it was changed.

        Args:
            text: TOML; "" if it is not newer after all.

        Raises:
            ConfigError: The text is no access list.
            StorageError: The file cannot be written.
        """
        if not text:
            return
        new = read_access_list(text, "access list of a name server", _today())
        if new.version > self.version:
            self._adopt(new)

    def _get(self, request: Request, header: GetAccessListRequest) -> AccessListInfo:
        now = self._guard.access_list
        text = write_access_list(now) if now.version > header.known_version else ""
        return AccessListInfo(now.version, now.digest(), text)

    def _update(self, request: Request, header: UpdateAccessListRequest) -> Reply:
        now = self._guard.access_list
        try:
            new = read_access_list(header.text, "access list", _today())
        except ConfigError as error:
            raise MessageIllegal(str(error)) from error
        if new.digest() == now.digest():
            return EMPTY_REPLY
        # A role that was down, and so is behind, takes a list made of a newer one than its own.
        if now.version > header.expected_version or new.version <= now.version:
            raise MessageIllegal(
                f"the access list is version {now.version} here, yours is version {new.version}, "
                f"made from {header.expected_version}; `mqmesh acl show > acl.toml` and edit again"
            )
        self._adopt(new)
        _log.warning("user %r changed the access list", request.peer.principal.name)
        return EMPTY_REPLY

    def _adopt(self, new: AccessList) -> None:
        if self._path is not None:
            write_access_file(self._path, new)
        self._put(new)
        self._seen = self._mark()

    def _read_again(self) -> None:
        if self._path is None:
            return
        try:
            new = read_access_file(self._path)
        except MQMeshError as error:
            _log.error("the access list stays at version %d: %s", self.version, error)
            return
        if new.version > self.version:
            self._put(new)
        elif new.digest() != self._guard.access_list.digest():
            _log.error(
                "%s has version %d with another content than the list in force, which is version "
                "%d; give it a higher version to put it in force",
                self._path, new.version, self.version,
            )  # fmt: skip

    def _put(self, new: AccessList) -> None:
        self._guard.put(new)
        self._changed = True
        _log.info("the access list is version %d, with %d users", new.version, len(new.user))

    def _mark(self) -> tuple[int, int, int] | None:
        """Return a mark that changes with the file."""
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)


def read_access_file(path: Path) -> AccessList:
    """Reads an access list.

    Raises:
        ConfigError: The file cannot be read, or is no access list.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_LIST_CHARACTERS + 1).decode()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
    if len(text) > MAX_LIST_CHARACTERS:
        raise ConfigError(f"{path}: over {MAX_LIST_CHARACTERS} characters")
    return read_access_list(text, str(path), _today())


def write_access_file(path: Path, access_list: AccessList) -> None:
    """Replaces an access list, all or nothing, durably.

    Raises:
        StorageError: The file cannot be written.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.unlink(missing_ok=True)
        with open(new, "x", encoding="utf-8", opener=open_private) as file:
            file.write(write_access_list(access_list))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise storage_error(error, f"cannot write {path}") from error


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
