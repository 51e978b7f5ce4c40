"""Messages and batches that were pulled, without a broker."""

from collections.abc import Collection
from typing import Final

import msgspec

from mqmesh.errors import CorruptBatch
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

_NEVER: Final = TimestampMs(0)
INFO: Final = BatchInfo(
    *("t", 2, "broker-a", QueueOffset(0), CommitLogOffset(0), 100, _NEVER, _NEVER),
    *("h:1", "h:2", 1, 1, 0),
)
"""Of queue 2 of topic t."""


def pulled(queue_offset: int, info: BatchInfo = INFO) -> StoredMessage:
    """Makes a message of topic t that was pulled."""
    return StoredMessage("t", b"x", queue_offset=QueueOffset(queue_offset), batch=info)


class FakeBatch(PulledBatch):
    """A batch whose decoding the test decides.

    Args:
        first: Queue offset of the first message.
        count: Number of messages.
        unwanted: Queue offsets of messages that a filter leaves out.
        error: Raised by ``decode``.
    """

    def __init__(
        self,
        first: int,
        count: int,
        unwanted: Collection[int] = (),
        error: CorruptBatch | None = None,
    ) -> None:
        self.first, self.end = first, first + count
        self.count, self.offsets = count, None
        self.unwanted, self.error = unwanted, error

    def decode(self, fencing_token: int = 0) -> list[StoredMessage]:
        """Makes the messages, or raises the error."""
        if self.error is not None:
            raise self.error
        info = msgspec.structs.replace(INFO, fencing_token=fencing_token)
        return [pulled(at, info) for at in range(self.first, self.end) if at not in self.unwanted]
