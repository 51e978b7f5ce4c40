"""Keys and an access list for the processes of a measurement with security on."""

import os
from pathlib import Path
from typing import Final

from mqmesh.roles.access_keeper import write_access_file
from mqmesh.sdk.client.options import CREDENTIALS_VARIABLE
from mqmesh.security.access_list import AccessList, User, UserRole
from mqmesh.security.keys import Credentials, save_credentials
from mqmesh.transport.zmq.handshakes import new_key_pair

NAMESRV: Final = "namesrv"
BROKER: Final = "broker-a"
CLIENT: Final = "client"
_ROLES: Final = {
    NAMESRV: UserRole.SERVICE,
    BROKER: UserRole.BROKER,
    CLIENT: UserRole.ADMIN,
}


class Security:
    """Of one measurement; clients that are started from now on have keys, or none.

    Args:
        folder: For the files.
        enable: Clients without a key are refused.
    """

    def __init__(self, folder: Path, *, enable: bool) -> None:
        self._folder = folder
        self._enable = enable
        os.environ.pop(CREDENTIALS_VARIABLE, None)
        if not enable:
            return
        pairs = {user: new_key_pair() for user in _ROLES}
        users = []
        for user, (public, secret) in pairs.items():
            own = Credentials(
                user=user,
                public_key=public,
                secret_key=secret,
                namesrv_server_key=pairs[NAMESRV][0],
            )
            save_credentials(folder / f"{user}.toml", own)
            brokers = [BROKER] if user == BROKER else []
            users.append(User(user, [public], _ROLES[user], brokers=brokers))
        write_access_file(folder / "access_list.toml", AccessList(1, users))
        os.environ[CREDENTIALS_VARIABLE] = str(folder / f"{CLIENT}.toml")

    def settings(self, user: str) -> list[str]:
        """Of a role that is this user."""
        if not self._enable:
            return []
        return [
            "security.enable=true",
            f"security.key_file={self._folder}/{user}.toml",
            f"security.access_list_file={self._folder}/access_list.toml",
        ]
