"""Users with keys, for tests of access rights."""

from __future__ import annotations

import datetime
from typing import Any

from mqmesh.security.access_list import AccessList, Namespace, User, UserRole
from mqmesh.security.guard import Guard
from mqmesh.security.keys import Credentials, KeyRing
from mqmesh.transport.zmq.handshakes import new_key_pair

TODAY = datetime.date(2026, 11, 24)


def credentials(
    user: str, server: Credentials | None = None, namesrv_addr: str = ""
) -> Credentials:
    """Makes new keys of a user that trusts this server; of a server, if there is none."""
    public, secret = new_key_pair()
    return Credentials(
        user=user,
        public_key=public,
        secret_key=secret,
        namesrv_server_key=server.public_key if server else public,
        namesrv_addr=namesrv_addr,
    )


def ring(own: Credentials) -> KeyRing:
    """Returns the keys of a client."""
    return KeyRing(own, *own.namesrv_keys)


def user(of: Credentials, role: UserRole = UserRole.NONE, **more: Any) -> User:
    """Returns the entry of a user in the access list."""
    return User(of.user, [of.public_key], role, **more)


def guard(*users: User) -> Guard:
    """Lets in these users."""
    namespaces = {one.namespace for one in users if one.namespace}
    return Guard(AccessList(1, list(users), list(map(Namespace, namespaces))), lambda: TODAY)
