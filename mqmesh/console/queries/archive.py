"""Snapshots of brokers on this machine."""

import asyncio
from pathlib import Path

import msgspec

from mqmesh.aio import BrokerAdmin
from mqmesh.console.page import TableArguments, TablePage, Visit, table_page
from mqmesh.errors import MQMeshError
from mqmesh.protocol.admin import ConfigEntry
from mqmesh.sdk.admin.admin import masters_of
from mqmesh.storage.tools.snapshot import Manifest, list_snapshots


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


class ArchiveView(msgspec.Struct, frozen=True):
    """Snapshots, and who can make them.

    Attributes:
        brokers: Broker groups.
        snapshots: One page of those on this machine.
    """

    brokers: list[str]
    snapshots: TablePage[SnapshotRow]


async def archive(visit: Visit, asked: TableArguments) -> ArchiveView:
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
    return ArchiveView(brokers, table_page(once, asked, searched, sort="-created_ms"))


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
