"""Users of the console: the people who may log in, and the credentials that each acts by."""

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec

from mqmesh.clock import Clock
from mqmesh.config import dump_toml, parse_config
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.private_files import save_private

SCRYPT_N: Final = 1 << 15
SCRYPT_R: Final = 8
SCRYPT_MEMORY: Final = 1 << 26
MIN_PASSWORD: Final = 8
MAX_PASSWORD: Final = 1_024
MAX_USERS: Final = 1_000
LOOK_MS: Final = 1_000
"""From one look at the file to the next."""
_log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class ConsoleUser(msgspec.Struct, frozen=True):
    """A person at the console.

    Attributes:
        name: Shown in the header; "" for everybody, where there is no login.
        credentials: File with the keys of the mqmesh user; "" for what MQMESH_CREDENTIALS names.
    """

    name: str = ""
    credentials: str = ""


class StoredUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user as the file has it.

    Attributes:
        name: For the login: letters, digits and ``_.@-``, up to 64.
        credentials: File with the keys of the mqmesh user that calls are made as.
        salt: 16 random bytes, hex.
        hash: scrypt of the password, n 32,768, r 8, p 1, 32 bytes, hex.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    credentials: str
    salt: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}\\Z")]
    hash: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}\\Z")]


class Users(Protocol):
    """All users that may log in."""

    def find(self, name: str) -> "StoredUser | None":
        """Return the user of this name; None if there is none."""


class UsersFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``users.toml``."""

    user: Annotated[list[StoredUser], msgspec.Meta(max_length=MAX_USERS)] = []

    def find(self, name: str) -> StoredUser | None:
        """Return the user of this name; None if there is none."""
        return next((one for one in self.user if one.name == name), None)


def load_users(path: Path) -> UsersFile:
    """Reads the users; none if there is no such file.

    Raises:
        ConfigError: The file cannot be read, is no such file, or can be read by others.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read()
    except FileNotFoundError:
        return UsersFile()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"users_file {path}: {getattr(error, 'strerror', error)}") from error
    if mode & 0o077:
        raise ConfigError(f"users_file {path}: others may read it; run chmod 600 {path}")
    return parse_config(UsersFile, text, str(path))


class WatchedUsers:
    """Users of a file, which is read again when it changes.

    Args:
        path: The file.
        clock: Source of time; the file is looked at once a second at most.

    Raises:
        ConfigError: The file cannot be used, or has no users.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._mark = _mark(path)
        self._users = load_users(path)
        self._looked_ms = clock.monotonic_ms()
        if not self._users.user:
            raise ConfigError(
                f"users_file {path}: it has no users; run mqmesh console add-user NAME"
            )

    def find(self, name: str) -> StoredUser | None:
        """Implement ``Users.find``."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._looked_ms >= LOOK_MS:
            self._looked_ms = now_ms
            mark = _mark(self._path)
            if mark != self._mark:
                self._mark = mark
                self._read_again()
        return self._users.find(name)

    def _read_again(self) -> None:
        try:
            self._users = load_users(self._path)
        except ConfigError as error:
            _log.error("the users stay as they were: %s", error)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return a mark that differs when a file was replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def save_users(path: Path, users: UsersFile) -> None:
    """Writes the users into a file that only its owner can read.

    Raises:
        OSError: It cannot be written.
    """
    save_private(path, dump_toml(users))


def new_user(name: str, password: str, credentials: str) -> StoredUser:
    """Makes a user.

    Raises:
        InvalidArgument: The name or password is of a wrong length, or the name of other characters.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidArgument(
            f"user {name!r:.80} must be 1 to 64 letters, digits or characters of _.@-"
        )
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
        raise InvalidArgument(f"a password has {MIN_PASSWORD} to {MAX_PASSWORD} characters")
    salt = secrets.token_bytes(16)
    return StoredUser(
        name=name, credentials=credentials, salt=salt.hex(), hash=_hash(password, salt).hex()
    )


def is_password(user: StoredUser | None, password: str) -> bool:
    """Return True for the password of a user; takes as long when there is no such user."""
    salt = bytes(16) if user is None else bytes.fromhex(user.salt)
    expected = bytes(32) if user is None else bytes.fromhex(user.hash)
    is_equal = hmac.compare_digest(_hash(password[:MAX_PASSWORD], salt), expected)
    return is_equal and user is not None


def _hash(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(
        password.encode("utf-8", "surrogatepass"),
        salt=salt,
        n=SCRYPT_N,
        r=SCRYPT_R,
        p=1,
        maxmem=SCRYPT_MEMORY,
        dklen=32,
    )
