"""Users of RocketMQ's clients: whose keys a signed request acts with. Pure."""

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from mqmesh.config import dump_toml, parse_config
from mqmesh.errors import ConfigError, NoPermission
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.queries import UNIQUE_QUERY

MAX_USERS: Final = 1_000
ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
_UNSIGNED: Final = frozenset({SIGNATURE, UNIQUE_QUERY})
"""Fields that the signature is not over; clients add them behind it."""


class GatewayUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user of RocketMQ's clients.

    Attributes:
        access_key: Name of the user, as clients send it.
        secret_key: Key of its signatures, at least 8 characters.
        credentials: Path of a file with the keys of a user of mqmesh, whose rights it has.
    """

    access_key: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    secret_key: Annotated[str, msgspec.Meta(min_length=8, max_length=255)]
    credentials: Annotated[str, msgspec.Meta(min_length=1)]

    def __repr__(self) -> str:
        return f"GatewayUser(access_key={self.access_key!r}, …)"


class _UsersFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file."""

    user: Annotated[list[GatewayUser], msgspec.Meta(max_length=MAX_USERS)] = []


def parse_users(text: str, name: str) -> dict[str, GatewayUser]:
    """Read a file of users.

    Args:
        text: TOML: a table ``[[user]]`` for each.
        name: Name of the file, for errors.

    Returns:
        Users by access key.

    Raises:
        ConfigError: It is no such file, or two users have one access key.
    """
    try:
        users = parse_config(_UsersFile, text, name).user
    except ConfigError as error:
        # The reason may show a value, and that may be a secret one.
        reason = str(error)
        if "secret_key =" in reason:
            reason = f"{name}: a secret_key is no text of 8 to 255 characters"
        raise ConfigError(reason) from None
    found = {one.access_key: one for one in users}
    if len(found) < len(users):
        raise ConfigError(f"{name}: two users have one access_key")
    return found


def write_users(users: list[GatewayUser]) -> str:
    """Write what ``parse_users`` reads."""
    return dump_toml(_UsersFile(user=users))


def find_user(request: RemotingCommand, users: Mapping[str, GatewayUser]) -> GatewayUser | None:
    """Return the user that a request is signed by; None for one that is not signed.

    Raises:
        NoPermission: The user is unknown, or the signature wrong.
    """
    fields = request.fields
    access_key = fields.get(ACCESS_KEY)
    if access_key is None:
        return None
    user = users.get(access_key)
    secret = (user.secret_key if user is not None else "").encode()
    given = fields.get(SIGNATURE, "").encode()
    if user is None or not hmac.compare_digest(sign(fields, request.body, secret), given):
        raise NoPermission(
            f"the request is not signed by a user of the gateway: {access_key!r:.100} is unknown, "
            "or its secret key is another one"
        )
    return user


def sign(fields: Mapping[str, str], body: bytes, secret: bytes) -> bytes:
    """Return the signature of a request, as RocketMQ's clients make it.

    Args:
        fields: Fields of the request's header.
        body: Body of the request.
        secret: The user's secret key.
    """
    texts = [value for name, value in sorted(fields.items()) if name not in _UNSIGNED]
    digest = hmac.new(secret, "".join(texts).encode(), hashlib.sha1)
    digest.update(body)
    return base64.b64encode(digest.digest())
