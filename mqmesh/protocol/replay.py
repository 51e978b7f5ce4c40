"""REPLAY_MESSAGES: stored messages once more, for a group or into another topic."""

from typing import Annotated, Final

import msgspec

from mqmesh.protocol.names import GroupName, TopicName
from mqmesh.protocol.pulling import QueueId
from mqmesh.protocol.retries import MAX_BATCH_MESSAGES

MAX_REPLAY_RUNS: Final = 1_000

_Place = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ReplayRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages of a queue that stand behind one another.

    Attributes:
        first: Queue offset of the first one.
        count: How many.
    """

    first: _Place
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH_MESSAGES)] = 1


class ReplayRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """REPLAY_MESSAGES: copies messages of a queue, under the ids that they have, into the retry
    topic of a group, which alone gets them then, or into another topic of the broker.

    In the other topic they come into the queue of the same number, counted round where it has
    fewer, so that messages of one queue stay in order. Their number of tries begins anew. A
    repeated request copies them again. The answer comes when they are stored.

    Attributes:
        topic: Physical topic.
        queue_id: Message queue.
        runs: Messages to copy, in order; the broker takes as many as fit one group, 4 MiB.
        group: Consumer group; empty for ``into_topic``.
        into_topic: Topic; empty for ``group``.

    Errors:
        MESSAGE_ILLEGAL: Neither a group nor another topic, or both; no runs; a batch that cannot be
            decoded.
        TOPIC_NOT_EXIST: The broker does not have one of the topics.
        CONSUMER_GROUP_NOT_EXIST: The broker does not know the group.
        NO_PERMISSION: The other topic may not be written.
        OFFSET_ILLEGAL: A message is not there, or not any more.
        DISK_FULL, SYSTEM_BUSY: Nothing was copied.
    """

    topic: TopicName
    queue_id: QueueId
    runs: Annotated[list[ReplayRun], msgspec.Meta(max_length=MAX_REPLAY_RUNS)]
    group: GroupName = ""
    into_topic: TopicName = ""


class ReplayResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to REPLAY_MESSAGES.

    Attributes:
        copied: So many messages of the request, from its first one on, were stored; at least one.
    """

    copied: int
