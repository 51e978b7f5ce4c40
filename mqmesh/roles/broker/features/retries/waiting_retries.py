"""Messages of a group that failed and wait until their retry is due."""

from mqmesh.batch.record_batch import read_header
from mqmesh.errors import CorruptBatch, CorruptRecord, OffsetOutOfRange
from mqmesh.roles.broker.features.delays.retry_board import RetryBoard
from mqmesh.storage.interface import MessageStore
from mqmesh.units import CommitLogOffset


def waiting_retries(store: MessageStore, board: RetryBoard, group: str) -> tuple[int, int]:
    """Return how many messages of a group wait for a retry, and since when the oldest does.

    Args:
        store: Messages.
        board: What is known of messages that wait for a retry.
        group: Consumer group.

    Returns:
        The number, and when the oldest was sent back last, ms since 1970; 0 if that is not known.
    """
    found = board.of(group)
    if found.oldest_offset < 0:
        return found.count, 0
    try:
        header = read_header(store.read_at(CommitLogOffset(found.oldest_offset)))
    except (CorruptBatch, CorruptRecord, OffsetOutOfRange):
        return found.count, 0  # the number is of use all the same
    return found.count, header.store_timestamp
