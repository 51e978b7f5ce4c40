"""Two stores whose logs are to be the same: copying, and looking whether they are."""

from pathlib import Path
from typing import Any

from harness.store_files import deliverable
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import LogChunk
from mqmesh.units import CommitLogOffset


def replicate(leader: CommitLogStore, follower: CommitLogStore, max_bytes: int) -> list[LogChunk]:
    """Copies until the follower has all."""
    chunks = []
    while end_of(follower) < end_of(leader):
        chunk = leader.read_raw(end_of(follower), max_bytes=max_bytes)
        follower.append_raw(chunk)
        chunks.append(chunk)
    return chunks


def end_of(store: CommitLogStore) -> CommitLogOffset:
    """Returns the end of a log, as a commit-log offset."""
    return CommitLogOffset(store.stats().max_commitlog_offset)


def log_of(store: CommitLogStore) -> list[tuple[int, bytes]]:
    """Reads every byte of the log."""
    segments = [segment for segment in store._log.segments if segment.start < end_of(store)]
    return [(one.start, Path(one.path).read_bytes()) for one in segments]


def state_of(store: CommitLogStore) -> tuple[Any, Any, Any]:
    """Returns all state that is derived from the log."""
    queues = {
        (topic, queue_id): (
            store.queue_bounds(topic, queue_id),
            deliverable(store, topic, queue_id),
        )
        for topic in store.topics()
        for queue_id in store.queues(topic)
    }
    return queues, dict(store._parts.states.dump()), store.epochs()
