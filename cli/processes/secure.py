"""`mqmesh up --secure`: makes the keys and the access list that a cluster needs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import quote

from mqmesh.errors import ConfigError
from mqmesh.private_files import make_folder, make_private
from mqmesh.roles.access_keeper import read_access_file, write_access_file
from mqmesh.security.access_list import AccessList, User, UserRole
from mqmesh.security.keys import Credentials, load_credentials, save_credentials
from mqmesh.transport.zmq.handshakes import new_key_pair

from .layout import ClusterConfig

FOLDER: Final = "security"
NAMESRV: Final = "namesrv"
CLIENT: Final = "client"
ACCESS_LIST: Final = "access_list.toml"


def client_file(folder: Path) -> Path:
    """The administrator's keys, in the data folder of a cluster."""
    return folder / FOLDER / f"{CLIENT}.toml"


def make_security(config: ClusterConfig) -> None:
    """Makes what is missing of keys and users, for a cluster with security on.

    Keys and users that are there stay as they are.

    Raises:
        ConfigError: Something cannot be written, or what is there cannot be used.
    """
    folder = config.folder / FOLDER
    try:
        make_folder(folder)
        make_private(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from error
    namesrv = _keys(folder, NAMESRV, "", "")
    client = _keys(folder, CLIENT, namesrv.public_key, config.namesrv_addr)
    users = [_user(namesrv, UserRole.SERVICE), _user(client, UserRole.ADMIN)]
    for name in sorted({broker.broker_name for broker in config.broker}):
        broker = _keys(folder, name, namesrv.public_key, "")
        users.append(_user(broker, UserRole.BROKER, [name]))
    _add(folder / ACCESS_LIST, users)


def _keys(folder: Path, name: str, namesrv_key: str, namesrv_addr: str) -> Credentials:
    path = folder / f"{quote(name, safe='')}.toml"
    if path.exists():
        return load_credentials(path)
    made = new_credentials(name, namesrv_key, namesrv_addr)
    save_credentials(path, made)
    return made


def new_credentials(user: str, namesrv_key: str, namesrv_addr: str) -> Credentials:
    """New keys.

    Args:
        user: Whose.
        namesrv_key: Public key of the name servers; "" if these are theirs.
        namesrv_addr: The name servers, for clients.
    """
    public, secret = new_key_pair()
    return Credentials(
        user=user,
        public_key=public,
        secret_key=secret,
        namesrv_server_key=namesrv_key or public,
        namesrv_addr=namesrv_addr,
    )


def _user(own: Credentials, role: UserRole, brokers: Iterable[str] = ()) -> User:
    return User(own.user, [own.public_key], role, brokers=list(brokers))


def _add(path: Path, users: list[User]) -> None:
    former = read_access_file(path) if path.exists() else AccessList(0, [])
    known = {user.name for user in former.user}
    missing = [user for user in users if user.name not in known]
    if missing:
        now = AccessList(former.version + 1, [*former.user, *missing])
        write_access_file(path, now)
