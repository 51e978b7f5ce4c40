"""Keys of CURVE, and the files that they are kept in."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from mqmesh.config import MAX_FILE_BYTES, dump_toml, parse_config
from mqmesh.errors import ConfigError
from mqmesh.private_files import open_private

KEY_CHARACTERS: Final = 40
"""A key has 32 bytes; five characters of Z85 stand for four of them (ZeroMQ RFC 32)."""
MAX_SERVER_KEYS: Final = 2
"""Most keys of the name servers: all get a new one before the old one is taken away."""
MAX_KNOWN_SERVERS: Final = 10_000
"""Endpoints whose key is remembered; then the one learnt first is forgotten."""

_OTHERS: Final = 0o077
_Z85: Final = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"

Key = Annotated[str, msgspec.Meta(pattern=f"^{_Z85}$")]
KeyOrNone = Annotated[str, msgspec.Meta(pattern=f"^({_Z85})?$")]
TwoKeys = Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_SERVER_KEYS)]


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a client or a role, with its name; a file holds them, see ``load``.

    Attributes:
        user: Its name in the access list. Servers go by the key: this is for error messages.
        public_key: Key of the user in the access list, 40 characters of Z85.
        secret_key: Secret key, which proves the ownership of the public key. It is never sent.
        namesrv_server_key: Public key of the name servers and of embedded coordinators, which
            share one; clients refuse a server without its secret half. Two keys while one replaces
            the other: either is accepted.
        namesrv_addr: The name servers, where the program names no others; "" for none.
    """

    user: str = ""
    public_key: Key
    secret_key: Key
    namesrv_server_key: Key | TwoKeys
    namesrv_addr: str = ""

    @property
    def namesrv_keys(self) -> Sequence[str]:
        """Keys that a name server may have."""
        found = self.namesrv_server_key
        return [found] if isinstance(found, str) else found

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, public_key={self.public_key!r}, …)"


def load_credentials(path: Path) -> Credentials:
    """Reads a file of credentials.

    Raises:
        ConfigError: The file cannot be read, others may read it, or a key is malformed.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OTHERS:
        raise ConfigError(f"{path}: mode {mode:04o} lets others read the secret key; chmod 600 it")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path}: belongs to another user ({found.st_uid}), who may change it")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
    try:
        return parse_config(Credentials, text, str(path))
    except ConfigError as error:
        # The reason may show a value, and that may be the secret one.
        reason = str(error)
        if "secret_key =" in reason:
            reason = f"{path}: secret_key is no key of {KEY_CHARACTERS} characters"
        raise ConfigError(reason) from None


def save_credentials(path: Path, credentials: Credentials) -> None:
    """Writes a new file that only its owner may read.

    Raises:
        ConfigError: The file exists already, or cannot be written.
    """
    try:
        with open(path, "x", encoding="utf-8", opener=open_private) as file:
            file.write(dump_toml(credentials))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


class KeyRing:
    """The own keys, and those that servers must prove to have.

    Args:
        own: Credentials of this process.
        server_keys: Of servers that nothing was learnt of; they have one of these.
    """

    def __init__(self, own: Credentials, *server_keys: str) -> None:
        self.own = own
        self._default = server_keys
        self._learnt: dict[str, tuple[str, ...]] = {}
        self._turned: dict[str, tuple[str, ...]] = {}
        self._private: set[str] = set()

    def keep_private(self, endpoint: str) -> None:
        """Marks the Unix socket of an own helper process: connections to it use no keys."""
        self._private.add(endpoint)

    def is_private(self, endpoint: str) -> bool:
        """Return True if ``keep_private`` marked this endpoint."""
        return endpoint in self._private

    def learn(self, endpoint: str, *server_keys: str) -> None:
        """Notes which key a server has, or may have, from a trusted source; "" is ignored."""
        if any(server_keys):
            _remember(self._learnt, endpoint, server_keys)

    def knows(self, endpoint: str) -> bool:
        """Return True if a trusted source named the key of the server at this endpoint."""
        return endpoint in self._learnt

    def server_key(self, endpoint: str) -> str:
        """Return the key that a server at this endpoint must prove to have."""
        return self._keys(endpoint)[0]

    def try_another(self, endpoint: str, refused: str) -> bool:
        """Takes note that a server proved to have another key than this one.

        Returns:
            Whether it may have another one: that one is expected from now on.
        """
        keys = self._keys(endpoint)
        if keys[0] == refused and len(keys) > 1:
            _remember(self._turned, endpoint, (*keys[1:], refused))
        return self._keys(endpoint)[0] != refused

    def _keys(self, endpoint: str) -> tuple[str, ...]:
        keys = self._learnt.get(endpoint, self._default)
        turned = self._turned.get(endpoint, keys)
        return turned if set(turned) == set(keys) else keys


def _remember(known: dict[str, tuple[str, ...]], endpoint: str, keys: tuple[str, ...]) -> None:
    known[endpoint] = keys
    if len(known) > MAX_KNOWN_SERVERS:
        del known[next(iter(known))]
