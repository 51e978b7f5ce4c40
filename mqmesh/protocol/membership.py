"""Words between clients and brokers about who belongs to which group."""

import enum
from typing import Annotated

import msgspec

from mqmesh.protocol.pulling import ExpressionType
from mqmesh.protocol.route import Name


class MessageModel(enum.StrEnum):
    """How a consumer group shares messages."""

    CLUSTERING = "CLUSTERING"
    """One member of the group gets each message."""
    BROADCASTING = "BROADCASTING"
    """Every member gets every message."""


class ConsumeFromWhere(enum.StrEnum):
    """Where a group without committed offsets begins."""

    LAST_OFFSET = "LAST_OFFSET"
    FIRST_OFFSET = "FIRST_OFFSET"
    TIMESTAMP = "TIMESTAMP"


class Subscription(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a consumer wants of a topic."""

    topic: Name
    expression: Annotated[str, msgspec.Meta(max_length=16_384)] = "*"
    expression_type: Annotated[str, msgspec.Meta(max_length=16)] = ExpressionType.TAG.value


class ConsumerData(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A consumer's part of a heartbeat."""

    group: Name
    message_model: Annotated[str, msgspec.Meta(max_length=16)]
    consume_from_where: Annotated[str, msgspec.Meta(max_length=16)]
    subscriptions: Annotated[list[Subscription], msgspec.Meta(max_length=1_024)]


class HeartbeatRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """HEART_BEAT: each 30 s to every broker in use, and at once when it changes.

    Attributes:
        client_id: Unique for a client's life.
        producer_groups: Groups that the client produces for.
        consumers: Groups that it consumes in.
        language: For the administrator's eyes.
        version: mqmesh version of the client.
    """

    client_id: Name
    producer_groups: Annotated[list[Name], msgspec.Meta(max_length=256)] = []
    consumers: Annotated[list[ConsumerData], msgspec.Meta(max_length=256)] = []
    language: Annotated[str, msgspec.Meta(max_length=32)] = "PYTHON"
    version: Annotated[str, msgspec.Meta(max_length=32)] = ""


class Membership(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a broker sees a client's part in a consumer group.

    Attributes:
        group: Consumer group.
        joined: Generation that the client's coming made; another one than before means that
            it was removed meanwhile, and replaced.
        generation: Of the group now.
    """

    group: Name
    joined: int
    generation: int


class HeartbeatResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to HEART_BEAT.

    Attributes:
        broker_instance_id: Changes when the broker was restarted.
        memberships: One for each of the client's consumer groups.
        warnings: What the user of the client should know, a sentence each.
    """

    broker_instance_id: int = 0
    memberships: Annotated[list[Membership], msgspec.Meta(max_length=256)] = []
    warnings: Annotated[list[str], msgspec.Meta(max_length=256)] = []


class UnregisterClientRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UNREGISTER_CLIENT: a client leaves all its groups; answered with an empty header."""

    client_id: Name


class ConsumerListRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_CONSUMER_LIST_BY_GROUP, answered with ``ConsumerList``."""

    group: Name


class ConsumerList(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Members of a group.

    Attributes:
        client_ids: Sorted.
        generation: Grows whenever the members change.
    """

    client_ids: list[str]
    generation: int = 0


class ConsumerIdsChanged(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """NOTIFY_CONSUMER_IDS_CHANGED, from the broker to each member, oneway."""

    group: Name
    generation: int = 0
