"""Seeds of clusters whose members acknowledge each message: their load, and their faults."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from harness.history import Delivery, MessageKey
from harness.simulation.books import RECEIVE, key_of
from harness.simulation.deliveries import MAX_RETRIES, DeliveryBooks
from harness.simulation.disk import Disk
from harness.simulation.election import GROUP, ElectionRun
from harness.simulation.failover import FailoverRun
from harness.simulation.key_books import JOBS, KEYS, MAX_UNSETTLED, place_of
from harness.simulation.load import (
    REPLACE_MS,
    Client,
    SimulatedProducer,
    SimulatedPush,
    SimulatedPushConsumer,
)
from harness.simulation.run import PATIENCE_MS, Run
from harness.simulation.workers import call_ms
from harness.simulation.world import Process, World
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import MQMeshError, Reject
from mqmesh.message import Message, StoredMessage, dlq_topic, retry_topic
from mqmesh.protocol.delivery import BY_SCHEDULE, SettleAction
from mqmesh.protocol.groups import GroupConfig
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease
from mqmesh.sdk.consumer.receiving.receive_source import Demand, ReceiveSource
from mqmesh.sdk.consumer.receiving.receiver import Receiver
from mqmesh.sdk.consumer.receiving.settler import OnSettled, Settler, Settling
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer

MEMBERS: Final = 3
"""Members that receive by themselves; one more has a listener called."""
PUSH_LEASE_MS: Final = 3_000
LOOK_MS: Final = 100
RECEIVE_EVERY_MS: Final = 300
WAITS_MS: Final = (500, 3_000)
LEASES_MS: Final = (1_000, 3_000, 10_000)
GRACE_MS: Final = 4_000
NACKS_MS: Final = (BY_SCHEDULE, 0, 700, 5_000, 40_000)
"""The last one is longer than what waits in a window; with order by key, where it holds up all
behind it, it is left out."""
WORK: Final = {
    SettleAction.ACK: 80,
    SettleAction.NACK: 10,
    SettleAction.REJECT: 2,
    SettleAction.EXTEND: 8,
    None: 5,
}
"""Frequencies of what a member does with a message; None for nothing, or too late."""
LATE_MS: Final = 12_000
GOES_ON: Final = (SettleAction.ACK, SettleAction.REJECT)
"""Outcomes behind which the next message of a sharding key is worked on."""

HARM: Final[tuple[dict[str, int], ...]] = (
    {"broker killed": 6, "broker stopped": 2, "client killed": 2, "client stopped": 2},
    {
        "client killed": 3,
        "client stopped": 3,
        "pause of a consumer": 3,
        "connections of a consumer broken": 3,
        "one-way partition of a consumer": 2,
        "partition": 1,
        "slow network": 2,
    },
    {
        "broker killed": 4,
        "pause of a consumer": 2,
        "client killed": 2,
        "pause": 1,
        "full disk": 1,
        "failing sync": 1,
        "clock step": 1,
        "schedule service killed": 1,
        "slow network": 1,
    },
)


def is_in_order(seed: int) -> bool:
    """Returns whether the group of a seed goes by sharding keys: of each kind of faults half."""
    return sum(seed >> shift for shift in (0, 2, 4)) % 2 == 1


class JobProducer(SimulatedProducer):
    """Sends jobs."""

    topics = (JOBS,)
    shares = (1,)
    most_at_once = 10

    def make_message(self, topic: str, number: int) -> Message:
        """Makes a job, mostly with a sharding key."""
        message = super().make_message(topic, number)
        message.sharding_key = f"key-{number % KEYS}" if number % KEYS else None
        return message


class _Receiving(SimpleConsumer):
    """A simple consumer that waits for nothing, and whose reports can be watched."""

    @property
    def receiver(self) -> Receiver:
        """Receive, and settle."""
        return self._engine._receiver

    def look(self, most: int, invisible_ms: int, wait_ms: int) -> list[StoredMessage]:
        """Returns what came; if there is nothing, has the brokers asked."""
        found = self._take(most)
        if not found:
            now_ms = self._engine.client.loop.clock.monotonic_ms()
            self._engine.want(self, Demand(most, invisible_ms, now_ms + wait_ms))
        return found

    def settle_later(
        self,
        messages: list[StoredMessage],
        action: SettleAction,
        delay_ms: int,
        on_done: Callable[[BaseException | None], None],
    ) -> None:
        """Reports on messages."""
        future = self._settle_later(messages, action, delay_ms)
        future.add_done_callback(lambda one: on_done(one.exception()))


def watch_returns(receiver: Receiver, books: DeliveryBooks) -> None:
    """Has it noted what a consumer gives back, which no caller or listener says."""
    follow, watched = receiver.follow, set[Settler]()

    def watch(settler: Settler) -> None:
        add = settler.add

        def added(*some: Settling) -> None:
            for one in some:
                if one.action == SettleAction.RETURN:
                    held = one.held
                    lease = held.lease
                    topic = retry_topic(RECEIVE) if lease.is_retry else held.topic
                    for offset in range(lease.first, lease.end):
                        if one.bits >> offset - lease.first & 1:
                            place = held.broker_name, topic, lease.queue_id, offset
                            books.gives_back(place, lease.lease)
            add(*some)

        settler.add = added  # type: ignore[method-assign]

    def followed(topic: str, selector: MessageSelector, broker_names: Iterable[str]) -> None:
        follow(topic, selector, broker_names)
        for source in receiver.sources.values():
            if source.settler not in watched:
                watched.add(source.settler)
                watch(source.settler)

    receiver.follow = followed  # type: ignore[method-assign]


class SimulatedReceiver(Client):
    """Receives, and says of each message what became of it; those of a key one after the other."""

    books: DeliveryBooks

    def make(self) -> _Receiving:
        """Makes the client."""
        self._done: list[StoredMessage] = []
        self._chains: dict[object, deque[StoredMessage]] = {}
        consumer = _Receiving(
            RECEIVE,
            client=self.world.client_options(),
            transport=self.transport,
            delivery=self.books.delivery,
        )
        consumer.subscribe(JOBS, "wanted")
        watch_returns(consumer.receiver, self.books)
        return consumer

    def begin(self) -> None:
        """Receives."""
        self.later(RECEIVE_EVERY_MS, self._receive)

    def restart(self, away_ms: int = REPLACE_MS) -> None:
        """Gives back what it holds; another one takes its place."""
        if self.transport.node.alive and not self.transport.node.paused:
            self.books.leaves(self.api.client_id)
        super().restart(away_ms)

    def _receive(self) -> None:
        chance = self.transport.node.random
        most = chance.choice((1, 4, 30))
        try:
            found = self.api.look(most, chance.choice(LEASES_MS), chance.choice(WAITS_MS))
        except MQMeshError:
            return  # it was closed
        for message in found:
            self.books.received(message, self.life)
            chain = self._chains.setdefault(self._chain_of(message), deque())
            chain.append(message)
            if len(chain) == 1:
                self._work(message)
        self.later(RECEIVE_EVERY_MS, self._receive)

    def _chain_of(self, message: StoredMessage) -> object:
        """Returns by what messages are one behind the other for this member."""
        place = place_of(message)
        if not self.books.in_order or message.sharding_key is None:
            return place, message.info.fencing_token
        return place[:3], message.info.fencing_token, message.sharding_key

    def _work(self, message: StoredMessage) -> None:
        node = self.transport.node
        action = node.random.choices(list(WORK), list(WORK.values()))[0]
        node.after(call_ms(node), lambda: self._end(message, action))

    def _end(self, message: StoredMessage, action: SettleAction | None) -> None:
        chance = self.transport.node.random
        if action == SettleAction.ACK:
            # Several go together, of one lease or of many.
            self._done.append(message)
            if chance.randrange(2):
                self._ack()
        elif action == SettleAction.EXTEND:
            self._settle([message], action, chance.choice(LEASES_MS))
            self.later(3_000, lambda: self._end(message, SettleAction.ACK))
            return
        elif action is None:
            if chance.randrange(2):
                self.later(LATE_MS, lambda: self._ack(message))
            return  # nor is what is behind it worked on
        else:
            self._ack()  # what is before it, first of all
            delays_ms = NACKS_MS[:-1] if self.books.in_order else NACKS_MS
            self._settle([message], action, chance.choice(delays_ms))
        chain = self._chains.pop(self._chain_of(message))
        chain.popleft()
        if chain and action in GOES_ON:
            self._chains[self._chain_of(message)] = chain
            self._work(chain[0])

    def _ack(self, *others: StoredMessage) -> None:
        done, self._done = self._done, []
        self._settle([*done, *others], SettleAction.ACK)

    def _settle(
        self, messages: list[StoredMessage], action: SettleAction, delay_ms: int = BY_SCHEDULE
    ) -> None:
        for message in messages:
            self.books.reports(message, action)

        def done(error: BaseException | None) -> None:
            for message in messages:
                self.books.answered(message, action, error)

        try:
            self.api.settle_later(messages, action, delay_ms, done)
        except MQMeshError:
            return  # it was closed


class _Pushing(SimulatedPushConsumer):
    """A push consumer whose reports can be watched."""

    @property
    def client_id(self) -> str:
        """Id of this member at brokers."""
        return self._engine.client.client_id

    @property
    def receiver(self) -> Receiver:
        """Receive, and settle."""
        assert self._engine.runs is not None
        return self._engine.runs.receiver


class PushReceiver(SimulatedPush):
    """Has a listener called with messages; its consumer says what became of them."""

    books: DeliveryBooks

    def __init__(self, world: World, books: DeliveryBooks, name: str) -> None:
        super().__init__(world, books, name, RECEIVE)

    def make(self) -> PushConsumer:
        """Makes the client."""
        consumer = _Pushing(
            self,
            RECEIVE,
            delivery=self.books.delivery,
            invisible_ms=PUSH_LEASE_MS,
            consume_thread_count=2,
        )
        consumer.subscribe(JOBS, "wanted", listener=self._listen)
        self._watch(consumer.receiver)
        return consumer

    def restart(self, away_ms: int = REPLACE_MS) -> None:
        """Gives back what it holds; another one takes its place."""
        if self.transport.node.alive and not self.transport.node.paused:
            self.books.leaves(self.api.client_id)
        super().restart(away_ms)

    def _watch(self, receiver: Receiver) -> None:
        """Has reports noted, and their answers."""
        known: dict[tuple[str, int, int], StoredMessage] = {}
        receive, settle = receiver.on_received, receiver.settle

        def received(
            source: ReceiveSource, messages: list[tuple[HeldLease, list[StoredMessage]]]
        ) -> None:
            for held, some in messages:
                for one in some:
                    known[held.broker_name, held.lease.lease, one.queue_offset] = one
            receive(source, messages)

        def settled(
            source: ReceiveSource,
            held: HeldLease,
            bits: int,
            action: SettleAction,
            on_done: OnSettled,
            **how: Any,
        ) -> None:
            lease = held.lease
            messages = [
                known[place]
                for offset in range(lease.first, lease.end)
                if bits >> offset - lease.first & 1
                and (place := (held.broker_name, lease.lease, offset)) in known
            ]
            if action == SettleAction.RETURN:
                messages = []  # they are noted below
            for one in messages:
                self.books.reports(one, action)

            def done(error: MQMeshError | None) -> None:
                for one in messages:
                    self.books.answered(one, action, error)
                on_done(error)

            settle(source, held, bits, action, done, **how)

        receiver.on_received = received
        receiver.settle = settled  # type: ignore[method-assign]
        watch_returns(receiver, self.books)

    def _listen(self, messages: list[StoredMessage]) -> ConsumeResult | None:
        (message,) = messages
        self.books.received(message, self.life)
        chance = self.transport.node.random.randrange(100)
        if chance < WORK[SettleAction.REJECT]:
            raise Reject("by chance")
        failed = chance < WORK[SettleAction.REJECT] + WORK[SettleAction.NACK]
        return ConsumeResult.RECONSUME_LATER if failed else None


class _Receives(Run):
    """A world whose clients are producers of jobs, and members that acknowledge each."""

    books: DeliveryBooks

    def _make_books(self) -> DeliveryBooks:
        return DeliveryBooks(
            lambda: float(self.world.now_ms),
            self._serving,
            self._dead,
            in_order=is_in_order(self.seed),
        )

    def _make_clients(self) -> list[Client]:
        world, books = self.world, self.books
        config = GroupConfig(
            RECEIVE,
            retry_max_times=MAX_RETRIES,
            delivery=books.delivery,
            max_unsettled=MAX_UNSETTLED,
            lost_grace_ms=GRACE_MS,
        )
        with GroupAdmin(world.namesrv_addr, transport=world.transport("admin")) as admin:
            admin.put_group(config)
        self._look_at_windows()
        made: list[Client] = [JobProducer(world, books, f"producer-{one}") for one in (1, 2)]
        made += [SimulatedReceiver(world, books, f"{RECEIVE}-{one}") for one in range(MEMBERS)]
        return [*made, PushReceiver(world, books, f"{RECEIVE}-push")]

    def _serving(self, name: str) -> BrokerFeatures | None:
        found = dict(self._features()).get(name)
        return None if found is None or found.core.is_follower else found

    def _disks(self) -> dict[str, Disk]:
        """Returns the disks whose messages are judged, by the name of their broker."""
        return self.world.disks

    def _process(self, name: str) -> Process | None:
        return self.world.brokers.get(name)

    def _look_at_windows(self) -> None:
        for name in self._disks():
            process = self._process(name)
            node = None if process is None else process.node
            self.books.look(name, is_awake=node is not None and not node.paused)
        self.world.simulation.after(LOOK_MS, self._look_at_windows)

    def _messages(self, topic: str) -> list[StoredMessage]:
        return [one for name, disk in self._disks().items() for one in disk.messages(topic, name)]

    def _dead(self) -> set[MessageKey]:
        return {key_of(one.body) for one in self._messages(dlq_topic(RECEIVE))}

    def _drain(self) -> list[str]:
        end_ms = self.world.now_ms + PATIENCE_MS
        missing = super()._drain()
        while not missing and (left := self._unsettled()):
            if self.world.now_ms > end_ms:
                return left
            self.world.simulation.run(2_000)
        return missing

    def _unsettled(self) -> list[str]:
        return [
            f"{window.unsettled} messages of {key} at {name}"
            for name in self._disks()
            if (broker := self._serving(name)) is not None
            for key, window in broker.state.windows.items()
            if window.unsettled
        ]

    def _stored(self) -> dict[str, list[Delivery]]:
        found = super()._stored()
        stored = [*self._messages(JOBS), *self._messages(retry_topic(RECEIVE))]
        self.books.judge_settled({place_of(one): key_of(one.body) for one in stored})
        return found


class ReceiveRun(_Receives):
    """Such a seed's world of two brokers; arguments as for ``Run``."""

    option = " --receive"

    @property
    def profile(self) -> dict[str, int]:
        """Frequency of each fault."""
        return HARM[self.seed % len(HARM)]


class ReceiveFailoverRun(_Receives, FailoverRun):
    """Such a seed's world whose follower becomes the master; arguments as for ``Run``."""

    option = " --receive --failover"


class ReceiveElectionRun(_Receives, ElectionRun):
    """Such a seed's world of replicas that elect their master; arguments as for ``Run``."""

    option = " --receive --election"

    def _make_clients(self) -> list[Client]:
        self.books.is_strict = self._mode is not AckReplicas.NONE
        return super()._make_clients()

    def _serving(self, name: str) -> BrokerFeatures | None:
        found = self._leading()
        return None if found is None or found.core.is_follower else found

    def _process(self, name: str) -> Process | None:
        return self._master()

    def _disks(self) -> dict[str, Disk]:
        master = self._master()
        return {} if master is None else {GROUP: self.world.disks[master.name]}
