"""Record batches with any contents, also such as no producer would make."""

from typing import Final

from mqmesh.batch.payload import CODEC_NONE, Buffer, Payload
from mqmesh.batch.record_batch import BatchHeader, BatchMeta, batch_parts, check_batch
from mqmesh.errors import CorruptBatch
from mqmesh.producer_key import producer_id_of

PRODUCER_KEY: Final = b"the key of tests"
PRODUCER_ID: Final = producer_id_of(PRODUCER_KEY)
"""Under this id a test may send when it shows ``PRODUCER_KEY``."""


def join_batch(
    payload: bytes,
    meta: BatchMeta,
    *,
    raw_size: int,
    message_count: int,
    queue_id: int,
    producer_id: int,
    first_sequence: int,
    born_timestamp: int,
    attributes: int,
    codec: int = CODEC_NONE,
) -> bytes:
    """Puts a header that says what is given before a payload, whatever that is.

    Returns:
        Layout: record batch, broker part blank, checksum right.
    """
    parts = batch_parts(
        Payload(payload, codec, raw_size, message_count, False, meta.tag_hashes),
        topic=meta.topic,
        queue_id=queue_id,
        producer_id=producer_id,
        first_sequence=first_sequence,
        born_timestamp=born_timestamp,
        born_host=meta.born_host,
        attributes=attributes,
    )
    return b"".join(parts)


def split_batches(buffer: Buffer, *, most: int) -> list[tuple[int, BatchHeader]]:
    """Finds the batches that stand one behind the other, as in a request.

    Args:
        buffer: Nothing but batches.
        most: Limit of batches.

    Returns:
        Position and header of each; all are checked as by ``check_batch``.

    Raises:
        CorruptBatch: A batch fails its checks, or there are none or too many.
    """
    found: list[tuple[int, BatchHeader]] = []
    position, end = 0, len(buffer)
    while position < end:
        if len(found) == most:
            raise CorruptBatch(f"more than {most} batches in one request")
        header = check_batch(buffer, position)
        found.append((position, header))
        position += header.total_size
    if not found:
        raise CorruptBatch("a request without a batch")
    return found
