"""Cluster files: the roles of a cluster, and the settings of each."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec

from mqmesh.config import check_utf8, dump_toml, load_config, parse_config
from mqmesh.console.config import ConsoleConfig
from mqmesh.errors import ConfigError
from mqmesh.hosts import WILDCARDS, bindable
from mqmesh.logs import LogFormat
from mqmesh.private_files import make_folder, make_private
from mqmesh.roles.broker.config import MASTER_ID, BrokerConfig
from mqmesh.roles.broker.ha_config import HaConfig, HaMode
from mqmesh.roles.coordinator.config import CoordinatorConfig
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.monitor_config import MonitorConfig
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.roles.supervisor.death_notes import ReplicaSeat
from mqmesh.roles.supervisor.supervisor import RoleSpec, python_argv
from mqmesh.security.config import SecurityConfig
from mqmesh.security.keys import load_credentials

from ..options import DEFAULT_DATA_DIR

MAX_ROLES: Final = 1_024
PORTS_PER_REPLICA: Final = 10
BROKER_STAGE: Final = 0
NAMESRV_STAGE: Final = 1
"""Brokers are stopped before the name servers that they take leave of."""

SECURITY: Final = "security"
"""Folder of keys, in the data folder."""
ACCESS_LIST: Final = "access_list.toml"
NAMESRV: Final = "namesrv"
RUN: Final = "run"
"""Folder of the settings of all roles, in the data folder."""
EXPORTER: Final = "exporter"
"""Users, whose keys are kept in files of their names; the monitor has those of the exporter."""
MONITOR: Final = "monitor"
CONSOLE: Final = "console"
CONSOLE_USERS: Final = "console-users.toml"
"""File of those who may log in at the console, beside the keys."""
GATEWAY: Final = "gateway"
GATEWAY_USERS: Final = "gateway-users.toml"
"""File of the users of RocketMQ's clients, beside the keys."""

DEFAULT_CLUSTER: Final = """
[[namesrv]]
listen_port = 9876
[[namesrv]]
listen_port = 9877
[[broker]]
listen_port = 10911
"""


def _default_replicas(count: int) -> str:
    """Returns the rest of the default cluster: an answered send is at all replicas in sync."""
    least = min(count, 2) if count > 2 else 1  # of two one alone has to do
    return f"""replicas = {count}
[ha]
mode = "auto"
ack_replicas = "all"
min_in_sync_replicas = {least}
total_replicas = {count}
"""


class ClusterSecurity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Security of the roles of a cluster.

    Attributes:
        enable: Security of each role. Keys, access list and ``client.toml`` for administrators are
            made in ``data_dir/security`` where they are missing. Without a value it is on if there
            are any.
        insecure: Each role may start without security although it was secured before.
    """

    enable: bool | None = None
    insecure: bool = False


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `mqmesh up`.

    Attributes:
        data_dir: Folder for everything that the cluster keeps: stores, logs, the run file.
            One running cluster each.
        log_format: ``text``, or ``json``: the log files of all processes hold an object a line.
        namesrv: Name servers, each with the settings of a name server. Where they do not say
            it, they are named ``namesrv-1``, ``namesrv-2``, … and keep their data in a
            folder of that name below ``data_dir``.
        filter_server: Filters in Python, with the settings of a filter server. Where they are
            enabled, each broker allows them, and gets a filter server named after it.
        schedule: Run a schedule service beside each broker; without one, delayed messages
            wait until there is one.
        coordinator: Keeps the records of broker groups that elect their master; run where there is
            one (``ha.mode`` ``auto``) that uses an embedded coordinator on this port.
        exporter: Metrics for Prometheus, where it is enabled; it reads them from the processes of
            this file.
        monitor: Alarms, where it is enabled; it watches the processes of this file, and keeps what
            it has seen below ``data_dir`` unless it says another ``state_file``.
        console: The web console, where it is enabled; it shows the cluster of this file.
        gateway: For RocketMQ's own clients, where it is enabled; it uses the name servers of this
            file, and keeps its ports below ``data_dir``. With security on, the file of its users is
            in ``data_dir/security`` unless its settings name another.
        broker: Brokers, each with the settings of a broker. Where they do not say it, they
            register with the name servers of this file, and keep their data in a folder of
            their name below ``data_dir``. One with ``replicas`` stands for so many processes.
        ha: Settings of replication for brokers that do not say them.
        security: Security of the roles; where it is enabled, each role has its keys below
            ``data_dir`` unless it says others.
    """

    data_dir: Annotated[str, msgspec.Meta(min_length=1)] = DEFAULT_DATA_DIR
    log_format: LogFormat = "text"
    namesrv: Annotated[list[NamesrvConfig], msgspec.Meta(max_length=MAX_ROLES)] = []
    filter_server: FiltersrvConfig = msgspec.field(default_factory=FiltersrvConfig)
    broker: Annotated[list[BrokerConfig], msgspec.Meta(max_length=MAX_ROLES)] = []
    schedule: bool = True
    coordinator: CoordinatorConfig = msgspec.field(default_factory=CoordinatorConfig)
    ha: HaConfig = msgspec.field(default_factory=HaConfig)
    exporter: ExporterConfig = msgspec.field(default_factory=ExporterConfig)
    monitor: MonitorConfig = msgspec.field(default_factory=MonitorConfig)
    console: ConsoleConfig = msgspec.field(default_factory=ConsoleConfig)
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)
    security: ClusterSecurity = ClusterSecurity()

    @property
    def folder(self) -> Path:
        """The data folder."""
        return Path(self.data_dir)

    @property
    def namesrv_addr(self) -> str:
        """The name servers as clients write them."""
        own = ";".join(map(_address_of, self.namesrv))
        return own or ";".join(self.broker[0].namesrv_addr)


def load_cluster(
    path: Path | None, overrides: Sequence[str] = (), *, replicas: int | None = None
) -> ClusterConfig:
    """Loads a cluster file; without one, the default cluster.

    Args:
        path: The file.
        overrides: Settings beside it, as ``key=value``.
        replicas: The default cluster's broker has so many, which elect their master.

    Raises:
        ConfigError: One line that says what to correct.
    """
    source = "default cluster" if path is None else str(path)
    if replicas is not None and path is not None:
        raise ConfigError(
            f"--replicas {replicas} is of the cluster without a file; in {path} say "
            'ha.mode = "auto", and replicas of a broker'
        )
    if path is None:
        text = DEFAULT_CLUSTER + (_default_replicas(replicas) if replicas is not None else "")
        config = parse_config(ClusterConfig, text, source, overrides, prepare=_share, fill=_fill)
    else:
        config = load_config(ClusterConfig, path, None, overrides, prepare=_share, fill=_fill)
    absolute = str(config.folder.absolute())  # the files of roles have it
    check_utf8(f"{source}: data_dir {absolute!r}", absolute)
    if not config.namesrv and not config.broker:
        raise ConfigError(
            f"{source}: neither [[namesrv]] nor [[broker]]; there is nothing to run: begin with a "
            "copy of conf/cluster.toml, or leave the file out and use --set"
        )
    names = [name for _, name, *_ in _roles(config)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{source}: two roles are named {twice!r}; give each its own name")
    return config


def key_file(folder: Path, user: str) -> Path:
    """Returns the path of the keys of a user that `mqmesh up --secure` makes.

    Args:
        folder: Data folder of the cluster.
        user: Name.
    """
    return folder / SECURITY / f"{quote(user, safe='')}.toml"


def role_specs(config: ClusterConfig) -> list[RoleSpec]:
    """Writes each role's settings into a file, and makes the command line that uses it.

    So a restart has the settings of the start, even if the cluster file was changed meanwhile.

    Raises:
        ConfigError: The data folder cannot be written, or a key file cannot be read.
    """
    folder = config.folder / RUN
    specs = [
        RoleSpec(
            role=role,
            name=name,
            argv=python_argv(
                *(role, "-c", str(_config_path(folder, name)), "--supervised"),
                *("--log-format", config.log_format),
            ),
            endpoint=endpoint,
            stop_stage=stage,
            server_key=_server_key(settings),
        )
        for role, name, endpoint, stage, settings in _roles(config)
    ]
    try:
        make_folder(folder)
        make_private(folder)
        for _, name, _, _, settings in _roles(config):
            _config_path(folder, name).write_text(dump_toml(settings), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from error
    return specs


def _server_key(settings: msgspec.Struct) -> str:
    security = getattr(settings, "security", None)
    if security is None or not security.enable:
        return ""
    return load_credentials(Path(security.key_file)).public_key


def seats_of_replicas(config: ClusterConfig) -> dict[str, ReplicaSeat]:
    """Returns the coordinators' seats of replicas that elect, by the names of their processes.

    Replicas of a coordinator that runs beside them are left out: it sees itself which are dead.
    """
    beside = f"embedded://{_where(config.coordinator)}" if _needs_coordinator(config) else ""
    return {
        _name_of(one): ReplicaSeat(
            one.ha.coordinator, one.cluster_name, one.broker_name, one.broker_id
        )
        for one in config.broker
        if one.ha.mode is HaMode.AUTO and one.ha.coordinator != beside
    }


def check_ports(config: ClusterConfig) -> None:
    """Finds a port that is taken before anything is started.

    Raises:
        ConfigError: Names the role and the setting.
    """
    seen: dict[tuple[str, int], str] = {}
    for name, key, host, port in _ports(config):
        if not port:
            continue
        other = seen.setdefault((host, port), name)
        if other != name:
            raise ConfigError(
                f"{name}: {host}:{port} is the address of {other}, too; change {key} of one of them"
            )
        problem = _bind_problem(host, port)
        if problem:
            raise ConfigError(f"{name}: cannot listen on {host}:{port}: {problem} (see {key})")


def _fill(data: dict[str, Any]) -> None:
    folder = Path(data.get("data_dir", DEFAULT_DATA_DIR)).absolute()
    namesrvs = data.setdefault("namesrv", [])
    for number, one in enumerate(namesrvs, start=1):
        one.setdefault("name", f"namesrv-{number}")
        one.setdefault("data_dir", str(folder / quote(one["name"], safe="")))
    addresses = [_address_of(msgspec.convert(one, NamesrvConfig)) for one in namesrvs]
    coordinator = data.setdefault("coordinator", {})
    coordinator.setdefault("data_dir", str(folder / "coordinator"))
    shared = data.get("ha", {})
    if shared.get("mode") == HaMode.AUTO.value:
        made = msgspec.convert(coordinator, CoordinatorConfig)
        shared = {"coordinator": f"embedded://{_where(made)}"} | shared
    for one in data.setdefault("broker", []):
        if shared:
            one["ha"] = shared | one.get("ha", {})
    data["broker"] = [replica for one in data["broker"] for replica in _replicas(one, folder)]
    for one in data["broker"]:
        name = one.setdefault("broker_name", BrokerConfig().broker_name)
        mode = HaMode(one.get("ha", {}).get("mode", HaMode.OFF))
        user = broker_user(name, one.get("broker_id", MASTER_ID), mode)
        keys = one.get("security", {})
        if keys.get("key_file") == str(key_file(folder, name)):  # by _share, not by the file
            one["security"] = keys | {"key_file": str(key_file(folder, user))}
        one.setdefault("store_path_root_dir", str(folder / quote(name, safe="")))
        if addresses:
            one.setdefault("namesrv_addr", addresses)
        if data.get("filter_server", {}).get("enable"):
            one.setdefault("filter_server_enable", True)


def _share(data: dict[str, Any]) -> None:
    """Gives each role the settings of all: those of replication, and the places of its keys.

    It runs before the checks, since rules of a role need these settings. Values of a wrong type are
    left to the checks.
    """
    brokers, namesrvs = (_tables(data.get(kind)) for kind in ("broker", "namesrv"))
    for one in brokers:
        shared, own = data.get("ha"), one.get("ha", {})
        # Without an id it may stand for several replicas, each of which is checked by itself.
        if "broker_id" in one and isinstance(shared, dict) and isinstance(own, dict):
            one["ha"] = shared | own
    security = data.get("security")
    if not isinstance(security, dict):
        return
    enable, insecure = (security.get(key) is True for key in ("enable", "insecure"))
    if not enable and not insecure:
        return
    folder = Path(str(data.get("data_dir", DEFAULT_DATA_DIR))).absolute()
    default = BrokerConfig().broker_name
    users = [(one, str(one.get("broker_name", default))) for one in brokers]
    users += [(one, NAMESRV) for one in _tables([*namesrvs, data.setdefault("coordinator", {})])]
    gateways = _tables([data.setdefault("gateway", {})])
    users += [(one, GATEWAY) for one in gateways]
    if enable:
        for one in gateways:
            one.setdefault("users_file", str(folder / SECURITY / GATEWAY_USERS))
    for role, user in users:
        if not isinstance(given := role.get("security", {}), dict):
            continue
        keys: dict[str, Any] = {
            "enable": True,
            "key_file": str(key_file(folder, user)),
            "access_list_file": str(folder / SECURITY / ACCESS_LIST),
        }
        role["security"] = (keys if enable else {"insecure": not given.get("enable")}) | given


def _tables(found: Any) -> list[dict[str, Any]]:
    """Returns the elements of a list that are tables; empty if the value is no list."""
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _replicas(broker: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Returns the tables of all replicas that a broker's table stands for."""
    count = broker.get("replicas", 1)
    ha = broker.get("ha", {})
    mode = ha.get("mode", HaMode.OFF.value)
    if count == 1 and (mode != HaMode.AUTO.value or "broker_id" in broker):
        return [broker]
    if mode == HaMode.OFF.value or broker.get("broker_id", MASTER_ID) != MASTER_ID:
        raise ConfigError(
            f'replicas = {count} needs ha.mode = "manual" or "auto", and is said of the master '
            "(broker_id 0)"
        )
    first = 0
    if mode == HaMode.AUTO.value:
        first, ha = 1, {"total_replicas": count} | ha
    plain = {key: value for key, value in broker.items() if key not in ("replicas", "ha")}
    master = msgspec.convert(plain, BrokerConfig)
    host = master.advertised_host or bindable(master.listen_host)
    root = broker.get("store_path_root_dir", folder / quote(master.broker_name, safe=""))
    tables = []
    for number in range(count):
        table = broker | {
            "replicas": 1,
            "broker_id": first + number,
            "listen_port": master.listen_port + number * PORTS_PER_REPLICA,
            "store_path_root_dir": str(replica_folder(Path(root), first + number, HaMode(mode))),
            "ha": ha,
        }
        if first + number != MASTER_ID and mode != HaMode.AUTO.value:
            table["ha"] = ha | {"master_addr": f"{host}:{master.listen_port}"}
        tables.append(table)
    return tables


def replica_folder(root: Path, broker_id: int, mode: HaMode) -> Path:
    """Returns the store folder of a replica; the first one has that of a broker without replicas.

    Args:
        root: Store folder of a broker without replicas.
        broker_id: Id of the replica.
        mode: HA mode of the group.
    """
    return root if _is_first(broker_id, mode) else root.with_name(f"{root.name}-r{broker_id}")


def data_folders(config: ClusterConfig) -> Iterator[tuple[Path, SecurityConfig]]:
    """Yields folders in which roles keep lasting data, and whether they are secured.

    Yields:
        The folder, absolute, and the settings of the role.
    """
    for _, _, _, _, settings in _roles(config):
        if isinstance(settings, BrokerConfig | ScheduleConfig | GatewayConfig):
            yield Path(settings.store_path_root_dir).absolute(), settings.security
        elif isinstance(settings, NamesrvConfig | CoordinatorConfig) and settings.data_dir:
            yield Path(settings.data_dir).absolute(), settings.security


def broker_user(broker_name: str, broker_id: int, mode: HaMode) -> str:
    """Returns a broker's user: in a group that elects its master, one for each replica.

    Args:
        broker_name: Broker group.
        broker_id: Id of the replica.
        mode: HA mode of the group.
    """
    return broker_name if mode is not HaMode.AUTO else f"{broker_name}-r{broker_id}"


def _name_of(broker: BrokerConfig) -> str:
    """Returns the name of a broker's process."""
    is_master = broker.broker_id == MASTER_ID
    return broker.broker_name if is_master else f"{broker.broker_name}-r{broker.broker_id}"


def _roles(config: ClusterConfig) -> Iterator[tuple[str, str, str, int, msgspec.Struct]]:
    """Yields role, name, expected endpoint, stop stage and settings of each process."""
    if _needs_coordinator(config):
        endpoint = f"tcp://{_where(config.coordinator)}"
        yield "coordinator", config.coordinator.name, endpoint, NAMESRV_STAGE, config.coordinator
    for namesrv in config.namesrv:
        endpoint = f"tcp://{bindable(namesrv.listen_host)}:{namesrv.listen_port}"
        yield "namesrv", namesrv.name, endpoint, NAMESRV_STAGE, namesrv
    for broker in config.broker:
        endpoint = f"tcp://{bindable(broker.listen_host)}:{broker.listen_port}"
        yield "broker", _name_of(broker), endpoint, BROKER_STAGE, broker
        if config.schedule and _is_first(broker.broker_id, broker.ha.mode):
            service = _schedule_of(config, broker)
            yield "schedule", service.name, "", BROKER_STAGE, service
    if config.exporter.enable:
        yield "exporter", config.exporter.name, "", NAMESRV_STAGE, _exporter_of(config)
    if config.monitor.enable:
        # It ends with the brokers: a process that is stopped on purpose is no alarm.
        yield "monitor", MONITOR, "", BROKER_STAGE, _monitor_of(config)
    if config.console.enable:
        yield "console", config.console.name, "", NAMESRV_STAGE, console_of(config)
    if config.gateway.enable:
        for own in _gateways_of(config):
            yield "gateway", own.instance, "", BROKER_STAGE, own
    for filtersrv in _filter_servers(config):
        yield "filtersrv", filtersrv.name, "", BROKER_STAGE, filtersrv


def _is_first(broker_id: int, mode: HaMode) -> bool:
    """Returns True for the first broker of its group, in a file that has the whole group."""
    return broker_id == (1 if mode is HaMode.AUTO else MASTER_ID)


def _where(coordinator: CoordinatorConfig) -> str:
    return f"{bindable(coordinator.listen_host)}:{coordinator.listen_port}"


def _needs_coordinator(config: ClusterConfig) -> bool:
    url = f"embedded://{_where(config.coordinator)}"
    return any(one.ha.mode is HaMode.AUTO and one.ha.coordinator == url for one in config.broker)


def _filter_servers(config: ClusterConfig) -> Iterator[FiltersrvConfig]:
    """Yields a filter server for each broker that allows it, followers too; at free ports."""
    if not config.filter_server.enable:
        return
    for broker in config.broker:
        if broker.filter_server_enable:
            host = "127.0.0.1" if broker.listen_host in WILDCARDS else bindable(broker.listen_host)
            yield msgspec.structs.replace(
                config.filter_server,
                name=f"filtersrv-{_name_of(broker)}",
                broker_name=broker.broker_name,
                broker_addr=f"{host}:{broker.listen_port}",
                listen_port=0,
                security=broker.security,
            )


def _schedule_of(config: ClusterConfig, broker: BrokerConfig) -> ScheduleConfig:
    name = ScheduleConfig(broker_name=broker.broker_name).name
    return ScheduleConfig(
        broker_name=broker.broker_name,
        namesrv_addr=broker.namesrv_addr,
        store_path_root_dir=str(config.folder.absolute() / quote(name, safe="")),
        use_ipc=broker.enable_ipc,
        security=broker.security,
    )


def _exporter_of(config: ClusterConfig) -> ExporterConfig:
    return msgspec.structs.replace(config.exporter, **_watching(config, config.exporter))


def _monitor_of(config: ClusterConfig) -> MonitorConfig:
    state_file = config.monitor.state_file or str(config.folder.absolute() / "monitor.json")
    watching = _watching(config, config.monitor)
    return msgspec.structs.replace(config.monitor, state_file=state_file, **watching)


def _gateways_of(config: ClusterConfig) -> Iterator[GatewayConfig]:
    """Yields the settings of each worker of the gateway."""
    for worker in range(1, config.gateway.workers + 1):
        yield msgspec.structs.replace(
            config.gateway,
            worker=worker,
            namesrv_addr=config.namesrv_addr.split(";"),
            store_path_root_dir=str(config.folder.absolute() / quote(config.gateway.name, safe="")),
        )


def console_of(config: ClusterConfig) -> ConsoleConfig:
    """Returns the settings of the console; with security on, its users have to log in."""
    own = config.console
    users_file = own.users_file
    if config.security.enable and not users_file:
        users_file = str(config.folder.absolute() / SECURITY / CONSOLE_USERS)
    watching = _watching(config, own, CONSOLE)
    return msgspec.structs.replace(own, users_file=users_file, **watching)


def _watching(
    config: ClusterConfig, own: ExporterConfig | MonitorConfig | ConsoleConfig, user: str = EXPORTER
) -> dict[str, Any]:
    """Asks all processes of this file."""
    folder, credentials = config.folder.absolute(), own.credentials
    if config.security.enable and not credentials:
        credentials = str(key_file(folder, user))
    return {
        "namesrv_addr": config.namesrv_addr.split(";"),
        "data_dir": str(folder),
        "credentials": credentials,
    }


def _ports(config: ClusterConfig) -> Iterator[tuple[str, str, str, int]]:
    """Yields name, key, host and port of everything that listens."""
    for namesrv in config.namesrv:
        yield namesrv.name, "listen_port", namesrv.listen_host, namesrv.listen_port
        yield namesrv.name, "publish_port", namesrv.listen_host, namesrv.publish_port
    if _needs_coordinator(config):
        one = config.coordinator
        yield one.name, "listen_port", one.listen_host, one.listen_port
    for page in (config.exporter, config.console):
        if page.enable:
            yield page.name, "listen_port", page.listen_host, page.listen_port
    if config.gateway.enable:
        own = config.gateway
        yield own.name, "namesrv_port", own.listen_host, own.namesrv_port
        if own.grpc_port:
            yield own.name, "grpc_port", own.listen_host, own.grpc_port
    for broker in config.broker:
        yield _name_of(broker), "listen_port", broker.listen_host, broker.listen_port


def _address_of(namesrv: NamesrvConfig) -> str:
    return f"{namesrv.advertised_host or bindable(namesrv.listen_host)}:{namesrv.listen_port}"


def _config_path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe='')}.toml"


def _bind_problem(host: str, port: int) -> str:
    """Returns the bind error of a port; "" if it can be bound, or if that cannot be known here."""
    host = {"*": "0.0.0.0"}.get(host, bindable(host)).strip("[]")
    with suppress(socket.gaierror):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As ZeroMQ does it; without, the remains of old connections would be in the way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                return error.strerror or str(error)
    return ""
