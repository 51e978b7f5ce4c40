"""Plan of a start of `mqmesh up` on a data folder, or the reason why it does not start. Pure.

A start without a flag of an earlier start never hides messages, shows an older state of them, or
opens a secured cluster to everybody. The contents of the data folder decide; where they say too
little the start is refused, and the error names the command to use.
"""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.roles.broker.config import MASTER_ID, BrokerConfig
from mqmesh.roles.broker.ha.store_history import StoreHistory
from mqmesh.roles.broker.ha_config import HaMode

from ..options import DEFAULT_DATA_DIR
from .layout import SECURITY, ClusterConfig, data_folders, replica_folder

SECURE: Final = ("security.enable=true",)
INSECURE: Final = ("security.enable=false", "security.insecure=true")


class FoundStore(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's store on this disk.

    Attributes:
        path: Folder of the store, absolute.
        history: Roles that the store had.
    """

    path: Path
    history: StoreHistory = StoreHistory()


class LastBroker(msgspec.Struct, frozen=True, kw_only=True):
    """A broker of the last start.

    Attributes:
        broker_name: Broker group.
        broker_id: Id of the replica.
        total_replicas: Replicas of its group; 0 where no master is elected.
        root: Folder of its store, absolute.
    """

    broker_name: str
    broker_id: int = MASTER_ID
    total_replicas: int = 0
    root: str


class LastStart(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the last start, kept in the data folder as JSON.

    Attributes:
        file: The cluster file, absolute; "" for none.
        brokers: All brokers of that start.
        version: Version of this format.
    """

    file: str = ""
    brokers: tuple[LastBroker, ...] = ()
    version: int = 1


class FoundCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a data folder before a start.

    Attributes:
        stores: Stores of brokers: those in the folder, and those of the last start elsewhere.
        last: The last start.
        has_keys: The folder has keys, or an access list.
        secured: Folders of roles that were used with security on.
        is_store: The folder is itself a broker's store.
    """

    stores: tuple[FoundStore, ...] = ()
    last: LastStart = LastStart()
    has_keys: bool = False
    secured: frozenset[Path] = frozenset()
    is_store: bool = False


class StartFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of a start beside its cluster file.

    Attributes:
        file: The cluster file; None for the cluster without a file.
        replicas: Replicas of the cluster without a file; None if not given.
        secure: ``--secure``.
        insecure: ``--insecure``.
    """

    file: Path | None = None
    replicas: int | None = None
    secure: bool = False
    insecure: bool = False


class StartPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a start.

    Attributes:
        replicas: Replicas of the cluster without a file; None for a broker alone.
        settings: Overrides, as ``key=value``.
        notes: Lines for people about the decisions of the plan.
    """

    replicas: int | None = None
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plan_start(cluster: ClusterConfig, found: FoundCluster, flags: StartFlags) -> StartPlan:
    """Decides settings that flags leave open.

    Args:
        cluster: Cluster from settings and flags alone.
        found: Content of its data folder.
        flags: Flags of the start.

    Raises:
        ConfigError: The data folder is a store, or was secured and is to be opened by settings.
    """
    if found.is_store:
        raise ConfigError(
            f"{cluster.folder} is the store of a broker, and no data folder of a cluster: say the "
            f"folder that it is in (--data-dir {shlex.quote(str(cluster.folder.parent))})"
        )
    settings, security_note = _plan_security(cluster, found, flags)
    replicas, replicas_note = _plan_replicas(cluster, found, flags)
    notes = tuple(note for note in (security_note, replicas_note) if note)
    return StartPlan(replicas=replicas, settings=settings, notes=notes)


def check_stores(cluster: ClusterConfig, found: FoundCluster, flags: StartFlags) -> list[str]:
    """Checks that a planned start uses every store there is, each as the replica that it is.

    Args:
        cluster: Cluster that is to start.
        found: Content of its data folder.
        flags: Flags of the start.

    Returns:
        Lines for people: which broker gets replicas.

    Raises:
        ConfigError: Messages would be hidden, or a secured store would be open.
    """
    _check_secured(cluster, found)
    used = {Path(one.store_path_root_dir).resolve(): one for one in cluster.broker}
    by_path = {one.path.resolve(): one for one in found.stores}
    for path, store in by_path.items():
        if path not in used:
            raise ConfigError(_left_out(cluster, found, store, flags))
    for path, broker in used.items():
        if path in by_path:
            _check_start(cluster, found, flags, by_path[path], broker)
    return list(_growth_notes(used, by_path, found.last))


def _plan_security(
    cluster: ClusterConfig, found: FoundCluster, flags: StartFlags
) -> tuple[tuple[str, ...], str]:
    """Plans the settings of security, and a note."""
    folder, enable = cluster.folder, cluster.security.enable
    if flags.insecure:
        was_secured = found.has_keys or found.secured
        note = f"{folder} was secured, and everybody who reaches it may do everything now"
        return (), f"{note} (--insecure)" if was_secured else ""
    if not found.has_keys or flags.secure or enable or cluster.security.insecure:
        return (), ""
    if enable is False:
        raise ConfigError(
            f"{folder / SECURITY} has keys of this cluster, and security.enable = false would let "
            "everybody in without one: leave that out, or say --insecure"
        )
    note = f"security is on, since {folder / SECURITY} has the keys of this cluster"
    return SECURE, f"{note} (--insecure starts it without)"


def _plan_replicas(
    cluster: ClusterConfig, found: FoundCluster, flags: StartFlags
) -> tuple[int | None, str]:
    """Returns the replicas of the broker in the cluster without a file, and a note."""
    if flags.file is not None or flags.replicas is not None:
        return flags.replicas, ""
    (broker,) = cluster.broker
    root = Path(broker.store_path_root_dir)
    elected = {
        one.history.replica.replica_id
        for one in found.stores
        if one.history.replica is not None
        and one.path == replica_folder(root, one.history.replica.replica_id, HaMode.AUTO)
    }
    if not elected:
        return None, ""
    last = [
        one.total_replicas for one in found.last.brokers if one.broker_name == broker.broker_name
    ]
    count = max(*elected, *last, 1)
    return count, (
        f"{broker.broker_name} has {count} {_plural('replica', count)} in {cluster.folder}, and so "
        f"it is started (--replicas {count})"
    )


def _check_secured(cluster: ClusterConfig, found: FoundCluster) -> None:
    for folder, security in data_folders(cluster):
        if folder in found.secured and not security.enable and not security.insecure:
            keys = cluster.folder / SECURITY
            raise ConfigError(
                f"{folder} was used with security on, and this start has none for it"
                + ("" if found.has_keys else f", nor are there keys in {keys}: put them back")
                + "; or say --secure (what is missing of keys is made anew, and clients need it "
                "then), or --insecure, which lets everybody in"
            )


def _check_start(
    cluster: ClusterConfig,
    found: FoundCluster,
    flags: StartFlags,
    store: FoundStore,
    broker: BrokerConfig,
) -> None:
    try:
        store.history.check_start(store.path, broker)
    except ConfigError as error:
        if not found.last.brokers:
            raise
        command = _command(cluster, found, flags)
        raise ConfigError(f"{error}. It was started last by `{command}`") from None


def _left_out(
    cluster: ClusterConfig, found: FoundCluster, store: FoundStore, flags: StartFlags
) -> str:
    """Explains why a start that leaves a store out is refused, and names the remedy."""
    replica, path = store.history.replica, shlex.quote(str(store.path))
    command = _command(cluster, found, flags)
    roots = {one.broker_name: Path(one.store_path_root_dir) for one in cluster.broker[::-1]}
    if replica is not None:
        for name, root in roots.items():
            if store.path == replica_folder(root, replica.replica_id, HaMode.AUTO):
                return (
                    f"{store.path} is replica {replica.replica_id} of {name}, which this start "
                    f"leaves out, and the others may lack what it has: start all with `{command}`. "
                    f"To go on without it take it out then (`mqmesh ha remove {name} "
                    f"{replica.replica_id}`), stop, and move its folder away "
                    f"(`mv {path} ELSEWHERE`)"
                )
    return (
        f"{store.path} is a broker's store, which this start leaves out: nobody would see its "
        f"messages. Start it as before with `{command}`, or move its folder away (`mv {path} "
        "ELSEWHERE`)"
    )


def _command(cluster: ClusterConfig, found: FoundCluster, flags: StartFlags) -> str:
    """Returns the command of the last start, as far as it is known."""
    words = ["mqmesh", "up"]
    if found.last.file:
        words += ["-c", shlex.quote(found.last.file)]
    elif flags.file is not None and not found.last.brokers:
        words += ["-c", "FILE"]
    if cluster.data_dir != DEFAULT_DATA_DIR:
        words += ["--data-dir", shlex.quote(cluster.data_dir)]
    return " ".join(words)


def _growth_notes(
    used: dict[Path, BrokerConfig], stores: dict[Path, FoundStore], last: LastStart
) -> Iterable[str]:
    """Returns lines about brokers that have more replicas than before."""
    known = {(one.broker_name, one.broker_id) for one in last.brokers}
    groups: dict[str, list[tuple[BrokerConfig, FoundStore | None]]] = {}
    for path, one in used.items():
        if one.ha.mode is HaMode.AUTO:
            groups.setdefault(one.broker_name, []).append((one, stores.get(path)))
    for name, replicas in groups.items():
        joined = any(store is not None and store.history.has_joined for _, store in replicas)
        new = [
            one.broker_id
            for one, store in replicas
            if store is None and (name, one.broker_id) not in known
        ]
        has_first = any(one.broker_id == 1 and store is not None for one, store in replicas)
        if has_first and not joined:
            count = replicas[0][0].ha.total_replicas
            yield (
                f"{name} was one broker, and becomes a group of {count} "
                f"{_plural('replica', count)}: replica 1 has its messages, the others copy them"
            )
        for replica_id in new if joined else ():
            yield (
                f"replica {replica_id} of {name} is new; the group takes it in after `mqmesh ha "
                f"add {name} {replica_id}`"
            )


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
