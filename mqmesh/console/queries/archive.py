"""Snapshots of brokers on this machine, and look-ups in the archive, without Java."""

import asyncio
import importlib
from pathlib import Path
from typing import Any, Final

import msgspec

from mqmesh.aio import BrokerAdmin
from mqmesh.console.page import TableArguments, TablePage, Text, Visit, table_page
from mqmesh.errors import ConfigError, MQMeshError, NoPermission
from mqmesh.protocol.admin import ConfigEntry
from mqmesh.protocol.commands import Right
from mqmesh.sdk.admin.admin import masters_of
from mqmesh.storage.tools.snapshot import Manifest, list_snapshots
from mqmesh.user_times import parse_time

SHOWN_BODY: Final = 200
MOST_FOUND: Final = 50


class SnapshotRow(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot.

    Attributes:
        name: Its directory's.
        broker_name: Broker group that it is of.
        created_ms: When it was made, ms since 1970; 0 for unknown.
        start_offset: Commit-log offset where its log begins.
        end_offset: Commit-log offset behind its last record.
        disk_bytes: Size of its files; those that the store has, too, take no room of their own.
        problem: Why it cannot be read; "" if it can.
    """

    name: str
    broker_name: str
    created_ms: int = 0
    start_offset: int = 0
    end_offset: int = 0
    disk_bytes: int = 0
    problem: str = ""


class SourceRow(msgspec.Struct, frozen=True):
    """A store of which the archive has messages.

    Attributes:
        broker: Name of the store in the archive.
        position: Commit-log offset to which its messages are there.
        keys_position: Commit-log offset to which their keys can be looked up.
        ingests: Steps that led there.
        missing_bytes: Bytes of log that are missing before some of them.
    """

    broker: str
    position: int
    keys_position: int
    ingests: int
    missing_bytes: int


class ArchiveView(msgspec.Struct, frozen=True):
    """Snapshots, and the stores in the archive.

    Attributes:
        brokers: Broker groups.
        snapshots: One page of those on this machine.
        sources: Stores of the archive.
        problem: Why the archive cannot be read; "" if it can, or there is none.
    """

    brokers: list[str]
    snapshots: TablePage[SnapshotRow]
    sources: list[SourceRow] = []
    problem: str = ""


class FindArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a look-up in the archive; one of them at least, or it finds nothing.

    Attributes:
        topic: Only of this topic.
        key: Only with this key.
        message_id: Only with this id.
        since: Stored then or later: an age such as 2d, or a moment.
        until: Stored then or before.
    """

    topic: Text = ""
    key: Text = ""
    message_id: Text = ""
    since: Text = ""
    until: Text = ""


class FoundRow(msgspec.Struct, frozen=True):
    """A message of the archive.

    Attributes:
        stored_ms: When it was stored, ms since 1970.
        topic: Its topic.
        place: Broker, queue and queue offset.
        message_id: Its id.
        body: The first 200 bytes as text.
    """

    stored_ms: int
    topic: str
    place: str
    message_id: str
    body: str


class FoundView(msgspec.Struct, frozen=True):
    """Messages of the archive, oldest place in the log first.

    Attributes:
        rows: The first 50 that the user may read.
        cut: Why some are missing; "" if none are.
    """

    rows: list[FoundRow]
    cut: str = ""


async def archive(visit: Visit, arguments: TableArguments) -> ArchiveView:
    """Return the snapshots of brokers whose directory is on this machine."""
    rows: list[SnapshotRow] = []
    async with visit.client(BrokerAdmin) as admin:
        brokers = sorted(masters_of((await admin.cluster()).brokers))
        for broker_name in brokers:
            for entries in (await admin.config(broker_name)).values():
                root = snapshot_root(entries)
                if visit.sees_all and root is not None and root.is_dir():
                    rows += await asyncio.to_thread(_rows_of, root, broker_name)
    once = {one.name: one for one in rows}.values()
    searched = ("name", "broker_name", "problem")
    table = table_page(once, arguments, searched, sort="-created_ms")
    if not visit.config.archive or not visit.sees_all:
        return ArchiveView(brokers, table)
    try:
        sources = await asyncio.to_thread(_sources, visit.config.archive)
    except MQMeshError as error:
        return ArchiveView(brokers, table, problem=str(error))
    return ArchiveView(brokers, table, sources)


def snapshot_root(entries: list[ConfigEntry]) -> Path | None:
    """Return the directory that gets a broker's snapshots; None if its settings do not say it."""
    known = {one.key: msgspec.json.decode(one.value) for one in entries}
    root, store = known.get("snapshot.root_dir"), known.get("store_path_root_dir")
    if root:
        return Path(root)
    return Path(store).absolute().parent / "snapshots" if store else None


def _rows_of(root: Path, broker_name: str) -> list[SnapshotRow]:
    try:
        found = list_snapshots(root)
    except MQMeshError as error:
        return [SnapshotRow(name=str(root), broker_name=broker_name, problem=str(error))]
    return [
        SnapshotRow(
            name=path.name,
            broker_name=one.broker_name,
            created_ms=one.created_ms,
            start_offset=one.start_offset,
            end_offset=one.end_offset,
            disk_bytes=one.disk_bytes,
        )
        if isinstance(one, Manifest)
        else SnapshotRow(name=path.name, broker_name="", problem=str(one))
        for path, one in found
    ]


def archive_module(name: str) -> Any:
    """Import a module of the archive.

    Raises:
        ConfigError: Its packages are not there.
    """
    try:
        return importlib.import_module(f"mqmesh.spark.{name}")
    except ImportError as error:
        if (error.name or "").startswith("mqmesh"):
            raise
        raise ConfigError(f"{error}: pip install 'mqmesh[archive]'") from error


def _sources(path: str) -> list[SourceRow]:
    with archive_module("failures").errors_of_libraries():
        return [
            SourceRow(
                one.broker,
                one.position,
                one.keys_position,
                len(one.ingests),
                sum(step.gap_before for step in one.gaps),
            )
            for one in archive_module("tables").sources(path)
        ]


async def find(visit: Visit, arguments: FindArguments) -> FoundView:
    """Return messages of the archive that the user may read."""
    if not visit.config.archive or visit.cluster:
        raise ConfigError("no archive is named: set archive in the console's settings")
    if not any(msgspec.structs.astuple(arguments)):
        return FoundView([])
    if arguments.topic and not visit.rights.may(Right.SUB, arguments.topic):
        raise NoPermission(f"your user may not read topic {arguments.topic!r}")
    now_ms = visit.clock.wall_ms()
    conditions = {
        "topic": arguments.topic,
        "key": arguments.key,
        "message_id": arguments.message_id,
        "from_ms": parse_time(arguments.since, now_ms, "since") if arguments.since else None,
        "to_ms": parse_time(arguments.until, now_ms, "until") if arguments.until else None,
    }
    found = await asyncio.to_thread(_find, visit.config.archive, conditions)
    rows = [one for one in found.rows if visit.rights.may(Right.SUB, one["topic"])]
    hidden = len(found.rows) - len(rows)
    notes = [f"{hidden} are in topics that your user may not read"] if hidden else []
    if found.more:
        notes.append(f"there are more than {MOST_FOUND}: narrow the time")
    return FoundView(
        [_found_row(one, shows_body=visit.config.allow_body_view) for one in rows],
        "; ".join(notes),
    )


def _find(path: str, conditions: dict[str, Any]) -> Any:
    with archive_module("failures").errors_of_libraries():
        return archive_module("find").find(path, most=MOST_FOUND, **conditions)


def _found_row(row: dict[str, Any], *, shows_body: bool) -> FoundRow:
    return FoundRow(
        int(row["store_timestamp"].timestamp() * 1_000),
        row["topic"],
        f"{row['broker']}/{row['queue_id']}@{row['queue_offset']}",
        row["message_id"],
        row["body"][:SHOWN_BODY].decode("utf-8", "replace") if shows_body else "",
    )
