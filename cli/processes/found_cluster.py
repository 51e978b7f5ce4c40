"""Looks for stores in a data folder before `mqmesh up` starts a cluster in it."""

from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import ConfigError, CorruptRecord
from mqmesh.roles.broker.ha.replica_role import ROLE_FILE, decode_role
from mqmesh.roles.broker.ha.replica_state import NAME as REPLICA_STATE
from mqmesh.roles.broker.ha.replica_state import decode_replica_state
from mqmesh.roles.broker.ha.store_history import StoreHistory
from mqmesh.roles.broker.ha_config import HaMode
from mqmesh.roles.started_as import NAME as STARTED_AS
from mqmesh.roles.started_as import read_started_as
from mqmesh.storage.backends import backend_of
from mqmesh.storage.files.atomic_file import load_document, save_document

from .layout import RUN, SECURITY, ClusterConfig, data_folders
from .start_plan import FoundCluster, FoundStore, LastBroker, LastStart

LAST_START: Final = "last-start.json"
"""Name of the file, in the folder of the roles' settings."""


def find_cluster(cluster: ClusterConfig) -> FoundCluster:
    """Looks into a data folder; the caller has its lock.

    Args:
        cluster: Cluster to start in it.

    Raises:
        ConfigError: The folder cannot be read.
        CorruptRecord: The record of a store, or of the last start, cannot be read.
    """
    folder = cluster.folder.absolute()
    try:
        last = _last_start(folder)
        roots = {Path(one.store_path_root_dir).absolute() for one in cluster.broker}
        roots |= {Path(one.root) for one in last.brokers}
        # Also replicas where older versions had them, below the folder of their broker.
        roots |= {*folder.glob("*/"), *folder.glob("*/r[0-9]*/")}
        stores = tuple(
            FoundStore(path=path, history=_history_of(path))
            for path in sorted(roots)
            if backend_of(path) is not None
        )
        marked = {path.parent for path in folder.glob(f"*/{STARTED_AS}")}
        marked |= {path for path, _ in data_folders(cluster)} | {one.path for one in stores}
        keys = folder / SECURITY
        return FoundCluster(
            stores=stores,
            last=last,
            has_keys=keys.is_dir() and any(keys.iterdir()),
            secured=frozenset(
                path for path in marked if path.is_dir() and read_started_as(path).secured
            ),
            is_store=backend_of(folder) is not None,
        )
    except OSError as error:
        raise ConfigError(f"data folder {folder}: {error.strerror or error}") from error


def save_last_start(cluster: ClusterConfig, file: Path | None) -> None:
    """Keeps the facts of a start for the next one.

    Args:
        cluster: Cluster that starts; the folder of the roles' settings is there.
        file: Its cluster file, None for none.

    Raises:
        StorageError: The record cannot be written.
    """
    brokers = tuple(
        LastBroker(
            broker_name=one.broker_name,
            broker_id=one.broker_id,
            total_replicas=one.ha.total_replicas if one.ha.mode is HaMode.AUTO else 0,
            root=str(_below(cluster.folder.absolute(), Path(one.store_path_root_dir).absolute())),
        )
        for one in cluster.broker
    )
    last = LastStart(file="" if file is None else str(file.absolute()), brokers=brokers)
    save_document(cluster.folder / RUN / LAST_START, msgspec.json.encode(last))


def _last_start(folder: Path) -> LastStart:
    file = folder / RUN / LAST_START
    document = load_document(file)
    if document is None:
        return LastStart()
    try:
        last = msgspec.json.decode(document, type=LastStart)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"{file} cannot be read: {error}") from error
    brokers = [msgspec.structs.replace(one, root=str(folder / one.root)) for one in last.brokers]
    return msgspec.structs.replace(last, brokers=tuple(brokers))


def _below(folder: Path, root: Path) -> Path:
    """A store in the data folder by its path from there: the folder may be moved or copied."""
    return root.relative_to(folder) if root.is_relative_to(folder) else root


def _history_of(root: Path) -> StoreHistory:
    document, role = load_document(root / REPLICA_STATE), load_document(root / "config" / ROLE_FILE)
    return StoreHistory(
        follows=read_started_as(root).follows,
        is_promoted=role is not None and decode_role(role).epoch > 0,
        replica=None if document is None else decode_replica_state(document),
    )
