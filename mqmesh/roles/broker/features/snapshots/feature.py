"""Snapshots: begun by a request, answered when they are on disk."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from mqmesh.errors import MQMeshError, UnsupportedCommand
from mqmesh.metrics import counter, gauge
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.request import Request
from mqmesh.protocol.snapshots import CreateSnapshotRequest, SnapshotInfo
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.snapshots.state import (
    SnapshotJob,
    SnapshotJobs,
    SnapshotStep,
    snapshot_name,
)
from mqmesh.roles.broker.index.indexer_link import IndexerLink
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import MessageStore
from mqmesh.storage.tools.snapshot import Manifest
from mqmesh.storage.tools.snapshot_keeping import WaitingReport, clean_waiting
from mqmesh.storage.tools.snapshot_making import (
    Pace,
    SnapshotOf,
    abandon_snapshot,
    begin_snapshot,
    finish_snapshot,
)
from mqmesh.version import VERSION

WAITING_EVERY_MS: Final = 5_000
"""Interval of looks at the snapshots that archives have not taken in."""

_log = logging.getLogger(__name__)


class SnapshotsFeature(Feature):
    """Snapshots of the store, made while it is in use."""

    def __init__(self, core: Core, index: IndexerLink | None) -> None:
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._index = index
        self._snapshots = SnapshotJobs(core.run_aside, core.root.absolute())
        self._waiting = WaitingReport()
        self._dropped = 0
        self._look_at_ms: int | None = 0

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.CREATE_SNAPSHOT: self.create_snapshot}

    def stopping(self) -> None:
        """Give up a snapshot that is being made."""
        self._snapshots.give_up()

    def create_snapshot(self, request: Request, header: CreateSnapshotRequest) -> None:
        """Begins a snapshot; the answer comes when it is whole."""
        jobs, config = self._snapshots, self._settings.now
        if (
            jobs.run_aside is None
            or jobs.store_root is None
            or config.storage.backend != "commitlog"
        ):
            raise UnsupportedCommand(
                f"snapshots are made of stores of the backend 'commitlog', this one is "
                f"{config.storage.backend!r} (storage.backend)"
            )
        job = jobs.begin(request.later(), self._clock.monotonic_ms(), header.archive)
        position = self._store.stats().max_commitlog_offset
        begin = partial(
            begin_snapshot,
            jobs.store_root,
            config.snapshot.root(jobs.store_root),
            snapshot_name(config.broker_name, self._clock.wall_ms(), position),
            reserve_bytes=config.storage.disk_reserve_bytes,
        )
        jobs.run_aside(begin, partial(self._on_begun, job))

    def _on_begun(self, job: SnapshotJob, new: Path | None, error: MQMeshError | None) -> None:
        if error is not None or new is None:
            self._fail(job, error)
            return
        job.new, job.step = new, SnapshotStep.INDEX
        if self._index is None:
            self._on_index(None)
        else:
            self._index.copy(str(new / "index"), self._on_index)

    def _on_index(self, error: MQMeshError | None) -> None:
        if error is not None:
            # A look-up there reads the log instead.
            _log.warning("the snapshot goes without the newest part of the index: %s", error)
        end = self._store.stats().max_commitlog_offset
        self._snapshots.wait_for_log(end, self._clock.monotonic_ms())
        self.tick(self._clock.monotonic_ms())

    def tick(self, now_ms: int) -> None:
        """Finish a snapshot once the log is durable."""
        jobs = self._snapshots
        if jobs.job is None:
            return
        end_offset = jobs.ready_offset(self._store.durable_offset(), now_ms)
        if end_offset is None:
            return
        job, config, stats = jobs.job, self._settings.now, self._store.stats()
        assert job.new is not None and jobs.run_aside is not None and jobs.store_root is not None
        facts = SnapshotOf(
            mqmesh_version=VERSION,
            cluster_name=config.cluster_name,
            broker_name=config.broker_name,
            broker_id=config.broker_id,
            store_id=stats.store_id,
            epoch=stats.epoch,
            end_offset=end_offset,
            created_ms=self._clock.wall_ms(),
            archive=job.archive,
        )
        job.messages = _message_count(self._store)
        finish = partial(
            finish_snapshot,
            jobs.store_root,
            job.new,
            facts,
            keep=config.snapshot.keep,
            pace=Pace(config.snapshot.copy_bytes_per_s, jobs.is_given_up),
        )
        jobs.run_aside(finish, partial(self._on_finished, job))

    def sample(self) -> None:
        """Look at the snapshots for archives, and remove those for which room is short."""
        jobs, config, now_ms = self._snapshots, self._settings.now, self._clock.monotonic_ms()
        if jobs.run_aside is None or jobs.store_root is None:
            return
        if self._look_at_ms is None or now_ms < self._look_at_ms:
            return
        self._look_at_ms = None
        look = partial(
            clean_waiting,
            config.snapshot.root(jobs.store_root),
            config.broker_name,
            most_bytes=config.snapshot.waiting_bytes,
            most_used_percent=config.storage.disk_max_used_space_ratio,
        )
        jobs.run_aside(look, self._on_looked)

    def _on_looked(self, found: WaitingReport | None, error: MQMeshError | None) -> None:
        self._look_at_ms = self._clock.monotonic_ms() + WAITING_EVERY_MS
        if found is None:
            _log.warning("the snapshots for archives cannot be looked at: %s", error)
            return
        self._waiting = found
        self._dropped += len(found.dropped)
        for name in found.dropped:
            _log.error(
                "removed snapshot %s, which an archive has not taken in: no room "
                "(snapshot.waiting_bytes, storage.disk_max_used_space_ratio)",
                name,
            )

    def _waiting_ms(self) -> int:
        oldest_ms = self._waiting.oldest_ms
        return max(0, self._clock.wall_ms() - oldest_ms) if oldest_ms else 0

    def _on_finished(
        self,
        job: SnapshotJob,
        outcome: tuple[Path, Manifest] | None,
        error: MQMeshError | None,
    ) -> None:
        if error is not None or outcome is None:
            self._fail(job, error)
            return
        path, manifest = outcome
        self._snapshots.end(made=True)
        took_ms = self._clock.monotonic_ms() - job.began_ms
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
        job.pending.done(info)

    def _fail(self, job: SnapshotJob, error: MQMeshError | None) -> None:
        jobs = self._snapshots
        jobs.end(made=False)
        assert error is not None
        _log.error("no snapshot: %s", error)
        if job.new is not None and jobs.run_aside is not None:
            jobs.run_aside(partial(abandon_snapshot, job.new), lambda outcome, error: None)
        job.pending.fail(error)

    metrics = (
        counter(
            "snapshots_made_total",
            "snapshots that became whole",
            lambda feature: feature._snapshots.made,
        ),
        counter(
            "snapshots_failed_total",
            "snapshots that did not",
            lambda feature: feature._snapshots.failed,
        ),
        gauge(
            "snapshots_waiting",
            "snapshots that an archive has not taken in",
            lambda feature: feature._waiting.count,
        ),
        gauge(
            "snapshots_waiting_oldest_ms",
            "age of the oldest of them",
            lambda feature: feature._waiting_ms(),
        ),
        gauge(
            "snapshots_waiting_own_bytes",
            "room on the disk that only they hold",
            lambda feature: feature._waiting.own_bytes,
        ),
        counter(
            "snapshots_dropped_total",
            "snapshots removed to make room before an archive took them in",
            lambda feature: feature._dropped,
        ),
    )


def _message_count(store: MessageStore) -> int:
    """Messages in all queues, those of system topics too."""
    bounds = (
        store.queue_bounds(topic, queue_id)
        for topic in store.topics()
        for queue_id in store.queues(topic)
    )
    return sum(end - first for first, end in bounds)
