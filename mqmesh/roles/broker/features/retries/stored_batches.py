"""Stored batches that single messages of are wanted, each read and decoded once."""

from mqmesh.batch.record_batch import BatchHeader, check_stored, decode_messages
from mqmesh.errors import CorruptBatch, OffsetIllegal
from mqmesh.message import StoredMessage
from mqmesh.storage.interface import GetStatus, MessageStore


class BatchInStore:
    """A batch in the store.

    Attributes:
        data: Its bytes.
        header: Its header.
        messages: Its messages; None when they cannot be decoded.
        error: Why not.
    """

    __slots__ = ("data", "error", "header", "messages")

    def __init__(self, data: memoryview, header: BatchHeader) -> None:
        self.data = data
        self.header = header
        self.messages: list[StoredMessage] | None = None
        self.error: CorruptBatch | None = None
        try:
            self.messages = decode_messages(data, header)
        except CorruptBatch as error:
            self.error = error

    def holds(self, queue_offset: int) -> bool:
        """True when a message is one of its own."""
        return self.header.base_queue_offset <= queue_offset < self.header.next_queue_offset


class StoredBatches:
    """Finds batches by the messages they hold.

    The last batch is kept, since many messages that are asked for are mostly neighbours.

    Args:
        store: Where they are.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._queue: tuple[str, int] | None = None
        self._last: BatchInStore | None = None

    def find(self, topic: str, queue_id: int, queue_offset: int) -> BatchInStore:
        """The batch that holds a message.

        Raises:
            OffsetIllegal: There is no such message, or not any more.
            CorruptBatch, CorruptRecord: It is damaged.
        """
        last = self._last
        if last is not None and self._queue == (topic, queue_id) and last.holds(queue_offset):
            return last
        found = self._store.get(topic, queue_id, queue_offset, max_bytes=1)
        if found.status is not GetStatus.FOUND:
            raise OffsetIllegal(
                f"queue {queue_id} of {topic!r} has no message at {queue_offset}; it has those "
                f"from {found.min_queue_offset} and before {found.max_queue_offset}"
            )
        header = check_stored(found.data[0])
        # A copy, since what is kept must not keep a map of the log.
        data = memoryview(bytes(found.data[0][: header.total_size]))
        self._queue = topic, queue_id
        self._last = BatchInStore(data, header)
        return self._last
