"""FastStream's tests without a cluster: published messages go straight to the handlers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.testing.broker import TestBroker, change_producer
from faststream._internal.types import CustomCallable
from faststream.exceptions import SubscriberNotFound

from mqmesh.filtering.predicate import fits_sql
from mqmesh.message import BatchInfo, Message, MessageQueue, StoredMessage
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.pulling import ExpressionType
from mqmesh.sdk.consumer.fetching.message_selector import Wanted, as_selector
from mqmesh.sdk.faststream.broker import MQMeshBroker
from mqmesh.sdk.faststream.message import Delivery, decode, parse
from mqmesh.sdk.faststream.publisher import MQMeshPublisher
from mqmesh.sdk.faststream.publishing import MessageEncoder, MQMeshProducer, MQMeshPublishCommand
from mqmesh.sdk.faststream.subscriber import MQMeshSubscriber
from mqmesh.sdk.producer.send_result import SendResult
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

_BROKER_NAME = "in-memory"


class TestMQMeshBroker(TestBroker[MQMeshBroker, Any], broker=MQMeshBroker):
    """Calls handlers within ``publish``, without a cluster::

        async with TestMQMeshBroker(broker) as tested:
            await tested.publish(Order(id="1"), "orders")
            bill.mock.assert_called_once_with({"id": "1"})

    Each group that wants a message gets it, by tag and SQL; filters in Python take all here.
    ``publish`` raises the errors of handlers; nothing is retried. Delays are over at once. With
    ``batch=True`` a handler gets the messages of one call as one list.

    Args:
        brokers, with_real, connect_only: As for FastStream's other test brokers.
    """

    def create_publisher_fake_subscriber(
        self, broker: MQMeshBroker, publisher: MQMeshPublisher
    ) -> tuple[MQMeshSubscriber, bool]:
        """Return a publisher's subscriber: a handler of the program, or one that only counts."""
        for one in _subscribers(self.brokers):
            if one.calls and one.topic == publisher.topic:
                return one, True
        batch = publisher.settings.batch
        made = broker.subscriber(publisher.topic, group="test", batch=batch, persistent=False)
        return made, False

    @contextmanager
    def _patch_producer(self, broker: MQMeshBroker) -> Iterator[None]:
        config = broker.config.broker_config
        encoder = MessageEncoder(config.fd_config._serializer, config.broker_codec)
        producer = ProducerInMemory(self.brokers, encoder, broker._parser, broker._decoder)
        with change_producer(config, producer):
            yield

    async def _fake_connect(self, broker: MQMeshBroker, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no broker to connect to."""


class ProducerInMemory(MQMeshProducer):
    """Producer that gives messages to handlers.

    Args:
        brokers: Whose.
        encoder, parser, decoder: As for ``MQMeshProducer``.
    """

    def __init__(
        self,
        brokers: Sequence[MQMeshBroker],
        encoder: MessageEncoder,
        parser: CustomCallable | None,
        decoder: CustomCallable | None,
    ) -> None:
        self._brokers = brokers
        self._encoder = encoder
        self.codec = encoder.codec
        self._parser = ParserComposition(parser, parse)
        self._decoder = ParserComposition(decoder, decode)
        self._sent = 0

    async def publish(self, cmd: MQMeshPublishCommand) -> SendResult:
        """Calls the handlers of a message, one after the other."""
        return await self.publish_batch(cmd)

    async def publish_batch(self, cmd: MQMeshPublishCommand) -> SendResult:
        """Calls the handlers of each message, or of all of them."""
        messages = await self._encoder.messages(cmd)
        first = self._sent
        self._sent += len(messages)
        stored = [_stored(message, number) for number, message in enumerate(messages, first)]
        for subscriber, wanted in self._wanting(stored):
            if subscriber.settings.batch:
                await subscriber.process_message(Delivery(*wanted))
                continue
            for message in wanted:
                await subscriber.process_message(Delivery(message))
        return SendResult(
            status=SendStatus.SEND_OK,
            message_queue=MessageQueue(cmd.destination, _BROKER_NAME, 0),
            queue_offset=QueueOffset(first),
            commitlog_offset=CommitLogOffset(first),
            store_timestamp=TimestampMs(0),
            producer_id=0,
            sequence=first,
            message_count=len(messages),
        )

    async def request(self, cmd: MQMeshPublishCommand) -> Delivery:
        """Calls the first handler, and returns its result; one of lists never answers."""
        (message,) = await self._encoder.messages(cmd)
        stored = _stored(message, self._sent)
        self._sent += 1
        for subscriber, _ in self._wanting([stored]):
            if subscriber.settings.batch:
                continue
            result = await subscriber.process_message(Delivery(stored))
            command = MQMeshPublishCommand.from_cmd(result.as_publish_command())
            command.destination = cmd.destination
            (reply,) = await self._encoder.messages(command)
            return Delivery(reply)
        raise SubscriberNotFound

    def _wanting(
        self, messages: list[StoredMessage]
    ) -> Iterator[tuple[MQMeshSubscriber, list[StoredMessage]]]:
        for one in _subscribers(self._brokers):
            if one.calls and one.topic == messages[0].topic:
                expression = one.settings.expression
                wanted = [message for message in messages if _fits(expression, message)]
                if wanted:
                    yield one, wanted


def _subscribers(brokers: Sequence[MQMeshBroker]) -> list[MQMeshSubscriber]:
    found = [one for broker in brokers for one in broker.subscribers]
    return [one for one in found if isinstance(one, MQMeshSubscriber)]


def _fits(expression: Wanted, message: StoredMessage) -> bool:
    selector = as_selector(expression)
    tags = selector.wanted_tags()
    if selector.expression_type == ExpressionType.SQL92:
        return fits_sql(selector.expression, message)
    return tags is None or message.tag in tags


def _stored(message: Message, number: int) -> StoredMessage:
    info = BatchInfo(
        topic=message.topic,
        queue_id=0,
        broker_name=_BROKER_NAME,
        base_queue_offset=QueueOffset(number),
        commitlog_offset=CommitLogOffset(number),
        store_size=len(message.body),
        born_timestamp=TimestampMs(0),
        store_timestamp=TimestampMs(0),
        born_host="",
        store_host="",
        producer_id=0,
        first_sequence=number,
        payload_crc=0,
    )
    stored = StoredMessage(*msgspec.structs.astuple(message))
    stored.queue_offset, stored.batch = QueueOffset(number), info
    return stored
