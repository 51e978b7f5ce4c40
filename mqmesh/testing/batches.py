"""Record batches with any contents, also such as no producer would make."""

from mqmesh.payload import CODEC_NONE, Payload
from mqmesh.record_batch import BatchMeta, batch_parts


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
