"""`mqmesh up --secure`: makes the keys and the access list that a cluster needs."""

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from mqmesh.console.users import UsersFile, load_users, new_user, save_users
from mqmesh.errors import ConfigError
from mqmesh.private_files import make_folder, make_private, save_private
from mqmesh.roles.access_keeper import read_access_file, write_access_file
from mqmesh.roles.gateway.users import GatewayUser, write_users
from mqmesh.security.access_list import AccessList, User, UserRole
from mqmesh.security.keys import Credentials, Key, TwoKeys, load_credentials, save_credentials
from mqmesh.transport.zmq.handshakes import new_key_pair

from .layout import (
    ACCESS_LIST,
    CONSOLE,
    CONSOLE_USERS,
    EXPORTER,
    GATEWAY,
    GATEWAY_USERS,
    NAMESRV,
    SECURITY,
    ClusterConfig,
    broker_user,
    key_file,
)

CLIENT: Final = "client"
ADMIN: Final = "admin"
"""First user of the console, and of RocketMQ's clients."""
PASSWORD_BYTES: Final = 12
SECRET_BYTES: Final = 24


def client_file(folder: Path) -> Path:
    """Returns the path of the administrator's keys, in the data folder of a cluster."""
    return key_file(folder, CLIENT)


def make_security(config: ClusterConfig) -> None:
    """Makes missing keys and users, for a cluster with security on.

    Keys and users that are there stay as they are.

    Raises:
        ConfigError: A file cannot be written, or a present one cannot be used.
    """
    folder = config.folder / SECURITY
    try:
        make_folder(folder)
        make_private(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from error
    namesrv = _keys(config.folder, NAMESRV, "", "")
    # Two while it is replaced by another one.
    trusted = namesrv.namesrv_server_key
    client = _keys(config.folder, CLIENT, trusted, config.namesrv_addr)
    users = [_user(namesrv, UserRole.SERVICE), _user(client, UserRole.ADMIN)]
    watching = (config.exporter, config.monitor)
    watchers = [EXPORTER] if any(one.enable and not one.credentials for one in watching) else []
    if config.console.enable and not config.console.credentials:
        watchers.append(CONSOLE)
    own_key = str(key_file(config.folder.absolute(), GATEWAY))
    if config.gateway.enable and config.gateway.security.key_file == own_key:
        watchers.append(GATEWAY)
    for name in watchers:
        watcher = _keys(config.folder, name, trusted, config.namesrv_addr)
        users.append(_user(watcher, UserRole.VIEW))
    brokers = {
        broker_user(one.broker_name, one.broker_id, one.ha.mode): one.broker_name
        for one in config.broker
    }
    for name, broker_name in sorted(brokers.items()):
        own = _keys(config.folder, name, trusted, "")
        users.append(_user(own, UserRole.BROKER, [broker_name]))
    _add(folder / ACCESS_LIST, users)


def make_console_user(config: ClusterConfig) -> str:
    """Makes the console's first user, ``admin``, with the administrator's keys.

    Returns:
        The password; "" where there are users already, or a file of users is named.

    Raises:
        ConfigError: The file cannot be written or used.
    """
    path = config.folder.absolute() / SECURITY / CONSOLE_USERS
    if not config.console.enable or config.console.users_file or load_users(path).user:
        return ""
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    admin = new_user(ADMIN, password, str(client_file(config.folder.absolute())))
    try:
        save_users(path, UsersFile(user=[admin]))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    return password


def make_gateway_user(config: ClusterConfig) -> None:
    """Makes the first user of RocketMQ's clients, ``admin``, with the administrator's keys.

    A file of users that is there stays as it is, also one without users.

    Raises:
        ConfigError: The file cannot be written.
    """
    folder = config.folder.absolute()
    path = folder / SECURITY / GATEWAY_USERS
    if not config.gateway.enable or config.gateway.users_file != str(path) or path.exists():
        return
    secret = secrets.token_urlsafe(SECRET_BYTES)
    admin = GatewayUser(access_key=ADMIN, secret_key=secret, credentials=str(client_file(folder)))
    try:
        save_private(path, write_users([admin]))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def _keys(folder: Path, name: str, namesrv_key: Key | TwoKeys, namesrv_addr: str) -> Credentials:
    path = key_file(folder, name)
    if path.exists():
        return load_credentials(path)
    made = new_credentials(name, namesrv_key, namesrv_addr)
    save_credentials(path, made)
    return made


def new_credentials(user: str, namesrv_key: Key | TwoKeys, namesrv_addr: str) -> Credentials:
    """Makes new keys.

    Args:
        user: Name of the user.
        namesrv_key: Public key of the name servers, or both; "" if these are theirs.
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
        now = AccessList(former.version + 1, [*former.user, *missing], former.namespace)
        write_access_file(path, now)
