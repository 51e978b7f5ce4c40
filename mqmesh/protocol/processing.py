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
            none. The broker stores nothing if the group's offset differs, so commits follow one
            another without a gap, even if some of them fail. The same commit also covers messages
            from there on that a filter passed over.
        queue_offset: Queue offset behind the last one, which the group reads next.
        token: Token of the member's lock of the queue: no generation is needed beside it.
        epoch: Epoch of the broker's log that they were read in; 0 if it is not known.
    """

    queue_id: QueueId
    known_offset: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
    queue_offset: Place
    token: LeaseNumber
    epoch: int = 0


class CommitProcessedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """COMMIT_PROCESSED: stores output messages, and marks the messages that they were made of as
    done.

    Both are stored, or neither is, even if processes die meanwhile; the answer has an empty header
    and comes once both are as safe as an acknowledged message. The body is the record batches, one
    behind the other, as in SEND_MESSAGE; half messages and expected revisions are refused. The
    broker recognises a commit that was stored before by its batches' producer and sequences, and
    answers that it is done, as long as the producer sends nothing else meanwhile: a producer has
    one commit in flight. A commit without batches only marks messages as done; it succeeds also if
    they were done before.

    Attributes:
        group: Consumer group.
        topic: Physical topic that was consumed.
        member: Client id.
        producer_key: Key of the producer instance that all batches are of, 16 bytes; may be empty
            without batches.
        batch_count: Number of batches, 0 to 1,000; of 4 MiB together, at most 4 for each queue, 128
            delayed ones.
        settlements: With the delivery "message" or "fifo": messages that are done, with the action
            ACK; at most 4,096.
        offsets: With the delivery "queue": messages that are done, by queue, each of them once.

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
        SERVICE_NOT_AVAILABLE: The commit may be stored, and is not safe yet where it is; repeat it.
        NOT_MASTER: The broker is a follower, or isolated; earlier commits may be stored.
        DISK_FULL: No room to write.
    """

    group: GroupName
    topic: TopicName
    member: Name
    producer_key: Annotated[bytes, msgspec.Meta(max_length=16)]
    batch_count: Annotated[int, msgspec.Meta(ge=0, le=MAX_COMMIT_BATCHES)] = 0
    settlements: Annotated[list[Settlement], msgspec.Meta(max_length=MAX_SETTLEMENTS)] = []
    offsets: Annotated[list[ProcessedOffset], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)] = []
