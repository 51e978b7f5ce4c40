"""COMMIT_PROCESSED: consumed messages and the messages that were made of them, all or none."""

from typing import Annotated, Final

import msgspec

from mqmesh.protocol.delivery import MAX_SETTLEMENTS, LeaseNumber, Place, Settlement
from mqmesh.protocol.names import GroupName, TopicName
from mqmesh.protocol.pulling import MAX_OFFSETS_PER_REQUEST, QueueId
from mqmesh.protocol.route import Name
from mqmesh.units import MIB

MAX_COMMIT_BATCHES: Final = 1_000
MAX_COMMIT_BYTES: Final = 4 * MIB
MAX_BATCHES_PER_QUEUE: Final = 4
"""As many as a producer may have in flight: all of them are remembered for repetitions."""
MAX_DELAYED_BATCHES: Final = 128
"""The same for delayed ones, which wait in few queues."""


class ProcessedOffset(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages of a queue that its owner has processed, one behind the other.

    Attributes:
        queue_id: Message queue.
        known_offset: Queue offset that the group has committed, as far as the member knows, -1 for
            none: nothing is stored if the group is elsewhere, so commits follow one another
            without a gap, whatever becomes of them. Messages from there on that are not consumed,
            since a filter passed over them, are done by the same commit.
        queue_offset: Queue offset behind the last one, which the group reads next.
        token: Of the member's lock of the queue: no generation is needed beside it.
        epoch: Of the broker's log that they were read in; 0 if it is not known.
    """

    queue_id: QueueId
    known_offset: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
    queue_offset: Place
    token: LeaseNumber
    epoch: int = 0


class CommitProcessedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """COMMIT_PROCESSED: stores messages, and that those are done which they were made of.

    All of it is stored or nothing, whatever dies meanwhile; it is answered with an empty header
    once that is as safe as an acknowledged message. The body is the record batches, one behind the
    other, as in SEND_MESSAGE; half messages and expected revisions are refused. A commit that was
    stored before is recognised by its batches' producer and sequences, and is answered as done, as
    long as their producer sends nothing else meanwhile: one has one commit in flight. One without
    batches says only that messages are done; it is answered so also when they were before.

    Attributes:
        group: Consumer group.
        topic: Physical topic that was consumed.
        member: Client id.
        producer_key: Key of the producer instance that all batches are of, 16 bytes; may be empty
            without batches.
        batch_count: Number of batches, 0 to 1,000; of 4 MiB together, at most 4 for each queue, 128
            delayed ones.
        settlements: With the delivery "message" or "fifo": what is done, with the action ACK; at
            most 4,096.
        offsets: With the delivery "queue": what is done, by queue, each of them once.

    Errors:
        TOPIC_NOT_EXIST: No such topic, also one of a batch: none is made.
        CONSUMER_GROUP_NOT_EXIST: No such group, and its first use makes none.
        NO_PERMISSION: No right to send to the topic of a batch, or a key of another producer.
        STALE_RECEIPT: A message is the member's no more, or is done already; nothing is stored.
        STALE_GENERATION: A queue is another member's, or the group is not at ``known_offset``: it
            was moved, or a commit of before is not stored, or is and was not answered. The same.
        OFFSET_ILLEGAL: As for UPDATE_CONSUMER_OFFSET.
        MESSAGE_ILLEGAL: A limit, a batch that SEND_MESSAGE refuses as well, a half message, or the
            group is in another delivery mode.
        SEQUENCE_CONFLICT: Other messages are stored under these sequences.
        SYSTEM_BUSY: As for SEND_MESSAGE.
        SERVICE_NOT_AVAILABLE: It may be stored, and is not safe yet where it is; repeat it.
        NOT_MASTER: The broker is a follower, or isolated; what it was sent before may be stored.
        DISK_FULL: No room to write.
    """

    group: GroupName
    topic: TopicName
    member: Name
    producer_key: Annotated[bytes, msgspec.Meta(max_length=16)]
    batch_count: Annotated[int, msgspec.Meta(ge=0, le=MAX_COMMIT_BATCHES)] = 0
    settlements: Annotated[list[Settlement], msgspec.Meta(max_length=MAX_SETTLEMENTS)] = []
    offsets: Annotated[list[ProcessedOffset], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)] = []
