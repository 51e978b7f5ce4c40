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
from mqmesh.roles.supervisor.supervisor import Supervisor
from mqmesh.roles.supervisor.supervisor_metrics import read_metrics
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client.options import DEFAULT_NAMESRV, client_transport

from ..admin.broker import metrics_as_json
from ..credentials import use_credentials, use_credentials_of
from ..notes import tell_error, tell_note
from ..options import config_options, json_option
from ..render import LogStream, duration, print_json, print_table, say, state_text
from .found_cluster import find_cluster, save_last_start
from .layout import MONITOR, ClusterConfig, check_ports, load_cluster, role_specs, seats_of_replicas
from .secure import client_file, make_security
from .serve import open_client_transport
from .start_plan import INSECURE, SECURE, StartFlags, check_stores, plan_start

PING_TIMEOUT_MS: Final = 1_000
MAX_HEALTH_BYTES: Final = 10_000
PINGS_AT_ONCE: Final = 16
REGISTERED_TIMEOUT_MS: Final = 200
DOWN_TIMEOUT_MS: Final = 10_000
START_TIMEOUT_MS: Final = 60_000
"""Timeout for one process: a broker reads its store first."""


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
    secure: bool,
    insecure: bool,
    as_json: bool,
) -> int:
    """Start a cluster and keep it running until Ctrl-C.

    Without a file: two name servers at 127.0.0.1:9876 and :9877, one broker at
    127.0.0.1:10911, data in ./mqmesh-data. A process that dies is started again.

    What is in the data folder is used: replicas that are there are started without
    --replicas, and a cluster that was secured is secured without --secure.

    \b
    Examples:
      mqmesh up
      mqmesh up --replicas 3
      mqmesh up --metrics
      mqmesh up --secure
      mqmesh up -c conf/cluster.toml
      mqmesh up --data-dir /tmp/try --set broker.0.storage.flush_disk_type=SYNC_FLUSH
    """
    if secure and insecure:
        raise click.UsageError("--secure and --insecure are opposites; leave one out")
    settings = _with_data_dir(overrides, data_dir)
    if metrics:
        settings.append("exporter.enable=true")
    settings += [*SECURE] * secure + [*INSECURE] * insecure
    flags = StartFlags(file=config_path, replicas=replicas, secure=secure, insecure=insecure)
    config = load_cluster(config_path, settings, replicas=replicas)
    keep_private()
    if not config.folder.exists():
        # No cluster can be running there, and a port that is taken is to leave no folder behind.
        check_ports(config)
    lock = DataFolderLock(config.folder)
    make_private(config.folder / "logs")
    try:
        former = read_record(config.folder)
        if former is not None:
            end_orphans(former)
        config = _as_planned(config, settings, flags)
        check_ports(config)
        if config.security.enable:
            make_security(config)
            use_credentials(client_file(config.folder))
        specs = role_specs(config)
        save_last_start(config, config_path)
        notes = _death_notes(config)
        supervisor = Supervisor(
            specs,
            config.folder,
            namesrv=config.namesrv_addr,
            ready_note=f"name servers {config.namesrv_addr}; stop with Ctrl-C or `mqmesh down`",
            log_format=config.log_format,
            say=LogStream(as_json=as_json).say,
            is_complete=partial(_all_registered, config),
            on_death=lambda name, pid: None if notes is None else notes.tell(name, pid),
        )
        try:
            code = supervisor.run()
        finally:
            if notes is not None:
                notes.close()
    finally:
        lock.release()
    if supervisor.failure:
        tell_error(supervisor.failure)
    return code


@click.command()
@config_options
@_data_dir_option
@json_option
def status(
    config_path: Path | None, overrides: tuple[str, ...], data_dir: str | None, as_json: bool
) -> int:
    """Show the processes of a running cluster, asking each how it is.

    Exit code 1 when something is down, or nothing is running.

    \b
    Examples:
      mqmesh status
      mqmesh status --data-dir /var/lib/mqmesh --json
    """
    folder = load_cluster(config_path, _with_data_dir(overrides, data_dir)).folder
    pid = supervisor_pid(folder)
    record = read_record(folder) if pid else None
    rows: list[dict[str, Any]] = []
    if record is not None:
        use_credentials_of(folder, record.namesrv)
        with ThreadPoolExecutor(PINGS_AT_ONCE) as pool:
            rows = list(pool.map(partial(_look_at, record.namesrv), record.roles))
    now_ms = SystemClock().wall_ms()
    uptime_ms = max(now_ms - record.started_ms, 0) if record else 0
    if as_json:
        print_json(
            {
                "data_dir": str(folder),
                "running": bool(pid),
                "pid": pid,
                "namesrv": record.namesrv if record else "",
                "uptime_ms": uptime_ms,
                "roles": rows,
                "metrics": metrics_as_json(read_metrics(record, now_ms)) if record else {},
            }
        )
    elif not pid:
        tell_note(f"no cluster is running on {folder}; `mqmesh up` starts one")
    else:
        namesrv = record.namesrv if record else "unknown"
        say(f"cluster on {folder}: process {pid}, up {duration(uptime_ms)}, name servers {namesrv}")
        print_table(
            ("ROLE", "NAME", "PID", "STATE", "ENDPOINT", "UPTIME", "RESTARTS", "ENDED BY"),
            [
                (
                    row["role"],
                    row["name"],
                    str(row["pid"] or "-"),
                    state_text(row["state"]),
                    row["endpoint"],
                    duration(row["uptime_ms"]) if row["state"] == "running" else "-",
                    row["restarts"],
                    ", ".join(f"{count} x {why}" for why, count in row["exits"].items()) or "-",
                )
                for row in rows
            ],
            optional=("ENDPOINT", "PID", "UPTIME", "RESTARTS"),
        )
    all_well = bool(rows) and all(row["state"] == "running" for row in rows)
    return ExitCode.OK if all_well else ExitCode.FAILED


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
    as_json: bool,
) -> int:
    """Stop a running cluster, and wait until it has stopped.

    Nothing running is no error. After a crash of `mqmesh up` itself it clears up.

    With names, as `mqmesh status` tells them, only these processes stop, until
    `mqmesh restart`. A master hands its lead over first.

    \b
    Examples:
      mqmesh down
      mqmesh down broker-a-r2
    """
    folder = load_cluster(config_path, _with_data_dir(overrides, data_dir)).folder
    if names:
        return _tell_moved(put_down(folder, names, up=False, timeout_ms=DOWN_TIMEOUT_MS), as_json)
    record = read_record(folder)
    stopped = stop_supervisor(folder, DOWN_TIMEOUT_MS)
    orphans: list[str] = []
    if record is not None and not supervisor_pid(folder):
        orphans = end_orphans(record)
        remove_record(folder)
    if as_json:
        print_json({"data_dir": str(folder), "stopped": stopped, "orphans": orphans})
    elif stopped:
        say(f"the cluster on {folder} has stopped")
    elif orphans:
        say(f"`mqmesh up` was gone; stopped what it left: {', '.join(orphans)}")
    else:
        say(f"no cluster is running on {folder}")
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
    as_json: bool,
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
    return _tell_moved(moved, as_json)


def _tell_moved(entries: list[RoleEntry], as_json: bool) -> int:
    if as_json:
        print_json([{"name": one.name, "state": one.state, "pid": one.pid} for one in entries])
    else:
        for one in entries:
            say(f"{one.name} is {one.state}")
    return ExitCode.OK


def _as_planned(asked: ClusterConfig, settings: list[str], flags: StartFlags) -> ClusterConfig:
    """Returns the cluster as planned for its data folder; prints notes about the decisions."""
    found = find_cluster(asked)
    plan = plan_start(asked, found, flags)
    config = load_cluster(flags.file, [*settings, *plan.settings], replicas=plan.replicas)
    for note in (*plan.notes, *check_stores(config, found, flags)):
        tell_note(note)
    return config


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


def _look_at(namesrv: str, entry: RoleEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "role": entry.role,
        "name": entry.name,
        "pid": entry.pid,
        "state": "down" if entry.state == "running" else entry.state,
        "endpoint": entry.endpoint,
        "uptime_ms": 0,
        "restarts": entry.restarts,
        "exits": entry.exits,
    }
    if entry.role == MONITOR:
        return row | {"state": entry.state}  # nobody connects to it
    if not entry.pid or not entry.endpoint or entry.endpoint.endswith(":0"):
        return row
    try:
        info = _ping(namesrv, entry.endpoint, entry.server_key)
    except (MQMeshError, OSError, msgspec.MsgspecError):
        return row
    # Another process at the same place is not the one that we ask about.
    if info.pid == entry.pid:
        row.update(state=info.state, uptime_ms=info.uptime_ms)
    return row


def _ping(namesrv: str, endpoint: str, server_key: str) -> RoleInfo:
    """Asks a process for its role info; an exporter by HTTP, encrypted or not.

    Raises:
        MQMeshError, OSError, MsgspecError: No answer, or one that cannot be decoded.
    """
    if endpoint.startswith(("http://", "https://")):
        told = msgspec.json.decode(_health(urlsplit(endpoint)), type=dict[str, Any])
        return msgspec.convert([told.get(name) for name in RoleInfo.__struct_fields__], RoleInfo)
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
