"""`mqmesh up`, `mqmesh status`, `mqmesh down`: a whole cluster on this machine."""

import ssl
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import click
import msgspec

from mqmesh.clock import SystemClock
from mqmesh.config import text_override
from mqmesh.errors import MQMeshError
from mqmesh.private_files import keep_private, make_private
from mqmesh.protocol.admin import RoleInfo
from mqmesh.roles.broker.config import MASTER_ID
from mqmesh.roles.broker.ha_config import HaMode
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.process import ExitCode
from mqmesh.roles.supervisor.death_notes import DeathNotes
from mqmesh.roles.supervisor.run_file import (
    DataFolderLock,
    RoleEntry,
    end_orphans,
    put_down,
    read_record,
    remove_record,
    stop_supervisor,
    supervisor_pid,
)
from mqmesh.roles.supervisor.supervisor import RoleSpec, Supervisor
from mqmesh.roles.supervisor.supervisor_metrics import read_metrics
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.views.clusters import LocalClusterView, SupervisedProcessView, metric_views
from mqmesh.sdk.admin.views.fields import view_of
from mqmesh.sdk.client.options import DEFAULT_NAMESRV, client_transport

from ..credentials import use_credentials, use_credentials_of
from ..notes import answers_json, print_error, print_note
from ..options import config_options, json_option
from ..render import (
    Column,
    LogStream,
    Table,
    duration,
    print_answer,
    say,
    state_text,
)
from .console import check_extra
from .found_cluster import find_cluster, save_last_start
from .layout import (
    GATEWAY_USERS,
    MONITOR,
    ClusterConfig,
    check_ports,
    console_of,
    load_cluster,
    role_specs,
    seats_of_replicas,
)
from .secure import ADMIN, client_file, make_console_user, make_gateway_user, make_security
from .serve import open_client_transport
from .start_plan import INSECURE, SECURE, StartFlags, check_stores, plan_start

PING_TIMEOUT_MS: Final = 1_000
MAX_HEALTH_BYTES: Final = 10_000
PINGS_AT_ONCE: Final = 16
REGISTERED_TIMEOUT_MS: Final = 200
DOWN_TIMEOUT_MS: Final = 10_000
START_TIMEOUT_MS: Final = 60_000
"""Timeout for one process: a broker reads its store first."""

_PROCESS: Final = (
    Column("role", "ROLE"),
    Column("name", "NAME"),
    Column("pid", "PID", lambda pid: str(pid or "-"), rank=2),
    Column("state", "STATE", state_text),
)
_LIFE: Final = (
    Column(
        "",
        "UPTIME",
        value=lambda one: duration(one.uptime_ms) if one.state == "running" else "-",
        rank=4,
    ),
    Column("restarts", "RESTARTS", rank=3),
    Column(
        "exits",
        "ENDED BY",
        lambda exits: ", ".join(f"{count} x {why}" for why, count in exits.items()) or "-",
    ),
)


def _not_empty(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise click.BadParameter("it is empty")  # as of a shell variable that is not set
    return value


_data_dir_option = click.option(
    "--data-dir",
    type=click.Path(),
    callback=_not_empty,
    help="Data folder of the cluster. [default: what the configuration says, or ./mqmesh-data]",
)


@click.command()
@config_options
@_data_dir_option
@click.option(
    "--replicas",
    type=click.IntRange(1, 16),
    help="Without a file: so many replicas of the broker, which elect their master.",
)
@click.option("--metrics", is_flag=True, help="Run an exporter for Prometheus, too.")
@click.option("--console", is_flag=True, help="Run the web console, too.")
@click.option("--gateway", is_flag=True, help="Let RocketMQ's own clients in by a gateway, too.")
@click.option(
    "--secure",
    is_flag=True,
    help="Encrypt, and let nobody in without a key; makes missing keys and access list.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Let everybody in, though the data folder has keys of a cluster that was secured.",
)
@json_option
def up(
    config_path: Path | None,
    overrides: tuple[str, ...],
    data_dir: str | None,
    replicas: int | None,
    metrics: bool,
    console: bool,
    gateway: bool,
    secure: bool,
    insecure: bool,
) -> int:
    """Start a cluster and keep it running until Ctrl-C.

    Without a file: two name servers at 127.0.0.1:9876 and :9877, one broker at
    127.0.0.1:10911, data in ./mqmesh-data. A process that dies is started again.

    A later start uses the cluster in the data folder: replicas that are there are started
    without --replicas, and a cluster that was secured is secured without --secure.

    \b
    Examples:
      mqmesh up
      mqmesh up --replicas 3
      mqmesh up --metrics
      mqmesh up --console
      mqmesh up --gateway
      mqmesh up --secure
      mqmesh up -c conf/cluster.toml
      mqmesh up --data-dir /tmp/try --set broker.0.storage.flush_disk_type=SYNC_FLUSH
    """
    if secure and insecure:
        raise click.UsageError("--secure and --insecure are opposites; leave one out")
    settings = _with_data_dir(overrides, data_dir)
    settings += ["exporter.enable=true"] * metrics + ["console.enable=true"] * console
    settings += ["gateway.enable=true"] * gateway
    settings += [*SECURE] * secure + [*INSECURE] * insecure
    flags = StartFlags(file=config_path, replicas=replicas, secure=secure, insecure=insecure)
    config = load_cluster(config_path, settings, replicas=replicas)
    keep_private()
    if not config.folder.exists():
        # No cluster can be running there, and a port that is taken is to leave no folder behind.
        check_ports(config)
    lock = DataFolderLock(config.folder)
    try:
        config = _prepare(config, settings, flags)
        specs = role_specs(config)
        save_last_start(config, config_path)
        return _supervise(config, specs)
    finally:
        lock.release()


def _prepare(requested: ClusterConfig, settings: list[str], flags: StartFlags) -> ClusterConfig:
    """Makes a data folder ready for its cluster.

    Args:
        requested: Cluster from settings and flags alone; the caller has the lock of its folder.
        settings: Overrides, as ``key=value``.
        flags: Flags of the start.

    Returns:
        The cluster as it is planned for the contents of the folder.
    """
    make_private(requested.folder / "logs")
    former = read_record(requested.folder)
    if former is not None:
        end_orphans(former)
    found = find_cluster(requested)
    plan = plan_start(requested, found, flags)
    config = load_cluster(flags.file, [*settings, *plan.settings], replicas=plan.replicas)
    notes = [*plan.notes, *check_stores(config, found, flags)]
    check_ports(config)
    for note in notes:
        print_note(note)
    if config.console.enable:
        check_extra()
    if config.security.enable:
        make_security(config)
        use_credentials(client_file(config.folder))
        make_gateway_user(config)
        if password := make_console_user(config):
            print_note(f"console: log in as {ADMIN}, password {password} (shown only once)")
    return config


def _supervise(config: ClusterConfig, specs: list[RoleSpec]) -> int:
    """Runs the processes of a cluster until it is stopped, and returns the exit code."""
    notes = _death_notes(config)
    supervisor = Supervisor(
        specs,
        config.folder,
        namesrv=config.namesrv_addr,
        ready_note=_ready_note(config),
        log_format=config.log_format,
        say=LogStream(as_json=answers_json()).say,
        is_complete=partial(_all_registered, config),
        on_death=lambda name, pid: None if notes is None else notes.report(name, pid),
    )
    try:
        code = supervisor.run()
    finally:
        if notes is not None:
            notes.close()
    if supervisor.failure:
        print_error(supervisor.failure)
    return code


@click.command()
@config_options
@_data_dir_option
@json_option
def status(config_path: Path | None, overrides: tuple[str, ...], data_dir: str | None) -> int:
    """Show the processes of a running cluster, asking each how it is.

    Exit code 1 when something is down, or nothing is running.

    \b
    Examples:
      mqmesh status
      mqmesh status --data-dir /var/lib/mqmesh --json
    """
    folder = load_cluster(config_path, _with_data_dir(overrides, data_dir)).folder
    view = _local_cluster(folder)
    if print_answer(view):
        _print_cluster(view)
    all_well = bool(view.roles) and all(one.state == "running" for one in view.roles)
    return ExitCode.OK if all_well else ExitCode.FAILED


def _print_cluster(view: LocalClusterView) -> None:
    if not view.running:
        print_note(f"no cluster is running on {view.data_dir}; `mqmesh up` starts one")
        return
    say(
        f"cluster on {view.data_dir}: process {view.pid}, up {duration(view.uptime_ms)}, "
        f"name servers {view.namesrv or 'unknown'}"
    )
    # Paths of local sockets begin with the folder, which was just said.
    sockets = f"ipc://{Path(view.data_dir).absolute()}/"
    endpoint = Column("endpoint", "ENDPOINT", lambda one: one.replace(sockets, "ipc://"), rank=1)
    Table((*_PROCESS, endpoint, *_LIFE), view.roles).print()


def _local_cluster(folder: Path) -> LocalClusterView:
    """Looks how the cluster in a data folder is, asking each of its processes."""
    pid = supervisor_pid(folder)
    record = read_record(folder) if pid else None
    nothing = LocalClusterView(data_dir=str(folder), running=bool(pid), pid=pid)
    if record is None:
        return nothing
    use_credentials_of(folder, record.namesrv)
    with ThreadPoolExecutor(PINGS_AT_ONCE) as pool:
        roles = list(pool.map(partial(_look_at, record.namesrv), record.roles))
    now_ms = SystemClock().wall_ms()
    return msgspec.structs.replace(
        nothing,
        namesrv=record.namesrv,
        uptime_ms=max(now_ms - record.started_ms, 0),
        roles=roles,
        metrics=metric_views(read_metrics(record, now_ms)),
    )


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@config_options
@_data_dir_option
@json_option
def down(
    names: tuple[str, ...],
    config_path: Path | None,
    overrides: tuple[str, ...],
    data_dir: str | None,
) -> int:
    """Stop a running cluster, and wait until it has stopped.

    Nothing running is no error. After a crash of `mqmesh up` itself it clears up.

    With names, as `mqmesh status` shows them, only these processes stop, until
    `mqmesh restart`. A master hands its lead over first.

    \b
    Examples:
      mqmesh down
      mqmesh down broker-a-r2
    """
    folder = load_cluster(config_path, _with_data_dir(overrides, data_dir)).folder
    if names:
        return _print_moved(put_down(folder, names, up=False, timeout_ms=DOWN_TIMEOUT_MS))
    record = read_record(folder)
    stopped = stop_supervisor(folder, DOWN_TIMEOUT_MS)
    orphans: list[str] = []
    if record is not None and not supervisor_pid(folder):
        orphans = end_orphans(record)
        remove_record(folder)
    line = f"no cluster is running on {folder}"
    if stopped:
        line = f"the cluster on {folder} has stopped"
    elif orphans:
        line = f"`mqmesh up` was gone; stopped what it left: {', '.join(orphans)}"
    print_answer({"data_dir": str(folder), "stopped": stopped, "orphans": orphans}, line)
    return ExitCode.OK


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@config_options
@_data_dir_option
@json_option
def restart(
    names: tuple[str, ...],
    config_path: Path | None,
    overrides: tuple[str, ...],
    data_dir: str | None,
) -> int:
    """Stop processes of a running cluster one after the other, and start each again.

    Names are those of `mqmesh status`. A master hands its lead over first.

    \b
    Examples:
      mqmesh restart broker-a-r2
    """
    folder = load_cluster(config_path, _with_data_dir(overrides, data_dir)).folder
    moved = []
    for name in names:
        put_down(folder, [name], up=False, timeout_ms=DOWN_TIMEOUT_MS)
        moved += put_down(folder, [name], up=True, timeout_ms=START_TIMEOUT_MS)
    return _print_moved(moved)


def _print_moved(entries: list[RoleEntry]) -> int:
    print_answer(
        [{"name": one.name, "state": one.state, "pid": one.pid} for one in entries],
        *(f"{one.name} is {one.state}" for one in entries),
    )
    return ExitCode.OK


def _ready_note(config: ClusterConfig) -> str:
    console = f"; console: {console_of(config).address()}" if config.console.enable else ""
    gateway = _gateway_note(config.gateway) if config.gateway.enable else ""
    where = f"name servers {config.namesrv_addr}{console}{gateway}"
    return f"{where}; stop with Ctrl-C or `mqmesh down`"


def _gateway_note(own: GatewayConfig) -> str:
    note = f"; for RocketMQ: {own.client_host}:{own.namesrv_port}"
    if own.grpc_port:
        note += f", by gRPC: {own.client_host}:{own.grpc_port}"
    if own.users_file:
        note += f"; its clients sign with the access_key and secret_key of {own.users_file}"
    if Path(own.users_file).name == GATEWAY_USERS:
        note += f", whose first user, {ADMIN}, acts as the administrator"
    return note


def _death_notes(config: ClusterConfig) -> DeathNotes | None:
    """Makes the notifier of dead replicas for external coordinators; None if none is used."""
    members = seats_of_replicas(config)
    first = next((one for one in config.broker if one.ha.mode is HaMode.AUTO), None)
    if not members or first is None:
        return None
    transport = open_client_transport(first)
    return DeathNotes(members, transport, transport.loop)


def _with_data_dir(overrides: tuple[str, ...], data_dir: str | None) -> list[str]:
    return [*overrides, *([text_override("data_dir", data_dir)] if data_dir is not None else [])]


def _all_registered(config: ClusterConfig) -> bool:
    """Returns True if every name server knows every broker, and the master of each group."""
    wanted = Counter(broker.broker_name for broker in config.broker)
    for address in config.namesrv_addr.split(";") if config.namesrv else ():
        try:
            with AdminClient(address, timeout_ms=REGISTERED_TIMEOUT_MS) as admin:
                known = admin.cluster().brokers
                led = [one for one in known if MASTER_ID in one.addresses]
                if not wanted <= Counter({one.broker_name: len(one.addresses) for one in led}):
                    return False
        except MQMeshError:
            return False
    return True


def _look_at(namesrv: str, entry: RoleEntry) -> SupervisedProcessView:
    view = view_of(SupervisedProcessView, entry, uptime_ms=0)
    if entry.role == MONITOR:
        return view  # no client connects to it
    if entry.state == "running":
        view = msgspec.structs.replace(view, state="down")
    if not entry.pid or not entry.endpoint or entry.endpoint.endswith(":0"):
        return view
    try:
        info = _ping(namesrv, entry.endpoint, entry.server_key)
    except (MQMeshError, OSError, msgspec.MsgspecError):
        return view
    # Another process at the same place is not the one that we ask about.
    if info.pid != entry.pid:
        return view
    return msgspec.structs.replace(view, state=info.state, uptime_ms=info.uptime_ms)


def _ping(namesrv: str, endpoint: str, server_key: str) -> RoleInfo:
    """Asks a process for its role info; an exporter by HTTP, encrypted or not.

    Raises:
        MQMeshError, OSError, MsgspecError: No answer, or one that cannot be decoded.
    """
    if endpoint.startswith(("http://", "https://")):
        health = msgspec.json.decode(_health(urlsplit(endpoint)), type=dict[str, Any])
        return msgspec.convert([health.get(name) for name in RoleInfo.__struct_fields__], RoleInfo)
    keys = {endpoint: server_key} if server_key else {}
    with AdminClient(
        namesrv or DEFAULT_NAMESRV,
        timeout_ms=PING_TIMEOUT_MS,
        transport=client_transport(None, server_keys=keys),
    ) as admin:
        return admin.ping(endpoint)


def _health(page: SplitResult) -> bytes:
    """Reads the health page of an exporter on this machine, with status 200 or not.

    Raises:
        OSError: The exporter does not answer.
    """
    host, port, timeout_s = page.hostname or "", page.port, PING_TIMEOUT_MS / 1_000
    connection = HTTPConnection(host, port, timeout=timeout_s)
    if page.scheme == "https":
        # Which process it is shows by its number; its certificate may be for another name.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = HTTPSConnection(host, port, timeout=timeout_s, context=context)
    with closing(connection):
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().read(MAX_HEALTH_BYTES)
        except HTTPException as error:
            raise OSError(f"no answer by HTTP: {error}") from error
