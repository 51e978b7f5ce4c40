"""Pull consumer: the application asks for messages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import Final, TypeVar, Unpack

from mqmesh.errors import (
    ClientClosed,
    InvalidArgument,
    MQMeshError,
    NoRoute,
    OffsetIllegal,
)
from mqmesh.message import (
    MessageQueue,
    StoredMessage,
    check_number,
    check_topic,
    describe,
)
from mqmesh.metrics import MetricBoard
from mqmesh.protocol.pulling import QueueBoundsResponse
from mqmesh.sdk.client.options import ClientOptions, NamesrvAddr, client_options, make_options
from mqmesh.sdk.consumer.assigned import Assigned
from mqmesh.sdk.consumer.consume_metrics import PULL_METRICS
from mqmesh.sdk.consumer.consumer_engine import ConsumerEngine
from mqmesh.sdk.consumer.consumer_options import (
    PullConsumerKeywords,
    PullConsumerOptions,
)
from mqmesh.sdk.consumer.fetching.fetch_buffer import FetchBuffer
from mqmesh.sdk.consumer.fetching.message_selector import (
    Wanted,
    as_selector,
    check_not_subscribed,
)
from mqmesh.sdk.consumer.fetching.process_queue import FlowLimits
from mqmesh.sdk.consumer.group_consumer import GroupConsumer
from mqmesh.sdk.consumer.polled_queues import PolledQueues
from mqmesh.sdk.consumer.rebalance import AllocateStrategy
from mqmesh.sdk.consumer.running_info import Introspection
from mqmesh.sdk.hooks import ConsumeContext, Hooks
from mqmesh.sdk.tracing.client_tracing import ClientTracing
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import Transport
from mqmesh.units import MAX_OFFSET, MIB

NEW_TOPIC_MS: Final = 500
NEW_TOPIC_STEP_MS: Final = 20

_T = TypeVar("_T")
_OnDone = Callable[[_T | MQMeshError], None]


class PullConsumer(GroupConsumer[FetchBuffer]):
    """Consumer that gives messages to the application when it polls.

    Either ``subscribe`` to topics, whose queues are then shared with the other members of
    the group, or ``assign`` queues. One thread polls at a time; everything else may be called
    from any thread::

        with PullConsumer("audit") as consumer:
            consumer.subscribe("orders")
            while True:
                for message in consumer.poll():
                    print(message.body)

    With ``auto_commit`` (the default) a poll marks messages of earlier polls as done. To
    gather several polls, and fail perhaps, use ``auto_commit=False`` and ``commit``::

        with PullConsumer("loader", auto_commit=False) as consumer:
            consumer.subscribe("orders")
            rows = []
            while True:
                rows += consumer.poll()
                if len(rows) >= 1_000:
                    store(rows)
                    consumer.commit()
                    rows = []

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
        hooks: Called for the messages of each queue before a poll returns them, and when the next
            poll marks them as done.
        options: Fields of ``PullConsumerOptions``, by name.

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
        **options: Unpack[PullConsumerKeywords],
    ) -> None:
        connection = client_options(client, namesrv_addr, credentials, namespace)
        super().__init__(group, connection, strategy, transport)
        self.options = make_options(PullConsumerOptions, options, "consumer option")
        self._tracing = ClientTracing(
            self.group,
            hooks,
            self.options,
            lambda: self._engine.client,
            self._make_trace_producer if transport is None else None,
            hooks_polls=True,
        )
        self._hooks = self._tracing.hooks
        self._wanted: list[MessageQueue] = []
        self._mode = ""
        self._on_arrival: Callable[[], None] = _nothing
        self._make_parts()
        self._tracing.instrument(self)

    def _make_parts(self) -> None:
        """Makes all that a start uses up."""
        self._engine = ConsumerEngine(
            self.group,
            self._client,
            self.options,
            self._strategy,
            lambda queue, start: self._queues.add(queue, start),
            self._transport,
        )
        client_engine = self._engine.client
        # Data of polls, under a lock of their own: the engine's tables belong to its thread.
        self._queues = PolledQueues(
            client_engine.transport.condition(),
            client_engine.loop.clock,
            FlowLimits(
                messages=self.options.pull_threshold_for_queue,
                size_bytes=self.options.pull_threshold_size_for_queue * MIB,
            ),
            self._engine.counters,
            self._check_running,
            self._check_able,
        )
        self._engine.on_fatal = self._queues.wake
        self._queues.on_arrival = self._on_arrival
        self.introspection = Introspection("pull", self._engine)
        self._metrics = MetricBoard()
        self._metrics.add(PULL_METRICS, lambda: self._engine)
        self._hooked: list[ConsumeContext] = []
        for topic, selector in self._subscribed.items():
            self._engine.subscribe(topic, selector)
        if self._mode == "assign":
            self._engine.assign(self._wanted)

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> None:
        """Connects, and waits until the first queues are there; further calls do nothing.

        A closed consumer may be started again. It has the subscriptions that it had, or the queues,
        and goes on at the committed offsets.

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
                self.introspection.begin()
                self._tracing.start(self._metrics, at_exit=True)
                self._engine.start()
            except BaseException:
                self.close()
                raise

    def close(self, *, unfinished: bool = False) -> None:
        """Commits polled messages, if ``auto_commit`` is on, and leaves; idempotent.

        Args:
            unfinished: Messages of the last poll were not worked on and shall come again.
        """
        if self._state in ("closing", "closed"):
            return
        running, self._state = self._state == "running", "closing"
        try:
            self._close(running, unfinished)
        finally:
            self._state = "closed"

    def _close(self, running: bool, unfinished: bool) -> None:
        if self.options.auto_commit and not unfinished:
            self._queues.acknowledge(None)
        self._queues.wake()  # waiting polls find the consumer closed
        self._polled_is_done("its consumer was closed before" if unfinished else None)
        if running:
            self._engine.close(lambda: None)
        else:
            self._engine.client.close()
        self._tracing.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(unfinished=error is not None)

    # ---- Which queues ----------------------------------------------------------------

    def subscribe(self, topic: str, expression: Wanted = "*") -> None:
        """Subscribes to a topic; before or after ``start``.

        Args:
            topic: Topic; it need not exist yet.
            expression: Tags joined by ``||``, ``*`` for all messages, a
                ``MessageSelector``, or a ``PythonFilter``.

        Raises:
            InvalidArgument: The topic's name or the expression is illegal, the topic is subscribed
                already (``unsubscribe`` it first), queues were assigned before, or there are
                16,383 topics already.
            ClientClosed: After ``close``.
        """
        check_topic(topic)
        selector = as_selector(expression)
        self._choose_mode("subscribe")
        check_not_subscribed(topic, self._subscribed)
        self._do(lambda: self._engine.subscribe(topic, selector))
        self._subscribed[topic] = selector

    def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Assigns these queues and no others, regardless of other members.

        Once started, it waits until they can be polled.

        Raises:
            InvalidArgument: Topics were subscribed to before.
            ClientClosed: After ``close``.
            RequestTimeout: The client loop does not answer.
            NoPermission: Brokers refuse the group or a topic.
        """
        wanted = list(queues)
        for queue in wanted:
            check_topic(queue.topic)
        self._choose_mode("assign")
        self._wanted = wanted
        if self._state == "new":
            self._engine.assign(wanted)
            return

        def assign(done: _OnDone[bool]) -> None:
            self._engine.assign(wanted)
            done(True)

        self._call(assign)
        self._queues.wait_ready(wanted, self.options.start_timeout_ms)

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic, sorted, regardless of their readers.

        An unknown topic is requested again for a moment: name servers learn of a new one up to
        100 ms later.

        Raises:
            NoRoute: The topic is not known, or no name server answers.
            ClientClosed: Before ``start``, or after ``close``.
        """
        self._check_running()
        client, timeout_ms = self._engine.client, self.options.request_timeout_ms
        check_topic(topic)
        clock = client.loop.clock
        give_up_ms = clock.monotonic_ms() + NEW_TOPIC_MS
        while True:
            try:
                client.wait_route(topic, timeout_ms)
                return list(client.routes.subscribe_queues(topic))
            except NoRoute:
                if clock.monotonic_ms() >= give_up_ms:
                    raise
            self._queues.wait_change(NEW_TOPIC_STEP_MS)
            self._check_running()

    def assignment(self) -> list[MessageQueue]:
        """Return the queues that this member has, sorted: each can be polled and committed.

        A queue that it was given a moment ago is not among them until it is known where to begin.
        """
        return sorted(self._queues.chosen(()))

    # ---- Messages --------------------------------------------------------------------

    def poll(self, timeout_ms: int = 1_000, max_messages: int | None = None) -> list[StoredMessage]:
        """Waits for messages.

        Args:
            timeout_ms: Longest wait; 0 does not wait.
            max_messages: Most messages, in place of ``pull_batch_size``.

        Returns:
            Messages, in order for each queue; none if none came in time.

        Raises:
            InvalidArgument: ``max_messages`` is not positive.
            ClientClosed: Before ``start``, or after ``close``.
            UndecodableMessages: The next messages of a queue cannot be decoded. Each time it is
                that queue's turn, until ``seek`` passes them over; other queues go on.
            NoPermission: There are no messages, and brokers refuse the group or a topic.
            TopicNotFound: There are no messages, and a topic does not exist, with
                ``topic_must_exist``.
        """
        self._check_running()
        self._polled_is_done(None)
        most = self.options.pull_batch_size if max_messages is None else max_messages
        if most < 1:
            raise InvalidArgument(f"max_messages must be at least 1, not {most}")
        found = self._queues.poll(most, timeout_ms, auto_commit=self.options.auto_commit)
        if not found:
            return found
        self._pull_on()
        if self._hooks is not None:
            now_ms = self._engine.client.loop.clock.wall_ms()
            for _, some in groupby(found, attrgetter("message_queue")):
                self._hooked.append(self._hooks.before_consume(list(some), now_ms))
        return found

    def pause(self, *queues: MessageQueue) -> None:
        """Pauses queues, all by default: polls pass over them until ``resume``.

        Raises:
            InvalidArgument: A queue is not assigned.
        """
        self._set_paused(queues, True)

    def resume(self, *queues: MessageQueue) -> None:
        """Ends ``pause``.

        Raises:
            InvalidArgument: A queue is not assigned.
        """
        self._set_paused(queues, False)

    # ---- Places in a queue -----------------------------------------------------------

    def position(self, queue: MessageQueue) -> int:
        """Return the queue offset of the next message that a poll returns.

        Raises:
            InvalidArgument: The queue is not assigned.
        """
        return self._buffer(queue).position

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Moves to an offset.

        Args:
            queue: An assigned queue.
            offset: From the queue's first message to behind its last.

        Raises:
            InvalidArgument: The queue is not assigned, or the offset is no int.
            OffsetIllegal: The queue does not reach there.
            MQMeshError: The broker does not answer, or refuses.
        """
        self._buffer(queue)
        if type(offset) is not int:
            raise InvalidArgument(f"offset of {queue} must be an int, not {describe(offset)}")
        bounds = self._bounds(queue)
        if not bounds.min_queue_offset <= offset <= bounds.max_queue_offset:
            raise OffsetIllegal(
                f"offset {offset} of {queue} is not within {bounds.min_queue_offset} and "
                f"{bounds.max_queue_offset}"
            )
        self._move(queue, offset)

    def seek_to_begin(self, *queues: MessageQueue) -> None:
        """Moves to the first message of queues, all assigned ones by default.

        Raises:
            MQMeshError: As ``seek``.
        """
        for queue in self._chosen(queues):
            self._move(queue, self._bounds(queue).min_queue_offset)

    def seek_to_end(self, *queues: MessageQueue) -> None:
        """Moves behind the last message of queues, all assigned ones by default.

        Raises:
            MQMeshError: As ``seek``.
        """
        for queue in self._chosen(queues):
            self._move(queue, self._bounds(queue).max_queue_offset)

    def seek_to_time(self, timestamp_ms: int, *queues: MessageQueue) -> None:
        """Moves to the first message stored at or after a time.

        Args:
            timestamp_ms: Milliseconds since 1970.
            queues: All assigned ones by default.

        Raises:
            MQMeshError: As ``seek``.
        """
        for queue in self._chosen(queues):
            self._move(queue, self.offset_of_time(queue, timestamp_ms))

    def offset_of_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at or after a time; the end if none.

        Raises:
            InvalidArgument: That is no time.
            MQMeshError: The broker does not answer, or refuses.
        """
        check_number("timestamp_ms", timestamp_ms, MAX_OFFSET)

        def ask(done: _OnDone[int]) -> None:
            self._engine.positions.find_time(queue, timestamp_ms, done)

        return self._call(ask)

    def lag(self, *queues: MessageQueue) -> dict[MessageQueue, int]:
        """Return the messages between ``position`` and the end of queues; all assigned by default.

        Raises:
            InvalidArgument: A queue is not assigned.
            MQMeshError: A broker does not answer, or refuses.
        """
        return {
            queue: max(self._bounds(queue).max_queue_offset - self.position(queue), 0)
            for queue in self._chosen(queues)
        }

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commits, and waits until it is done.

        Args:
            offsets: The next offset to read of each queue; by default what polls returned so
                far is done.

        Raises:
            InvalidArgument: A queue is not assigned, or its offset is none; nothing was committed.
            MQMeshError: A broker refused or did not answer; the offsets are tried again with
                the next commit.
        """
        chosen = self._chosen(tuple(offsets or ()))
        self.acknowledge(offsets)

        def commit(done: _OnDone[bool]) -> None:
            self._engine.commit(chosen, lambda error: done(True if error is None else error))

        self._call(commit)

    def acknowledge(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Mark messages done, as ``commit`` does, and leave it to later commits to notify brokers.

        Raises:
            InvalidArgument: A queue is not assigned, or its offset is none.
        """
        for queue, offset in (offsets or {}).items():
            self._buffer(queue)
            check_number(f"offset of {queue}", offset, MAX_OFFSET)
        self._queues.acknowledge(offsets)

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the offset that the group committed in a queue; None if it never did.

        Raises:
            MQMeshError: The broker does not answer, or refuses.
        """

        def ask(done: _OnDone[dict[MessageQueue, int]]) -> None:
            self._engine.offsets.fetch(queue.broker_name, [queue], done)

        offset = self._call(ask)[queue]
        return None if offset < 0 else offset

    # ---- How it goes -----------------------------------------------------------------

    @property
    def on_arrival(self) -> Callable[[], None]:
        """Called in the client loop whenever a poll may find something; must return at once."""
        return self._on_arrival

    @on_arrival.setter
    def on_arrival(self, hook: Callable[[], None]) -> None:
        self._on_arrival = self._queues.on_arrival = hook

    # ---- Helpers ---------------------------------------------------------------------

    def _polled_is_done(self, why_not: str | None) -> None:
        if self._hooks is not None:
            hooked, self._hooked = self._hooked, []
            for context in hooked:
                self._hooks.after_consume(context, why_not)

    def _choose_mode(self, mode: str) -> None:
        self._check_not_closed()
        if self._mode not in ("", mode):
            raise InvalidArgument("subscribe and assign exclude each other")
        self._mode = mode

    def _check_running(self) -> None:
        if self._state == "running" and self._engine.client.closed:
            raise ClientClosed("the consumer's thread has ended; see the log")
        self._check_not_closed()
        if self._state != "running":
            raise ClientClosed("call start() first")

    def _check_able(self) -> None:
        fatal = self._engine.hindrances.fatal
        if fatal is not None:
            raise fatal

    def _call(self, function: Callable[[_OnDone[_T]], None]) -> _T:
        self._check_running()
        return self._engine.client.call(function, self.options.request_timeout_ms)

    def _buffer(self, queue: MessageQueue) -> FetchBuffer:
        self._check_running()
        return self._queues.buffer(queue)

    def _chosen(self, queues: tuple[MessageQueue, ...]) -> list[MessageQueue]:
        if queues:
            self._check_running()
        return self._queues.chosen(queues)

    def _bounds(self, queue: MessageQueue) -> QueueBoundsResponse:
        def ask(done: _OnDone[QueueBoundsResponse]) -> None:
            self._engine.positions.find_bounds(queue, done)

        return self._call(ask)

    def _move(self, queue: MessageQueue, offset: int) -> None:
        def move(done: _OnDone[bool]) -> None:
            one = self._engine.assigned.get(queue)
            if one is None or one.sink is None or one.loop is None:
                done(InvalidArgument(f"{queue} is not assigned to this consumer"))
                return
            one.sink.move(offset)
            one.loop.restart()
            done(True)

        self._call(move)

    def _set_paused(self, queues: tuple[MessageQueue, ...], paused: bool) -> None:
        chosen = self._chosen(queues)
        self._queues.set_paused(chosen, paused)

        def change() -> None:
            for queue in chosen:
                one = self._engine.assigned.get(queue)
                if one is not None and one.loop is not None:
                    one.loop.paused = paused
                    one.loop.resume()

        self._engine.client.post(change)

    def _pull_on(self) -> None:
        waiting: list[Assigned[FetchBuffer]] = [
            one
            for one in self._engine.assigned.copy().values()
            if one.loop is not None and one.loop.waiting_for_room
        ]

        def resume() -> None:
            for one in waiting:
                if one.loop is not None:
                    one.loop.resume()

        if waiting:
            self._engine.client.post(resume)


def _nothing() -> None:
    """Do nothing."""
