"""Records of the op topic: how half messages ended, and how often was asked about them.

An op message's body is 1 to 52,428 entries of 20 bytes, little endian: queue offset of the
half batch i64, ordinal of the first message u32, number of messages u32, kind u8, reserved
u8, check times u16. Decisions of a turn are in one batch, or in several where they are many;
each batch is in a group with the messages that it commits: of both all is in the log or nothing.
On disk: never changes.
"""

import enum
import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.batch.record_batch import Attributes, BatchHeader, decode_messages, encode_batch
from mqmesh.errors import CorruptBatch
from mqmesh.message import TRANS_OP_HALF_TOPIC, Message
from mqmesh.units import MIB

OP_QUEUE: Final = 0
MAX_OPS: Final = 400_000
"""Most entries of one batch."""

_ENTRY = struct.Struct("<qIIBBH")
_ENTRIES_A_MESSAGE: Final = MIB // _ENTRY.size


class OpKind(enum.IntEnum):
    """Kind of an entry. On disk."""

    COMMIT = 1
    ROLLBACK = 2
    PARK = 3
    """Messages asked about as often as allowed, and copied to TRANS_CHECK_MAX_TIME_TOPIC."""
    CHECK = 4
    """Messages that were asked about."""


class Op(msgspec.Struct, frozen=True, gc=False):
    """One entry.

    Attributes:
        base: Queue offset of the half batch.
        first: Ordinal of the first message.
        count: Messages.
        kind: ``OpKind`` as a number.
        checks: How often they were asked about, for CHECK and PARK.
    """

    base: int
    first: int
    count: int
    kind: int
    checks: int = 0


def encode_ops(
    ops: Sequence[Op], *, producer_id: int, first_sequence: int, born_timestamp: int
) -> bytes:
    """Encodes entries as one batch of the op topic.

    Args:
        ops: 1 to ``MAX_OPS``.
        producer_id: The broker's instance id.
        first_sequence: As for a producer's batch.
        born_timestamp: Now, in ms.

    Returns:
        Layout: record batch, broker part blank.
    """
    assert 0 < len(ops) <= MAX_OPS
    entries = [
        _ENTRY.pack(one.base, one.first, one.count, one.kind, 0, min(one.checks, 0xFFFF))
        for one in ops
    ]
    messages = [
        Message(TRANS_OP_HALF_TOPIC, b"".join(entries[start : start + _ENTRIES_A_MESSAGE]))
        for start in range(0, len(entries), _ENTRIES_A_MESSAGE)
    ]
    return encode_batch(
        messages,
        topic=TRANS_OP_HALF_TOPIC,
        queue_id=OP_QUEUE,
        producer_id=producer_id,
        first_sequence=first_sequence,
        born_timestamp=born_timestamp,
        attributes=Attributes.REDELIVERED,
    )


def decode_ops(data: bytes | memoryview, header: BatchHeader) -> list[Op]:
    """Decodes a batch of the op topic.

    Raises:
        CorruptBatch: It is none.
    """
    found = []
    for message in decode_messages(data, header):
        if len(message.body) % _ENTRY.size:
            raise CorruptBatch(f"an op message of {len(message.body)} bytes is no array of entries")
        for base, first, count, kind, _, checks in _ENTRY.iter_unpack(message.body):
            found.append(Op(base, first, count, kind, checks))
    return found


def runs_of(ordinals: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending ordinals as runs of first and count."""
    runs: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if runs and runs[-1][0] + runs[-1][1] == ordinal:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((ordinal, 1))
    return runs
