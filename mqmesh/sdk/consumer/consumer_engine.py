"""Core of push and pull consumers: membership, assigned queues, their pulls and offsets."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Final, Generic

import msgspec

from mqmesh.errors import (
    AuthenticationFailed,
    EndpointUnreachable,
    MQMeshError,
    NoRoute,
    RemoteProtocolError,
    StaleGeneration,
    TopicNotFound,
)
from mqmesh.message import RETRY_PREFIX, MessageQueue, StoredMessage
from mqmesh.namespaces import prefix_of
from mqmesh.protocol.command import Command, decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.groups import ConsumerOffsetReset
from mqmesh.protocol.membership import (
    ConsumerData,
    ConsumerIdsChanged,
    HeartbeatRequest,
    HeartbeatResponse,
    MessageModel,
    Subscription,
    TopicConsumption,
)
from mqmesh.protocol.route import TopicRoute
from mqmesh.sdk.client.backoff import Backoff
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.assigned import Assigned, AssignedQueues, S
from mqmesh.sdk.consumer.consumer_options import ConsumerOptions
from mqmesh.sdk.consumer.fetching.message_selector import (
    MessageSelector,
    Wanted,
    as_selector,
)
from mqmesh.sdk.consumer.fetching.pull_loop import PullCounters, PullLoop, PullMeter
from mqmesh.sdk.consumer.fetching.pulled_batch import PullSource
from mqmesh.sdk.consumer.filter_link import FilterLinks
from mqmesh.sdk.consumer.hindrances import REPORT_MS, Hindrances
from mqmesh.sdk.consumer.introspection.questions import Answerer, Questions
from mqmesh.sdk.consumer.local_offsets import LocalOffsets
from mqmesh.sdk.consumer.memberships import Memberships, Standing
from mqmesh.sdk.consumer.offset_store import BrokerOffsets, OffsetStore
from mqmesh.sdk.consumer.queue_assignment import QueueAssignment
from mqmesh.sdk.consumer.queue_leases import TICK_MS as LEASE_TICK_MS
from mqmesh.sdk.consumer.queue_leases import QueueLeases
from mqmesh.sdk.consumer.rebalance import AllocateStrategy
from mqmesh.sdk.consumer.receiving.received_runs import ReceivedRuns
from mqmesh.sdk.consumer.receiving.receiver import TICK_MS as RECEIVE_TICK_MS
from mqmesh.sdk.consumer.start_offsets import QueueStarts, Start
from mqmesh.sdk.consumer.start_positions import Position, StartPositions
from mqmesh.transport.interface import Transport
from mqmesh.version import VERSION

HANDOVER_MS: Final = 100
"""A new owner waits so long before it requests offsets, so that the former one can commit."""
SECOND_COMMIT_MS: Final = 50
"""Delay of a second commit, for messages that listeners had when their queue was given away."""
TAKE_ANEW_MOST_MS: Final = 1_000
"""Longest delay before a claim of a queue that a broker gives and takes again and again."""
TOPIC_GRACE_MS: Final = 500
"""A start waits so much longer than ``topic_wait_ms`` for the client loop to report its end."""
ABSENT_MS: Final = 40_000
"""A broker that is away is reported when it was not connected for so long."""
START_COMMIT_MS: Final = 5
CLOSE_COMMIT_MS: Final = 500

MOST_NAMED: Final = 8
"""Topics that one line of the log names."""

_log = logging.getLogger(__name__)


class ConsumerEngine(Generic[S]):
    """A member of a consumer group. Methods are for the client loop, unless they say so.

    Args:
        group: Consumer group.
        client: Settings of the connection.
        options: Settings of the consumer.
        strategy: Divides queues among members.
        make_sink: Makes the place for the messages of a queue that begins at an offset.
        transport: The world; ZeroMQ by default.
        on_end: Called last in the client loop; nothing is sent any more.

    Attributes:
        meters: Counters of pulls, by topic.
        stats: Recent consumption, for heartbeats.
        answerers: Handlers of administrators' requests, by request code.
        hindrances: Reasons why no messages come.
        on_fatal: Called when it cannot work as things are; see ``Hindrances.fatal``.
        runs: Messages received under leases, in place of queues; set before ``start``.
    """

    def __init__(
        self,
        group: str,
        client: ClientOptions,
        options: ConsumerOptions,
        strategy: AllocateStrategy,
        make_sink: Callable[[MessageQueue, int], S],
        transport: Transport | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.group = group
        self.options = options
        self.counters = PullCounters()
        self.assigned: AssignedQueues[S] = AssignedQueues()
        self.client = ClientEngine(
            client,
            heartbeat=self._heartbeat,
            on_routes=self._routes_changed,
            on_command=self._take_command,
            on_broker=self._broker_changed,
            on_heartbeat=self._heartbeat_answered,
            stand_ins=True,
            on_end=on_end,
            transport=transport,
        )
        self.settled = self.client.transport.flag()
        self.filters = FilterLinks(group, self.client)
        self.memberships = Memberships(group)
        self.offsets = self._make_offsets()
        self.positions = StartPositions(
            self.offsets, self.client, options.consume_from_where, options.consume_timestamp_ms
        )
        self.assignment = QueueAssignment(
            group,
            self.client,
            strategy if options.message_model == MessageModel.CLUSTERING else None,
            subscribed=self._subscribed,
            has_queues=lambda: bool(self.assigned),
            on_hindered=partial(self.hindered, "who the members are is unknown"),
            apply=self._apply,
        )
        self.starts = QueueStarts(
            self.offsets,
            self.positions,
            self.client.call_later,
            is_ours=self.assigned.__contains__,
            is_wanted=self._is_wanted,
            begin=self._begin_queue,
            on_hindered=lambda queue, error: self.hindered(_where_to_begin(queue), error),
        )
        self.on_fatal: Callable[[], None] = lambda: None
        self.hindrances = self._make_hindrances()
        self.meters: dict[str, PullMeter] = {}
        self.stats: Callable[[], list[TopicConsumption]] = list
        self.answerers: dict[int, Answerer] = {}
        self.runs: ReceivedRuns | None = None
        self._questions = Questions(self.client, self.answerers)
        self._make_sink = make_sink
        self._subscriptions: dict[str, Subscription] = {}
        self._manual = False
        self._unsettled: set[str] = set()
        self._met_brokers, self._without_promise = set[str](), set[str]()
        self._absent: set[str] = set()
        self._returned: set[str] = set()
        self._epochs_met: dict[str, int] = {}
        self._forsaken: dict[MessageQueue, None] = {}
        self._anew: dict[MessageQueue, Backoff] = {}
        self._starts: list[MessageQueue] = []
        self._closing = False
        self._refused: AuthenticationFailed | None = None

    def _make_offsets(self) -> OffsetStore:
        if self.options.message_model == MessageModel.BROADCASTING:
            folder = Path(self.options.offsets_dir).expanduser()
            group = prefix_of(self.client.namespace) + self.group
            return LocalOffsets(folder, group, self.client.options.instance_name)
        return BrokerOffsets(self.group, self.client.client_id, self.client, self.memberships)

    def _make_hindrances(self) -> Hindrances:
        return Hindrances(
            self.group,
            self.client.loop.clock.monotonic_ms,
            self.client.call_later,
            topic_wait_ms=self.options.topic_wait_ms,
            topic_must_exist=self.options.topic_must_exist,
            on_missing=self.note_settled,
            on_fatal=self._cannot_work,
        )

    # ---- Life; from other threads -----------------------------------------------------

    def open(self) -> None:
        """Makes the offsets usable, before ``start``.

        Raises:
            ConfigError: Those of a broadcasting consumer are not.
        """
        self.offsets.open()

    def start(self) -> None:
        """Starts the engine, and waits until the first queues can be pulled.

        It does not wait for ever: a broker that is down is waited for in the background.

        Raises:
            AuthenticationFailed: The name servers do not trust the client, or the other way round.
            NoPermission: Brokers refuse the group or its topics, or a filter in Python.
            TopicNotFound: A topic does not exist, with ``topic_must_exist``.
            FilterFailed: A filter in Python cannot be used.
        """
        self.positions.started_at_ms = self.client.loop.clock.wall_ms()
        self.client.start()
        self.client.post(self._begin)
        if not self._wait_settled():
            _log.warning(
                "group %s: not all queues are known after %d ms (%s); going on in the background",
                self.group,
                self.options.start_timeout_ms,
                self._why_unsettled(),
            )
            self.client.post(self._settle)
        if self._refused is not None:
            raise self._refused
        fatal = self.hindrances.fatal
        if fatal is not None:
            raise fatal
        self.filters.check(self.assigned.copy(), self.options.start_timeout_ms / 1_000)

    def _wait_settled(self) -> bool:
        if self.settled.wait(self.options.start_timeout_ms / 1_000):
            return True
        left_ms = self.options.topic_wait_ms - self.options.start_timeout_ms + TOPIC_GRACE_MS
        if left_ms <= 0 or not self.hindrances.waits_for_topics:
            return False
        return self.settled.wait(left_ms / 1_000)

    def close(self, stop_work: Callable[[], object]) -> None:
        """Ends pulling, waits for the work to stop, commits and leaves the group.

        Args:
            stop_work: Waits for messages in work.
        """
        if self.client.closed or not self.client.started:
            stop_work()
            self.client.close()
            self.offsets.close()
            return
        try:
            self.client.post(self._stop_pulling)
            stop_work()
            self.client.call(self._commit_last, CLOSE_COMMIT_MS)
        except MQMeshError as error:
            _log.warning("group %s: the last offsets were not committed: %s", self.group, error)
        self.client.close()
        self.offsets.close()
        if self.runs is not None:
            self.runs.receiver.abandon()

    @property
    def _shares(self) -> bool:
        """True when queues are divided among the members of the group."""
        return self.options.message_model == MessageModel.CLUSTERING and not self._manual

    def lock_queues(self, renew_ms: int, on_regained: Callable[[], None]) -> None:
        """Takes only queues that brokers lock for this member; before ``start``.

        Args:
            renew_ms: Between renewals of the locks.
            on_regained: Called when queues whose locks were in doubt may go on.
        """
        self.starts.leases = QueueLeases(
            self.group,
            self.client.client_id,
            self.client,
            self.client.loop.clock,
            renew_ms=renew_ms,
            on_lost=self._lock_lost,
            on_regained=on_regained,
        )

    @property
    def leases(self) -> QueueLeases | None:
        """Locks of queues, if ``lock_queues`` was called."""
        return self.starts.leases

    # ---- Subscriptions and queues -------------------------------------------------------

    def subscribe(self, topic: str, expression: Wanted) -> None:
        """Takes part in a topic; from any thread before ``start``."""
        selector = as_selector(expression)
        subscription = Subscription(topic, selector.expression, selector.expression_type)
        if self._subscriptions.get(topic) == subscription:
            return
        self._give_up(self.assigned.of_topic(topic))
        self._subscriptions[topic] = subscription
        self.filters.choose(topic, selector.python)
        if not self.settled.is_set():
            self._unsettled.add(topic)
        if self.positions.started_at_ms:
            self._follow(topic)
            self.client.heartbeats.send_all_soon()

    def unsubscribe(self, topic: str) -> None:
        """Takes no part in a topic any more."""
        self.hindrances.end(topic)
        if self._subscriptions.pop(topic, None) is not None:
            if self.runs is not None:
                self.runs.forget(topic)
            self._give_up(self.assigned.of_topic(topic))
            self.filters.choose(topic, None)
            self.note_settled(topic)
            self.client.heartbeats.send_all_soon()

    def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Takes just these queues, regardless of other members; from any thread before start."""
        self._manual = True
        self.offsets.claiming = False
        wanted = dict.fromkeys(queues)
        self._give_up([queue for queue in self.assigned if queue not in wanted])
        new = [queue for queue in wanted if queue not in self.assigned]
        for topic in {queue.topic for queue in new}:
            self._subscriptions.setdefault(topic, Subscription(topic))
            if not self.settled.is_set():
                self._unsettled.add(topic)
            if self.positions.started_at_ms:
                self._follow(topic)
        self._take(new, 0)

    def subscriptions(self) -> list[Subscription]:
        """Return the subscriptions."""
        return list(self._subscriptions.values())

    def sinks(self) -> dict[MessageQueue, S]:
        """Return the sink of each queue that is pulled at present."""
        return {queue: one.sink for queue, one in self.assigned.items() if one.sink is not None}

    def held(self) -> dict[str, tuple[int, int]]:
        """Return how many messages are not done, and about how many bytes they have, by topic."""
        found: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for queue, one in self.assigned.copy().items():
            if one.sink is not None:
                before, more = found[queue.topic], one.sink.held()
                found[queue.topic] = before[0] + more[0], before[1] + more[1]
        return found if self.runs is None else self.runs.held()

    def begun_ms(self, message: StoredMessage) -> int | None:
        """Return since when a listener has a message, monotonic; None for less than a second."""
        if self.runs is not None:
            return self.runs.begun_ms(message)
        one = self.assigned.get(message.message_queue)
        return None if one is None or one.sink is None else one.sink.begun_ms(message.queue_offset)

    # ---- Offsets ------------------------------------------------------------------------

    def commit_soon(self) -> None:
        """Commits, and reports if that fails."""
        self.commit(self._reachable(), self._report_commit)

    def commit(
        self, queues: Iterable[MessageQueue], on_done: Callable[[MQMeshError | None], None]
    ) -> None:
        """Commits the progress in queues of this consumer."""
        offsets = {}
        for queue in queues:
            one = self.assigned.get(queue)
            if one is not None and one.sink is not None:
                offsets[queue] = one.sink.commit_offset()

        def done(error: MQMeshError | None) -> None:
            if error is None:
                self._note_committed(offsets)
            on_done(error)

        self.offsets.commit(offsets, done)

    def _note_committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        now_ms = self.client.loop.clock.monotonic_ms()
        for queue, offset in offsets.items():
            one = self.assigned.get(queue)
            if one is not None and one.committed_offset != offset:
                one.committed_offset, one.committed_ms = offset, now_ms

    def _reachable(self) -> list[MessageQueue]:
        if self.options.message_model == MessageModel.BROADCASTING:
            return list(self.assigned)
        return [q for q in self.assigned if not self.client.brokers.is_unreachable(q.broker_name)]

    def _report_commit(self, error: MQMeshError | None) -> None:
        stale = isinstance(error, StaleGeneration)
        if error is None or self.client.closed or (stale and self._closing):
            return  # queues that were given back; the last commit reports for itself
        if stale:
            self.memberships.doubt()
            self.client.heartbeats.send_all()  # its answer decides what to do
        _log.warning("group %s: offsets were not committed: %s", self.group, error)

    def _commit_last(self, on_done: Callable[[bool | MQMeshError], None]) -> None:
        if self.runs is not None:
            self.runs.finish(on_done)
            return
        reachable = self._reachable()
        self.commit(reachable, lambda error: on_done(True if error is None else error))
        # A queue whose listener still runs stays locked until the lock's time is over.
        busy = {queue for queue, sink in self.sinks().items() if not sink.is_idle()}
        self.offsets.release([queue for queue in reachable if queue not in busy])

    def _stop_pulling(self) -> None:
        self._closing = True
        for one in self.assigned.values():
            if one.loop is not None:
                one.loop.drop()
        if self.runs is not None:
            self.runs.stop()
        self.filters.close()

    # ---- Events -------------------------------------------------------------------------

    def _begin(self) -> None:
        loop, options = self.client.loop, self.options
        loop.call_every(options.rebalance_interval_ms, self.rebalance_soon)
        loop.call_every(options.rebalance_interval_ms, self._look_for_brokers)
        loop.call_every(options.persist_consumer_offset_interval_ms, self.commit_soon)
        if self.leases is not None:
            loop.call_every(LEASE_TICK_MS, self.leases.tick)
        if self.runs is not None:
            loop.call_every(RECEIVE_TICK_MS, self.runs.tick)
        if not self._unsettled:
            self._settle()
        for topic in list(self._subscriptions):
            self._follow(topic)

    def _follow(self, topic: str) -> None:
        def found(route: TopicRoute | MQMeshError) -> None:
            if isinstance(route, TopicNotFound):
                # Everything that comes into this topic comes after us.
                self.positions.note_queues(topic, ())
                if self.runs is not None and topic in self._subscriptions:
                    self.runs.follow(self._subscriptions[topic], ())
                if topic.startswith(RETRY_PREFIX):
                    self.note_settled(topic)  # it is made with the first message that fails
                else:
                    self.hindrances.miss(topic, partial(self._why_missing, topic))
            elif isinstance(route, TopicRoute):
                self._routes_changed({topic})
            elif isinstance(route, AuthenticationFailed) and not self.settled.is_set():
                self._refused = route
                self._settle()
            elif not topic.startswith(RETRY_PREFIX):
                why = partial(self._why_missing, topic)
                self.hindrances.miss(topic, why, REPORT_MS)

        self.client.finder.find(topic, found)

    def _heartbeat(self) -> HeartbeatRequest:
        consumers = []
        if self._subscriptions and not self._manual:
            consumers = [
                ConsumerData(
                    self.group,
                    self.options.message_model,
                    self.options.consume_from_where,
                    list(self._subscriptions.values()),
                    DeliveryMode.QUEUE if self.runs is None else self.runs.delivery,
                )
            ]
        return HeartbeatRequest(
            self.client.client_id, consumers=consumers, version=VERSION, stats=self.stats()
        )

    def _why_missing(self, topic: str) -> MQMeshError:
        problem, where = self.client.finder.problem, self.client.options.namesrv_addr
        if problem is None:
            return TopicNotFound(f"it does not exist, or this client may not see it ({where})")
        return NoRoute(f"no route from {where}: {problem}")

    def hindered(self, what: str, error: MQMeshError | None, wait_ms: int = 0) -> None:
        """Note why something cannot be done, to be reported after so long; None if it can."""
        if error is None:
            self.hindrances.end(what)
        elif not self._closing:
            self.hindrances.note(what, error, wait_ms)

    def _cannot_work(self) -> None:
        self.on_fatal()
        if not self.settled.is_set():
            self._settle()

    def _routes_changed(self, topics: set[str]) -> None:
        routes = self.client.routes
        for topic in topics & self._subscriptions.keys():
            self.hindrances.end(topic)
            self.positions.note_queues(topic, routes.subscribe_queues(topic))
            if self.runs is not None:
                self.runs.follow(self._subscriptions[topic], routes.subscribe_queues(topic))
                continue
            if routes.priorities(topic) and topic not in self._without_promise:
                self._without_promise.add(topic)
                _log.warning(
                    "group %s: topic %s has priorities, and consumers that share queues promise "
                    "nothing about them; a SimpleConsumer goes by them",
                    self.group,
                    topic,
                )
            for broker_name in routes.brokers_of(topic):
                try:
                    # All of them must know that we are there, not only those that have our queues.
                    self.client.brokers.connection(broker_name)
                except MQMeshError as error:
                    _log.info("broker %s cannot be reached: %s", broker_name, error)
        self.rebalance_soon()

    def _broker_changed(self, broker_name: str, up: bool) -> None:
        if self.leases is not None:
            self.leases.broker_changed(broker_name, up)
        if not up:
            return
        if self.runs is not None:
            self.runs.receiver.broker_came(broker_name)
        if broker_name in self._met_brokers:
            self.assignment.broker_returned()
            self._returned.add(broker_name)
        self._met_brokers.add(broker_name)
        self.rebalance_soon()

    def _look_for_brokers(self) -> None:
        """Report brokers of subscribed topics and assigned queues that are not connected."""
        routes, brokers = self.client.routes, self.client.brokers
        names = {name for topic in self._subscriptions for name in routes.brokers_of(topic)}
        names |= {queue.broker_name for queue in self.assigned}
        absent = {name for name in names if not brokers.is_connected(name)}
        for name in self._absent - absent:
            self.hindered(_no_connection(name), None)
        for name in sorted(absent):
            error = brokers.failures.get(name) or EndpointUnreachable("it does not answer")
            self.hindrances.note(_no_connection(name), error, ABSENT_MS)
        self._absent = absent

    def _meet_epoch(self, broker_name: str, epoch: int) -> None:
        """Handle a new epoch of a broker group: not all that was committed may have got there."""
        if epoch > self._epochs_met.get(broker_name, 0):
            self._epochs_met[broker_name] = epoch
            # Its master may not know us yet: all is committed once it has answered our heartbeat.
            self._returned.add(broker_name)
            self.client.heartbeats.send_all()

    def _heartbeat_answered(
        self, broker_name: str, answer: HeartbeatResponse | MQMeshError
    ) -> None:
        refused = f"broker {broker_name} refused the heartbeat"
        if isinstance(answer, MQMeshError):
            self.hindered(refused, answer)
            return
        self.hindered(refused, None)
        if self.runs is not None:
            self.runs.receiver.member_known(broker_name)
        standing = self.memberships.on_heartbeat(broker_name, answer)
        own = [queue for queue in self.assigned if queue.broker_name == broker_name]
        if standing is Standing.REPLACED and self._shares:
            _log.warning("group %s: %s took this member for dead", self.group, broker_name)
            self.offsets.forget_broker(broker_name)
            for queue in own:
                self._check_still_ours(self.assigned[queue])
            self.rebalance_soon()
        elif standing is Standing.RESTARTED:
            for queue in own:
                loop = self.assigned[queue].loop
                if loop is not None and loop.generation:
                    loop.generation = self.memberships.claimed(queue)
        elif standing is Standing.DOUBTED:
            for queue in own:
                self._check_still_ours(self.assigned[queue])
        if broker_name in self._returned:
            self._returned.discard(broker_name)
            self.offsets.forget_broker(broker_name)
            self.commit_soon()

    def _check_still_ours(self, state: Assigned[S]) -> None:
        """Check by a commit that a queue is still ours: only the latest owner may commit."""

        def done(error: MQMeshError | None) -> None:
            if isinstance(error, StaleGeneration):
                self._stale(state, error)

        if state.sink is not None:
            self.offsets.commit({state.queue: state.sink.commit_offset()}, done)

    def _start_over(self, queues: list[MessageQueue]) -> None:
        """Others have these queues, so nothing of them is committed."""
        for queue in queues:
            self._let_go(queue)
            self.offsets.forget(queue)
            self._forsaken[queue] = None
            if queue not in self._anew:
                clock = self.client.loop.clock
                self._anew[queue] = Backoff(clock.monotonic_ms, TAKE_ANEW_MOST_MS)
        if self.leases is not None:
            self.leases.forget(queues)
        self.rebalance_soon()

    def _lock_lost(self, queue: MessageQueue) -> None:
        if queue in self.assigned:
            _log.warning("group %s: another member has or had %s; taken anew", self.group, queue)
            self._start_over([queue])

    def _let_go(self, queue: MessageQueue) -> S | None:
        """Let go of a queue that is not ours any more; return where its messages went."""
        one = self.assigned[queue]
        del self.assigned[queue]
        if one.loop is not None:
            one.loop.drop()
        if one.sink is not None:
            one.sink.drop()
            if not one.sink.is_idle():
                # The next owner waits for running calls, and if that is us, we do too.
                self.starts.leaving.add(queue)
                one.sink.when_idle(lambda: self.starts.leaving.discard(queue))
        return one.sink

    def _stale(self, state: Assigned[S], error: MQMeshError) -> None:
        if self.assigned.get(state.queue) is state:
            _log.warning("group %s: %s is taken anew: %s", self.group, state.queue, error)
            self.client.heartbeats.send_all()
            self._start_over([state.queue])

    def begin_anew(self, queue: MessageQueue, why: MQMeshError) -> None:
        """Take a queue anew, from where its broker says that the group has come to."""
        state = self.assigned.get(queue)
        if state is not None:
            self._stale(state, why)

    def _take_command(self, broker_name: str, command: Command) -> None:
        try:
            if command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
                if decode_header(ConsumerIdsChanged, command.header).group == self.group:
                    self.rebalance_soon()
            elif command.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
                moved = decode_header(ConsumerOffsetReset, command.header)
                if moved.group == self.group:
                    self._follow_reset(broker_name, moved)
            elif command.code == RequestCode.ASK_CLIENT:
                self._questions.on_ask(broker_name, command)
        except RemoteProtocolError as error:
            _log.warning("broker %s: %s", broker_name, error)

    def _follow_reset(self, broker_name: str, moved: ConsumerOffsetReset) -> None:
        for one in moved.queues:
            queue = MessageQueue(one.topic, broker_name, one.queue_id)
            state = self.assigned.get(queue)
            if state is None or self._closing:
                continue
            if state.loop is not None:
                state.loop.reset(one.queue_offset)
            else:
                # The offset that is being requested may be older than the reset.
                del self.assigned[queue]
                self._take([queue], 0)
        if self.options.message_model == MessageModel.BROADCASTING:
            self.commit_soon()

    # ---- Rebalance ----------------------------------------------------------------------

    def rebalance_soon(self, delay_ms: int = 0) -> None:
        """Makes the assignment anew in a moment; many calls make one rebalance."""
        self.assignment.plan(delay_ms)

    def _subscribed(self) -> list[str]:
        is_divided = not (self._closing or self._manual or self.runs is not None)
        return list(self._subscriptions) if is_divided else []

    def _apply(self, topic: str, mine: list[MessageQueue], alone: bool) -> None:
        wanted = set(mine)
        # A broker that is away takes its queues out of the route, but no other member gets them.
        present = set(self.client.routes.brokers_of(topic))
        lost = [
            queue
            for queue in self.assigned.of_topic(topic)
            if queue not in wanted and queue.broker_name in present
        ]
        new = [queue for queue in mine if queue not in self.assigned]
        if lost or new:
            _log.info(
                "group %s, topic %s: %d queues (%d new, %d given up)",
                self.group,
                topic,
                len(mine),
                len(new),
                len(lost),
            )
        self._give_up(lost)
        self._release_forsaken(topic, wanted)
        # An owner of a lock need not wait: the former owner gave it back after its last commit.
        delay_ms = 0 if alone or self.leases is not None else HANDOVER_MS
        self._take([queue for queue in new if queue not in self._anew], delay_ms)
        for queue in new:
            if queue in self._anew:
                self._take([queue], max(delay_ms, self._anew[queue].next_delay_ms()))
        self._check_settled(topic)

    def _give_up(self, queues: list[MessageQueue]) -> None:
        idle: dict[MessageQueue, S | None] = {}
        for queue in queues:
            self._anew.pop(queue, None)
            sink = self._let_go(queue)
            if sink is None and queue in self.starts.leaving:
                continue  # it came back and goes again, and has not been handed over meanwhile
            if sink is None or sink.is_idle():
                idle[queue] = sink
            else:
                sink.when_idle(partial(self._hand_over, {queue: sink}))
        if idle:
            self._hand_over(idle)

    def _release_forsaken(self, topic: str, wanted: Set[MessageQueue]) -> None:
        """Release queues that we wanted anew and were not given; their new owner waits for us."""
        for queue in wanted:
            self._forsaken.pop(queue, None)
        left = [q for q in self._forsaken if q.topic == topic and q not in self.starts.leaving]
        for queue in left:
            del self._forsaken[queue]
            self._anew.pop(queue, None)
        self.offsets.release(left)

    def _hand_over(self, given: Mapping[MessageQueue, S | None]) -> None:
        """Commits the progress in queues that were given up, and lets others have them."""
        gone = {queue: sink for queue, sink in given.items() if sink is not None}

        def commit(on_done: Callable[[MQMeshError | None], None]) -> None:
            # Not those that came back meanwhile.
            offsets = {q: s.commit_offset() for q, s in gone.items() if q not in self.assigned}
            self.offsets.commit(offsets, on_done)

        def forget() -> None:
            commit(self._report_commit)
            kept = self.assigned
            for queue in gone:
                if queue not in kept:
                    self.offsets.forget(queue)
            self.offsets.release([queue for queue in given if queue not in kept])

        if self.leases is None:
            commit(self._report_commit)
            self.client.call_later(SECOND_COMMIT_MS, forget)
            return
        # Nothing runs any more. Even if we were given it again, we ask for it anew.
        self.offsets.commit({q: s.commit_offset() for q, s in gone.items()}, self._report_commit)
        for queue in given:
            self.offsets.forget(queue)
        self.leases.forget(given)
        self.offsets.release(list(given))

    def _take(self, queues: list[MessageQueue], delay_ms: int) -> None:
        for queue in queues:
            self.assigned[queue] = Assigned(queue)
        self.starts.plan([self.assigned[queue] for queue in queues], delay_ms)

    def _is_wanted(self, start: Start) -> bool:
        return self.assigned.get(start.queue) is start and not self._closing

    def _begin_queue(self, start: Start, position: Position) -> None:
        queue, state = start.queue, self.assigned[start.queue]
        self.hindered(_where_to_begin(queue), None)
        state.sink = self._make_sink(queue, position.queue_offset)
        wanted = self._subscriptions[queue.topic]
        text, kind = wanted.expression, wanted.expression_type
        selector = MessageSelector(expression=text, expression_type=kind)
        address = self.client.routes.address(queue.broker_name)
        now_ms = self.client.loop.clock.monotonic_ms
        state.loop = PullLoop(
            queue,
            self.group,
            state.sink,
            self.filters.way(queue),
            msgspec.structs.replace(self.options.pull_settings(), zone=self.client.options.zone),
            self.counters,
            selector=selector,
            source=PullSource(
                queue.broker_name,
                address.tcp if address is not None else "",
                selector.wanted_tags(),
                not selector.selects_all,
                self.client.namespace,
            ),
            generation=self.memberships.claimed(queue) if self._shares else 0,
            epochs=self.offsets.epochs,
            replicas=None if self.filters.uses(queue) else self.client.replicas,
            on_epoch=partial(self._meet_epoch, queue.broker_name),
            on_stale=partial(self._stale, state),
            on_reset=lambda: self.offsets.forget(queue),
            meter=self.meters.setdefault(queue.topic, PullMeter(now_ms)),
        )
        state.loop.resume()
        if not position.committed:
            self._commit_start(queue)
        self._check_settled(queue.topic)

    def _commit_start(self, queue: MessageQueue) -> None:
        # A broker's queues are located one after the other, and committed together.
        self._starts.append(queue)
        if len(self._starts) > 1:
            return

        def commit() -> None:
            starts, self._starts = self._starts, []
            self.commit(() if self._closing else starts, self._report_commit)

        self.client.call_later(START_COMMIT_MS, commit)

    # ---- Settling -----------------------------------------------------------------------

    def _check_settled(self, topic: str) -> None:
        if all(self.assigned[queue].sink is not None for queue in self.assigned.of_topic(topic)):
            self.note_settled(topic)

    def note_settled(self, topic: str) -> None:
        """Note that messages of a topic that are sent from now on will come."""
        self._unsettled.discard(topic)
        if not self._unsettled and self.positions.started_at_ms:
            self._settle()

    def _why_unsettled(self) -> str:
        """Return the reason why the start waits; from other threads."""
        waiting = sorted(self._unsettled.copy())
        # The group's retry topic is nothing that its user named.
        topics = [one for one in waiting if not one.startswith(RETRY_PREFIX)] or waiting
        unknown = [topic for topic in topics if self.client.routes.route(topic) is None]
        if not unknown:
            return f"no broker has answered yet where to begin in {_few(topics)}"
        problem = self.client.finder.problem
        return (
            f"no route of {_few(unknown)} from {self.client.options.namesrv_addr}: "
            f"{problem or 'no answer yet'}"
        )

    def _settle(self) -> None:
        self.positions.settled = True
        self.settled.set()


def _no_connection(broker_name: str) -> str:
    return f"no connection to broker {broker_name}"


def _where_to_begin(queue: MessageQueue) -> str:
    return f"where to begin in topic {queue.topic} is unknown"


def _few(names: Sequence[str]) -> str:
    """Return names for a line of the log, which may be some thousand."""
    shown = ", ".join(names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"
