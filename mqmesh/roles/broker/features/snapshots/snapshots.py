"""Snapshots: begun by a request, answered when they are on disk."""

import logging
from functools import partial
from pathlib import Path

from mqmesh.errors import MQMeshError, UnsupportedCommand
from mqmesh.protocol.command import Request, reply_with
from mqmesh.protocol.snapshots import CreateSnapshotRequest, SnapshotInfo
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.snapshots.snapshot_desk import (
    SnapshotJob,
    SnapshotStep,
    snapshot_name,
)
from mqmesh.storage.interface import MessageStore
from mqmesh.storage.tools.snapshot import Manifest
from mqmesh.storage.tools.snapshot_making import (
    Pace,
    SnapshotOf,
    abandon_snapshot,
    begin_snapshot,
    finish_snapshot,
)
from mqmesh.version import VERSION

_log = logging.getLogger(__name__)


def create_snapshot(context: BrokerContext, request: Request, asked: CreateSnapshotRequest) -> None:
    """Begins a snapshot; the answer comes when it is whole."""
    desk, config = context.snapshots, context.config
    if desk.run_aside is None or desk.store_root is None or config.storage.backend != "commitlog":
        raise UnsupportedCommand(
            f"snapshots are made of stores of the backend 'commitlog', this one is "
            f"{config.storage.backend!r} (storage.backend)"
        )
    job = desk.begin(request.without_frame(), context.clock.monotonic_ms())
    position = context.store.stats().max_commitlog_offset
    begin = partial(
        begin_snapshot,
        desk.store_root,
        config.snapshot.root(desk.store_root),
        snapshot_name(config.broker_name, context.clock.wall_ms(), position),
        reserve_bytes=config.storage.disk_reserve_bytes,
    )
    desk.run_aside(begin, partial(_on_begun, context, job))


def _on_begun(
    context: BrokerContext, job: SnapshotJob, new: Path | None, error: MQMeshError | None
) -> None:
    if error is not None or new is None:
        _fail(context, job, error)
        return
    job.new, job.step = new, SnapshotStep.INDEX
    if context.index is None:
        _on_index(context, None)
    else:
        context.index.copy(str(new / "index"), partial(_on_index, context))


def _on_index(context: BrokerContext, error: MQMeshError | None) -> None:
    if error is not None:
        # Whoever looks something up reads the log there instead.
        _log.warning("the snapshot goes without the newest part of the index: %s", error)
    end = context.store.stats().max_commitlog_offset
    context.snapshots.wait_for_log(end, context.clock.monotonic_ms())
    tick_snapshot(context, context.clock.monotonic_ms())


def tick_snapshot(context: BrokerContext, now_ms: int) -> None:
    """Goes on with a snapshot once the log is durable; to be called about ten times a second."""
    desk = context.snapshots
    if desk.job is None:
        return
    end_offset = desk.ready_offset(context.store.durable_offset(), now_ms)
    if end_offset is None:
        return
    job, config, stats = desk.job, context.config, context.store.stats()
    assert job.new is not None and desk.run_aside is not None and desk.store_root is not None
    facts = SnapshotOf(
        mqmesh_version=VERSION,
        cluster_name=config.cluster_name,
        broker_name=config.broker_name,
        broker_id=config.broker_id,
        store_id=stats.store_id,
        epoch=stats.epoch,
        end_offset=end_offset,
        created_ms=context.clock.wall_ms(),
    )
    job.messages = _message_count(context.store)
    finish = partial(
        finish_snapshot,
        desk.store_root,
        job.new,
        facts,
        keep=config.snapshot.keep,
        pace=Pace(config.snapshot.copy_bytes_per_s, desk.is_given_up),
    )
    desk.run_aside(finish, partial(_on_finished, context, job))


def _message_count(store: MessageStore) -> int:
    """Messages in all queues, those of system topics too."""
    bounds = (
        store.queue_bounds(topic, queue_id)
        for topic in store.topics()
        for queue_id in store.queues(topic)
    )
    return sum(end - first for first, end in bounds)


def _on_finished(
    context: BrokerContext,
    job: SnapshotJob,
    outcome: tuple[Path, Manifest] | None,
    error: MQMeshError | None,
) -> None:
    if error is not None or outcome is None:
        _fail(context, job, error)
        return
    path, manifest = outcome
    context.snapshots.end(made=True)
    took_ms = context.clock.monotonic_ms() - job.began_ms
    _log.info("snapshot %s: log to %d, %d ms", path, manifest.end_offset, took_ms)
    info = SnapshotInfo(
        str(path),
        manifest.broker_name,
        manifest.start_offset,
        manifest.end_offset,
        job.messages,
        manifest.disk_bytes,
        len(manifest.files),
        took_ms,
    )
    context.wire.reply(job.request, reply_with(info))


def _fail(context: BrokerContext, job: SnapshotJob, error: MQMeshError | None) -> None:
    desk = context.snapshots
    desk.end(made=False)
    assert error is not None
    _log.error("no snapshot: %s", error)
    if job.new is not None and desk.run_aside is not None:
        desk.run_aside(partial(abandon_snapshot, job.new), lambda outcome, error: None)
    context.wire.fail(job.request, error)
