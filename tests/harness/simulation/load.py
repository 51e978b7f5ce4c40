"""The clients of a simulation: they send, consume and decide, each at its own pace."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from harness.history import COMMITTED, ROLLED_BACK
from harness.simulation.books import (
    DELAYED,
    ORDER,
    ORDERED,
    PLAIN,
    PULL,
    PUSH,
    READERS,
    TRANSACTED,
    Books,
    body_of,
    key_of,
    tag_of,
)
from harness.simulation.workers import SimulatedPool, SimulatedWorkers
from harness.simulation.world import World
from mqmesh.errors import MQMeshError
from mqmesh.message import Message, MessageQueue, StoredMessage
from mqmesh.protocol.groups import GroupConfig, ResetWhere
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.listening.consume_service import ConsumeService, Workers
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.transactions.listener_pool import ListenerPool
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import (
    LocalTransactionState,
    TransactionFuture,
    TransactionListener,
)
from mqmesh.transport.simulated.node import NodeKilled
from mqmesh.transport.simulated.simulation import START_WALL_MS
from mqmesh.transport.simulated.transport import SimulatedTransport

SEND_EVERY_MS: Final = 1_500
POLL_EVERY_MS: Final = 500
FAIL_EVERY: Final = 25
"""One of so many calls of a listener fails."""
REPLACE_MS: Final = 1_000
CHANGE_EVERY_MS: Final = 5_000
PAUSE_MS: Final = 3_000
"""Length of the pauses of groups: shorter than the time between two changes."""
MOST_QUEUES: Final = 4


class Client(ABC):
    """A client's process, and those that take its place when it is killed.

    Args:
        world: World of the client.
        books: Records of what it does.
        name: Name of the node; producers add the number of their life.
    """

    def __init__(self, world: World, books: Books, name: str) -> None:
        self.world = world
        self.books = books
        self.name = name
        self.lives = 0
        self.sending = True
        self.transport: SimulatedTransport
        self.api: Any = None

    @property
    def life(self) -> str:
        """Name of this life."""
        return f"{self.name}.{self.lives}"

    def start(self) -> None:
        """Begins the next life."""
        self.lives += 1
        self.transport = self.world.transport(self.name)
        self.api = self.make()
        try:
            self.api.start()
        except NodeKilled:
            return
        except MQMeshError as error:
            self.books.wrong["C11"].append(f"{self.name} did not start: {error}")
        self.begin()

    @abstractmethod
    def make(self) -> Any:
        """Makes the client."""

    def begin(self) -> None:  # noqa: B027 - only clients that send begin
        """Has it do something, once it is started."""

    def kill(self) -> None:
        """Kills the client as kill -9 does; another one takes its place."""
        if self.transport.node.alive:
            self.transport.node.kill()
            self.abandon()
            self.world.simulation.after(REPLACE_MS, self.start)

    def abandon(self) -> None:
        """Abandons what a killed process has open: nobody closes it."""
        if isinstance(self.api, Producer):
            self.api._forked()

    def restart(self, away_ms: int = REPLACE_MS) -> None:
        """Says goodbye, and another one takes its place after a while."""
        node = self.transport.node
        if not node.alive or node.paused:
            return
        try:
            self.api.close()
        except NodeKilled:
            return
        node.kill()
        self.abandon()
        self.world.simulation.after(away_ms, self.start)

    def later(self, most_ms: int, step: Callable[[], None]) -> None:
        """Takes a step within so long."""
        node = self.transport.node
        node.after(node.random.randint(1, most_ms), step)


class SimulatedProducer(Client):
    """Sends plain, ordered and delayed messages, each life under a name of its own."""

    topics: tuple[str, ...] = (PLAIN, ORDERED, DELAYED)
    shares: tuple[int, ...] = (4, 4, 1)
    most_at_once = 3

    def make(self) -> Producer:
        """Makes the client."""
        self._numbers = itertools.count()
        return Producer(
            "producers",
            client=self.world.client_options(),
            transport=self.transport,
            send_msg_timeout_ms=20_000,
            retry_times_when_send_async_failed=100,
        )

    def begin(self) -> None:
        """Sends."""
        self.later(SEND_EVERY_MS, self._send)

    def _send(self) -> None:
        if not self.sending:
            return
        chance = self.transport.node.random
        topic = chance.choices(self.topics, self.shares)[0]
        for _ in range(chance.randint(1, self.most_at_once)):
            self._send_one(topic)
        self.later(SEND_EVERY_MS, self._send)

    def make_message(self, topic: str, number: int) -> Message:
        """Makes a message."""
        return Message(topic, body_of(self.life, number), tag=tag_of(number))

    def _send_one(self, topic: str) -> None:
        chance = self.transport.node.random
        number, producer = next(self._numbers), self.life
        message = self.make_message(topic, number)
        if topic == DELAYED:
            delay_ms = chance.randint(500, 15_000)
            clock = self.transport.clock
            message.deliver_at_ms = clock.wall_ms() + delay_ms
            self.books.due_ms[producer, number] = float(message.deliver_at_ms - START_WALL_MS)
        broker = chance.choice(sorted(self.world.schedules))
        queue = MessageQueue(topic, broker, chance.randrange(2))
        self.books.sent(topic, producer, number)
        key = producer, number
        try:
            future = self.api.send_async(message, queue=queue)
        except MQMeshError as error:
            self.books.failed_send(topic, key, error)
            return
        future.add_done_callback(lambda one: self.books.outcome(topic, key, one))


class SimulatedPushConsumer(PushConsumer):
    """A push consumer whose workers are steps of the simulation."""

    def __init__(self, client: "SimulatedPush", group: str, **options: Any) -> None:
        self._simulated = client
        super().__init__(
            group,
            client=client.world.client_options(),
            transport=client.transport,
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
            **options,
        )

    def _make_workers(self, service: ConsumeService) -> Workers:
        node = self._simulated.transport.node
        return SimulatedWorkers(node, service, 4, self._simulated.on_call)


class SimulatedPush(Client):
    """Consumes, concurrently or in order; some calls fail."""

    def __init__(self, world: World, books: Books, name: str, group: str) -> None:
        super().__init__(world, books, name)
        self.group = group
        self.on_begin: Callable[[], None] = _nothing

    def make(self) -> PushConsumer:
        """Makes the client."""
        consumer = SimulatedPushConsumer(self, self.group, consume_orderly=self.group == ORDER)
        for topic in READERS[self.group]:
            consumer.subscribe(topic, listener=self._listen)
        return consumer

    def on_call(self, message: StoredMessage, tenure: object) -> None:
        """A worker begins a call."""
        self.on_begin()
        if self.group != ORDER:
            return
        queue = f"{message.topic}@{message.broker_name}/{message.queue_id}"
        self.books.begin(queue, tenure)

    def _listen(self, messages: list[StoredMessage]) -> ConsumeResult | None:
        (message,) = messages
        key = key_of(message.body)
        books, group = self.books, self.group
        if message.reconsume_times == 0 or group == ORDER:
            books.delivered(group, message, self.life)
        if self.transport.node.random.randrange(FAIL_EVERY) == 0:
            books.failed[group][key] = None
            return ConsumeResult.RECONSUME_LATER
        books.done[group].add(key)
        return None


class SimulatedPull(Client):
    """Polls, and commits by itself."""

    def make(self) -> PullConsumer:
        """Makes the client."""
        consumer = PullConsumer(
            PULL,
            client=self.world.client_options(),
            transport=self.transport,
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        )
        for topic in READERS[PULL]:
            consumer.subscribe(topic)
        return consumer

    def begin(self) -> None:
        """Polls."""
        self.later(POLL_EVERY_MS, self._poll)

    def _poll(self) -> None:
        try:
            messages = self.api.poll(0)
        except MQMeshError:
            return  # it was closed
        for message in messages:
            self.books.delivered(PULL, message, self.life)
        self.later(POLL_EVERY_MS, self._poll)


class _Deciding(TransactionProducer):
    """A transaction producer whose threads are steps of the simulation."""

    def __init__(self, client: "SimulatedTransactions") -> None:
        self._simulated = client
        super().__init__(
            "transactions",
            _Listener(client),
            client=client.world.client_options(),
            transport=client.transport,
        )

    def _make_pool(self, name: str, most: int) -> ListenerPool:
        return SimulatedPool(self._simulated.transport, name, most)


class _Listener(TransactionListener):
    def __init__(self, client: "SimulatedTransactions") -> None:
        self._client = client

    def execute_local_transaction(self, message: StoredMessage, arg: Any) -> LocalTransactionState:
        return self._client.decide(key_of(message.body), at_once=True)

    def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        return self._client.decide(key_of(message.body), at_once=False)


class SimulatedTransactions(Client):
    """Sends in transactions, and answers checks for the whole group."""

    def make(self) -> TransactionProducer:
        """Makes the client."""
        self._numbers = itertools.count()
        return _Deciding(self)

    def begin(self) -> None:
        """Sends."""
        self.later(2 * SEND_EVERY_MS, self._send)

    def decide(self, key: tuple[str, int], *, at_once: bool) -> LocalTransactionState:
        """Runs the local transaction, or says how it ended."""
        books, chance = self.books, self.transport.node.random
        if key not in books.decisions:
            if at_once and chance.randrange(3) == 0:
                books.undecided[key] = None
                return LocalTransactionState.UNKNOWN
            # A producer that is asked about a transaction that nobody ran excludes that it ever
            # runs: its sender may have learned that the half message is not safe, and rolls it
            # back.
            good = chance.randrange(3) > 0 and (at_once or key in books.undecided)
            made = COMMITTED if good else ROLLED_BACK
            books.decisions[key] = made, float(self.transport.clock.monotonic_ms())
        if books.decisions[key][0] == COMMITTED:
            return LocalTransactionState.COMMIT
        return LocalTransactionState.ROLLBACK

    def _send(self) -> None:
        if not self.sending:
            return
        number, producer = next(self._numbers), self.life
        self.books.sent(TRANSACTED, producer, number)
        message = Message(TRANSACTED, body_of(producer, number))
        try:
            self.api.send_message_in_transaction_async(message, on_done=_ignore)
        except MQMeshError as error:
            self.books.failed_send(TRANSACTED, (producer, number), error)
        self.later(2 * SEND_EVERY_MS, self._send)


class SimulatedAdministrator(Client):
    """Changes topics, groups and offsets while everybody works."""

    def start(self) -> None:
        """Begins."""
        self.lives += 1
        self.transport = self.world.transport(self.name)
        self.api = self.make()
        self.begin()

    def make(self) -> GroupAdmin:
        """Makes the client."""
        self._side_topics: list[str] = []
        return GroupAdmin(self.world.namesrv_addr, transport=self.transport)

    def begin(self) -> None:
        """Changes things, one behind the other."""
        self._is_asking = False
        self.later(CHANGE_EVERY_MS, self._change)

    def restart(self, away_ms: int = REPLACE_MS) -> None:
        """Says goodbye, but not amid a request: ``close`` would wait for it in its own thread."""
        if not self._is_asking:
            super().restart(away_ms)

    def _change(self) -> None:
        if not self.sending:
            return
        changes = (self._make, self._delete, self._widen, self._put_group, self._reset)
        # Some of the brokers may be down, or nobody lead: what was done stays.
        self._is_asking = True
        with suppress(MQMeshError):
            self.transport.node.random.choice(changes)()
        self._is_asking = False
        self.later(CHANGE_EVERY_MS, self._change)

    def _make(self) -> None:
        name = f"side-{len(self._side_topics)}"
        self._side_topics.append(name)
        self.api.create_topic(name, queues=self.transport.node.random.randint(1, 3))

    def _delete(self) -> None:
        if self._side_topics:
            self.api.delete_topic(self.transport.node.random.choice(self._side_topics))

    def _widen(self) -> None:
        chance = self.transport.node.random
        queues = chance.randint(2, MOST_QUEUES)  # producers know two
        self.api.put_topic(TopicConfig(chance.choice((PLAIN, ORDERED)), queues, queues))

    def _put_group(self) -> None:
        chance = self.transport.node.random
        group, is_told = chance.choice((PUSH, PULL)), bool(chance.randrange(2))
        policies: dict[str, Any] = chance.choice(
            (
                {},
                {"retry_delays": "exp 1s x2 max 5s jitter 20%"},
                {"max_messages_per_s": 500},
                {"paused_until": self.transport.clock.wall_ms() + PAUSE_MS},
            )
        )
        self.api.put_group(
            GroupConfig(group, notify_consumer_ids_changed_enable=is_told, **policies)
        )

    def _reset(self) -> None:
        # To the first message: what is delivered again is no mistake, what is skipped would be.
        group = self.transport.node.random.choice((PUSH, PULL))
        self.books.resets.add((group, PLAIN))
        self.api.reset_offset(group, PLAIN, ResetWhere.FIRST)


def _ignore(future: TransactionFuture) -> None:
    """Ignores the outcome: the books of decisions count."""


def _nothing() -> None:
    """Ignores the beginning of a call."""


def make_clients(world: World, books: Books) -> list[Client]:
    """Makes all kinds of clients, two of each."""
    made: list[Client] = []
    for number in (1, 2):
        made += [
            SimulatedProducer(world, books, f"producer-{number}"),
            SimulatedPush(world, books, f"push-{number}", PUSH),
            SimulatedPush(world, books, f"order-{number}", ORDER),
            SimulatedPull(world, books, f"pull-{number}"),
            SimulatedTransactions(world, books, f"decider-{number}"),
        ]
    return made
