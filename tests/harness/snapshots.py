"""Snapshots of stores that are turned by hand, for tests."""

from pathlib import Path

from harness.indexed_store import IndexedStore
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.tools.snapshot import Manifest
from mqmesh.storage.tools.snapshot_making import Pace, SnapshotOf, begin_snapshot, finish_snapshot


def take_snapshot(
    indexed: IndexedStore | CommitLogStore,
    directory: Path,
    root: Path,
    *,
    name: str = "broker-a.20260301T000000Z.0",
    broker_name: str = "broker-a",
    end_offset: int | None = None,
    keep: int = 0,
    archive: str = "",
    pace: Pace | None = None,
) -> tuple[Path, Manifest]:
    """Makes a snapshot as a broker does.

    Args:
        indexed: The store, with its index or without.
        directory: The store's.
        root: For snapshots.
        name: Name of the snapshot.
        broker_name: Name of the broker.
        end_offset: Commit-log offset where it ends; None for the end of the log.
        keep: Number of snapshots to keep, 0 for all.
        archive: Archive that it is for; empty for none.
        pace: Pace of the copying; None for no limit.
    """
    store = indexed if isinstance(indexed, CommitLogStore) else indexed.store
    new = begin_snapshot(directory, root, name, reserve_bytes=0)
    if isinstance(indexed, IndexedStore):
        indexed.index.copy_live(new / "index")
    stats = store.stats()
    facts = SnapshotOf(
        mqmesh_version="test",
        cluster_name="cluster",
        broker_name=broker_name,
        broker_id=0,
        store_id=stats.store_id,
        epoch=stats.epoch,
        end_offset=stats.max_commitlog_offset if end_offset is None else end_offset,
        created_ms=1,
        archive=archive,
    )
    return finish_snapshot(directory, new, facts, keep=keep, pace=pace or Pace())
