"""Seeds of clusters whose members acknowledge each message: their load, and their faults."""

from collections.abc import Callable
from typing import Final

from harness.history import Delivery, MessageKey
from harness.simulation.books import RECEIVE, key_of
from harness.simulation.deliveries import (
    JOBS,
    MAX_RETRIES,
    MAX_UNSETTLED,
    DeliveryBooks,
    place_of,
)
from harness.simulation.disk import Disk
from harness.simulation.election import GROUP, ElectionRun
from harness.simulation.failover import FailoverRun
from harness.simulation.load import REPLACE_MS, Client, SimulatedProducer
from harness.simulation.run import PATIENCE_MS, Run
from harness.simulation.workers import call_ms
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import MQMeshError
from mqmesh.message import StoredMessage, dlq_topic, retry_topic
from mqmesh.protocol.delivery import BY_SCHEDULE, DeliveryMode, SettleAction
from mqmesh.protocol.groups import GroupConfig
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.receiving.receive_source import Demand
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer

MEMBERS: Final = 4
LOOK_MS: Final = 100
RECEIVE_EVERY_MS: Final = 300
WAITS_MS: Final = (500, 3_000)
LEASES_MS: Final = (1_000, 3_000, 10_000)
GRACE_MS: Final = 4_000
NACKS_MS: Final = (BY_SCHEDULE, 0, 700, 5_000, 40_000)
"""The last one is longer than what waits in a window."""
WORK: Final = {
    SettleAction.ACK: 80,
    SettleAction.NACK: 10,
    SettleAction.REJECT: 2,
    SettleAction.EXTEND: 8,
    None: 5,
}
"""Frequencies of what a member does with a message; None for nothing."""

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


class JobProducer(SimulatedProducer):
    """Sends jobs."""

    topics = (JOBS,)
    shares = (1,)
    most_at_once = 10


class _Receiving(SimpleConsumer):
    """A simple consumer that waits for nothing."""

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


class SimulatedReceiver(Client):
    """Receives, and says of each message what became of it."""

    books: DeliveryBooks

    def make(self) -> _Receiving:
        """Makes the client."""
        self._done: list[StoredMessage] = []
        consumer = _Receiving(RECEIVE, client=self.world.client_options(), transport=self.transport)
        consumer.subscribe(JOBS, "wanted")
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
            self._work(message)
        self.later(RECEIVE_EVERY_MS, self._receive)

    def _work(self, message: StoredMessage) -> None:
        node = self.transport.node
        action = node.random.choices(list(WORK), list(WORK.values()))[0]
        if action is not None:
            node.after(call_ms(node), lambda: self._end(message, action))

    def _end(self, message: StoredMessage, action: SettleAction) -> None:
        chance = self.transport.node.random
        if action == SettleAction.ACK:
            # Several go together, of one lease or of many.
            self._done.append(message)
            if chance.randrange(2):
                done, self._done = self._done, []
                self._settle(done, action)
        elif action == SettleAction.EXTEND:
            self._settle([message], action, chance.choice(LEASES_MS))
            self.later(3_000, lambda: self._settle([message], SettleAction.ACK))
        else:
            self._settle([message], action, chance.choice(NACKS_MS))

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


class _Receives(Run):
    """A world whose clients are producers of jobs, and members that acknowledge each."""

    books: DeliveryBooks

    def _make_books(self) -> DeliveryBooks:
        return DeliveryBooks(lambda: float(self.world.now_ms), self._serving, self._dead)

    def _make_clients(self) -> list[Client]:
        world, books = self.world, self.books
        config = GroupConfig(
            RECEIVE,
            retry_max_times=MAX_RETRIES,
            delivery=DeliveryMode.MESSAGE,
            max_unsettled=MAX_UNSETTLED,
            lost_grace_ms=GRACE_MS,
        )
        with GroupAdmin(world.namesrv_addr, transport=world.transport("admin")) as admin:
            admin.put_group(config)
        self._look_at_windows()
        made: list[Client] = [JobProducer(world, books, f"producer-{one}") for one in (1, 2)]
        return made + [
            SimulatedReceiver(world, books, f"{RECEIVE}-{one}") for one in range(MEMBERS)
        ]

    def _serving(self, name: str) -> BrokerFeatures | None:
        found = dict(self._features()).get(name)
        return None if found is None or found.core.is_follower else found

    def _disks(self) -> dict[str, Disk]:
        """Returns the disks whose messages are judged, by the name of their broker."""
        return self.world.disks

    def _look_at_windows(self) -> None:
        for name in self._disks():
            self.books.look(name)
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

    def _disks(self) -> dict[str, Disk]:
        master = self._master()
        return {} if master is None else {GROUP: self.world.disks[master.name]}
