"""When stored messages were stored, for people."""

from mqmesh.batch.record_batch import read_header
from mqmesh.errors import CorruptBatch, StorageError
from mqmesh.storage.interface import GetStatus, MessageStore
from mqmesh.units import TimestampMs


def store_time(store: MessageStore, topic: str, queue_id: int, queue_offset: int) -> TimestampMs:
    """Return when a message was stored, ms since 1970; 0 if there is none, or it is damaged.

    An answer that lists many queues is of use without one of these times.
    """
    try:
        found = store.get(topic, queue_id, queue_offset, max_bytes=1)
        if found.status is not GetStatus.FOUND:
            return TimestampMs(0)
        return TimestampMs(read_header(found.data[0]).store_timestamp)
    except (StorageError, CorruptBatch):
        return TimestampMs(0)
