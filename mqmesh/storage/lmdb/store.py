"""LmdbStore: the whole store in one LMDB environment, for small installations.

One transaction a ``put`` writes batches, queues and the state by which repeated sends are
recognised. So after the death of the process all of them agree, and there is nothing to recover.
The broker puts all batches of a turn of its event loop at once: they share one commit, and with
``SYNC_FLUSH`` its two syncs.

With ``ASYNC_FLUSH`` commits are not synced; a thread syncs the file now and then. If the *system*
dies, LMDB promises nothing: the next opening checks the store, and if LMDB cannot read it, all of
it is lost.
"""

import errno
import logging
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.batch.record_batch import Attributes, check_stored
from mqmesh.clock import Clock
from mqmesh.errors import (
    CorruptBatch,
    CorruptRecord,
    DiskFull,
    OffsetOutOfRange,
    StorageError,
    StoreClosed,
)
from mqmesh.storage.interface import (
    BatchToPut,
    FlushDiskType,
    GetResult,
    GetStatus,
    MessageStore,
    OnProgress,
    PutResult,
    StoreConfig,
    StoreStats,
    Wake,
)
from mqmesh.storage.lmdb import layout
from mqmesh.storage.lmdb.env import LmdbEnv, Pair
from mqmesh.storage.lmdb.opening import Contents, EnvironmentParts, Queue, open_environment
from mqmesh.storage.lmdb.reading import entry_at, read_batches
from mqmesh.storage.log.control_record import ControlKind, encode_control_record
from mqmesh.storage.log.flush import Flusher
from mqmesh.storage.queues.placement import InARow, Placed, Placement
from mqmesh.storage.queues.producer_states import StoredBatch
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

log = logging.getLogger(__name__)

DELETES_AT_ONCE: Final = 500
"""Pairs of deleted topics, or of forgotten producers, removed by one tick."""

_REDELIVERED: Final = int(Attributes.REDELIVERED)


class _Draft:
    """Changes that a put will write."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self.pairs: dict[bytes, bytes] = {}
        self.queues: dict[tuple[str, int], Queue] = {}
        self.topic_ids: dict[str, int] = {}

    def queue(self, topic: str, queue_id: int) -> Queue:
        """Return a queue; a new one belongs to the store when this draft is written."""
        queue = self._contents.topics.get(topic, {}).get(queue_id)
        queue = queue or self.queues.get((topic, queue_id))
        if queue is None:
            queue = Queue(topic, self.topic_id(topic), queue_id)
            self.queues[topic, queue_id] = queue
            self.pairs[layout.queue_key(queue.topic_id, queue_id)] = b""
        return queue

    def topic_id(self, topic: str) -> int:
        """Return the number of a topic."""
        topic_id = self._contents.topic_ids.get(topic) or self.topic_ids.get(topic)
        if topic_id is None:
            topic_id = self._contents.next_topic_id + len(self.topic_ids)
            self.topic_ids[topic] = topic_id
            self.pairs[layout.topic_key(topic)] = layout.encode_topic(topic_id, topic)
        return topic_id


class LmdbStore(MessageStore):
    """A store in one environment; only syncs of ``ASYNC_FLUSH`` leave the caller's thread."""

    def __init__(
        self, parts: EnvironmentParts, config: StoreConfig, *, clock: Clock, wake: Wake
    ) -> None:
        """Takes over an opened environment; see ``open``."""
        self._parts = parts
        self._env: LmdbEnv = parts.env
        contents = self._contents = parts.contents
        self._config = config
        self._clock = clock
        self._states = contents.states
        self._end = contents.end
        self._flusher: Flusher | None = None
        if config.flush_disk_type is FlushDiskType.ASYNC_FLUSH:
            self._flusher = Flusher(
                durable_offset=contents.end,
                at_once=False,
                interval_ms=config.flush_interval_commitlog_ms,
                wake=wake,
                sync=self._sync,
            )
        self._directory: Path = parts.directory
        # Keys of last batches that the environment holds and memory no longer does; to be removed.
        self._forgotten: set[bytes] = set()
        self._put_batches = 0
        self._put_messages = 0
        self._duplicates = 0
        self._commits = 0
        self._failure: str | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        config: StoreConfig,
        *,
        clock: Clock,
        wake: Wake,
        on_progress: OnProgress,
    ) -> "LmdbStore":
        """Opens a store.

        Args:
            directory: Directory of the files; made if need be.
            config: Settings; of the sizes only ``mapped_file_size_commit_log`` counts, as
                the limit of a batch.
            clock: Source of time, for labels.
            wake: Called from the flush thread when ``durable_offset`` has moved or the
                store has stopped; must not raise.
            on_progress: Called now and then while the store is checked after a power cut.

        Raises:
            StoreLocked: Another process has the store open.
            StorageError: The store cannot be opened.
        """
        parts = open_environment(
            directory, config, now_ms=TimestampMs(clock.wall_ms()), on_progress=on_progress
        )
        return cls(parts, config, clock=clock, wake=wake)

    # ---- Writing ---------------------------------------------------------------------

    def put(
        self,
        batches: Sequence[BatchToPut],
        store_timestamp: TimestampMs,
        *,
        despite_full: bool = False,
    ) -> list[PutResult]:
        """Implement ``MessageStore.put``."""
        self._check_writable()
        draft, places = _Draft(self._contents), InARow(self._end)
        head = self._contents.head
        placement = Placement(
            self._states,
            draft.queue,
            store_id=head.store_id,
            config=self._config,
        )
        placed: list[Placed[Queue]] = []
        try:
            results = placement.place(places, batches, store_timestamp, head.epoch, placed)
            if placed:
                self._add_pairs(draft, places, placed)
                self._commit(sorted(draft.pairs.items()))
        except StorageError:
            placement.take_back(placed, self._end)
            raise
        self._duplicates += placement.duplicates
        if placed:
            self._apply(draft, placed, places.end)
        return results

    def _add_pairs(self, draft: _Draft, places: InARow, placed: Sequence[Placed[Queue]]) -> None:
        for (batch, queue, result), data in zip(placed, places.records(), strict=True):
            header, position = batch.header, result.commitlog_offset
            entry = layout.entry_key(queue.topic_id, queue.queue_id, result.base_queue_offset)
            draft.pairs[layout.log_key(position)] = data
            draft.pairs[entry] = layout.encode_entry(
                position,
                header.total_size,
                header.message_count,
                result.store_timestamp,
                batch.tag_hashes,
            )
            if not header.attributes & _REDELIVERED:
                producer_id = header.producer_id
                key = layout.producer_key(queue.topic_id, queue.queue_id, producer_id)
                window = self._states.window((queue.topic, queue.queue_id, producer_id))
                draft.pairs[key] = msgspec.msgpack.encode(window)

    def _apply(self, draft: _Draft, placed: Sequence[Placed[Queue]], end: int) -> None:
        """Adds written batches to the state in memory."""
        contents = self._contents
        contents.topic_ids |= draft.topic_ids
        contents.next_topic_id += len(draft.topic_ids)
        for (topic, queue_id), queue in draft.queues.items():
            contents.topics.setdefault(topic, {})[queue_id] = queue
        for batch, queue, _ in placed:
            queue.end += batch.header.message_count
            self._put_messages += batch.header.message_count
        producers = [key for key in draft.pairs if key.startswith(layout.PRODUCER)]
        contents.producers.update(producers)
        self._forgotten.difference_update(producers)
        self._put_batches += len(placed)
        self._move_to(end)

    def _move_to(self, end: int) -> None:
        self._end = end
        if self._flusher is not None:
            self._flusher.written(end, [-1])

    def _commit(self, pairs: Sequence[Pair], deletes: Sequence[bytes] = ()) -> None:
        """Writes pairs in one transaction.

        Raises:
            DiskFull: No room; nothing was written.
            StorageError: The write failed; the store has stopped.
        """
        if not deletes:
            self._check_room(sum(len(value) for _, value in pairs))
        try:
            self._env.write(pairs, deletes)
        except StorageError as error:
            # Without room the transaction is undone, and nothing refers to the pages that it wrote.
            # After any other error the content is unknown, and a second try may only seem to
            # succeed.
            if not isinstance(error, DiskFull):
                self._failure = str(error)
                log.critical("the store stops: %s", error)
            raise
        self._commits += 1

    def _check_room(self, wanted: int) -> None:
        room = os.statvfs(self._directory)
        if room.f_bavail * room.f_frsize < wanted + self._config.disk_reserve_bytes:
            raise DiskFull(
                f"{self._directory}: {os.strerror(errno.ENOSPC)} for {wanted} bytes besides "
                f"the reserve of {self._config.disk_reserve_bytes}"
            )

    def _sync(self, fd: int) -> None:
        """Sync for the flush thread; LMDB allows this one call beside those of its thread."""
        del fd
        try:
            self._env.sync()
        except StorageError as error:
            raise OSError(errno.EIO, str(error)) from error

    def delete_topic(self, topic: str) -> None:
        """Implement ``MessageStore.delete_topic``."""
        self._check_writable()
        contents = self._contents
        topic_id = contents.topic_ids.get(topic)
        if topic_id is None:
            return
        marker = encode_control_record(
            ControlKind.TOPIC_DELETED,
            commitlog_offset=self._end,
            epoch=contents.head.epoch,
            store_id=contents.head.store_id,
            store_timestamp=self._clock.wall_ms(),
            data=topic.encode(),
        )
        # Deletions may use the reserve: they make room.
        self._commit(
            [(layout.deleted_key(topic_id), b""), (layout.log_key(self._end), marker)],
            [layout.topic_key(topic)],
        )
        del contents.topic_ids[topic]
        contents.topics.pop(topic, None)
        contents.deleted.append(topic_id)
        self._states.forget_topic(topic)
        self._move_to(self._end + len(marker))

    # ---- Reading ---------------------------------------------------------------------

    def get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        max_bytes: int,
        tag_hashes: frozenset[int] | None = None,
        verify: bool = False,
    ) -> GetResult:
        """Implement ``MessageStore.get``."""
        self._check_open()
        queue = self._contents.topics.get(topic, {}).get(queue_id)
        bounds = QueueOffset(0), QueueOffset(0 if queue is None else queue.end)
        if queue_offset < 0:
            return GetResult(GetStatus.OFFSET_TOO_SMALL, bounds[0], *bounds)
        if queue_offset > bounds[1]:
            return GetResult(GetStatus.OFFSET_OVERFLOW, bounds[1], *bounds)
        if queue is None or queue_offset == bounds[1]:
            return GetResult(GetStatus.NO_NEW_MESSAGE, bounds[1], *bounds)
        data, position, count = read_batches(
            self._env,
            queue,
            queue_offset,
            max_bytes=max_bytes,
            tag_hashes=tag_hashes,
            verify=verify,
        )
        status = GetStatus.FOUND if data else GetStatus.NO_MATCHED_MESSAGE
        return GetResult(status, QueueOffset(position), *bounds, data, count)

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        """Implement ``MessageStore.queue_bounds``."""
        self._check_open()
        queue = self._contents.topics.get(topic, {}).get(queue_id)
        return QueueOffset(0), QueueOffset(0 if queue is None else queue.end)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: TimestampMs) -> QueueOffset:
        """Implement ``MessageStore.offset_by_time``."""
        self._check_open()
        queue = self._contents.topics.get(topic, {}).get(queue_id)
        low, high = 0, 0 if queue is None else queue.end
        while queue is not None and low < high:
            entry = entry_at(self._env, queue, (low + high) // 2)
            if entry.store_timestamp >= timestamp_ms:
                high = entry.base
            else:
                low = entry.end
        return QueueOffset(low)

    def read_at(self, commitlog_offset: CommitLogOffset) -> bytes:
        """Implement ``MessageStore.read_at``."""
        self._check_open()
        if not 0 <= commitlog_offset < self._end:
            raise OffsetOutOfRange(f"{commitlog_offset} is not between 0 and {self._end}")
        data = self._env.get(layout.log_key(commitlog_offset))
        if data is None:
            raise CorruptRecord(f"no batch begins at {commitlog_offset}")
        try:
            header = check_stored(data)
        except CorruptBatch as error:
            raise CorruptRecord(f"no good batch begins at {commitlog_offset}: {error}") from error
        store_id = self._contents.head.store_id
        if header.commitlog_offset != commitlog_offset or header.store_id != store_id:
            raise CorruptRecord(f"the batch at {commitlog_offset} belongs somewhere else")
        return data

    def producer_window(self, topic: str, queue_id: int, producer_id: int) -> list[StoredBatch]:
        """Implement ``MessageStore.producer_window``."""
        self._check_open()
        return self._states.window((topic, queue_id, producer_id))

    def queues(self, topic: str) -> list[int]:
        """Implement ``MessageStore.queues``."""
        self._check_open()
        return sorted(self._contents.topics.get(topic, {}))

    def topics(self) -> list[str]:
        """Implement ``MessageStore.topics``."""
        self._check_open()
        return list(self._contents.topics)

    # ---- Background and end ----------------------------------------------------------

    def durable_offset(self) -> CommitLogOffset:
        """Implement ``MessageStore.durable_offset``."""
        self._check_open()
        return CommitLogOffset(self._end if self._flusher is None else self._flusher.durable_offset)

    def tick(self, now_ms: int) -> bool:
        """Implement ``MessageStore.tick``."""
        del now_ms
        self._check_writable()
        try:
            self._parts.lock.check()
            return self._remove_deleted() or self._remove_forgotten()
        except DiskFull as error:
            # LMDB copies what it changes; there may be room at the next tick.
            log.warning("what was deleted stays for now: %s", error)
            return False
        except StorageError as error:
            self._failure = str(error)
            raise StoreClosed(f"the store has stopped: {error}") from error

    def _remove_deleted(self) -> bool:
        """Removes some pairs of a deleted topic; True if there are more."""
        deleted = self._contents.deleted
        if not deleted:
            return False
        topic_id, most = deleted[0], DELETES_AT_ONCE
        keys: list[bytes] = []
        for kind in (layout.QUEUE, layout.PRODUCER, layout.ENTRY):
            keys += self._env.keys(*layout.of_topic(kind, topic_id), most=most - len(keys))
        is_last = len(keys) < most
        if is_last:
            keys.append(layout.deleted_key(topic_id))
        self._commit([], keys)
        self._contents.producers.difference_update(keys)
        self._forgotten.difference_update(keys)
        if is_last:
            del deleted[0]
        return bool(deleted)

    def _remove_forgotten(self) -> bool:
        """Removes last batches of producers once most of them were forgotten."""
        written, ids, forgotten = (
            self._contents.producers,
            self._contents.topic_ids,
            self._forgotten,
        )
        if not forgotten:
            if len(written) <= 2 * self._config.max_producer_states:
                return False
            forgotten |= written
            for (topic, queue_id, producer_id), _ in self._states.dump():
                forgotten.discard(layout.producer_key(ids[topic], queue_id, producer_id))
        keys = list(islice(forgotten, DELETES_AT_ONCE))
        self._commit([], keys)
        written.difference_update(keys)
        forgotten.difference_update(keys)
        return bool(forgotten)

    def stats(self) -> StoreStats:
        """Implement ``MessageStore.stats``."""
        self._check_open()
        contents, flusher = self._contents, self._flusher
        return StoreStats(
            backend="lmdb",
            disk_bytes=self._env.file_bytes,
            max_commitlog_offset=self._end,
            durable_offset=self.durable_offset(),
            topics=len(contents.topics),
            queues=sum(map(len, contents.topics.values())),
            put_batches=self._put_batches,
            put_messages=self._put_messages,
            duplicates=self._duplicates,
            flushes=self._commits if flusher is None else flusher.flushes,
            flush_errors=int(self._stopped_by() is not None),
            epoch=contents.head.epoch,
            store_id=contents.head.store_id,
            started_clean=contents.started_clean,
            recovered_bytes=contents.checked_bytes,
            damaged=contents.damaged,
            writable=self._stopped_by() is None,
        )

    def close(self) -> None:
        """Implement ``MessageStore.close``."""
        if self._closed:
            return
        self._closed = True
        if self._flusher is not None:
            self._flusher.close()
        if self._stopped_by() is None:
            head = msgspec.structs.replace(
                self._contents.head, next_topic_id=self._contents.next_topic_id, clean=True
            )
            try:
                self._env.write([(layout.HEAD_KEY, msgspec.msgpack.encode(head))])
                self._env.sync()
            except StorageError as error:
                log.error("the store was not closed in order: %s", error)
        self._parts.resources.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store was closed")

    def _check_writable(self) -> None:
        self._check_open()
        reason = self._stopped_by()
        if reason is not None:
            raise StoreClosed(f"the store has stopped: {reason}")

    def _stopped_by(self) -> str | None:
        if self._failure is None and self._flusher is not None:
            error = self._flusher.error
            return None if error is None else f"the environment cannot be synced: {error}"
        return self._failure
