"""Structs of clients and brokers about members of groups, and locks of queues."""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.protocol.names import GroupName, TopicName
from mqmesh.protocol.pulling import MAX_OFFSETS_PER_REQUEST, ExpressionType, QueueId
from mqmesh.protocol.route import Name

MAX_SUBSCRIPTIONS: Final = 16_384
"""Topics that one consumer may subscribe to, its group's retry topic among them."""
LOCK_HELD_BY_OTHER: Final = 0
"""Answer in place of a token: another member has the queue; ask again."""
LOCK_PENDING: Final = -1
"""Answer in place of a token: the broker just came back and waits for former holders; ask again."""


class MessageModel(enum.StrEnum):
    """Ways in which a consumer group shares messages."""

    CLUSTERING = "CLUSTERING"
    """One member of the group gets each message."""
    BROADCASTING = "BROADCASTING"
    """Every member gets every message."""


class ConsumeFromWhere(enum.StrEnum):
    """Starting points of a group without committed offsets."""

    LAST_OFFSET = "LAST_OFFSET"
    """Behind the last message."""
    FIRST_OFFSET = "FIRST_OFFSET"
    """The first message."""
    TIMESTAMP = "TIMESTAMP"
    """The first message stored at or after a time."""


class Subscription(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Subscription of a consumer to a topic.

    Attributes:
        topic: Physical topic.
        expression: Of tags ``A || B``, or ``*`` for all; SQL92; or the id of an uploaded filter.
        expression_type: ``ExpressionType``.
    """

    topic: TopicName
    expression: Annotated[str, msgspec.Meta(max_length=16_384)] = "*"
    expression_type: Annotated[str, msgspec.Meta(max_length=16)] = ExpressionType.TAG.value


class ConsumerData(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A consumer's part of a heartbeat.

    Attributes:
        group: Consumer group, 1 to 255 characters.
        message_model: ``MessageModel``.
        consume_from_where: ``ConsumeFromWhere``; for administrators, the client itself acts on it.
        subscriptions: The same for all members of a group.
        delivery: ``DeliveryMode``, that of the group.
        divides_by_number: It divides queues by their numbers alone, as clients of RocketMQ do; then
            all members of its group have to.
    """

    group: GroupName
    message_model: Annotated[str, msgspec.Meta(max_length=16)]
    consume_from_where: Annotated[str, msgspec.Meta(max_length=16)]
    subscriptions: Annotated[list[Subscription], msgspec.Meta(max_length=MAX_SUBSCRIPTIONS)]
    delivery: Annotated[str, msgspec.Meta(max_length=16)] = "queue"
    divides_by_number: bool = False


class TopicConsumption(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Metrics of a consumer in a topic; rates are of the last half minute.

    Attributes:
        group: Consumer group.
        topic: Physical topic.
        ok_per_s: Messages that listeners have done, a second.
        failed_per_s: Messages whose listener failed, a second.
        failed_last_hour: How many these were in the last hour.
        handling_ms: Average time of a listener's call.
        pulled_per_s: Messages that came, a second.
        pull_wait_ms: Average time from a pull to its answer, of those that brought some.
        cached_messages: Pulled and not done; of a pull consumer, not polled.
        cached_bytes: About how many bytes these have, as stored.
        recent_ok: Messages that listeners have done in the last ten minutes.
        recent_failed: Messages whose listener failed in that time.
        recent_ms: How long that is: less for a consumer that was started a short while ago.
    """

    group: GroupName
    topic: TopicName
    ok_per_s: float = 0.0
    failed_per_s: float = 0.0
    failed_last_hour: int = 0
    handling_ms: float = 0.0
    pulled_per_s: float = 0.0
    pull_wait_ms: float = 0.0
    cached_messages: int = 0
    cached_bytes: int = 0
    recent_ok: int = 0
    recent_failed: int = 0
    recent_ms: int = 0


class HeartbeatRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """HEART_BEAT: state of a client: its groups and subscriptions, on every connection to a broker.

    Sent at once after a connect and after each change, and each 30 s. The client is a member of its
    groups from the first heartbeat on, and the other members are notified. Another
    ``broker_instance_id`` than before says that the broker was restarted.

    Attributes:
        client_id: Unique for a client's life.
        producer_groups: Groups that the client produces for.
        consumers: Groups that it consumes in.
        language: For the administrator's eyes.
        version: mqmesh version of the client.
        stats: Metrics of its consumers of late, for administrators.

    Errors:
        MESSAGE_ILLEGAL: A name, model or expression is wrong, or a group is named twice.
        NO_PERMISSION: A group is in another delivery mode, or a client of another namespace has
            this id.
        REQUEST_CODE_NOT_SUPPORTED: The type of expression is not served here.
        SYSTEM_BUSY: ``max_clients`` is reached.
        CONSUMER_GROUP_NOT_EXIST: A group without settings, and ``auto_create_subscription_group``
            is off.
    """

    client_id: Name
    producer_groups: Annotated[list[GroupName], msgspec.Meta(max_length=256)] = []
    consumers: Annotated[list[ConsumerData], msgspec.Meta(max_length=256)] = []
    language: Annotated[str, msgspec.Meta(max_length=32)] = "PYTHON"
    version: Annotated[str, msgspec.Meta(max_length=32)] = ""
    stats: Annotated[list[TopicConsumption], msgspec.Meta(max_length=MAX_SUBSCRIPTIONS)] = []


class Membership(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Membership of a client in a consumer group, as a broker sees it.

    Attributes:
        group: Consumer group.
        joined: Generation that the client's coming made; another one than before, from the same
            ``broker_instance_id``, means that it was removed meanwhile, and replaced.
        generation: Of the group now.
    """

    group: GroupName
    joined: int
    generation: int


class HeartbeatResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to HEART_BEAT.

    Attributes:
        broker_instance_id: Changes when the broker was restarted.
        memberships: One for each of the client's consumer groups.
        warnings: Warnings for the user of the client, a sentence each.
    """

    broker_instance_id: int = 0
    memberships: Annotated[list[Membership], msgspec.Meta(max_length=256)] = []
    warnings: Annotated[list[str], msgspec.Meta(max_length=256)] = []


class UnregisterClientRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UNREGISTER_CLIENT: a client leaves all its groups, without the grace of a broken connection;
    usually oneway. Leaving twice is no error; nothing happens if its heartbeats come by another
    connection, or by a user of another namespace.

    Attributes:
        client_id: The client, as in its heartbeats.
    """

    client_id: Name


class ConsumerListRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_CONSUMER_LIST_BY_GROUP: members of a group, from which each computes the same assignment
    of queues.

    Attributes:
        group: Consumer group.

    Errors:
        CONSUMER_GROUP_NOT_EXIST: No member is connected here, or the master was elected within the
            last 1.5 s without copies that know the members. That is not "you are alone": each
            member keeps its queues.
        MESSAGE_ILLEGAL: The name of the group.
    """

    group: GroupName


class ConsumerList(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Members of a group.

    Attributes:
        client_ids: Sorted.
        generation: Grows whenever the members change.
        owners: Owners of this broker's queues at the first request of the generation, by topic:
            for each queue id the place of the owner in ``client_ids``, -1 for a queue without an
            owner. It is the same for all requests of a generation, so that all members divide
            alike. Empty where a member divides by numbers alone.
    """

    client_ids: list[str]
    generation: int = 0
    owners: dict[str, list[int]] = {}


class ConsumerIdsChanged(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """NOTIFY_CONSUMER_IDS_CHANGED: from a broker to each member of a group, oneway: members came or
    went, ask for the list again. May be lost; members also ask each 20 s.

    Attributes:
        group: Consumer group.
        generation: Its generation now.
    """

    group: GroupName
    generation: int = 0


class LockEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A queue to lock, or what became of that.

    Attributes:
        topic: Physical topic.
        queue_id: Message queue.
        token: In a request: token of the lock that the member believes it holds, 0 for none. In an
            answer: above 0 the token of the lock, which stays the same as long as no other member
            had the queue; else ``LOCK_HELD_BY_OTHER`` or ``LOCK_PENDING``.
    """

    topic: TopicName
    queue_id: QueueId
    token: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] = 0


class LockBatchRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """LOCK_BATCH_MQ: locks queues for one member, as ordered consumption needs it, or renews its
    locks.

    A lock is renewed each 20 s, or three times in its lease. It ends when it is given back, when it
    is not renewed for ``rebalance_lock_max_live_time_ms``, or ``rebalance_lock_lost_grace_ms``
    (3 s) after the connection broke that it was renewed by. A member begins no message without a
    connection to the broker, nor after the lease.
    It presents the token that it has; another one in the answer says that the queue was with
    another member meanwhile, and what it holds of the queue is void.

    Where copies confirm the log, an answer comes once a record behind the request is confirmed, and
    ``lease_ms`` is those 3 s. A new master knows the locks: holders go on with their tokens, and
    only queues of those who have not come back wait for 3 s from when it serves.

    Elsewhere a broker grants nothing for the same 3 s after its start: former holders present their
    tokens, and the newest token gets the queue, as a new lock. After an election members without a
    token wait ``ha.lease_ttl_ms`` (3 s) more.

    Attributes:
        group: Consumer group.
        client_id: The member.
        queues: Which.

    Errors:
        MESSAGE_ILLEGAL: The name of the group.
        STALE_GENERATION: No member here.
        SYSTEM_BUSY: ``max_consumer_offsets`` is reached, or ``max_sync_flush_waits`` requests wait.
        NOT_MASTER: Another replica may lead by now.
        SERVICE_NOT_AVAILABLE: Too few replicas are there to confirm a lock, or it took its lease.
    """

    group: GroupName
    client_id: Name
    queues: Annotated[list[LockEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]


class LockBatchResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to LOCK_BATCH_MQ.

    Attributes:
        lease_ms: The locks end so long after the request, unless it is repeated.
        queues: Queues of the request, in the same order.
    """

    lease_ms: int
    queues: Annotated[list[LockEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]


class UnlockBatchRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UNLOCK_BATCH_MQ: ends a member's locks of queues and its claims to them, after its last
    commit; answered with an empty header. Doing so twice is no error.

    Attributes:
        group: Consumer group.
        client_id: The member.
        queues: Which; their tokens do not matter.

    Errors:
        MESSAGE_ILLEGAL: The name of the group.
    """

    group: GroupName
    client_id: Name
    queues: Annotated[list[LockEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]
