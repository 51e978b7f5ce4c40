"""Words about who may read a queue: locks of ordered consumers, and giving queues back."""

from typing import Annotated, Final

import msgspec

from mqmesh.protocol.pulling import MAX_OFFSETS_PER_REQUEST, QueueId
from mqmesh.protocol.route import Name

LOCK_HELD_BY_OTHER: Final = 0
"""Instead of a token: another member has the queue; ask again."""
LOCK_PENDING: Final = -1
"""Instead of a token: the broker just came back and waits for former holders; ask again."""


class LockEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A queue to lock, or what became of that.

    Attributes:
        topic: Physical topic.
        queue_id: Message queue.
        token: In a request: of the lock that the member believes it holds, 0 for none. In an
            answer: above 0 the lock's, which stays the same as long as nobody else had the
            queue; else ``LOCK_HELD_BY_OTHER`` or ``LOCK_PENDING``.
    """

    topic: Name
    queue_id: QueueId
    token: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] = 0


class LockBatchRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """LOCK_BATCH_MQ: a member wants queues for itself alone, or goes on wanting them.

    Attributes:
        group: Consumer group.
        client_id: The member.
        queues: Which.
    """

    group: Name
    client_id: Name
    queues: Annotated[list[LockEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]


class LockBatchResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to LOCK_BATCH_MQ.

    Attributes:
        lease_ms: The locks end so long after the request, unless it is repeated.
        queues: As asked, in the same order.
    """

    lease_ms: int
    queues: Annotated[list[LockEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]


class UnlockBatchRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UNLOCK_BATCH_MQ: a member has done with queues; answered with an empty header.

    Attributes:
        group: Consumer group.
        client_id: The member.
        queues: Which; their tokens do not matter.
    """

    group: Name
    client_id: Name
    queues: Annotated[list[LockEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]
