"""Cuts a stored batch down to the requested messages.

The remaining messages keep their queue offsets and ids: the cut batch has the header of the
whole one, and its meta has the positions that its messages had (``SparseMeta``). The broker that
cuts it makes the checksums anew; the stored ones travel in the meta.
"""

import struct
from collections.abc import Sequence
from itertools import compress
from typing import Final

import msgspec

from mqmesh.batch.payload import Buffer, Payload, compress_payload, join_messages, split_payload
from mqmesh.batch.record_batch import (
    Attributes,
    BatchHeader,
    BatchMeta,
    SparseMeta,
    batch_parts,
    stamp,
)

_SPARSE: Final = int(Attributes.SPARSE)
_DROPPED: Final = ~int(Attributes.HAS_DELAY | Attributes.HAS_EXPIRY | Attributes.HAS_EXPECTED)
# whose meta has something else in its place


def cut_batch(
    header: BatchHeader, meta: BatchMeta, payload: Buffer, selected: bytes
) -> tuple[bytes, ...]:
    """Makes a batch of some messages of a stored one.

    Args:
        header: Header of the whole batch.
        meta: Meta of the whole batch.
        payload: Opened payload of the whole batch.
        selected: A byte for each message, 1 for a selected one, at least one of them. It may
            end before the batch does: the cut batch then ends there, too.

    Returns:
        The cut batch in pieces. Layout: record batch, sparse.

    Raises:
        CorruptBatch: The payload is no array of messages.
    """
    places = list(compress(range(len(selected)), selected))
    return cut_messages(header, meta, split_payload(payload), places, len(selected))


def cut_messages(
    header: BatchHeader,
    meta: BatchMeta,
    messages: Sequence[msgspec.Raw],
    places: Sequence[int],
    count: int,
) -> tuple[bytes, ...]:
    """Makes a batch of some messages of a stored one, whose payload was split before.

    Args:
        header: Header of the whole batch.
        meta: Meta of the whole batch.
        messages: All messages of the batch, from ``split_payload``.
        places: Ordinals of the selected messages in the batch, from 0, in order; at least one.
        count: The cut batch ends behind so many messages of the whole one.

    Returns:
        The cut batch in pieces. Layout: record batch, sparse.
    """
    if isinstance(places, range):
        data = join_messages(messages[places.start : places.stop])
    else:
        data = join_messages([messages[at] for at in places])
    ordinals = struct.pack(f"<{len(places)}H", *places)
    stored, codec = compress_payload(data) if header.codec else (data, header.codec)
    parts = batch_parts(
        Payload(stored, codec, len(data), count, False, b""),
        topic=meta.topic,
        queue_id=header.queue_id,
        producer_id=header.producer_id,
        first_sequence=header.first_sequence,
        born_timestamp=header.born_timestamp,
        attributes=header.attributes & _DROPPED | _SPARSE,
        meta=SparseMeta(
            meta.topic, b"", meta.born_host, ordinals, header.total_size, header.producer_crc
        ),
    )
    front = stamp(
        msgspec.structs.replace(header, producer_crc=int.from_bytes(parts[1], "little")),
        commitlog_offset=header.commitlog_offset,
        base_queue_offset=header.base_queue_offset,
        store_timestamp=header.store_timestamp,
        epoch=header.epoch,
        store_id=header.store_id,
    )
    return (front, *parts[1:])
