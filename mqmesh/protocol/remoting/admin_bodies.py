"""Bodies in JSON of RocketMQ's requests of administrators, and of their answers; names are Java's.

Maps whose keys are objects are made by ``loose_json``.
"""

from typing import Annotated

import msgspec

from mqmesh.protocol.remoting.bodies import QueueName, RouteBroker, SubscriptionData, Text


class ClusterBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to GET_BROKER_CLUSTER_INFO.

    Attributes:
        broker_addr_table: Broker groups by name.
        cluster_addr_table: Names of the groups of each cluster.
    """

    broker_addr_table: dict[str, RouteBroker]
    cluster_addr_table: dict[str, list[str]]


class TopicListBody(msgspec.Struct, rename="camel", gc=False):
    """Names of topics.

    Attributes:
        topic_list: Names.
        broker_addr: Address of a broker that knows more, where the list may be one broker's.
    """

    topic_list: list[str]
    broker_addr: str | msgspec.UnsetType = msgspec.UNSET


class GroupListBody(msgspec.Struct, rename="camel", gc=False):
    """Names of consumer groups.

    Attributes:
        group_list: Names.
    """

    group_list: list[str]


class TableBody(msgspec.Struct, gc=False):
    """Names and texts.

    Attributes:
        table: By name.
    """

    table: dict[str, str]


class TopicConfigBody(msgspec.Struct, rename="camel", gc=False):
    """Settings of a topic.

    Attributes:
        topic_name: Its name.
        read_queue_nums: Queues for consumers.
        write_queue_nums: Queues for producers.
        perm: Bits: 4 read, 2 write.
        topic_filter_type: ``SINGLE_TAG``.
        topic_sys_flag: 0.
        order: It is an ordered topic.
        attributes: None.
    """

    topic_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = {}


class VersionBody(msgspec.Struct, rename="camel", gc=False):
    """Version of a table; mqmesh's tables have other ones.

    Attributes:
        counter: 1.
        state_version: 0.
        timestamp: 0.
    """

    counter: int = 1
    state_version: int = 0
    timestamp: int = 0


class TopicConfigsBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to GET_ALL_TOPIC_CONFIG.

    Attributes:
        topic_config_table: By name.
        data_version: Of the table.
    """

    topic_config_table: dict[str, TopicConfigBody]
    data_version: VersionBody = msgspec.field(default_factory=VersionBody)


class GroupConfigBody(msgspec.Struct, rename="camel", gc=False):
    """Settings of a consumer group; those that mqmesh has not are read and not kept.

    Attributes:
        group_name: Its name.
        consume_enable: Members may pull.
        consume_from_min_enable: Nothing follows from it.
        consume_broadcast_enable: Members may broadcast.
        consume_message_orderly: Clients by gRPC get messages in the order of their message groups:
            ``delivery`` is "fifo" then. Consumers in order by remoting do without.
        retry_queue_nums: 1.
        retry_max_times: Tries before a message is a dead letter.
        broker_id: 0.
        which_broker_when_consume_slowly: 1.
        notify_consumer_ids_changed_enable: Members are notified when others come and go.
    """

    group_name: Text
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: int = 1
    retry_max_times: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True


class GroupConfigListBody(msgspec.Struct, rename="camel", gc=False):
    """Body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST.

    Attributes:
        group_config_list: The groups.
    """

    group_config_list: Annotated[list[GroupConfigBody], msgspec.Meta(max_length=1_000)]


class TopicConfigListBody(msgspec.Struct, rename="camel", gc=False):
    """Body of UPDATE_AND_CREATE_TOPIC_LIST.

    Attributes:
        topic_config_list: The topics.
    """

    topic_config_list: Annotated[list[TopicConfigBody], msgspec.Meta(max_length=1_000)]


class GroupConfigsBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to GET_ALL_SUBSCRIPTIONGROUP_CONFIG.

    Attributes:
        subscription_group_table: By name.
        data_version: Of the table.
    """

    subscription_group_table: dict[str, GroupConfigBody]
    data_version: VersionBody = msgspec.field(default_factory=VersionBody)


class ConnectionBody(msgspec.Struct, rename="camel", gc=False):
    """A client at a broker.

    Attributes:
        client_id: The client.
        client_addr: Its address, as far as the gateway knows it.
        language: RocketMQ's name of its language.
        version: Number of its version.
    """

    client_id: str
    client_addr: str
    language: str
    version: int


class SubscribedBody(msgspec.Struct, rename="camel", gc=False):
    """Subscription of a group to a topic, as brokers show it.

    Attributes:
        topic: The topic.
        sub_string: Expression.
        expression_type: ``TAG`` or ``SQL92``.
        tags_set: Tags of the expression.
        code_set: Empty.
        class_filter_mode: False.
        sub_version: 0.
    """

    topic: str
    sub_string: str
    expression_type: str
    tags_set: list[str] = []
    code_set: list[int] = []
    class_filter_mode: bool = False
    sub_version: int = 0


class ConsumerConnectionBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to GET_CONSUMER_CONNECTION_LIST.

    Attributes:
        connection_set: Members.
        subscription_table: By topic.
        consume_type: ``CONSUME_PASSIVELY``.
        message_model: ``CLUSTERING`` or ``BROADCASTING``.
        consume_from_where: Where they begin.
    """

    connection_set: list[ConnectionBody]
    subscription_table: dict[str, SubscribedBody]
    consume_type: str
    message_model: str
    consume_from_where: str


class ProducerConnectionBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to GET_PRODUCER_CONNECTION_LIST.

    Attributes:
        connection_set: Members.
    """

    connection_set: list[ConnectionBody]


class ProducerBody(msgspec.Struct, rename="camel", gc=False):
    """A producer at a broker.

    Attributes:
        client_id: The client.
        remote_ip: Its address, as far as the gateway knows it.
        language: RocketMQ's name of its language.
        version: Number of its version.
        last_update_timestamp: Of its last heartbeat, ms since 1970.
    """

    client_id: str
    remote_ip: str = msgspec.field(name="remoteIP")
    language: str
    version: int
    last_update_timestamp: int


class ProducersBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to GET_ALL_PRODUCER_INFO.

    Attributes:
        data: Producers, by group.
    """

    data: dict[str, list[ProducerBody]]


class SubscriptionAnswer(msgspec.Struct, rename="camel", gc=False):
    """Answer to QUERY_SUBSCRIPTION_BY_CONSUMER.

    Attributes:
        subscription_data: Left out if no member subscribes to the topic.
        group: Consumer group.
        topic: Topic.
    """

    subscription_data: SubscribedBody | msgspec.UnsetType
    group: str
    topic: str


class TopicOffsetBody(msgspec.Struct, rename="camel", gc=False):
    """A queue of a topic.

    Attributes:
        min_offset: First message.
        max_offset: Behind the last.
        last_update_timestamp: Store time of the last message, 0 for none.
    """

    min_offset: int
    max_offset: int
    last_update_timestamp: int


class TopicStatsBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to GET_TOPIC_STATS_INFO.

    Attributes:
        offset_table: ``TopicOffsetBody`` by ``QueueName``.
        topic_put_tps: 0.
    """

    offset_table: msgspec.Raw
    topic_put_tps: float = 0.0


class OffsetBody(msgspec.Struct, rename="camel", gc=False):
    """Progress of a group in a queue.

    Attributes:
        broker_offset: End of the queue.
        consumer_offset: Next message to be done.
        pull_offset: Next message to be pulled.
        last_timestamp: Store time of the message at ``consumer_offset``; 0 for none.
    """

    broker_offset: int
    consumer_offset: int
    pull_offset: int
    last_timestamp: int


class ConsumeStatsBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to GET_CONSUME_STATS.

    Attributes:
        consume_tps: Messages a second of late.
        offset_table: ``OffsetBody`` by ``QueueName``.
    """

    consume_tps: float
    offset_table: msgspec.Raw


class ConsumeStatsListBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to GET_BROKER_CONSUME_STATS.

    Attributes:
        broker_addr: Address of the broker group.
        consume_stats_list: Of each group, its progress by topic.
        total_diff: Messages that are not done.
        total_inflight_diff: Messages of them that were handed out.
    """

    broker_addr: str
    consume_stats_list: list[dict[str, list[ConsumeStatsBody]]]
    total_diff: int
    total_inflight_diff: int


class TimeSpanBody(msgspec.Struct, rename="camel", gc=False):
    """Times of a queue and of a group in it, ms since 1970.

    Attributes:
        message_queue: Queue.
        min_time_stamp: Of its first message.
        max_time_stamp: Of its last message.
        consume_time_stamp: Of the message that is to be done next.
        delay_time: How long that one waits, in ms.
    """

    message_queue: QueueName
    min_time_stamp: int
    max_time_stamp: int
    consume_time_stamp: int
    delay_time: int


class TimeSpansBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to QUERY_CONSUME_TIME_SPAN.

    Attributes:
        consume_time_span_set: One for each queue.
    """

    consume_time_span_set: list[TimeSpanBody]


class ResetBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to INVOKE_BROKER_TO_RESET_OFFSET, and body of RESET_CONSUMER_CLIENT_OFFSET.

    Attributes:
        offset_table: Offsets by ``QueueName``.
    """

    offset_table: msgspec.Raw


class StatsItemBody(msgspec.Struct, gc=False):
    """Count of something in a period.

    Attributes:
        sum: Count.
        tps: The same, a second.
        avgpt: Average of one.
    """

    sum: int = 0
    tps: float = 0.0
    avgpt: float = 0.0


class StatsBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to VIEW_BROKER_STATS_DATA.

    Attributes:
        stats_minute: Last minute.
        stats_hour: Last hour; not counted.
        stats_day: Today.
    """

    stats_minute: StatsItemBody
    stats_hour: StatsItemBody
    stats_day: StatsItemBody


class QueueUnitBody(msgspec.Struct, rename="camel", gc=False):
    """Entry of a consume queue.

    Attributes:
        physic_offset: Offset in the log, as RocketMQ's clients see it.
        physic_size: Bytes of its batch.
        tags_code: Hash of its tag.
        eval: False.
        msg: Fault of the entry.
    """

    physic_offset: int
    physic_size: int
    tags_code: int
    eval: bool = False
    msg: str | msgspec.UnsetType = msgspec.UNSET


class QueueUnitsBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to QUERY_CONSUME_QUEUE.

    Attributes:
        queue_data: Entries.
        min_queue_index: First one of the queue.
        max_queue_index: Behind the last one.
    """

    queue_data: list[QueueUnitBody]
    min_queue_index: int
    max_queue_index: int


class ProcessQueueBody(msgspec.Struct, rename="camel", gc=False):
    """A queue of a running consumer.

    Attributes:
        commit_offset: Offset that it committed.
        cached_msg_min_offset: First message that is not done.
        cached_msg_max_offset: Last message that was pulled.
        cached_msg_count: Messages between.
        cached_msg_size_in_mib: Their size, MiB.
        last_pull_timestamp: Of the last pull, ms since 1970.
        last_consume_timestamp: Of the last message that was done.
        droped: It is given up.
        locked: It is locked.
    """

    commit_offset: int = 0
    cached_msg_min_offset: int = 0
    cached_msg_max_offset: int = 0
    cached_msg_count: int = 0
    cached_msg_size_in_mib: int = msgspec.field(name="cachedMsgSizeInMiB", default=0)
    last_pull_timestamp: int = 0
    last_consume_timestamp: int = 0
    droped: bool = False
    locked: bool = False


class ConsumeStatusBody(msgspec.Struct, gc=False):
    """Rates of a running consumer in a topic.

    Attributes:
        pull_ms: Average time of a pull.
        pull_per_s: Messages pulled a second.
        consume_ms: Average time of a listener's call.
        ok_per_s: Messages done a second.
        failed_per_s: Messages that failed a second.
        failed: Messages that failed in the last hour.
    """

    pull_ms: float = msgspec.field(name="pullRT", default=0.0)
    pull_per_s: float = msgspec.field(name="pullTPS", default=0.0)
    consume_ms: float = msgspec.field(name="consumeRT", default=0.0)
    ok_per_s: float = msgspec.field(name="consumeOKTPS", default=0.0)
    failed_per_s: float = msgspec.field(name="consumeFailedTPS", default=0.0)
    failed: int = msgspec.field(name="consumeFailedMsgs", default=0)


class RunningInfoBody(msgspec.Struct, rename="camel", gc=False):
    """Answer of a client to GET_CONSUMER_RUNNING_INFO, as far as mqmesh shows it.

    Attributes:
        properties: Its settings.
        subscription_set: Its subscriptions.
        mq_table: Its queues; keys are the JSON of a ``QueueName``.
        status_table: Rates by topic.
        jstack: Where its threads stand.
    """

    properties: dict[str, str | int | float | bool | None] = {}
    subscription_set: list[SubscriptionData] = []
    mq_table: dict[str, ProcessQueueBody] = {}
    status_table: dict[str, ConsumeStatusBody] = {}
    jstack: str | None = None


class RunningInfoAnswer(msgspec.Struct, rename="camel", gc=False):
    """Answer to an administrator's GET_CONSUMER_RUNNING_INFO.

    Attributes:
        properties: Settings of the consumer.
        subscription_set: Its subscriptions.
        mq_table: ``ProcessQueueBody`` by ``QueueName``.
        status_table: Rates by topic.
        jstack: Where its threads stand.
    """

    properties: dict[str, str]
    subscription_set: list[SubscribedBody]
    mq_table: msgspec.Raw
    status_table: dict[str, ConsumeStatusBody]
    jstack: str


class HandedBody(msgspec.Struct, rename="camel", gc=False):
    """Answer to CONSUME_MESSAGE_DIRECTLY.

    Attributes:
        consume_result: ``CR_SUCCESS``, ``CR_LATER``, ``CR_THROW_EXCEPTION``, …
        remark: Why.
        spent_time_mills: How long it took.
        order: The consumer consumes in order.
        auto_commit: True.
    """

    consume_result: str | None = None
    remark: str | None = None
    spent_time_mills: int = 0
    order: bool = False
    auto_commit: bool = True
