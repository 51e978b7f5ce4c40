"""Structs of administration of consumer groups: settings, members, progress, offsets."""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.message import check_group, is_system_topic
from mqmesh.protocol.delivery import MAX_INVISIBLE_MS, MIN_INVISIBLE_MS
from mqmesh.protocol.membership import ConsumerData, TopicConsumption
from mqmesh.protocol.names import DeadLetterName, GroupName, TopicName
from mqmesh.protocol.pulling import MAX_OFFSETS_PER_REQUEST, Offset, QueueId, QueueOffsetEntry
from mqmesh.protocol.route import Name
from mqmesh.units import MAX_OFFSET, MAX_TIMESTAMP_MS

MAX_GROUPS_PER_ANSWER: Final = 256
MAX_QUEUES_PER_RESET: Final = 256
MAX_QUEUES_PER_STATS: Final = 128
"""Queues in one answer about a group's progress: each may cost a read from the log."""
MAX_CLIENTS_PER_ANSWER: Final = 100

LOOK_GROUP_PREFIX: Final = "mqmesh-consume-"
"""Name prefix of groups that only look on (`mqmesh consume`): brokers keep nothing of them."""
TOOL_GROUPS: Final = frozenset({"mqmesh-query"})
"""Groups of clients that ask for single messages: brokers keep nothing of them, either."""
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
BY_CONSUMER: Final = -1

RetryDelaysText = Annotated[str, msgspec.Meta(max_length=1_024)]
WallClockMs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIMESTAMP_MS)]
MessagesPerS = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class GroupConfig(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Settings of a consumer group; RocketMQ's ``SubscriptionGroupConfig``.

    Attributes:
        group: Name.
        consume_enable: Members may pull.
        consume_broadcast_enable: Members may pull with BROADCASTING.
        retry_max_times: A message that was sent back as often becomes a dead letter, regardless of
            the consumer's setting; -1 leaves it to the consumer. Ordered consumers do not send
            back, and go by their own ``max_reconsume_times``.
        notify_consumer_ids_changed_enable: Members are notified at once when others come and go.
        retry_delays: Delays of the retries, ``10s 30s 1m`` or ``exp 1s x2 max 2h jitter 20%``;
            empty for the delay levels of the broker. See ``policies.parse_retry_delays``.
        dead_letter: ``keep`` in ``%DLQ%<group>``, ``drop``, or the topic that dead letters go to.
        paused_until: Members get nothing before, wall clock, ms; 0 for not paused.
        paused_topics: The same by topic, beside that; up to 256.
        max_messages_per_s: Messages that one broker hands out to the group in a second; 0 for no
            limit.
        delivery: ``DeliveryMode``; changed only while the group has no members.
        invisible_ms: Length of a lease, where a receive names none, 1,000 to 43,200,000.
        max_unsettled: Messages of a queue that are handed out or wait to be handed out again, 1 to
            1,000,000.
        lost_grace_ms: So long a member whose connection broke keeps its leases, 0 to 43,200,000.
        priority_fairness: Of topics with priorities: each n-th receive begins with the queue
            whose first message is oldest; 0 for never, then higher priorities always come first.
    """

    group: GroupName
    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_max_times: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] = BY_CONSUMER
    notify_consumer_ids_changed_enable: bool = True
    retry_delays: RetryDelaysText = ""
    dead_letter: DeadLetterName = "keep"
    paused_until: WallClockMs = 0
    paused_topics: dict[TopicName, WallClockMs] = {}
    max_messages_per_s: MessagesPerS = 0
    delivery: Annotated[str, msgspec.Meta(max_length=16)] = "queue"
    invisible_ms: Annotated[int, msgspec.Meta(ge=MIN_INVISIBLE_MS, le=MAX_INVISIBLE_MS)] = 60_000
    max_unsettled: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    lost_grace_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_INVISIBLE_MS)] = 10_000
    priority_fairness: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0


class UpdateGroupRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: creates or changes the settings of a consumer group;
    answered with those in force, once they are on disk.

    A broker with ``auto_create_subscription_group`` makes default settings at the first heartbeat
    or commit of a group.

    Attributes:
        config: Wanted.
        must_exist: Refuse to create.
        must_be_new: Refuse to change.

    Errors:
        MESSAGE_ILLEGAL: The name, or ``must_be_new`` and it exists.
        CONSUMER_GROUP_NOT_EXIST: ``must_exist``, and it does not.
        SYSTEM_BUSY: ``max_subscription_groups`` is reached.
    """

    config: GroupConfig
    must_exist: bool = False
    must_be_new: bool = False


class GetGroupsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG: one group, or all that have settings, offsets or members
    here, in pages by name. An unknown one is an empty list.

    Attributes:
        group: Only this one; empty for all.
        after: For all: those whose names come after this one.
        namespace: For all: those of this one; "" for all that the user may see.

    Errors:
        MESSAGE_ILLEGAL: The name of the group.
    """

    group: GroupName = ""
    after: GroupName = ""
    namespace: Name = ""


class GroupFailures(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Deliveries and failures of a group's members in the last ten minutes, as of their last
    heartbeats.

    Attributes:
        deliveries: Messages that came to listeners, each time.
        failed: Of them, those whose listener failed.
        failed_per_s: The same, a second.
    """

    deliveries: int = 0
    failed: int = 0
    failed_per_s: float = 0.0


class GroupSummary(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A group on one broker, in a line.

    Attributes:
        config: Settings; the defaults if none were made.
        is_configured: The broker has settings of it.
        members: Connected consumers.
        message_model: ``MessageModel`` of its members, "" if there are none.
        topics: Topics that it has offsets in or that members subscribe to, without those of
            its own retries and dead letters.
        lag: Messages that are not done: those between its offsets and the ends of the queues, and
            those of ``retrying``; 0 if it broadcasts, for its members keep their offsets by
            themselves.
        consume_tps: Messages handed out a second of late.
        retrying: Messages that failed and are not done: they wait for their retry, or are due.
        dead: Messages in its dead letter topic.
        differing: Members that subscribe differently from the group.
        failures: Deliveries and failures of its members in the last ten minutes.
    """

    config: GroupConfig
    is_configured: bool = True
    members: int = 0
    message_model: str = ""
    topics: list[TopicName] = []
    lag: int = 0
    consume_tps: float = 0.0
    retrying: int = 0
    dead: int = 0
    differing: int = 0
    failures: GroupFailures = GroupFailures()


class GroupSummaries(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Groups by name.

    Attributes:
        groups: At most 256.
        more: Ask again with the last one's name as ``after``.
    """

    groups: Annotated[list[GroupSummary], msgspec.Meta(max_length=MAX_GROUPS_PER_ANSWER)]
    more: bool = False


class DeleteGroupRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """DELETE_SUBSCRIPTIONGROUP: forgets the settings and all offsets of a group; answered with an
    empty header once that is on disk. Deleting an unknown group is no error.

    Attributes:
        group: Consumer group.
        remove_topics: Delete its retry and its dead letter topic, too, with their messages.

    Errors:
        MESSAGE_ILLEGAL: The name, or the group has members.
    """

    group: GroupName
    remove_topics: bool = False


class ConsumerConnectionsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_CONSUMER_CONNECTION_LIST: members of a consumer group, their subscriptions, and how these
    differ from the group's.

    Attributes:
        group: Consumer group.

    Errors:
        CONSUMER_GROUP_NOT_EXIST: No member is connected here.
        MESSAGE_ILLEGAL: The name of the group.
    """

    group: GroupName


class ConsumerConnection(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One member of a consumer group.

    Attributes:
        client_id: Member.
        language: As its client says.
        version: mqmesh version of its client.
        connected: False while its connection is broken and its time of grace not over.
        silent_ms: Since its last heartbeat.
        data: Its part of the last heartbeat for the group.
        difference: How it subscribes differently from the group; empty if it does not.
        stats: Its metrics in the group of late, as of its last heartbeat.
    """

    client_id: str
    language: str
    version: str
    connected: bool
    silent_ms: int
    data: ConsumerData
    difference: str = ""
    stats: list[TopicConsumption] = []


class ConsumerConnections(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Members of a consumer group, by client id.

    Attributes:
        members: Those that this broker knows.
        generation: Of the group.
    """

    members: list[ConsumerConnection]
    generation: int = 0


class ProducerConnectionsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_PRODUCER_CONNECTION_LIST: members of a producer group; none is no error.

    Attributes:
        group: Producer group.

    Errors:
        MESSAGE_ILLEGAL: The name of the group.
    """

    group: GroupName


class ProducerConnection(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One member of a producer group.

    Attributes:
        client_id: Member.
        language: As its client says.
        version: mqmesh version of its client.
        connected: As for ``ConsumerConnection``.
        silent_ms: As for ``ConsumerConnection``.
    """

    client_id: str
    language: str
    version: str
    connected: bool
    silent_ms: int


class ProducerConnections(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Members of a producer group, by client id.

    Attributes:
        members: Those that this broker knows.
    """

    members: list[ProducerConnection]


class AllClientsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ALL_CLIENTS: clients that are registered at a broker, in pages by client id.

    Attributes:
        after_client_id: Go on behind this one: the last of the former answer.
        namespace: Only clients of this one; "" for all that the user may see.
    """

    after_client_id: Name = ""
    namespace: Name = ""


class ClientInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One client of a broker.

    Attributes:
        client_id: Client id.
        language: As it says.
        version: mqmesh version of it.
        connected: As for ``ConsumerConnection``.
        silent_ms: As for ``ConsumerConnection``.
        producer_groups: Producer groups that it sends for.
        consumer_groups: Consumer groups that it consumes for.
    """

    client_id: str
    language: str
    version: str
    connected: bool
    silent_ms: int
    producer_groups: list[GroupName]
    consumer_groups: list[GroupName]


class AllClients(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Clients of a broker, by client id.

    Attributes:
        clients: At most 100.
        more: Ask again behind the last one.
    """

    clients: Annotated[list[ClientInfo], msgspec.Meta(max_length=MAX_CLIENTS_PER_ANSWER)]
    more: bool


class ConsumeStatsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_CONSUME_STATS: progress of a group in each queue, in pages.

    Of the topics that it has offsets in or that its members subscribe to, and of its retry topic;
    not of its dead letters, nor of topics that hold delayed messages and transactions.

    Attributes:
        group: Consumer group.
        topic: Only this one; empty for all topics of the group.
        after_topic: Go on behind this topic and queue: the last ones of the former answer.
        after_queue_id: Within ``after_topic``.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        MESSAGE_ILLEGAL: The name of the group.
    """

    group: GroupName
    topic: TopicName = ""
    after_topic: TopicName = ""
    after_queue_id: QueueId = 0


class WindowProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Progress of a group that acknowledges each message, in one queue.

    Attributes:
        ready: Messages that were never handed out.
        in_flight: Messages that members hold.
        waiting: Messages that failed, or whose lease ended: they come again.
        redelivered: Messages of these two that were handed out more than once.
        oldest_held_ms: So long ago the oldest of those was handed out that members hold.
    """

    ready: int
    in_flight: int = 0
    waiting: int = 0
    redelivered: int = 0
    oldest_held_ms: int = 0


class QueueProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Progress of a group in a queue.

    Attributes:
        topic: Physical topic.
        queue_id: From 0.
        min_queue_offset: First message of the queue.
        max_queue_offset: Behind the last one.
        consumer_offset: The next one to be done, as committed; -1 for never.
        pull_offset: Behind the last one handed out since the broker was started, -1 for none.
        oldest_timestamp: Store time of the message at ``consumer_offset``, 0 if none waits.
        client_id: Member that has the queue, as far as the broker knows; empty for none.
        window: Of a group that acknowledges each message; None for others.
    """

    topic: TopicName
    queue_id: int
    min_queue_offset: int
    max_queue_offset: int
    consumer_offset: int
    pull_offset: int = -1
    oldest_timestamp: int = 0
    client_id: str = ""
    window: WindowProgress | None = None


class ConsumeStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Progress of a group, by topic and queue.

    Attributes:
        queues: At most 128.
        more: Ask again behind the last one.
        consume_tps: Messages handed out to the group a second of late, all topics together.
        now_ms: The broker's wall clock, which timestamps are to be compared with.
        waiting_retries: Messages of the group that failed and wait for their retry.
        waiting_since: When the oldest of them was sent back last; 0 if that is not known.
    """

    queues: Annotated[list[QueueProgress], msgspec.Meta(max_length=MAX_QUEUES_PER_STATS)]
    more: bool
    consume_tps: float
    now_ms: int
    waiting_retries: int = 0
    waiting_since: int = 0


class GroupsProgressRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_GROUPS_PROGRESS: progress of all groups, the queues of each topic together; for
    exporters.

    In pages, each ended when 64 queues were looked at. The first page makes a listing of the
    groups; the broker keeps the last four.

    Attributes:
        listing: Of the former answer; 0 for the first one.
        place: As its ``next_place``.
        after_topic: As its ``after_topic``.
        namespace: Only groups of this one, for the first page; "" for all that the user may see.
    """

    listing: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)] = 0
    place: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)] = 0
    after_topic: Name = ""
    namespace: Name = ""


class TopicProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Progress of a group in a topic: all of its queues on one broker together.

    Attributes:
        topic: Physical topic.
        max_queue_offset: Sum of where the queues end.
        consumer_offset: Sum of the committed offsets; of a group that acknowledges each message,
            how many are done, also behind one that is not.
        lag: Messages that are not done, in the retry topic those that wait for their retry, too; 0
            for a group that broadcasts, whose members keep their offsets by themselves.
        in_flight: Messages of them that were handed out, and are with a consumer.
        oldest_timestamp: Store time of the oldest message that is not done; 0 for none.
        ready_timestamp: Store time of the oldest message that was not handed out; 0 for none.
        waiting: Messages of ``lag`` that wait for their retry.
    """

    topic: TopicName
    max_queue_offset: int
    consumer_offset: int
    lag: int
    in_flight: int = 0
    oldest_timestamp: int = 0
    ready_timestamp: int = 0
    waiting: int = 0


class GroupTopics(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A group on one broker; one with many topics may come in several parts.

    Attributes:
        group: Consumer group.
        topics: Sorted; its retry topic is one of them, if it has one.
        members: Connected consumers.
        message_model: ``MessageModel`` of its members, "" if there are none.
        dead: Messages in its dead letter topic.
        dead_letters: Messages that came there since the broker was started.
        failures: Deliveries and failures of its members in the last ten minutes.
    """

    group: GroupName
    topics: list[TopicProgress]
    members: list[ConsumerConnection] = []
    message_model: str = ""
    dead: int = 0
    dead_letters: int = 0
    failures: GroupFailures = GroupFailures()


class GroupsProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Progress of some groups; a page ends when so many queues were looked at.

    Attributes:
        listing: Number of a listing of the groups that existed at its first page. If it is not the
            requested one, the broker has forgotten that one, and this is the first page of a new
            listing.
        groups: Groups of this page, in the listing's order.
        next_place: Place for the next request; -1 at the end.
        after_topic: Position within the group at that place; "" for its beginning. It is a place
            and no name, so it is not changed for clients with a namespace.
        now_ms: The broker's wall clock, to compare timestamps with.
    """

    listing: int
    groups: list[GroupTopics]
    next_place: int
    after_topic: Name
    now_ms: int


class TopicConsumersRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_TOPIC_CONSUME_BY_WHO: groups that have offsets in a topic, or members that subscribe to
    it.

    Attributes:
        topic: Physical topic.

    Errors:
        MESSAGE_ILLEGAL: The name of the topic.
    """

    topic: TopicName


class GroupNames(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Consumer groups, sorted.

    Attributes:
        groups: Names.
    """

    groups: list[GroupName]


class ResetWhere(enum.StrEnum):
    """Targets of a reset."""

    TIMESTAMP = "TIMESTAMP"
    """The first message stored at or after a time."""
    OFFSET = "OFFSET"
    """An offset of one queue."""
    FIRST = "FIRST"
    """The first message."""
    LAST = "LAST"
    """The end behind the last message: all messages that are there now are skipped."""


class ResetOffsetRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """INVOKE_BROKER_TO_RESET_OFFSET: moves a group in a topic, with members or without; answered
    once that is on disk.

    At most 256 queues a request, then ``more``. Until a running consumer has followed, its commits
    in such a queue are refused with OFFSET_ILLEGAL and its pulls answered with OFFSET_RESET. A
    broadcasting group keeps its offsets by itself: its members are notified, and nothing is stored.

    Attributes:
        group: Consumer group.
        topic: Physical topic.
        where: ``ResetWhere``.
        queue_id: Only this queue; -1 for all.
        timestamp_ms: For ``TIMESTAMP``.
        queue_offset: For ``OFFSET``, which needs a ``queue_id``.
        dry_run: Only report what would change.
        after_queue_id: Go on behind this queue: the last one of the former answer.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        OFFSET_ILLEGAL: Outside of the queue; nothing was changed.
        MESSAGE_ILLEGAL: A name, ``where``, or no such queue.
        SYSTEM_BUSY: ``max_consumer_offsets`` is reached.
    """

    group: GroupName
    topic: TopicName
    where: Annotated[str, msgspec.Meta(max_length=16)]
    queue_id: Annotated[int, msgspec.Meta(ge=-1, le=2**32 - 1)] = -1
    timestamp_ms: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    queue_offset: Offset = -1
    dry_run: bool = False
    after_queue_id: Annotated[int, msgspec.Meta(ge=-1, le=2**32 - 1)] = -1


class CloneOffsetRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CLONE_GROUP_OFFSET: lets a group go on where another one is; otherwise as
    INVOKE_BROKER_TO_RESET_OFFSET. Topics that the source has no offset in stay as they are.

    Attributes:
        source: Group to copy from.
        target: Group to copy to.
        topic: Only this one; empty for all but the source's own retries and dead letters.
        dry_run: Only report what would change.

    Errors:
        MESSAGE_ILLEGAL: A name, or both are the same.
        SYSTEM_BUSY: ``max_consumer_offsets`` is reached.
    """

    source: GroupName
    target: GroupName
    topic: TopicName = ""
    dry_run: bool = False


class OffsetChange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Effect of a reset on a queue.

    Attributes:
        topic: Physical topic.
        queue_id: From 0.
        old_offset: Committed before, -1 for never.
        new_offset: From now on.
        min_queue_offset: First message of the queue.
        max_queue_offset: Behind the last one.
    """

    topic: TopicName
    queue_id: int
    old_offset: int
    new_offset: int
    min_queue_offset: int
    max_queue_offset: int


class OffsetChanges(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Effects of a reset.

    Attributes:
        queues: All that it concerns, also those whose offset stays.
        members_notified: Connected members that were notified.
        more: Ask again behind the last queue: the rest of the topic has not changed yet.
    """

    queues: Annotated[list[OffsetChange], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]
    members_notified: int = 0
    more: bool = False


class ConsumerOffsetReset(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """RESET_CONSUMER_CLIENT_OFFSET: from a broker to each member of a group whose offsets were
    moved, oneway. The member gives up what it holds of these queues, goes on at the offsets, and
    commits them.

    Attributes:
        group: Consumer group.
        queues: Where to go on.
    """

    group: GroupName
    queues: Annotated[list[QueueOffsetEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]


def only_looks(group: str) -> bool:
    """Return True for a group that reads messages and leaves nothing behind."""
    return group in TOOL_GROUPS or group.startswith(LOOK_GROUP_PREFIX)


def check_client_group(name: str) -> str:
    """Returns the name of a group that a client wants to belong to, if it may.

    Raises:
        InvalidArgument: Not legal, or reserved.
    """
    check_group(name)
    if is_system_topic(name) or name.startswith(SYSTEM_GROUP_PREFIX):
        raise InvalidArgument(f"group {name!r} is reserved for the system")
    return name


def check_lasting_group(name: str) -> str:
    """Returns the name of a group that may leave something behind: offsets, messages sent back.

    Raises:
        InvalidArgument: Not legal, or reserved, or it only looks.
    """
    if only_looks(check_client_group(name)):
        raise InvalidArgument(
            f"group {name!r} only looks at messages and leaves nothing behind: it commits no "
            "offsets and sends nothing back"
        )
    return name
