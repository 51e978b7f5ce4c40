"""Stored messages on their way to another topic or queue, with their present ids.

Retries, dead letters, delayed messages that are due and committed half messages are the same thing:
messages of the broker, written once more elsewhere. The new batch keeps the producer id, the
sequences, and the time and host of birth; because of ``Attributes.REDELIVERED`` it takes no part in
the detection of duplicates.
"""

from collections.abc import Sequence

import msgspec

from mqmesh.batch.delayed_batch import ExpiringMeta
from mqmesh.batch.payload import (
    CODEC_NONE,
    COMPRESS_OVER_BYTES,
    Buffer,
    Payload,
    join_payload,
    split_payload,
)
from mqmesh.batch.record_batch import (
    HEADER_SIZE,
    Attributes,
    BatchHeader,
    BatchMeta,
    CommitMeta,
    batch_parts,
    read_meta,
    read_payload,
)
from mqmesh.errors import InvalidArgument


def redeliver(
    buffer: Buffer,
    header: BatchHeader,
    *,
    position: int = 0,
    first: int = 0,
    count: int | None = None,
    topic: str,
    queue_id: int,
    attributes: int = 0,
    prepared_offset: int | None = None,
    expires_ms: int = 0,
    raws: Sequence[msgspec.Raw] | None = None,
) -> bytes:
    """Makes a batch for another topic or queue out of messages of a stored one.

    An unchanged whole batch is not decoded; of a part only its messages are.

    Args:
        buffer: Buffer with the stored batch, which passed ``check_batch``.
        header: Header of the batch.
        position: Position at which the batch begins.
        first: Ordinal of the first requested message.
        count: Number of consecutive messages; None for all from ``first``.
        topic: Physical topic of the new batch; the messages keep their own.
        queue_id: Queue of the new batch.
        attributes: Bits beside REDELIVERED and those for keys and tags.
        prepared_offset: For committed messages: commit-log offset of their half messages.
        expires_ms: Wall clock from which on no consumer gets the messages, 0 for never.
        raws: Messages from ``payload.split_payload`` of the batch, if they are known already.

    Returns:
        Layout: record batch, its broker part blank.

    Raises:
        InvalidArgument: The batch has no such messages.
        CorruptBatch: The batch cannot be decoded.
        LocalProtocolError: The new batch is over a limit, see ``encode_batch``.
    """
    count = header.message_count - first if count is None else count
    if first < 0 or count < 1 or first + count > header.message_count:
        raise InvalidArgument(
            f"messages {first} to {first + count - 1} of a batch of {header.message_count}"
        )
    meta = read_meta(buffer, header, position)
    if count == header.message_count:
        payload = _whole_payload(buffer, header, position, meta.tag_hashes)
    else:
        if raws is None:
            raws = split_payload(read_payload(buffer, header, position))
        payload = _part_payload(header, raws[first : first + count])
    new_meta: BatchMeta | None = None
    if prepared_offset is not None:
        new_meta = CommitMeta(topic, payload.tag_hashes, meta.born_host, prepared_offset)
    elif expires_ms:
        new_meta = ExpiringMeta(topic, payload.tag_hashes, meta.born_host, expires_ms=expires_ms)
        attributes |= Attributes.HAS_EXPIRY
    parts = batch_parts(
        payload,
        topic=topic,
        queue_id=queue_id,
        producer_id=header.producer_id,
        first_sequence=header.first_sequence + first,
        born_timestamp=header.born_timestamp,
        born_host=meta.born_host,
        attributes=attributes | Attributes.REDELIVERED,
        meta=new_meta,
    )
    return b"".join(parts)


def _part_payload(header: BatchHeader, raws: Sequence[msgspec.Raw]) -> Payload:
    # A compressed batch may be too large for any batch once it is uncompressed.
    over_bytes = COMPRESS_OVER_BYTES if header.codec == CODEC_NONE else 0
    return join_payload(raws, compress_over_bytes=over_bytes)


def _whole_payload(
    buffer: Buffer, header: BatchHeader, position: int, tag_hashes: bytes
) -> Payload:
    """Return the payload of a batch as it is stored."""
    start = position + HEADER_SIZE + header.meta_size
    return Payload(
        bytes(memoryview(buffer)[start : start + header.payload_size]),
        header.codec,
        header.raw_size,
        header.message_count,
        bool(header.attributes & Attributes.HAS_KEYS),
        tag_hashes,
    )
