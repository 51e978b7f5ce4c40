"""A cluster that lets nobody in without a key: its folder of keys, and one process of each role."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from harness.keys import credentials, user
from mqmesh.protocol.commands import ServedBy
from mqmesh.roles.access_keeper import read_access_file, write_access_file
from mqmesh.security.access_list import AccessList, Namespace, User, UserRole
from mqmesh.security.keys import load_credentials, save_credentials
from mqmesh.testing.processes import ProcessCluster, RoleProcess

BROKER: Final = "broker-a"
ACCESS_LIST: Final = "access_list.toml"
NAMESRV: Final = "namesrv"
"""User whose keys name servers and coordinators have."""
CLIENT: Final = "client"
"""The administrator."""


def secured_folder(folder: Path) -> Path:
    """Makes a folder of keys as `mqmesh up --secure` does; returns it."""
    keys = folder / "security"
    keys.mkdir(mode=0o700)
    namesrv = credentials(NAMESRV)
    broker, client = credentials(BROKER, namesrv), credentials(CLIENT, namesrv)
    for own in (namesrv, broker, client):
        save_credentials(keys / f"{own.user}.toml", own)
    users = [
        user(namesrv, UserRole.SERVICE),
        user(broker, UserRole.BROKER, brokers=[BROKER]),
        user(client, UserRole.ADMIN),
    ]
    write_access_file(keys / ACCESS_LIST, AccessList(1, users))
    return keys


def keys_in(folder: Path) -> Path | None:
    """Returns the folder of keys that ``secured_folder`` made in a folder, or None."""
    keys = folder / "security"
    return keys if keys.is_dir() else None


def put_users(keys: Path, users: Iterable[User]) -> None:
    """Users are in the access list from now on."""
    path = keys / ACCESS_LIST
    now = read_access_file(path)
    for one in users:
        now = now.with_user(one)
        if one.namespace and one.namespace not in {known.name for known in now.namespace}:
            now = AccessList(now.version, now.user, [*now.namespace, Namespace(one.namespace)])
    write_access_file(path, now)


def place_of(endpoint: str) -> str:
    """Returns the address where a process listens, in ZeroMQ's form."""
    return endpoint if "://" in endpoint else f"tcp://{endpoint}"


class Roles:
    """One process of each role that others connect to.

    Args:
        folder: For keys, stores and logs; a short path.
        broker_settings: Settings of the broker.
        users: Clients without a key are refused; these users are there beside those that every
            secured cluster has. None for no security.

    Attributes:
        keys: Folder with the keys.
        credentials: File with those of the administrator; "" without security.
        roles: The processes.
        namesrv_addr: Name server.
    """

    def __init__(
        self,
        folder: Path,
        broker_settings: dict[str, str] | None = None,
        users: Iterable[User] | None = None,
    ) -> None:
        keys = None
        if users is not None:
            keys = secured_folder(folder)
            put_users(keys, users)
        self.keys = keys or folder
        self.credentials = "" if keys is None else str(keys / f"{CLIENT}.toml")
        settings = {"filter_server_enable": "true", **(broker_settings or {})}
        self._cluster = ProcessCluster(folder, broker_settings=settings, keys=keys)
        self._folder = folder
        self.namesrv_addr = self._cluster.namesrv_addr
        self.roles = {
            ServedBy.NAMESRV: self._cluster.namesrvs[0],
            ServedBy.BROKER: self._cluster.brokers[BROKER],
        }
        starts = {
            ServedBy.SCHEDULE: lambda: self._cluster.start_schedule(BROKER),
            ServedBy.COORDINATOR: self._coordinator,
            ServedBy.FILTERSRV: self._filtersrv,
        }
        with ThreadPoolExecutor() as pool:
            begun = {role: pool.submit(start) for role, start in starts.items()}
        try:
            for role, one in begun.items():
                self.roles[role] = one.result()
        except BaseException:
            self.close()
            raise

    def server_key(self, role: ServedBy) -> str:
        """Returns the public key that a role proves to have."""
        user = NAMESRV if role in (ServedBy.NAMESRV, ServedBy.COORDINATOR) else BROKER
        return load_credentials(self.keys / f"{user}.toml").public_key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes."""
        for role in (ServedBy.FILTERSRV, ServedBy.COORDINATOR):
            with suppress(KeyError):
                self.roles[role].stop()
        self._cluster.close()

    def _coordinator(self) -> RoleProcess:
        settings = {"listen_port": "0", "data_dir": str(self._folder / "coordinator")}
        settings |= self._cluster.security(NAMESRV)
        return RoleProcess("coordinator", settings, self._folder / "coordinator.log")

    def _filtersrv(self) -> RoleProcess:
        broker = self._cluster.brokers[BROKER].endpoint
        settings = {"enable": "true", "broker_name": BROKER, "broker_addr": broker}
        settings |= self._cluster.security(BROKER)
        return RoleProcess("filtersrv", settings, self._folder / "filtersrv.log")
