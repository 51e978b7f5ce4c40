"""Push consumer: a listener is called with messages."""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Unpack

from mqmesh.errors import (
    ClientClosed,
    CorruptBatch,
    InvalidArgument,
    MQMeshError,
)
from mqmesh.message import (
    MessageQueue,
    StoredMessage,
    check_topic,
    is_system_topic,
    retry_topic,
)
from mqmesh.metrics import MetricBoard
from mqmesh.protocol.client_rpc import HandToRequest
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.membership import MessageModel
from mqmesh.sdk.client.options import ClientOptions, NamesrvAddr, client_options, make_options
from mqmesh.sdk.client.run import run
from mqmesh.sdk.consumer.consume_metrics import LISTENER_METRICS, PULL_METRICS
from mqmesh.sdk.consumer.consumer_engine import ConsumerEngine
from mqmesh.sdk.consumer.consumer_options import (
    PushConsumerKeywords,
    PushConsumerOptions,
)
from mqmesh.sdk.consumer.fetching.message_selector import (
    Wanted,
    as_selector,
    check_not_subscribed,
)
from mqmesh.sdk.consumer.fetching.process_queue import StateSpan
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.group_consumer import GroupConsumer
from mqmesh.sdk.consumer.introspection.questions import OnAnswer
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult as ConsumeResult
from mqmesh.sdk.consumer.listening.consume_result import Listener, hooked, is_coroutine_function
from mqmesh.sdk.consumer.listening.consume_service import (
    ConcurrentService,
    ConsumeService,
    Workers,
)
from mqmesh.sdk.consumer.listening.consume_work import AnyListener, QueueWork
from mqmesh.sdk.consumer.listening.group_retry import GroupRetry, Retry
from mqmesh.sdk.consumer.listening.handed_over import HandOver, handed_message
from mqmesh.sdk.consumer.listening.local_retry import LocalRetry, NoRetry
from mqmesh.sdk.consumer.listening.orderly_queue import NO_LIMIT, Always, OrderlyQueue
from mqmesh.sdk.consumer.listening.orderly_retry import OrderlyRetry, to_dead_letters
from mqmesh.sdk.consumer.listening.orderly_service import OrderlyService
from mqmesh.sdk.consumer.listening.send_back_queue import SendBackQueue
from mqmesh.sdk.consumer.listening.worker_threads import SparingThreads, WorkerThreads
from mqmesh.sdk.consumer.processed_commits import ProcessedCommits
from mqmesh.sdk.consumer.processing import (
    LeasedCommits,
    OwnedCommits,
    Processing,
    check_outputs,
)
from mqmesh.sdk.consumer.push_sink import PushSink
from mqmesh.sdk.consumer.rebalance import AllocateStrategy
from mqmesh.sdk.consumer.receiving.received_runs import ReceivedRuns
from mqmesh.sdk.consumer.running_info import Introspection
from mqmesh.sdk.hooks import HookCalls, Hooks
from mqmesh.sdk.tracing.client_tracing import ClientTracing
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import Transport

WATCH_INTERVAL_MS: Final = 1_000
SENT_BACK_S: Final = 0.5
"""Longest wait of a closing consumer for brokers to take the messages sent back."""

_log = logging.getLogger(__name__)


class PushConsumer(GroupConsumer[PushSink]):
    """Consumer that calls a listener with the messages of its topics, on several threads.

    The members of a group share the queues of a topic. A message is done when the listener
    returns. If it raises, or returns ``ConsumeResult.RECONSUME_LATER``, the message comes again
    to a member of the group, after 10 s, 30 s, 1 minute and so on; what failed after
    ``max_reconsume_times`` of these retries is a dead letter in ``%DLQ%<group>``. After a crash
    some messages come again, so a listener must bear repeats::

        def on_messages(messages):
            for message in messages:
                print(message.body)

        consumer = PushConsumer("audit")
        consumer.subscribe("orders", listener=on_messages)
        consumer.run()  # or start() and close(), or "with"

    Args:
        group: Consumer group, 1 to 255 characters of ``[%|a-zA-Z0-9_.-]``.
        namesrv_addr: ``host:port`` of the name servers, as a list, or as a text separated by
            commas or semicolons. By default those of ``client``, or of `mqmesh up`.
        credentials: Path of the file with the client's keys, or ``Credentials``, where security
            is on; by default those of ``client``.
        namespace: Namespace of all topics and groups, see docs/namespaces.md; by default that of
            ``client``, else of the environment (MQMESH_NAMESPACE).
        strategy: Divides queues among members: ``average``, ``average_by_circle``,
            ``consistent_hash``, ``machine_room``, or a strategy of
            ``mqmesh.sdk.consumer.rebalance``.
        client: Settings of the connection.
        transport: The world; ZeroMQ by default.
        hooks: Called around each call of a listener, in this order.
        options: Fields of ``PushConsumerOptions``, by name.

    Raises:
        InvalidArgument: A name or an option is out of bounds.
    """

    def __init__(
        self,
        group: str,
        *,
        namesrv_addr: NamesrvAddr | None = None,
        credentials: str | Credentials | None = None,
        namespace: str | None = None,
        strategy: AllocateStrategy | str = "average",
        client: ClientOptions | None = None,
        transport: Transport | None = None,
        hooks: Sequence[Hooks] = (),
        **options: Unpack[PushConsumerKeywords],
    ) -> None:
        connection = client_options(client, namesrv_addr, credentials, namespace)
        super().__init__(group, connection, strategy, transport)
        self.options = make_options(PushConsumerOptions, options, "consumer option")
        self.options.check_delivery()
        self._tracing = ClientTracing(
            self.group,
            hooks,
            self.options,
            lambda: self._engine.client,
            self._make_trace_producer if transport is None else None,
            timeout_ms=self.options.consume_timeout_ms,
            most_retries=self.options.dead_letters_after(),
        )
        self._hooks = self._tracing.hooks
        self._listeners: dict[str, AnyListener] = {}
        self._make_parts()

    def _make_parts(self) -> None:
        """Makes all that a start uses up."""
        self._engine = ConsumerEngine(
            self.group,
            self._client,
            self.options,
            self._strategy,
            self._make_sink,
            self._transport,
            self._ended,
        )
        self._back = SendBackQueue(
            self.group,
            self._engine.client,
            self._engine.client.brokers.may_come,
            self.options.most_retries(),
            self._engine.client.transport.condition(),
        )
        self._retry = self._make_retry()
        self._commits = ProcessedCommits(self._engine.client)
        self._engine.runs = self._make_runs()
        self._service = self._make_service()
        self._workers = self._make_workers(self._service)
        if isinstance(self._service, OrderlyService) and self._is_clustering:
            self._engine.lock_queues(self.options.rebalance_lock_interval_ms, self._service.look)
        self.introspection = Introspection("push", self._engine, self._service)
        self._engine.answerers[RequestCode.CONSUME_MESSAGE_DIRECTLY] = self._take_handed
        self._metrics = MetricBoard()
        self._metrics.add(PULL_METRICS, lambda: self._engine)
        self._metrics.add(LISTENER_METRICS, lambda: self._service)
        for topic, selector in self._subscribed.items():
            self._engine.subscribe(topic, selector)

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> None:
        """Connects, and waits until the first queues are there; further calls do nothing.

        Messages sent after it has returned are seen, also by a new group. It returns without
        queues if brokers cannot be reached within ``start_timeout_ms``, and goes on by itself. A
        closed consumer may be started again, and has the subscriptions that it had.

        Raises:
            ClientClosed: It is being closed, or it was given a transport, which is closed with it.
            ConfigError: The offset file of a broadcasting consumer cannot be used.
            AuthenticationFailed: The name servers do not trust the client, or the other way round.
            NoPermission: Brokers refuse the group, its topics, or a filter in Python.
            TopicNotFound: A topic does not exist within ``topic_wait_ms``, with
                ``topic_must_exist``.
            FilterFailed: A filter in Python cannot be loaded.
            TooManyOpenFiles: The process has too few descriptors left.
        """
        self._renew()
        if self._state == "new":
            self._state = "running"
            try:
                self._engine.open()
                self._tracing.start(self._metrics, at_exit=True)
                if self._is_clustering and self._engine.runs is None:
                    # Messages of the group that failed come back there.
                    self._engine.subscribe(retry_topic(self.group), "*")
                self._engine.client.call_later(WATCH_INTERVAL_MS, self._watch)
                self.introspection.begin()
                self._engine.start()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Waits for running listeners for a moment, commits and leaves; idempotent."""
        if self._state in ("closing", "closed"):
            return
        running, self._state = self._state == "running", "closing"
        try:
            self._close(running)
        finally:
            self._state = "closed"

    def _close(self, running: bool) -> None:
        timeout_s = self.options.close_timeout_ms / 1_000

        def stop_work() -> None:
            clock = self._engine.client.loop.clock
            until_ms = clock.monotonic_ms() + self.options.close_timeout_ms
            self._service.close()
            if not self._workers.close(timeout_s):
                _log.warning(
                    "group %s: listeners still run after %s s; their messages will come again",
                    self.group,
                    timeout_s,
                )
            # Messages that are sent back in time are committed.
            left_s = max(until_ms - clock.monotonic_ms(), 0) / 1_000
            self._retry.wait(min(left_s, SENT_BACK_S))

        if running:
            self._engine.close(stop_work)
        else:
            self._service.close()
            self._engine.client.close()
        self._tracing.close()

    @property
    def closed(self) -> bool:
        """True after ``close``, or when the consumer's thread died."""
        return self._state in ("closing", "closed") or self._engine.client.closed

    def run(self) -> None:
        """Starts, consumes until SIGINT or SIGTERM, ends the calls that run, commits and closes.

        For several clients in one process there is ``mqmesh.run``.

        Raises:
            InvalidArgument: This is not the main thread, where alone signals can be handled.
            MQMeshError: As for ``start``.
        """
        run(self)

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ---- What to consume -------------------------------------------------------------

    def subscribe(self, topic: str, expression: Wanted = "*", *, listener: Listener) -> None:
        """Subscribes to a topic; before or after ``start``.

        All members of a group must subscribe to the same topics with the same expressions.

        Args:
            topic: Topic; it need not exist yet.
            expression: Tags joined by ``||``, ``*`` for all messages, a
                ``MessageSelector``, or a ``PythonFilter``.
            listener: Called with 1 to ``consume_message_batch_max_size`` messages of one queue,
                from several threads at once. They are done when it returns, unless it returns
                ``ConsumeResult.RECONSUME_LATER``.

        Raises:
            InvalidArgument: The topic's name or the expression is illegal, the topic is subscribed
                already (``unsubscribe`` it first), or the listener cannot be called, or is a
                coroutine function; or there are 16,383 topics already.
            ClientClosed: After ``close``.
        """
        if is_coroutine_function(listener):
            raise InvalidArgument(
                "listener is a coroutine function, which this consumer would not await; "
                "PushConsumer of mqmesh.aio does"
            )
        self._subscribe(topic, expression, listener)

    def processing(self, messages: Sequence[StoredMessage]) -> Processing:
        """Return a block for a listener, whose outputs are stored when its messages are done::

            def on_messages(messages):
                with consumer.processing(messages) as out:
                    for message in messages:
                        out.send(Message("bills", bill(message)))

        Both are stored at once, or neither: docs/exactly-once.md. If the block raises, let the
        listener raise as well: the messages come again as after every failure.

        Args:
            messages: Those of the call of the listener, from the first one on; of one broker
                group, to which the outputs go, too.

        Raises:
            InvalidArgument: There are none, or they are consumed neither in order nor one by one
                (``consume_orderly``, or ``delivery`` "message" or "fifo").
        """
        engine = self._engine
        commit = OwnedCommits(engine, self._commits).commit
        if engine.runs is not None:
            receiver = engine.runs.receiver
            commit = LeasedCommits(self.group, engine.client, receiver, self._commits).commit
        elif engine.leases is None:
            raise InvalidArgument(
                "messages are processed in order (consume_orderly), or one by one (delivery = "
                "message or fifo); a group with offsets knows no other progress"
            )
        return Processing(engine.client, messages, commit, lambda error: None)

    def check_outputs(self, *topics: str) -> None:
        """Check that outputs can be stored wherever its topics are consumed; after ``start``.

        Args:
            topics: Topics of outputs.

        Raises:
            NoRoute: They cannot; names topic and broker group.
            ClientClosed: It is not running.
        """
        own = [one for one in self._subscribed if not is_system_topic(one)]
        check_outputs(self._engine.client, own, topics, self.options.start_timeout_ms)

    # ---- How it goes -----------------------------------------------------------------

    def assignment(self) -> list[MessageQueue]:
        """Return the queues of its topics that this member has at present, sorted.

        Queues of the group's retry topic are divided, too, but not listed.
        """
        own = retry_topic(self.group)
        return sorted(queue for queue in self._engine.assigned.copy() if queue.topic != own)

    def generation(self, queue: MessageQueue) -> int | None:
        """Return the generation in which this member was given a queue; None if it has not it.

        In one generation a queue is given to one member; a later one replaces it.
        """
        one = self._engine.assigned.get(queue)
        return one.loop.generation if one is not None and one.loop is not None else None

    @property
    def failures(self) -> int:
        """Calls of a listener that failed so far."""
        return self._service.failures

    # ---- Helpers ---------------------------------------------------------------------

    def _subscribe(self, topic: str, expression: Wanted, listener: AnyListener) -> None:
        check_topic(topic)
        selector = as_selector(expression)
        if not callable(listener):
            raise InvalidArgument(f"listener must be callable, not {type(listener).__name__}")
        check_not_subscribed(topic, self._subscribed)
        if selector.python is not None and self._engine.runs is not None:
            raise InvalidArgument(
                f"delivery = {self.options.delivery} takes tags or SQL92, no filter in Python"
            )

        def subscribe() -> None:
            self._listeners[topic] = listener
            self._engine.subscribe(topic, selector)

        self._do(subscribe)
        self._subscribed[topic] = selector

    def _ended(self) -> None:
        self._back.end_all(ClientClosed("the consumer was closed"))
        self._commits.end_all()

    @property
    def _is_clustering(self) -> bool:
        return self.options.message_model == MessageModel.CLUSTERING

    def _make_runs(self) -> ReceivedRuns | None:
        """Make the receiver of messages one by one, unless members divide the queues."""
        if self.options.delivery is DeliveryMode.QUEUE:
            return None
        engine = self._engine
        return ReceivedRuns(
            self.group,
            engine.client,
            self.options.run_settings(),
            engine.counters,
            engine.meters,
            self._with_hooks(self._listen_again),
            engine.hindered,
            engine.note_settled,
        )

    def _make_service(self) -> ConsumeService:
        changed = self._engine.client.transport.condition()
        now_ns = self._engine.client.loop.clock.monotonic_ns
        if self.options.consume_orderly:
            return OrderlyService(
                changed,
                now_ns,
                self.options.suspend_current_queue_time_ms,
                self._call_later,
                to_dead_letters(self._back),
            )
        runs = self._engine.runs
        if runs is None:
            return ConcurrentService(changed, now_ns, self._retry.on_failed)
        service = ConcurrentService(changed, now_ns, runs.on_failed)
        runs.attach(service)
        return service

    def _make_workers(self, service: ConsumeService) -> Workers:
        name, most = f"mqmesh-{self.group}", self.options.consume_thread_count
        clock = self._engine.client.loop.clock
        if isinstance(service, ConcurrentService):
            return SparingThreads(service, name, most, clock, self._call_later)
        return WorkerThreads(service, name, most, clock)

    def _make_retry(self) -> Retry:
        if self.options.consume_orderly:
            options = self.options
            gives_up = options.dead_letter_undecodable or options.max_reconsume_times >= 0
            return OrderlyRetry(self._back, gives_up and self._is_clustering, self._pass_over)
        if not self._is_clustering:
            return NoRetry()
        keep = LocalRetry(self._call_later, self._submit_again)
        return GroupRetry(self.group, self._back, self._call_later, keep.on_failed)

    def _listener_of(self, topic: str) -> AnyListener:
        """Return the listener of messages that were sent to a topic at first.

        Raises:
            InvalidArgument: There is none in this member.
        """
        listener = self._listeners.get(topic)
        if listener is None:
            raise InvalidArgument(
                f"this member of group {self.group} has no listener for topic {topic}"
            )
        return listener

    def _hooked(
        self, listener: AnyListener, hooks: HookCalls, wall_ms: Callable[[], int]
    ) -> AnyListener:
        return hooked(listener, hooks, wall_ms)

    def _listen_again(self, messages: list[StoredMessage]) -> object:
        return self._listener_of(messages[0].topic)(messages)

    def _make_sink(self, queue: MessageQueue, start: int) -> PushSink:
        listener: AnyListener
        batch_size = self.options.consume_message_batch_max_size
        if queue.topic == retry_topic(self.group):
            # One by one: so the one that spoilt a call of many is found, and each has its topic.
            listener, batch_size = self._listen_again, 1
        else:
            listener = self._listeners[queue.topic]
        listener = self._with_hooks(listener)

        def progress() -> None:
            one = self._engine.assigned.get(queue)
            if one is None or one.loop is None or not one.loop.waiting_for_room:
                return
            if one.sink is None or one.sink.has_room():
                self._call_soon(one.loop.resume)

        def broken(batch: PulledBatch, span: StateSpan, error: CorruptBatch) -> None:
            self._engine.counters.corrupt_batches += 1
            self._retry.on_undecodable(queue, batch.first, batch.end, span, error)

        def work() -> QueueWork:
            if not self.options.consume_orderly:
                return QueueWork(listener, batch_size, progress, broken, topic=queue.topic)
            leases = self._engine.leases
            lease = Always() if leases is None else leases.lease(queue)
            limit = self.options.max_reconsume_times if self._is_clustering else NO_LIMIT
            return OrderlyQueue(
                listener, batch_size, progress, broken, lease, limit, topic=queue.topic
            )

        return PushSink(start, self.options, self._service, work)

    def _take_handed(
        self, broker_name: str, question: bytes, body: memoryview, on_answer: OnAnswer
    ) -> None:
        """Take a message that an administrator hands to this member."""
        header = decode_header(HandToRequest, memoryview(question))
        in_order = self.options.delivery is DeliveryMode.FIFO
        if in_order or not isinstance(self._service, ConcurrentService):
            raise InvalidArgument(
                f"group {self.group} consumes in order: no message may overtake another one"
            )
        address = self._engine.client.routes.address(broker_name)
        host = "" if address is None else address.tcp
        message = handed_message(
            body,
            header.ordinal,
            broker_name=broker_name,
            store_host=host,
            namespace=self._engine.client.namespace,
        )
        listener = self._with_hooks(self._listener_of(message.topic))
        loop = self._engine.client.loop
        HandOver(self._service, loop, on_answer).begin(listener, message)

    def _with_hooks(self, listener: AnyListener) -> AnyListener:
        if self._hooks is None:
            return listener
        return self._hooked(listener, self._hooks, self._engine.client.loop.clock.wall_ms)

    def _submit_again(
        self, work: QueueWork, messages: list[StoredMessage], span: StateSpan, attempt: int
    ) -> None:
        assert isinstance(self._service, ConcurrentService)
        self._service.submit_again(work, messages, span, attempt)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        try:
            self._engine.client.post(callback)
        except MQMeshError:
            _log.debug("group %s is closed", self.group)

    def _call_later(self, delay_ms: int, callback: Callable[[], None]) -> None:
        if self._engine.client.loop.in_loop_thread:
            self._engine.client.call_later(delay_ms, callback)
        else:
            self._call_soon(lambda: self._engine.client.call_later(delay_ms, callback))

    def _pass_over(self, queue: MessageQueue, offset: int) -> None:
        one = self._engine.assigned.get(queue)
        if one is not None and one.sink is not None and one.loop is not None:
            one.sink.move(offset)
            one.loop.restart()

    def _watch(self) -> None:
        now_ms = self._engine.client.loop.clock.monotonic_ms()
        waiting = self._service.waiting()
        sinks = self._engine.sinks()
        for queue, sink in sinks.items():
            for offset, span in sink.overdue(now_ms, waiting):
                self._retry.on_overdue(queue, offset, span, self.options.consume_timeout_ms)
        for one in list(self._engine.assigned.values()):
            # Messages may be done without a worker: sent back, for one, while their call hangs.
            if one.loop is not None and one.loop.waiting_for_room:
                one.loop.resume()
        if self._engine.runs is not None:
            self._engine.runs.look(now_ms)
        self._retry.look(now_ms, {queue: sink.commit_offset() for queue, sink in sinks.items()})
        self._engine.client.call_later(WATCH_INTERVAL_MS, self._watch)
