"""What FastStream keeps of a broker, its subscribers and its publishers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from faststream import AckPolicy
from faststream._internal.configs import (
    BrokerConfig,
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
)
from faststream._internal.constants import EMPTY

from mqmesh.sdk.app.message_maker import OwnFields
from mqmesh.sdk.app.subscriptions import Errors
from mqmesh.sdk.consumer.consumer_options import PushConsumerKeywords
from mqmesh.sdk.consumer.fetching.message_selector import Wanted
from mqmesh.sdk.faststream.group_consumers import GroupConsumers
from mqmesh.sdk.faststream.message import decode, parse


@dataclass(kw_only=True)
class MQMeshBrokerConfig(BrokerConfig):
    """Of a broker, or of a router.

    Attributes:
        consumers: The broker's; a router has none.
    """

    consumers: GroupConsumers | None = None


@dataclass(kw_only=True)
class SubscriberSettings(SubscriberUsecaseConfig):
    """Of a subscriber.

    Attributes:
        topic: Without the routers' prefixes.
        group: Consumer group.
        expression: Which messages.
        dead_letter_on: Errors that make a dead letter at once.
        options: Of the group's consumer.
    """

    topic: str
    group: str
    expression: Wanted
    dead_letter_on: Errors
    options: PushConsumerKeywords
    parser: Callable[[Any], Awaitable[Any]] = field(default=parse)
    decoder: Callable[[Any], Awaitable[Any]] = field(default=decode)

    @property
    def ack_policy(self) -> AckPolicy:
        """Its own, else the broker's, else: what fails comes again."""
        for policy in self._ack_policy, self._outer_config.ack_policy:
            if policy is not EMPTY:
                return policy
        return AckPolicy.NACK_ON_ERROR


@dataclass(kw_only=True)
class SubscriberTitles(SubscriberSpecificationConfig):
    """Of a subscriber in AsyncAPI's document."""

    topic: str


@dataclass(kw_only=True)
class PublisherSettings(PublisherUsecaseConfig):
    """Of a publisher.

    Attributes:
        topic: Without the routers' prefixes.
        headers: Properties of all its messages.
        fields: What else they have, unless a call says otherwise.
    """

    topic: str
    headers: dict[str, str]
    fields: OwnFields


@dataclass(kw_only=True)
class PublisherTitles(PublisherSpecificationConfig):
    """Of a publisher in AsyncAPI's document."""

    topic: str
