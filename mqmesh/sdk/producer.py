"""Sends messages."""

import logging
import secrets
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from mqmesh.errors import (
    ClientClosed,
    InvalidArgument,
    MQMeshError,
)
from mqmesh.message import (
    Message,
    MessageQueue,
    check_group,
    check_messages,
    check_topic,
    is_plain,
)
from mqmesh.protocol.codes import RequestCode, ResponseCode, error_of
from mqmesh.protocol.membership import HeartbeatRequest
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.sdk.client import ClientEngine
from mqmesh.sdk.options import DEFAULT_NAMESRV, ClientOptions
from mqmesh.sdk.producer_options import producer_options
from mqmesh.sdk.publish_routes import PublishRoutes
from mqmesh.sdk.queue_selector import QueueSelector
from mqmesh.sdk.send_buffer import Lane, SendBuffer
from mqmesh.sdk.send_result import (
    OnDone,
    PendingBatch,
    SendFuture,
    SendResult,
    make_result,
)
from mqmesh.sdk.sender import BatchCodec, Sender
from mqmesh.transport.channel import BlockingChannel
from mqmesh.version import VERSION

CLOSE_FLUSH_S: Final = 1.0
"""How long ``close`` waits for sends that have no outcome yet."""

_SUCCESS: Final = int(ResponseCode.SUCCESS)
_log = logging.getLogger(__name__)


class Producer:
    """Sends messages to any topic. Thread-safe.

    A synchronous ``send`` goes straight from the calling thread to the broker. Concurrent
    and asynchronous sends share batches by themselves: while a request is in flight, what
    arrives next shares the next one. Every message is stored once however often its
    request must be repeated, and messages of one queue keep the order of their sends.

    Args:
        group: Producer group, 1 to 255 characters of ``[%|a-zA-Z0-9_-]``.
        namesrv_addr: ``host:port`` of the name servers, separated by semicolons.
        client: Settings of the connection; its ``namesrv_addr`` is replaced by the argument.
        options: Fields of ``ProducerOptions``, by name.

    Raises:
        InvalidArgument: A name or an option is out of bounds.
    """

    def __init__(
        self,
        group: str,
        *,
        namesrv_addr: str = DEFAULT_NAMESRV,
        client: ClientOptions | None = None,
        **options: Any,
    ) -> None:
        self.group = check_group(group)
        self.options = producer_options(options)
        client = msgspec.structs.replace(client or ClientOptions(), namesrv_addr=namesrv_addr)
        self._engine = ClientEngine(
            client,
            heartbeat=self._heartbeat,
            on_routes=self._routes_changed,
            on_broker=lambda _name, _up: self._sender.schedule(),
        )
        one = self.options
        self._buffer = SendBuffer(
            max_bytes=one.buffer_memory_bytes,
            max_batch_bytes=one.batch_size_bytes,
            max_batch_messages=one.batch_messages,
        )
        self._codec = BatchCodec(secrets.randbits(64), one.compress_msg_body_over_how_much)
        self._routes = PublishRoutes(
            self._engine, self._buffer, avoid_slow=one.send_latency_fault_enable
        )
        self._sender = Sender(
            self._engine,
            self._buffer,
            self._codec,
            self._routes.another_lane,
            max_in_flight=one.max_requests_in_flight,
            on_sent=self._routes.on_sent,
            retry_not_stored=one.retry_another_broker_when_not_store_ok,
        )
        self._direct = threading.Lock()
        self._channels: dict[str, BlockingChannel] = {}
        self._state = "new"

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> None:
        """Connects; further calls do nothing.

        Raises:
            ClientClosed: After ``close``.
        """
        if self._state == "closed":
            raise ClientClosed("the producer was closed; make a new one")
        if self._state == "new":
            self._state = "running"
            self._engine.start()

    def close(self) -> None:
        """Waits up to a second for sends without an outcome, then closes; idempotent."""
        if self._state == "closed":
            return
        running, self._state = self._state == "running", "closed"
        if running and not self._engine.loop.in_loop_thread:
            self._wait_for_outcomes()
        error = ClientClosed("the producer was closed before the message was stored")
        for batch in self._buffer.drain():
            self._buffer.settle(batch)
            batch.finish(None, error)
        for channel in list(self._channels.values()):
            channel.cancel()
        with self._direct:  # a send that waited on a channel has given up by now
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
        self._engine.close()
        for batch in self._buffer.drain():  # sends that raced with the closing
            batch.finish(None, error)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- Sending ---------------------------------------------------------------------

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
        wait_store: bool = True,
    ) -> SendResult:
        """Sends a message and waits until it is stored.

        Args:
            message: What to send.
            queue: The queue to send to.
            selector: Chooses the queue; called with the queues, the message and ``arg``.
            arg: For the selector.
            timeout_ms: In place of ``send_msg_timeout_ms``.
            wait_store: Wait for disk and slave as the broker's mode says.

        Returns:
            Where the message is; look at ``status`` if the broker flushes or replicates
            synchronously.

        Raises:
            InvalidArgument: The message is illegal, or no queue of its topic was chosen.
            NoRoute: No broker is known that would take it.
            SystemBusy: The broker refuses for flow control; not retried.
            BrokerError: The broker refused otherwise.
            RequestTimeout, EndpointUnreachable: No answer after all tries; whether the
                message was stored is unknown, and a repeated call may store it again.
            ClientClosed: The producer is not running.
        """
        self._check_blocking()
        (message,) = check_messages([message], max_message_size=self.options.max_message_size)
        deadline_ms = self._deadline(timeout_ms)
        topic = self._routes.lanes(message.topic, deadline_ms)
        lane = self._routes.bound_lane(topic, message, queue, selector, arg)
        bound = lane is not None
        if lane is None:
            lane = self._routes.next_lane(topic)
        retries = self.options.retry_times_when_send_failed
        if self._direct.acquire(blocking=False):
            try:
                claimed = self._buffer.claim(lane)
                if claimed:
                    batch = self._buffer.lone_batch(
                        lane,
                        message,
                        deadline_ms,
                        bound=bound,
                        retries=retries,
                        wait_store=wait_store,
                    )
                    error = self._send_directly(lane, batch)
            finally:
                self._direct.release()
            if claimed:
                if error is None:
                    return make_result(batch, 0)
                # From here on it is retried like any other.
                self._engine.post(lambda: self._sender.adopt(lane, batch, error))
                return self._await(SendFuture(batch, 0), deadline_ms)
        future, _ = self._buffer.append(lane, None, message, deadline_ms, None, retries, wait_store)
        self._sender.schedule()
        return self._await(future, deadline_ms)

    def send_async(
        self,
        message: Message,
        on_done: OnDone | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> SendFuture:
        """Sends a message without waiting for its outcome.

        Args:
            message: What to send; must not be changed afterwards.
            on_done: Called with the future when it is done, in the producer's own thread.
            queue, selector, arg, timeout_ms: As for ``send``.

        Returns:
            The future outcome.

        Raises:
            InvalidArgument, NoRoute, ClientClosed: As for ``send``.
            QueueFull: No room in the buffer within the timeout; at once in a callback.
        """
        if self._state != "running":
            self._refuse()
        deadline_ms = self._deadline(timeout_ms)
        # A topic that has lanes has a legal name, so a plain message needs no further check.
        limit = self.options.max_message_size
        topic = self._routes.known(message.topic) if is_plain(message, limit) else None
        if topic is None:
            (message,) = check_messages((message,), max_message_size=limit)
            topic = self._routes.lanes(message.topic, deadline_ms)
        lane = None
        if message.sharding_key is not None or queue is not None or selector is not None:
            lane = self._routes.bound_lane(topic, message, queue, selector, arg)
        buffer = self._buffer
        if buffer.pending_bytes >= self.options.buffer_memory_bytes:
            self._wait_room(deadline_ms)
        retries = self.options.retry_times_when_send_async_failed
        future, lane = buffer.append(lane, topic, message, deadline_ms, on_done, retries)
        if not lane.in_flight and self._sender.has_room(lane.queue.broker_name):
            self._sender.schedule()
        return future

    def send_oneway(self, message: Message, **choice: Any) -> None:
        """Sends a message and never tells what became of it; it is not retried.

        Args:
            message: What to send.
            choice: ``queue``, ``selector`` and ``arg``, as for ``send``.

        Raises:
            InvalidArgument, NoRoute, ClientClosed, QueueFull: As for ``send_async``.
        """
        if self._state != "running":
            self._refuse()
        (message,) = check_messages((message,), max_message_size=self.options.max_message_size)
        deadline_ms = self._deadline(None)
        topic = self._routes.lanes(message.topic, deadline_ms)
        lane = self._routes.bound_lane(topic, message, **choice)
        self._wait_room(deadline_ms)
        # It shares batches with the others, which costs less than a request of its own.
        self._buffer.append(lane, topic, message, deadline_ms, None, 0)
        self._sender.schedule()

    def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Sends messages of one topic as one batch, to one queue, and waits for it.

        All of them are stored, side by side, or none.

        Args:
            messages: At least one; of one topic, and of one sharding key if they have any.
            queue, timeout_ms: As for ``send``.

        Returns:
            Where the batch is; ``queue_offset`` and ``message_id`` are the first message's.

        Raises:
            InvalidArgument: Also for messages that do not fit into one batch.
            MQMeshError: As for ``send``.
        """
        self._check_blocking()
        deadline_ms = self._deadline(timeout_ms)
        retries = self.options.retry_times_when_send_failed
        return self._await(
            self._add_batch(messages, None, queue, deadline_ms, retries), deadline_ms
        )

    def send_batch_async(
        self,
        messages: Sequence[Message],
        on_done: OnDone | None = None,
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> SendFuture:
        """Sends a batch as ``send_batch`` does, without waiting for its outcome.

        Args:
            messages, queue, timeout_ms: As for ``send_batch``.
            on_done: As for ``send_async``.

        Raises:
            InvalidArgument, NoRoute, ClientClosed, QueueFull: As for ``send_async``.
        """
        if self._state != "running":
            self._refuse()
        retries = self.options.retry_times_when_send_async_failed
        return self._add_batch(messages, on_done, queue, self._deadline(timeout_ms), retries)

    def fetch_publish_queues(
        self, topic: str, *, timeout_ms: int | None = None
    ) -> list[MessageQueue]:
        """The queues that messages of a topic may be sent to.

        Raises:
            NoRoute, ClientClosed: As for ``send``.
        """
        self._check_blocking()
        return list(self._routes.lanes(topic, self._deadline(timeout_ms)).queues)

    def can_send_at_once(self, topic: str) -> bool:
        """True when ``send_async`` to a topic would not wait for a route or for room.

        Raises:
            ClientClosed: The producer is not running.
        """
        if self._state != "running":
            self._refuse()
        return (
            self._routes.known(topic) is not None
            and self._buffer.pending_bytes < self.options.buffer_memory_bytes
        )

    def wait_until_can_send(self, topic: str) -> None:
        """Waits for a topic's route and for room, up to ``send_msg_timeout_ms``.

        Raises:
            NoRoute, QueueFull, ClientClosed, InvalidArgument: As for ``send_async``.
        """
        deadline_ms = self._deadline(None)
        self._routes.lanes(check_topic(topic), deadline_ms)
        self._wait_room(deadline_ms)

    # ---- Sending, the inner part -----------------------------------------------------

    def _send_directly(self, lane: Lane, batch: PendingBatch) -> MQMeshError | None:
        """One try in the calling thread, with the lane claimed; None when it succeeded."""
        broker_name = lane.queue.broker_name
        started_ms = self._now_ms()
        error: MQMeshError
        try:
            data = self._codec.encode(batch, self._engine.loop.clock.wall_ms())
            timeout_ms = max(batch.deadline_ms - started_ms, 1)
            answer = self._channel(broker_name).request(
                RequestCode.SEND_MESSAGE,
                data,
                header=encode_send(timeout_ms, 1),
                timeout_ms=timeout_ms,
            )
            (outcome,) = decode_outcomes(answer.header, answer.body)
        except MQMeshError as failure:
            error = failure
        except BaseException:
            # Ctrl-C in the middle: the lane must not stay claimed for ever.
            self._release(lane)
            raise
        else:
            self._routes.on_sent(broker_name, self._now_ms() - started_ms, True)
            if outcome.code == _SUCCESS:
                batch.outcome = outcome
                self._release(lane)
                return None
            return error_of(outcome.code, outcome.remark, outcome.retry_after_ms)
        self._routes.on_sent(broker_name, self._now_ms() - started_ms, False)
        return error

    def _channel(self, broker_name: str) -> BlockingChannel:
        if self._state != "running":
            self._refuse()
        endpoint = self._engine.endpoint(broker_name)
        channel = self._channels.get(broker_name)
        if channel is None or channel.endpoint != endpoint:
            if channel is not None:
                channel.close()
            channel = self._channels[broker_name] = BlockingChannel(self._engine.context, endpoint)
        return channel

    def _release(self, lane: Lane) -> None:
        if self._buffer.release(lane):
            self._sender.schedule()

    def _add_batch(
        self,
        messages: Sequence[Message],
        on_done: OnDone | None,
        queue: MessageQueue | None,
        deadline_ms: int,
        retries: int,
    ) -> SendFuture:
        checked = check_messages(messages, max_message_size=self.options.max_message_size)
        if not checked:
            raise InvalidArgument("a batch without messages")
        first = checked[0]
        if first.sharding_key is not None and any(
            one.sharding_key != first.sharding_key for one in checked
        ):
            raise InvalidArgument("the messages of a batch have different sharding keys")
        topic = self._routes.lanes(first.topic, deadline_ms)
        lane = self._routes.bound_lane(topic, first, queue)
        bound = lane is not None
        if lane is None:
            lane = self._routes.next_lane(topic)
        self._wait_room(deadline_ms)
        future = self._buffer.append_batch(
            lane, checked, deadline_ms, on_done, bound=bound, retries=retries
        )
        if not lane.in_flight and self._sender.has_room(lane.queue.broker_name):
            self._sender.schedule()
        return future

    def _await(self, future: SendFuture, deadline_ms: int) -> SendResult:
        # The sender ends every send by its deadline; the extra second is for a stuck machine.
        left_ms = max(deadline_ms - self._now_ms(), 0) + 1_000
        return future.result(left_ms / 1_000)

    def _wait_room(self, deadline_ms: int) -> None:
        waits = not self._engine.loop.in_loop_thread
        self._buffer.wait_room(deadline_ms - self._now_ms() if waits else 0)

    def _wait_for_outcomes(self) -> None:
        if not self._buffer.wait_empty(CLOSE_FLUSH_S):
            _log.warning(
                "closing with %d bytes of messages whose outcome is unknown",
                self._buffer.pending_bytes,
            )

    # ---- Helpers ---------------------------------------------------------------------

    def _heartbeat(self) -> HeartbeatRequest:
        return HeartbeatRequest(self._engine.client_id, [self.group], version=VERSION)

    def _routes_changed(self, topics: set[str]) -> None:
        self._routes.on_routes(topics)
        self._sender.schedule()

    def _now_ms(self) -> int:
        return self._engine.loop.clock.monotonic_ms()

    def _deadline(self, timeout_ms: int | None) -> int:
        if timeout_ms is None:
            timeout_ms = self.options.send_msg_timeout_ms
        elif timeout_ms < 1:
            raise InvalidArgument(f"timeout_ms is {timeout_ms}; at least 1 is needed")
        return self._now_ms() + timeout_ms

    def _check_blocking(self) -> None:
        if self._state != "running":
            self._refuse()
        if self._engine.loop.in_loop_thread:
            raise InvalidArgument("a callback cannot wait for a send; use send_async there")

    def _refuse(self) -> None:
        if self._state == "new":
            raise ClientClosed("the producer is not started; call start() or use it with 'with'")
        raise ClientClosed("the producer is closed")
