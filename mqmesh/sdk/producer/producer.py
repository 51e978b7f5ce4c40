"""Producer of messages."""

import concurrent.futures
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, Self, TypeVar, Unpack

from mqmesh.errors import ClientClosed, InvalidArgument, MQMeshError, RequestTimeout
from mqmesh.message import (
    MAX_DELAY_MS,
    Message,
    MessageQueue,
    check_group,
    check_number,
    check_topic,
    is_closed_topic,
)
from mqmesh.message_checks import check_messages, is_plain
from mqmesh.metrics import MetricBoard, Readings
from mqmesh.producer_key import new_key
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import HeartbeatRequest
from mqmesh.protocol.schedule import CancelDelayedRequest
from mqmesh.sdk.client.at_exit import close_at_exit, closed
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.direct_channels import DirectChannels
from mqmesh.sdk.client.forks import call_in_forks
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.client.options import ClientOptions, NamesrvAddr, client_options, make_options
from mqmesh.sdk.hooks import HookCalls, Hooks
from mqmesh.sdk.producer.batch_codec import BatchCodec
from mqmesh.sdk.producer.explicit_batch import explicit_batch
from mqmesh.sdk.producer.lanes import GRACE_MS, Lane, TopicLanes
from mqmesh.sdk.producer.pace import GIVE_WAY_BATCH_BYTES, SendPace
from mqmesh.sdk.producer.producer_options import ProducerKeywords, ProducerOptions
from mqmesh.sdk.producer.publish_routes import PublishRoutes
from mqmesh.sdk.producer.queue_selector import QueueChoice, QueueSelector, SendChoice
from mqmesh.sdk.producer.replies import ReplyFuture, ReplySender, make_reply, time_to_live_ms
from mqmesh.sdk.producer.requests import REQUEST_METRICS, OnReply, RequestFuture, Requests
from mqmesh.sdk.producer.send_buffer import SendBuffer, message_size
from mqmesh.sdk.producer.send_result import (
    OnDone,
    SendFuture,
    SendResult,
    run_after_send,
)
from mqmesh.sdk.producer.sender import SEND_METRICS, Sender, Watch
from mqmesh.sdk.tracing.client_tracing import ClientTracing
from mqmesh.sdk.tracing.trace_dispatcher import STORE_S
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import OnDone as OnAnswer
from mqmesh.transport.interface import Transport
from mqmesh.units import MIB
from mqmesh.version import VERSION

_T = TypeVar("_T")

MAX_TIMEOUT_MS: Final = 600_000

_WHY_NOT: Final = {
    "new": "the producer is not started; call start() or use it with 'with'",
    "closing": "the producer is closed",
    "closed": "the producer is closed",
    "dead": "the producer's thread died; the log says why",
    "forked": "the producer belongs to the process that started it; start one after the fork",
}
"""Reasons why a producer in some state does not send."""
_log = logging.getLogger(__name__)


class Producer:
    """Producer of messages to any topic. Thread-safe, but not for use in signal handlers.

    A synchronous ``send`` goes straight from the calling thread to the broker. Concurrent
    and asynchronous sends share batches by themselves: while a request is in flight, what
    arrives next shares the next one. A broker stores every message once however often its
    request must be repeated, and messages of one sharding key, or sent to a chosen queue,
    keep the order of their sends. Messages that may go to any queue are sent to another
    broker when theirs fails; if the first one had stored them all the same, they are at
    both, with the same message ids.

    A producer belongs to the process that starts it: start it after ``fork``, not before.

    Args:
        group: Producer group, 1 to 255 characters of ``[%|a-zA-Z0-9_.-]``.
        namesrv_addr: ``host:port`` of the name servers, as a list, or as a text separated by
            commas or semicolons. By default those of ``client``, or of `mqmesh up`.
        credentials: Path of the file with the client's keys, or ``Credentials``, where security
            is on; by default those of ``client``.
        namespace: Namespace of all topics and groups, see docs/namespaces.md; by default that of
            ``client``, else of the environment (MQMESH_NAMESPACE).
        client: Settings of the connection.
        transport: The world; ZeroMQ by default.
        hooks: Called around each batch that is sent, in this order.
        options: Fields of ``ProducerOptions``, by name.

    Raises:
        InvalidArgument: A name or an option is out of bounds.
    """

    _options_type: type[ProducerOptions] = ProducerOptions

    def __init__(
        self,
        group: str,
        *,
        namesrv_addr: NamesrvAddr | None = None,
        credentials: str | Credentials | None = None,
        namespace: str | None = None,
        client: ClientOptions | None = None,
        transport: Transport | None = None,
        hooks: Sequence[Hooks] = (),
        **options: Unpack[ProducerKeywords],
    ) -> None:
        self.group = check_group(group)
        self.options = make_options(self._options_type, options, "producer option")
        self._client = client_options(client, namesrv_addr, credentials, namespace)
        self._transport = transport
        make_producer = self._make_trace_producer if transport is None else None
        self._tracing = ClientTracing(
            self.group, hooks, self.options, lambda: self._engine, make_producer
        )
        self._hooks = self._tracing.hooks
        self._make_parts()
        self._life = ranked_lock(LockRank.LIFE)
        self._state = "new"
        self._needs_parts = False
        self._tracing.instrument(self)
        call_in_forks(self._forked)

    def _make_parts(self) -> None:
        """Makes all that belongs to one process."""
        self._engine = ClientEngine(
            self._client,
            heartbeat=self._heartbeat,
            on_routes=self._routes_changed,
            on_command=self._take_command,
            on_broker=self._broker_changed,
            on_end=self._ended,
            transport=self._transport,
        )
        one = self.options
        self._pace = SendPace(self._engine.transport)
        self._buffer = SendBuffer(one, self._engine.transport, self._pace.give_way)
        self._timeout_ms = one.send_msg_timeout_ms
        self._max_message_size = one.max_message_size
        self._retries = one.retry_times_when_send_failed
        self._async_retries = one.retry_times_when_send_async_failed
        self._posts = self._engine.transport.watches_channels and not one.linger_ms
        self._may_join = self._retries == self._async_retries
        self._clock_ns = self._engine.loop.clock.monotonic_ns
        self._codec = BatchCodec(
            new_key(self._engine.transport.random),
            one.compress_msg_body_over_how_much,
            self._hooks,
            self._tracing.message_trace,
            namespace=self._engine.namespace,
        )
        self._join = self._buffer.join
        self._routes = PublishRoutes(
            self._engine, self._buffer, avoid_slow=one.send_latency_fault_enable
        )
        self._direct = DirectChannels(self._engine, one.busy_poll_us)
        self._sender = Sender(
            self._engine, self._buffer, self._codec, self._routes, self._pace, one, self._direct
        )
        self._requests = Requests(self._engine, one.max_pending_requests)
        self._replies = ReplySender(self._engine, one.max_pending_requests)
        self._metrics = MetricBoard()
        self._metrics.add(SEND_METRICS, lambda: self._sender)
        self._metrics.add(REQUEST_METRICS, lambda: self._requests)
        self._commands: dict[int, Callable[[str, Command], None]] = {
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self._requests.on_push,
        }

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> None:
        """Connects, also once more after ``close``; further calls do nothing.

        Raises:
            ClientClosed: It is being closed, its thread died, or it was given a transport, which is
                closed with it.
            TooManyOpenFiles: The process has too few descriptors left.
        """
        try:
            with self._life:
                if self._state == "closed":
                    self._engine.check_replaceable("producer")
                    self._needs_parts, self._state = True, "new"
                if self._state == "new":
                    self._connect()
        except BaseException:
            self.close()
            raise
        if self._state != "running":
            self._refuse()

    def _connect(self) -> None:
        if self._needs_parts:
            self._make_parts()
            self._needs_parts = False
        self._tracing.start(self._metrics)
        self._engine.start()
        self._state = "running"
        close_at_exit(self)

    def close(self) -> None:
        """Waits up to ``close_timeout_ms`` for sends without an outcome, then closes; idempotent.

        It may be started again.

        Sends without an outcome by then end with ``ClientClosed``, before this returns unless it is
        called by a callback, and are logged. A producer that was not closed is closed at the end of
        the program.
        """
        if self._state == "forked":
            return  # the parent may have held any lock
        with self._life:
            before = self._state
            if before in ("closing", "closed"):
                return
            self._state = "closing"
            self._buffer.stop_joins()
        try:
            self._close(before)
        finally:
            self._state = "closed"

    def _close(self, before: str) -> None:
        patience_s = 0.0
        if before == "running" and not self._engine.loop.in_loop_thread:
            deadline_ms = self._now_ms() + self.options.close_timeout_ms
            self._buffer.stop_lingering()
            self._sender.schedule()
            self._buffer.wait_empty(self.options.close_timeout_ms / 1_000)
            patience_s = max(deadline_ms - self._now_ms(), 0) / 1_000
        self._sender.take_posted(ClientClosed("the producer was closed before an answer came"))
        self._direct.close(patience_s)
        self._engine.close()
        self._tracing.close()
        closed(self)

    def _forked(self) -> None:
        """Note that this process is a fork, where only a producer that does not run can be used."""
        if self._state in ("new", "closed"):
            self._life = ranked_lock(LockRank.LIFE)  # a thread of the parent may have had it
            self._needs_parts = True
            return
        self._state = "forked"
        self._buffer.stop_joins()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ---- Sending ---------------------------------------------------------------------

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        arg: Any = None,
        priority: int | None = None,
        ttl_ms: int | None = None,
        timeout_ms: int | None = None,
        wait_store: bool = True,
    ) -> SendResult:
        """Sends a message and waits until it is stored.

        Args:
            message: Message to send.
            queue: The queue to send to.
            selector: Chooses the queue; called with the queues, the message and ``arg``.
            arg: For the selector.
            priority: Of a topic with priorities, from 0, the lowest, which is that of messages
                without one: chooses among the queues of that priority.
            ttl_ms: Time that the message lives, from 1 to 40 years; no consumer gets it afterwards.
                A delayed message lives so long from its delivery on. None for no limit. The topic
                has to allow it (``message_ttl``).
            timeout_ms: In place of ``send_msg_timeout_ms``.
            wait_store: Wait for disk and replicas as the broker's mode says. If not, SEND_OK says
                that the master has it in memory.

        Returns:
            Where the message is; look at ``status`` if the broker flushes or replicates
            synchronously.

        Raises:
            InvalidArgument: The message is illegal, or no queue of its topic was chosen.
            NoRoute: No broker is known that would take it.
            SystemBusy: The broker refuses for flow control; not retried.
            BrokerError: The broker refused otherwise.
            RequestTimeout, EndpointUnreachable, NotMaster: No answer after all tries; whether the
                message was stored is unknown, and a repeated call may store it again.
            ClientClosed: The producer is not running.
        """
        if self._state != "running" or self._engine.loop.in_loop_thread:
            self._refuse_waiting()
        is_free = queue is None and selector is None and priority is None
        if is_free and self._may_join and timeout_ms is None and wait_store and ttl_ms is None:
            joined = self._join(message)
            if joined is not None:
                return joined.result()
        if not is_plain(message, self._max_message_size):
            (message,) = check_messages((message,), max_message_size=self._max_message_size)
        if timeout_ms is None:
            deadline_ms = self._clock_ns() // 1_000_000 + self._timeout_ms
        else:
            deadline_ms = self._deadline(timeout_ms)
        topic = self._routes.topics.get(message.topic) or self._topic(message.topic, deadline_ms)
        lane = None
        if not is_free or message.sharding_key is not None:
            if priority is not None:
                topic = self._routes.level(topic, priority)
            lane = self._routes.bound_lane(topic, message, queue, selector, arg)
        retries = self._retries
        if not self.options.linger_ms and ttl_ms is None:
            sent = self._sender.send_lone(lane, topic, message, deadline_ms, retries, wait_store)
            if sent is not None:
                return sent.result()
        bound = lane is not None
        return self._append(
            lane, topic, message, deadline_ms, None, retries, bound, wait_store, ttl_ms
        ).result()

    def send_async(
        self,
        message: Message,
        on_done: OnDone | None = None,
        **choice: Unpack[SendChoice],
    ) -> SendFuture:
        """Sends a message without waiting for its outcome.

        Args:
            message: Message to send; must not be changed afterwards.
            on_done: Called with the future when it is done, in the producer's own thread.
            choice: ``queue``, ``selector``, ``arg``, ``priority``, ``ttl_ms`` and ``timeout_ms``,
                as for ``send``.

        Returns:
            The future outcome.

        Raises:
            InvalidArgument, NoRoute, ClientClosed: As for ``send``.
            QueueFull: No room in the buffer within the timeout; at once in a callback.
        """
        # Each named keyword of a function costs 10 ns a call, a tenth of a join.
        if on_done is None and not choice:
            # The state need not be checked: a producer that does not run lets no message join.
            joined = self._join(message)
            if joined is not None:
                return joined
        return self._add(message, on_done, self._async_retries, may_leave=True, **choice)

    def send_oneway(self, message: Message, **choice: Unpack[QueueChoice]) -> None:
        """Sends a message and never reports its outcome; it is not retried.

        Args:
            message: Message to send.
            choice: ``queue``, ``selector``, ``arg``, ``priority`` and ``ttl_ms``, as for ``send``.

        Raises:
            InvalidArgument, NoRoute, ClientClosed, QueueFull: As for ``send_async``.
        """
        # It shares batches with the others, which costs less than a request of its own.
        self._add(message, None, 0, may_leave=False, **choice)

    def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        priority: int | None = None,
        ttl_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Sends messages of one topic as one batch, to one queue, and waits for it.

        All of them are stored, side by side, or none.

        Args:
            messages: At least one; of one topic, and of one sharding key if they have any;
                delayed all by one level, all to points in time, or not.
            queue, priority, ttl_ms, timeout_ms: As for ``send``.

        Returns:
            Where the batch is; ``queue_offset`` and ``message_id`` are the first message's.

        Raises:
            InvalidArgument: Also for messages that do not fit into one batch: over 65,536, or
                over 16 MiB.
            MQMeshError: As for ``send``.
        """
        self._check_blocking()
        deadline_ms = self._deadline(timeout_ms)
        retries = self.options.retry_times_when_send_failed
        return self._add_batch(
            messages, None, queue, priority, ttl_ms, deadline_ms, retries
        ).result()

    def send_batch_async(
        self,
        messages: Sequence[Message],
        on_done: OnDone | None = None,
        *,
        queue: MessageQueue | None = None,
        priority: int | None = None,
        ttl_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> SendFuture:
        """Sends a batch as ``send_batch`` does, without waiting for its outcome.

        Args:
            messages, queue, priority, ttl_ms, timeout_ms: As for ``send_batch``.
            on_done: As for ``send_async``.

        Raises:
            InvalidArgument, NoRoute, ClientClosed, QueueFull: As for ``send_async``. The future
                reports messages that only just do not fit into one batch.
        """
        if self._state != "running":
            self._refuse()
        retries = self.options.retry_times_when_send_async_failed
        deadline_ms = self._deadline(timeout_ms)
        return self._add_batch(messages, on_done, queue, priority, ttl_ms, deadline_ms, retries)

    def cancel_delayed(self, sent: SendResult, *, timeout_ms: int | None = None) -> None:
        """Cancels a delayed message that was sent on its own and waits still.

        Args:
            sent: Result of its send, here or at another producer of the cluster.
            timeout_ms: In place of ``send_msg_timeout_ms``.

        Raises:
            InvalidArgument: That is no ``SendResult``, or one of a batch; ``DelayClient`` cancels
                single messages of one, by their ``message_ids``.
            CancelRefused: It was delivered or cancelled before, or is being delivered.
            BrokerError: The broker does not know it, or cannot answer now.
            NoRoute, RequestTimeout, EndpointUnreachable: Whether it is cancelled is unknown.
            ClientClosed: The producer is not running.
        """
        self._check_blocking()
        if not isinstance(sent, SendResult) or sent.message_count != 1:
            raise InvalidArgument(
                f"must be the SendResult of one message, not {sent!r:.100}; DelayClient.cancel and "
                "`mqmesh schedule cancel` take a message id"
            )
        deadline_ms = self._deadline(timeout_ms)
        queue = sent.message_queue
        if self._engine.routes.address(queue.broker_name) is None:
            # A topic that the send made just now may not have a route yet.
            self._engine.wait_route(queue.topic, max(deadline_ms - self._now_ms(), 1))
        left_ms = max(deadline_ms - self._now_ms(), 1)
        header = encode_header(CancelDelayedRequest(sent.producer_id, sent.sequence))
        code = RequestCode.CANCEL_DELAYED

        def ask(done: OnAnswer) -> None:
            self._engine.request(queue.broker_name, code, done, header=header, timeout_ms=left_ms)

        self._engine.call(ask, left_ms + GRACE_MS)

    def request(
        self, message: Message, timeout_ms: int | None = None, **choice: Unpack[QueueChoice]
    ) -> Message:
        """Sends a message and waits for the reply that a consumer makes with ``reply``.

        The request is stored and consumed like every message; the reply comes straight to this
        producer, through the broker, and is not stored.

        Args:
            message: Request.
            timeout_ms: For request and reply together, ``send_msg_timeout_ms`` by default.
            choice: ``queue``, ``selector``, ``arg``, ``priority`` and ``ttl_ms``, as for ``send``.

        Raises:
            RequestTimeout: No reply in time; whether the request was handled is unknown.
            QueueFull: ``max_pending_requests`` wait already.
            MQMeshError: The request could not be sent; as for ``send``.
        """
        self._check_blocking()
        future = self.request_async(message, timeout_ms=timeout_ms, **choice)
        return _wait(future, timeout_ms or self.options.send_msg_timeout_ms)

    def request_async(
        self,
        message: Message,
        on_done: OnReply | None = None,
        *,
        timeout_ms: int | None = None,
        **choice: Unpack[QueueChoice],
    ) -> RequestFuture:
        """Sends a request without waiting for its reply.

        Args:
            message, timeout_ms, choice: As for ``request``.
            on_done: Called with the future when it is done, in the producer's own thread.

        Returns:
            A ``concurrent.futures.Future`` of the reply; after a cancel it gets no reply any more,
            but the request may be handled all the same.

        Raises:
            InvalidArgument, NoRoute, ClientClosed, QueueFull: As for ``send_async``.
        """
        # Between the two looks at the clock a millisecond may end, and be the only one.
        left_ms = max(self._deadline(timeout_ms) - self._now_ms(), 1)
        asking, correlation_id, future = self._requests.open(message, left_ms)
        if on_done is not None:
            future.add_done_callback(on_done)

        def sent(outcome: SendFuture) -> None:
            error = outcome.exception()
            if error is not None:
                self._requests.fail(correlation_id, error)

        try:
            send_ms = min(left_ms, self.options.send_msg_timeout_ms)
            self.send_async(asking, sent, timeout_ms=send_ms, **choice)
        except BaseException:
            future.cancel()
            raise
        return future

    def reply(
        self,
        request: Message,
        body: bytes | bytearray | memoryview,
        *,
        tag: str | None = None,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
    ) -> bool:
        """Replies to a consumed request, and waits until that is known to have arrived.

        It tries again while the broker, or the requester, is away for a moment.

        Args:
            request: The message as it was consumed; ``is_request`` is True for one.
            body, tag, keys, properties: Of the reply.
            timeout_ms: ``send_msg_timeout_ms`` by default, and never longer than the sender of
                the request said it would wait.

        Returns:
            True when the requester has the reply; False when it does not wait any more.

        Raises:
            InvalidArgument: The message is no request, or the reply is illegal.
            ClientNotOnline: The requester was not there until the time was over.
            MQMeshError: The broker could not be reached, or refused.
        """
        self._check_blocking()
        future = self.reply_async(
            request, body, tag=tag, keys=keys, properties=properties, timeout_ms=timeout_ms
        )
        return _wait(future, timeout_ms or self.options.send_msg_timeout_ms)

    def reply_async(
        self,
        request: Message,
        body: bytes | bytearray | memoryview,
        *,
        tag: str | None = None,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
    ) -> ReplyFuture:
        """Replies without waiting; arguments and outcome as of ``reply``.

        Raises:
            InvalidArgument, ClientClosed: As for ``reply``.
            QueueFull: ``max_pending_requests`` replies are on their way already.
        """
        deadline_ms = self._deadline(timeout_ms)
        most = self.options.max_message_size
        reply = make_reply(
            request, body, max_message_size=most, tag=tag, keys=keys, properties=properties
        )
        to_live_ms = time_to_live_ms(request)
        if to_live_ms is not None:
            deadline_ms = min(deadline_ms, self._now_ms() + to_live_ms)
        return self._replies.send(request, reply, deadline_ms)

    def metrics(self) -> Readings:
        """Return the metrics of this producer; from any thread.

        ``producer.metrics().number("sends_total", "orders", "SEND_OK")``; all are in
        docs/reference/metrics.md.
        """
        return Readings(self._metrics.read())

    @property
    def pending_requests(self) -> int:
        """Requests that wait for their replies."""
        return len(self._requests)

    @property
    def late_replies(self) -> int:
        """Replies that came after the end of their wait; they were dropped."""
        return self._requests.late_replies

    @property
    def closed(self) -> bool:
        """True after ``close``, or when the producer's thread died."""
        return self._engine.closed

    def fetch_publish_queues(
        self, topic: str, *, timeout_ms: int | None = None
    ) -> list[MessageQueue]:
        """Return the queues that messages of a topic may be sent to.

        Raises:
            NoRoute, ClientClosed: As for ``send``.
        """
        self._check_blocking()
        return list(self._topic(topic, self._deadline(timeout_ms)).queues)

    def can_send(self, topic: str, *, wait: bool = False, timeout_ms: int | None = None) -> bool:
        """Return True when ``send_async`` to a topic would not wait for a route or for room.

        Args:
            topic: Topic.
            wait: Wait until that is so.
            timeout_ms: For so long; by default ``send_msg_timeout_ms``.

        Raises:
            ClientClosed: The producer is not running.
            NoRoute, QueueFull, InvalidArgument: Only if it was to wait: as for ``send_async``.
        """
        if wait:
            self._check_blocking()
            deadline_ms = self._deadline(timeout_ms)
            self._topic(topic, deadline_ms)
            self._buffer.wait_room(deadline_ms)
            return True
        if self._state != "running":
            self._refuse()
        return (
            topic in self._routes.topics
            and self._buffer.pending_bytes < self.options.buffer_memory_bytes
        )

    def take_answers_by(self, watch: Watch) -> None:
        """Have answers to sends that leave at once taken by another loop; for mqmesh.aio."""
        if self._posts:
            self._sender.watch = watch

    # ---- Sending, the inner part -----------------------------------------------------

    def _topic(self, name: str, deadline_ms: int) -> TopicLanes:
        topic = self._routes.topics.get(name)
        if topic is None:
            # A topic that has lanes has a legal name.
            if is_closed_topic(check_topic(name)):
                raise InvalidArgument(f"topic {name!r} is reserved; users may not send to it")
            # A plain str also where the user's is not: the fast path must not call its methods.
            topic = self._routes.lanes(str.__str__(name), deadline_ms)
        return topic

    def _add(
        self,
        message: Message,
        on_done: OnDone | None,
        retries: int,
        *,
        may_leave: bool,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        arg: Any = None,
        priority: int | None = None,
        ttl_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> SendFuture:
        """Check a message and add it, or let it leave in this thread if nothing is in flight."""
        if self._state != "running":
            self._refuse()
        if not is_plain(message, self._max_message_size):
            (message,) = check_messages((message,), max_message_size=self._max_message_size)
        deadline_ms = self._deadline(timeout_ms)
        topic = self._topic(message.topic, deadline_ms)
        if priority is not None:
            topic = self._routes.level(topic, priority)
        lane = self._routes.bound_lane(topic, message, queue, selector, arg)
        may_leave = may_leave and self._posts and ttl_ms is None and self._buffer.is_quiet
        if may_leave and not self._engine.loop.in_loop_thread:
            sent = self._sender.send_lone(
                lane, topic, message, deadline_ms, retries, True, on_done, waits=False
            )
            if sent is not None:
                return sent
        bound = lane is not None
        return self._append(
            lane, topic, message, deadline_ms, on_done, retries, bound, ttl_ms=ttl_ms
        )

    def _append(
        self,
        lane: Lane | None,
        topic: TopicLanes | None,
        message: Message,
        deadline_ms: int,
        on_done: OnDone | None,
        retries: int,
        bound: bool,
        wait_store: bool = True,
        ttl_ms: int | None = None,
    ) -> SendFuture:
        """Adds a message to the buffer, arguments as of ``SendBuffer.append``, and has it sent."""
        ttl_ms = checked_ttl(ttl_ms)
        size = message_size(message)
        try:
            future, lane = self._buffer.append(
                lane, topic, message, size, deadline_ms, on_done, retries, bound, wait_store, ttl_ms
            )
            self._sender.added(lane)
        except BaseException:
            # Also after Ctrl-C: senders that join an open batch rely on this call at its opening.
            self._sender.schedule()
            raise
        return future

    def _add_batch(
        self,
        messages: Sequence[Message],
        on_done: OnDone | None,
        queue: MessageQueue | None,
        priority: int | None,
        ttl_ms: int | None,
        deadline_ms: int,
        retries: int,
    ) -> SendFuture:
        hooks = self._hooks
        if hooks is not None and hooks.sees_sends and _are_messages(messages):
            return self._add_hooked(
                hooks, messages, on_done, queue, priority, ttl_ms, deadline_ms, retries
            )
        return self._add_plain(messages, on_done, queue, priority, ttl_ms, deadline_ms, retries)

    def _add_hooked(
        self,
        hooks: HookCalls,
        messages: Sequence[Message],
        on_done: OnDone | None,
        queue: MessageQueue | None,
        priority: int | None,
        ttl_ms: int | None,
        deadline_ms: int,
        retries: int,
    ) -> SendFuture:
        if hooks.sees_before_send:
            messages = check_messages(messages, max_message_size=self._max_message_size)
        context = hooks.before_send(messages, queue, self._engine.loop.clock.wall_ms())

        def done(sent: SendFuture) -> None:
            run_after_send(hooks, context, sent.batch)
            if on_done is not None:
                on_done(sent)

        try:
            return self._add_plain(
                context.messages.copy(), done, queue, priority, ttl_ms, deadline_ms, retries
            )
        except MQMeshError as error:
            if hooks.sees_before_send:  # else no hook has seen it
                context.error = error
                hooks.after_send(context)
            raise

    def _add_plain(
        self,
        messages: Sequence[Message],
        on_done: OnDone | None,
        queue: MessageQueue | None,
        priority: int | None,
        ttl_ms: int | None,
        deadline_ms: int,
        retries: int,
    ) -> SendFuture:
        # Encoded here, not in the client loop, which serves all senders.
        made = explicit_batch(messages, self._codec, self._max_message_size)
        topic = self._topic(made.first.topic, deadline_ms)
        if priority is not None:
            topic = self._routes.level(topic, priority)
        lane = self._routes.bound_lane(topic, made.first, queue)
        future, lane = self._buffer.append_batch(
            lane,
            topic,
            made.payload,
            deadline_ms,
            on_done,
            retries,
            made.delay,
            made.due_times,
            checked_ttl(ttl_ms),
        )
        self._sender.added(lane)
        self._pace.give_way(len(made.payload.data), GIVE_WAY_BATCH_BYTES)
        return future

    # ---- Helpers ---------------------------------------------------------------------

    def _make_trace_producer(self, group: str) -> "Producer":
        return trace_producer(group, self._client)

    def _heartbeat(self) -> HeartbeatRequest:
        return HeartbeatRequest(self._engine.client_id, [self.group], version=VERSION)

    def _routes_changed(self, topics: set[str]) -> None:
        self._routes.on_routes(topics)
        self._sender.schedule()

    def _broker_changed(self, broker_name: str, up: bool) -> None:
        if not up:
            self._direct.interrupt(broker_name)
            self._sender.take_posted()
        self._sender.schedule()

    def _take_command(self, broker_name: str, command: Command) -> None:
        take = self._commands.get(command.code)
        if take is not None:
            take(broker_name, command)

    def _ended(self) -> None:
        with self._life:
            if self._state == "running":
                self._state = "dead"
                self._buffer.stop_joins()
        self._sender.end_all(
            ClientClosed("the producer was closed before it was known that the message is stored"),
            f"producer group {self.group}",
        )
        self._requests.end_all(ClientClosed("the producer was closed before a reply came"))
        self._replies.end_all(ClientClosed("the producer was closed before the reply was taken"))

    def _deadline(self, timeout_ms: int | None) -> int:
        if timeout_ms is None:
            timeout_ms = self.options.send_msg_timeout_ms
        elif type(timeout_ms) is not int or not 0 < timeout_ms <= MAX_TIMEOUT_MS:
            raise InvalidArgument(
                f"timeout_ms must be an int of 1 to {MAX_TIMEOUT_MS}, not {timeout_ms!r}"
            )
        return self._clock_ns() // 1_000_000 + timeout_ms

    def _now_ms(self) -> int:
        return self._clock_ns() // 1_000_000

    def _check_blocking(self) -> None:
        if self._state != "running" or self._engine.loop.in_loop_thread:
            self._refuse_waiting()

    def _refuse_waiting(self) -> NoReturn:
        if self._state != "running":
            self._refuse()
        raise InvalidArgument("a callback cannot wait for a send; use send_async there")

    def _refuse(self) -> NoReturn:
        raise ClientClosed(_WHY_NOT[self._state])


def trace_producer(group: str, client: ClientOptions) -> Producer:
    """Return a producer for trace records, of a client with these settings."""
    return Producer(
        group,
        client=client,
        send_msg_timeout_ms=5_000,
        buffer_memory_bytes=8 * MIB,
        close_timeout_ms=round(STORE_S * 1_000),
    )


def checked_ttl(ttl_ms: int | None) -> int:
    """Return the time that a message lives, 0 for no limit.

    Raises:
        InvalidArgument: It is out of bounds.
    """
    if ttl_ms is None:
        return 0
    check_number("ttl_ms", ttl_ms, MAX_DELAY_MS)
    if not ttl_ms:
        raise InvalidArgument("ttl_ms = 0: nobody would get the message; leave it out for no limit")
    return ttl_ms


def _are_messages(messages: Sequence[Message]) -> bool:
    return isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Message)


def _wait(future: "concurrent.futures.Future[_T]", timeout_ms: int) -> _T:
    try:
        return future.result((timeout_ms + GRACE_MS) / 1_000)
    except concurrent.futures.TimeoutError:
        future.cancel()
        raise RequestTimeout(f"no outcome within {timeout_ms} ms") from None
    except concurrent.futures.CancelledError:
        raise RequestTimeout("the request was cancelled") from None
