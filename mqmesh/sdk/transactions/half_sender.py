"""Sender of half messages: like plain ones, but to the half topic of the same broker."""

from mqmesh.batch.half_batch import half_parts, have_immunity
from mqmesh.batch.payload import Payload
from mqmesh.batch.record_batch import Attributes
from mqmesh.message import Message, MessageQueue
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.producer.batch_codec import BatchCodec
from mqmesh.sdk.producer.lanes import Lane, PendingBatch
from mqmesh.sdk.producer.pace import SendPace
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.publish_routes import PublishRoutes
from mqmesh.sdk.producer.queue_selector import QueueSelector
from mqmesh.sdk.producer.send_buffer import SendBuffer, message_size
from mqmesh.sdk.producer.send_result import OnDone, SendFuture
from mqmesh.sdk.producer.sender import Sender


class HalfCodec(BatchCodec):
    """Codec of half messages of one producer group."""

    is_half = True

    def _parts(self, batch: PendingBatch, payload: Payload) -> tuple[bytes, ...]:
        return half_parts(
            payload,
            producer_group=self._group,
            real_topic=self._prefix + batch.queue.topic,
            real_queue_id=batch.queue.queue_id,
            has_immunity=have_immunity(batch.messages),
            producer_id=batch.producer_id,
            first_sequence=batch.first_sequence,
            born_timestamp=batch.born_timestamp,
            born_host=self._born_host,
            attributes=0 if batch.wait_store else int(Attributes.NO_WAIT_STORE),
        )


class HalfRoutes(PublishRoutes):
    """Routes of half messages: never to a second broker when the first one may have them.

    It would ask back about its own one day, and two commits of one transaction would be two
    messages.
    """

    def another_lane(self, queue: MessageQueue, never: frozenset[str]) -> Lane | None:
        """Return ``PublishRoutes.another_lane``; None as soon as a broker may have the messages."""
        return None if never else super().another_lane(queue, never)


class HalfSender:
    """Sender of half messages, on a producer's engine.

    Args:
        engine: The producer's.
        options: Its options.
        codec: With a key of its own.
    """

    def __init__(
        self,
        engine: ClientEngine,
        options: ProducerOptions,
        codec: HalfCodec,
    ) -> None:
        self.key = codec.key
        self._retries = options.retry_times_when_send_async_failed
        pace = SendPace(engine.transport)
        self.buffer = SendBuffer(options, engine.transport, pace.give_way)
        self.routes = HalfRoutes(engine, self.buffer, avoid_slow=options.send_latency_fault_enable)
        self.sender = Sender(engine, self.buffer, codec, self.routes, pace, options)

    def append(
        self,
        message: Message,
        deadline_ms: int,
        on_done: OnDone | None,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        arg: object = None,
        priority: int | None = None,
    ) -> SendFuture:
        """Adds a checked message; arguments and errors as of ``Producer.send_async``."""
        topic = self.routes.lanes(message.topic, deadline_ms)
        if priority is not None:
            topic = self.routes.level(topic, priority)
        lane = None
        if message.sharding_key is not None or queue is not None or selector is not None:
            lane = self.routes.bound_lane(topic, message, queue, selector, arg)
        future, lane = self.buffer.append(
            lane,
            topic,
            message,
            message_size(message),
            deadline_ms,
            on_done,
            self._retries,
            lane is not None,
        )
        self.sender.added(lane)
        return future
