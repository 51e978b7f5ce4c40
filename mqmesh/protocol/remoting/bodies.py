"""Bodies in JSON of RocketMQ's requests and answers, as fastjson reads and writes them.

Fields that the gateway does not use are left out; unknown ones are passed over. Names are Java's.
"""

from typing import Annotated, TypeVar

import msgspec

from mqmesh.errors import RemoteProtocolError

MAX_GROUPS = 256
MAX_SUBSCRIPTIONS = 1_024
MAX_QUEUES = 65_536

Text = Annotated[str, msgspec.Meta(max_length=512)]

_T = TypeVar("_T")
_encoder = msgspec.json.Encoder()


class SubscriptionData(msgspec.Struct, rename="camel", gc=False):
    """Subscription of a consumer to a topic.

    Attributes:
        topic: The topic.
        sub_string: Expression.
        expression_type: ``TAG`` or ``SQL92``.
    """

    topic: Text
    sub_string: Annotated[str, msgspec.Meta(max_length=16_384)] | None = "*"
    expression_type: Text | None = "TAG"


class CheckClientBody(msgspec.Struct, rename="camel", gc=False):
    """Body of CHECK_CLIENT_CONFIG.

    Attributes:
        subscription_data: Subscription that the client is about to make.
    """

    subscription_data: SubscriptionData


class ConsumerBody(msgspec.Struct, rename="camel", gc=False):
    """A consumer's part of a heartbeat.

    Attributes:
        group_name: Consumer group.
        message_model: ``CLUSTERING`` or ``BROADCASTING``.
        consume_from_where: Where it begins, with the prefix ``CONSUME_FROM_``.
        subscription_data_set: Its subscriptions.
    """

    group_name: Text
    message_model: Text = "CLUSTERING"
    consume_from_where: Text = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: Annotated[
        list[SubscriptionData], msgspec.Meta(max_length=MAX_SUBSCRIPTIONS)
    ] = []


class ProducerData(msgspec.Struct, rename="camel", gc=False):
    """A producer's part of a heartbeat.

    Attributes:
        group_name: Producer group.
    """

    group_name: Text


class HeartbeatData(msgspec.Struct, gc=False):
    """Body of HEART_BEAT.

    Attributes:
        client_id: The client.
        producers: Groups that it produces for.
        consumers: Groups that it consumes in.
    """

    client_id: Text = msgspec.field(name="clientID")
    producers: Annotated[list[ProducerData], msgspec.Meta(max_length=MAX_GROUPS)] = msgspec.field(
        name="producerDataSet", default_factory=list
    )
    consumers: Annotated[list[ConsumerBody], msgspec.Meta(max_length=MAX_GROUPS)] = msgspec.field(
        name="consumerDataSet", default_factory=list
    )


class QueueName(msgspec.Struct, rename="camel", frozen=True, gc=False):
    """A message queue.

    Attributes:
        topic: Topic.
        broker_name: Broker group.
        queue_id: Number of the queue.
    """

    topic: Text
    broker_name: Text
    queue_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class LockBody(msgspec.Struct, rename="camel", gc=False):
    """Body of LOCK_BATCH_MQ and UNLOCK_BATCH_MQ.

    Attributes:
        consumer_group: Group.
        client_id: GatewayMember.
        mq_set: Queues.
    """

    consumer_group: Text
    client_id: Text
    mq_set: Annotated[list[QueueName], msgspec.Meta(max_length=MAX_QUEUES)] = []


class LockedBody(msgspec.Struct, gc=False):
    """Body of the answer to LOCK_BATCH_MQ.

    Attributes:
        locked: Queues that the member has.
    """

    locked: list[QueueName] = msgspec.field(name="lockOKMQSet")


class ConsumerIds(msgspec.Struct, rename="camel", gc=False):
    """Body of the answer to GET_CONSUMER_LIST_BY_GROUP.

    Attributes:
        consumer_id_list: GatewayMembers of the group.
    """

    consumer_id_list: list[str]


class RouteQueue(msgspec.Struct, rename="camel", gc=False):
    """A topic on one broker group.

    Attributes:
        broker_name: Broker group.
        read_queue_nums: Queues for consumers.
        write_queue_nums: Queues for producers.
        perm: Bits: 4 read, 2 write.
        topic_sys_flag: 0.
    """

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_sys_flag: int = 0


class RouteBroker(msgspec.Struct, rename="camel", gc=False):
    """A broker group.

    Attributes:
        cluster: Its cluster.
        broker_name: Its name.
        broker_addrs: Addresses by broker id; the gateway has one, of the id 0.
        enable_acting_master: False.
    """

    cluster: str
    broker_name: str
    broker_addrs: dict[int, str]
    enable_acting_master: bool = False


class RouteBody(msgspec.Struct, rename="camel", gc=False):
    """Body of the answer to GET_ROUTEINFO_BY_TOPIC.

    Attributes:
        queue_datas: The topic on each broker group.
        broker_datas: The broker groups.
        filter_server_table: Empty.
        order_topic_conf: For ordered topics: ``broker:queues`` of each group, joined by ``;``.
    """

    queue_datas: list[RouteQueue]
    broker_datas: list[RouteBroker]
    filter_server_table: dict[str, list[str]] = {}
    order_topic_conf: str | msgspec.UnsetType = msgspec.UNSET


def decode_body(kind: type[_T], body: bytes) -> _T:
    """Read a body.

    Raises:
        RemoteProtocolError: It is none of this kind.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"a body that is no {kind.__name__}: {error}") from error


def encode_body(body: object) -> bytes:
    """Return a body in JSON."""
    return _encoder.encode(body)
