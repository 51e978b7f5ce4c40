"""Seeds whose members make messages of messages: P15, each input is in the outputs once.

Two groups read the same topic: in one members acknowledge each message, in the other they own
queues. Both store what they make together with their progress.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

from harness.history import ACKED, Delivery, MessageKey
from harness.simulation.books import Books, key_of
from harness.simulation.election import GROUP, MODES, ElectionRun, start_group
from harness.simulation.load import Client, SimulatedProducer, SimulatedPush, SimulatedPushConsumer
from harness.simulation.run import QUEUES
from harness.simulation.workers import call_ms
from harness.simulation.world import World
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import ClientClosed, MQMeshError, SendInDoubt
from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.delivery import DeliveryMode, SettleAction
from mqmesh.protocol.groups import GroupConfig
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.processing import Processing
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.consumer.receiving.receive_source import Demand
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer

ORDERS, BILLS = "orders", "bills"
EACH, OWNED = "each", "owned"
"""Groups: in the first one members acknowledge each message, in the other they own queues."""
WITH_COPIES: Final = tuple(mode for mode in MODES if mode is not AckReplicas.NONE)
KEYS: Final = 5
RECEIVE_EVERY_MS: Final = 400
LEASE_MS: Final = 3_000
"""Shorter than a failover, now and then, so that leases change hands."""
FAIL_EVERY: Final = 15
HARM: Final[tuple[dict[str, int], ...]] = (
    {"broker killed": 6, "client killed": 4, "switch-over": 4, "broker stopped": 2},
    {
        "pause of a broker": 3,
        "pause of a consumer": 4,
        "connections of a consumer broken": 3,
        "one-way partition of a consumer": 2,
        "leader cut off": 2,
        "slow network": 2,
    },
    {
        "broker killed": 3,
        "partition of replicas": 3,
        "client killed": 2,
        "client stopped": 2,
        "power cut of all": 1,
        "connections of a consumer broken": 3,
    },
)


class OrderProducer(SimulatedProducer):
    """Producer of orders, some with a sharding key."""

    topics = (ORDERS,)
    shares = (1,)
    most_at_once = 6

    def make_message(self, topic: str, number: int) -> Message:
        """Makes an order."""
        message = super().make_message(topic, number)
        message.sharding_key = f"key-{number % KEYS}" if number % KEYS else None
        return message


class Bill(NamedTuple):
    """A bill that is stored.

    Attributes:
        group: Group that made it.
        commit: Number of the commit that it came with.
        order: Key of the order.
    """

    group: str
    commit: int
    order: MessageKey


class _Receiving(SimpleConsumer):
    """A simple consumer that waits for nothing."""

    def look(self) -> list[StoredMessage]:
        """Returns what came; if there is nothing, has the brokers asked."""
        found = self._take(8)
        if not found:
            now_ms = self._engine.client.loop.clock.monotonic_ms()
            self._engine.want(self, Demand(8, LEASE_MS, now_ms + LEASE_MS))
        return found

    def give_up(self, messages: list[StoredMessage]) -> None:
        """Refuses messages."""
        self._settle_later(messages, SettleAction.NACK, 0)


class BillingReceiver(Client):
    """Member that receives orders, and makes bills of them."""

    books: "ProcessingBooks"

    def make(self) -> _Receiving:
        """Makes the client."""
        consumer = _Receiving(
            EACH,
            client=self.world.client_options(),
            transport=self.transport,
            delivery=self.books.delivery,
        )
        consumer.subscribe(ORDERS)
        return consumer

    def begin(self) -> None:
        """Receives."""
        self.later(RECEIVE_EVERY_MS, self._receive)

    def _receive(self) -> None:
        node = self.transport.node
        try:
            found = self.api.look()
            at = node.random.randint(0, len(found))
            for some in (found[:at], found[at:]):
                if some:
                    node.after(call_ms(node), partial(self._bill, some))
        except MQMeshError:
            return  # it was closed
        self.later(RECEIVE_EVERY_MS, self._receive)

    def _bill(self, messages: list[StoredMessage]) -> None:
        try:
            if self.transport.node.random.randrange(FAIL_EVERY) == 0:
                self.api.give_up(messages)
                return
            self.books.commit(EACH, messages, self.api.processing(messages))
        except MQMeshError:
            pass  # it was closed


class BillingOwner(SimulatedPush):
    """Owner of queues whose listener makes bills of their orders."""

    books: "ProcessingBooks"

    def __init__(self, world: World, books: Books, name: str) -> None:
        super().__init__(world, books, name, OWNED)

    def make(self) -> PushConsumer:
        """Makes the client."""
        consumer = SimulatedPushConsumer(
            self, OWNED, consume_orderly=True, consume_message_batch_max_size=4
        )
        consumer.subscribe(ORDERS, listener=self._bill)
        return consumer

    def _bill(self, messages: list[StoredMessage]) -> Any:
        if self.transport.node.random.randrange(FAIL_EVERY) == 0:
            return ConsumeResult.RECONSUME_LATER
        return self.books.commit(OWNED, messages, self.api.processing(messages))


class ProcessingBooks(Books):
    """Record of what was sent, and of how commits ended.

    Args:
        now_ms: The simulation's clock.
        billed: Returns the bills that are stored.
        in_order: The group whose members acknowledge each message goes by sharding keys.

    Attributes:
        delivery: Mode of that group.
        outcomes: Errors of commits; None for none.
    """

    def __init__(
        self,
        now_ms: Callable[[], float],
        billed: Callable[[], list[Bill]],
        *,
        in_order: bool,
    ) -> None:
        super().__init__(now_ms, (ORDERS, BILLS), {})
        self.outcomes: dict[int, BaseException | None] = {}
        self._numbers = count()
        self.delivery = DeliveryMode.FIFO if in_order else DeliveryMode.MESSAGE
        self._billed = billed

    def commit(
        self, group: str, messages: list[StoredMessage], block: Processing
    ) -> "Future[None]":
        """Has a bill of each message committed with it, and notes the outcome."""
        number = next(self._numbers)
        for message in messages:
            body = f"{group}/{number}/".encode() + bytes(message.body)
            block.outputs.send(Message(BILLS, body, sharding_key=message.sharding_key))
        future = block.commit_later()
        future.add_done_callback(lambda one: self._ended(number, one))
        return future

    def _ended(self, number: int, future: "Future[None]") -> None:
        self.outcomes[number] = future.exception()

    def missing(self) -> list[str]:
        """Returns orders that no bill was made of yet."""
        billed = {(one.group, one.order) for one in self._billed()}
        acked = [key for key, one in self.attempts[ORDERS].items() if one.outcome == ACKED]
        found = []
        for group in (EACH, OWNED):
            lost = [key for key in acked if (group, key) not in billed]
            if lost:
                found.append(f"{len(lost)} bills of {group}, as of {lost[0]}")
        return found

    def judge_bills(self) -> list[str]:
        """Returns what is wrong: P15, each order is in the bills of each group once.

        All bills of a commit that was done are stored, and none of one that was refused.
        """
        billed = self._billed()
        times = Counter((one.group, one.order) for one in billed)
        stored = {one.commit for one in billed}
        wrong = [
            f"P15: {number} bills of {group} for order {key}"
            for (group, key), number in times.items()
            if number > 1 or key not in self.attempts[ORDERS]
        ]
        for number, error in self.outcomes.items():
            is_open = isinstance(error, SendInDoubt | ClientClosed)
            if not is_open and (error is None) != (number in stored):
                wrong.append(f"P15: commit {number} is stored, or not, against its outcome {error}")
        if None not in self.outcomes.values():
            wrong.append("P15: nothing was billed")
        return wrong


class ProcessingRun(ElectionRun):
    """Such a seed's world of replicas that elect their master; arguments as for ``Run``."""

    option = " --processing"
    books: ProcessingBooks

    @property
    def profile(self) -> dict[str, int]:
        """Frequency of each fault."""
        return HARM[self.seed % len(HARM)]

    def _make_books(self) -> ProcessingBooks:
        return ProcessingBooks(
            lambda: float(self.world.now_ms), self._billed, in_order=self.seed // 3 % 2 == 1
        )

    def _start(self) -> None:
        world, books = self.world, self.books
        self._mode = WITH_COPIES[self.seed % len(WITH_COPIES)]
        books.statuses_hold = True
        self.replicas = start_group(world, self._mode, zones=False)
        with GroupAdmin(world.namesrv_addr, transport=world.transport("admin")) as admin:
            for topic in books.topics:
                admin.create_topic(topic, queues=QUEUES)
            admin.put_group(GroupConfig(EACH, delivery=books.delivery, lost_grace_ms=2_000))
        self._start_clients()
        self._watch()

    def _make_clients(self) -> list[Client]:
        world, books = self.world, self.books
        made: list[Client] = [OrderProducer(world, books, f"producer-{one}") for one in (1, 2)]
        for one in (1, 2, 3):
            made.append(BillingReceiver(world, books, f"receive-{one}"))
            made.append(BillingOwner(world, books, f"order-{one}"))
        return made

    def _billed(self) -> list[Bill]:
        master = self._master()
        if master is None:
            return []
        found = []
        for message in self.world.disks[master.name].messages(BILLS, GROUP):
            group, number, body = bytes(message.body).split(b"/")
            found.append(Bill(group.decode(), int(number), key_of(body)))
        return found

    def _judged(self) -> list[str]:
        return [*super()._judged(), *self.books.judge_bills()]

    def _stored(self) -> dict[str, list[Delivery]]:
        # Bills are judged by their commits (``judge_bills``), not by what one log has of a topic.
        if self._master() is None:
            self._wrong.append("H8: nobody leads in the end")
        return {topic: [] for topic in self.books.topics}
