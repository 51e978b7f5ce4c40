"""Configurations for FastStream of a broker, its subscribers and its publishers."""

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

from mqmesh.sdk.app.message_maker import SendFields
from mqmesh.sdk.app.subscriptions import Errors
from mqmesh.sdk.consumer.consumer_options import PushConsumerKeywords
from mqmesh.sdk.consumer.fetching.message_selector import Wanted
from mqmesh.sdk.faststream.group_consumers import GroupConsumers
from mqmesh.sdk.faststream.message import decode, decode_batch, parse, parse_batch

Payloads = list[tuple[dict[str, Any], str]]


@dataclass(kw_only=True)
class MQMeshBrokerConfig(BrokerConfig):
    """Configuration of a broker, or of a router.

    Attributes:
        consumers: The broker's; a router has none.
    """

    consumers: GroupConsumers | None = None


@dataclass(kw_only=True)
class SubscriberSettings(SubscriberUsecaseConfig):
    """Configuration of a subscriber.

    Attributes:
        topic: Without the routers' prefixes.
        group: Consumer group.
        expression: Filter of messages.
        dead_letter_on: Errors that make a dead letter at once.
        batch: Its function gets lists.
        exactly_once: Messages that the function publishes are stored with the progress of the
            group.
        options: Of the group's consumer.
    """

    topic: str
    group: str
    expression: Wanted
    dead_letter_on: Errors
    batch: bool
    exactly_once: bool
    options: PushConsumerKeywords
    parser: Callable[[Any], Awaitable[Any]] = field(init=False)
    decoder: Callable[[Any], Awaitable[Any]] = field(init=False)

    def __post_init__(self) -> None:
        """Chooses how messages are read."""
        self.parser, self.decoder = (parse_batch, decode_batch) if self.batch else (parse, decode)

    @property
    def ack_policy(self) -> AckPolicy:
        """Policy of the subscriber, else of the broker, else redelivery of failed messages."""
        for policy in self._ack_policy, self._outer_config.ack_policy:
            if policy is not EMPTY:
                return policy
        return AckPolicy.NACK_ON_ERROR


@dataclass(kw_only=True)
class SubscriberTitles(SubscriberSpecificationConfig):
    """Title and payload of a subscriber in AsyncAPI's document."""

    topic: str
    batch: bool


@dataclass(kw_only=True)
class PublisherSettings(PublisherUsecaseConfig):
    """Configuration of a publisher.

    Attributes:
        topic: Without the routers' prefixes.
        batch: It sends lists, each as one batch.
        headers: Properties of all its messages.
        fields: Their other fields, unless a call says otherwise.
    """

    topic: str
    batch: bool
    headers: dict[str, str]
    fields: SendFields


@dataclass(kw_only=True)
class PublisherTitles(PublisherSpecificationConfig):
    """Title and payload of a publisher in AsyncAPI's document."""

    topic: str
    batch: bool


def message_payloads(payloads: Payloads, *, batch: bool) -> Payloads:
    """Return the payloads of messages for AsyncAPI; functions with ``batch`` have lists of them.

    Args:
        payloads: Types that each function takes or returns, and its name.
        batch: The functions have lists.
    """
    return [(_item_of(payload) if batch else payload, name) for payload, name in payloads]


def _item_of(payload: dict[str, Any]) -> dict[str, Any]:
    if "items" not in payload:
        return payload
    kept = {key: payload[key] for key in ("title", "$defs") if key in payload}
    return {**payload["items"], **kept}
