"""Common base of a broker and a router of FastStream: subscribers and publishers."""

from collections.abc import Sequence
from typing import Any, Final, TypedDict, Unpack, cast

from fast_depends.dependencies import Dependant
from faststream import AckPolicy
from faststream._internal.broker.registrator import Registrator
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.parser import CodecProto
from faststream._internal.types import CustomCallable

from mqmesh.errors import InvalidArgument
from mqmesh.message import check_consumer_group, check_topic
from mqmesh.sdk.app.message_maker import SendFields
from mqmesh.sdk.app.subscriptions import Errors, check_options, in_order
from mqmesh.sdk.client.options import make_options
from mqmesh.sdk.consumer.consumer_options import (
    PullConsumerKeywords,
    PullConsumerOptions,
    PushConsumerKeywords,
)
from mqmesh.sdk.consumer.fetching.message_selector import Wanted, as_selector
from mqmesh.sdk.faststream.config import (
    MQMeshBrokerConfig,
    PublisherSettings,
    PublisherTitles,
    SubscriberSettings,
    SubscriberTitles,
)
from mqmesh.sdk.faststream.message import Delivery
from mqmesh.sdk.faststream.publisher import MQMeshPublisher, PublisherPage
from mqmesh.sdk.faststream.subscriber import MQMeshSubscriber, SubscriberPage


class Titles(TypedDict, total=False):
    """Title of an endpoint in AsyncAPI's document."""

    title: str | None
    description: str | None
    include_in_schema: bool


class SubscriberKeywords(PushConsumerKeywords, PullConsumerKeywords, Titles, total=False):
    """Options of a group's consumer, and of FastStream's subscribers.

    Those of ``PullConsumer`` alone are for subscribers without a function.
    """

    ack_policy: AckPolicy
    no_reply: bool
    dependencies: Sequence[Dependant]
    parser: CustomCallable | None
    decoder: CustomCallable | None
    codec: CodecProto | None
    persistent: bool


class PublisherKeywords(SendFields, Titles, total=False):
    """Fields of a publisher's messages, and options of FastStream's publishers."""

    schema: Any
    persistent: bool


_BATCH_MAX_SIZE: Final = 32
_TITLES = Titles.__optional_keys__
_OWN = (
    SubscriberKeywords.__optional_keys__
    - PushConsumerKeywords.__optional_keys__
    - PullConsumerKeywords.__optional_keys__
)
_FIELDS = SendFields.__optional_keys__
_ONLY_PULL = PullConsumerKeywords.__optional_keys__ - PushConsumerKeywords.__optional_keys__


class MQMeshRegistrator(Registrator[Delivery, MQMeshBrokerConfig]):
    """Registry of subscribers and publishers."""

    def subscriber(  # type: ignore[override]
        self,
        topic: str,
        *,
        group: str,
        expression: Wanted = "*",
        dead_letter_on: Errors = (),
        batch: bool = False,
        exactly_once: bool = False,
        **options: Unpack[SubscriberKeywords],
    ) -> MQMeshSubscriber:
        """Registers a function as handler of a topic's messages; without one, see ``get_one``.

        Args:
            topic: Topic; it need not exist yet.
            group: Consumer group. All of its subscribers share one consumer.
            expression: As for ``PushConsumer.subscribe``: tags, SQL, a filter in Python.
            dead_letter_on: Errors that make a dead letter at once; others are retried. A body
                that the function's types refuse is one always.
            batch: The function gets a list of messages that wait in a queue, up to
                ``consume_message_batch_max_size`` (32), which succeed or fail together.
                It answers no requests. All subscribers of a group get lists, or none does.
            exactly_once: Messages that the function publishes while it works, and its result, are
                stored together with the progress of the group: both or neither. They go to topics
                of the broker group that was consumed from; replies to requests go at once. The
                group consumes in order (``consume_orderly``), or one by one (``delivery``).
            options: Of the group's consumer, the same for all topics of a group
                (``consume_thread_count``, ``consume_orderly`` …); and FastStream's ``ack_policy``,
                ``no_reply``, ``dependencies``, ``parser``, ``decoder``, ``codec``, ``persistent``,
                ``title``, ``description`` and ``include_in_schema``. By default failed messages
                are redelivered: ``AckPolicy.NACK_ON_ERROR``.

        Raises:
            InvalidArgument: A name, the expression or an option is out of bounds.
        """
        outer = cast(MQMeshBrokerConfig, self.config)
        own: dict[str, Any] = {name: value for name, value in options.items() if name in _OWN}
        consumer = {name: value for name, value in options.items() if name not in _OWN}
        if exactly_once:
            consumer = dict(in_order(cast(PushConsumerKeywords, consumer)))
        if batch:
            consumer.setdefault("consume_message_batch_max_size", _BATCH_MAX_SIZE)
        # A router's prefixes may still grow: the whole name is checked once more at the start.
        check_topic(outer.prefix + topic)
        check_consumer_group(group)
        as_selector(expression)
        _check_options(consumer, batch=batch)
        calls = CallsCollection[Delivery]()
        titles = SubscriberTitles(topic=topic, batch=batch, **_titles(own))
        settings = SubscriberSettings(
            topic=topic,
            group=group,
            expression=expression,
            dead_letter_on=dead_letter_on,
            batch=batch,
            exactly_once=exactly_once,
            options=cast(PushConsumerKeywords, consumer),
            no_reply=own.get("no_reply", False),
            _outer_config=outer,
            _ack_policy=own.get("ack_policy", EMPTY),
        )
        made = MQMeshSubscriber(settings, SubscriberPage(outer, titles, calls), calls)
        super().subscriber(made, persistent=own.get("persistent", True))
        return made.add_call(
            parser_=own.get("parser") or self._parser,
            decoder_=own.get("decoder") or self._decoder,
            codec_=own.get("codec"),
            dependencies_=own.get("dependencies", ()),
        )

    def publisher(  # type: ignore[override]
        self,
        topic: str,
        *,
        headers: dict[str, str] | None = None,
        batch: bool = False,
        **options: Unpack[PublisherKeywords],
    ) -> MQMeshPublisher:
        """Sends to a topic: values, or results of a handler that it decorates.

        Args:
            topic: Topic.
            headers: Properties of all its messages.
            batch: A list that a handler returns is sent as one batch, a message for each item; of
                an empty one nothing is sent.
            options: ``tag``, ``keys``, ``sharding_key``, ``delay_level`` … of all its messages;
                and FastStream's ``schema``, ``persistent``, ``title``, ``description`` and
                ``include_in_schema``.

        Raises:
            InvalidArgument: The topic's name is illegal, or an option is unknown.
        """
        outer = cast(MQMeshBrokerConfig, self.config)
        check_topic(outer.prefix + topic)
        if unknown := options.keys() - PublisherKeywords.__optional_keys__:
            raise InvalidArgument(f"unknown option of a publisher: {', '.join(sorted(unknown))}")
        fields = {name: value for name, value in options.items() if name in _FIELDS}
        settings = PublisherSettings(
            topic=topic,
            batch=batch,
            headers=headers or {},
            fields=cast(SendFields, fields),
            _outer_config=outer,
        )
        titles = PublisherTitles(
            topic=topic, batch=batch, schema_=options.get("schema"), **_titles(dict(options))
        )
        made = MQMeshPublisher(settings, PublisherPage(outer, titles))
        super().publisher(made, persistent=options.get("persistent", True))
        return made


def _check_options(options: dict[str, Any], *, batch: bool) -> None:
    # It is not known yet whether a function follows. Without one the options are a pull consumer's.
    if options.keys() & _ONLY_PULL:
        make_options(PullConsumerOptions, options, "consumer option")
    else:
        check_options(cast(PushConsumerKeywords, options), batch=batch)


def _titles(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "title_": options.get("title"),
        "description_": options.get("description"),
        "include_in_schema": options.get("include_in_schema", True),
    }
