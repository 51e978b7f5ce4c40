"""A database of sqlite3 with the tables, and a broker that remembers as a real one does."""

from __future__ import annotations

import sqlite3
from collections import defaultdict

import pytest

from mqmesh.errors import (
    LocalProtocolError,
    MessageIllegal,
    SendInDoubt,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import MessageQueue
from mqmesh.producer_key import producer_id_of
from mqmesh.sql.relay import OutboxRelay
from mqmesh.sql.schema import schema
from mqmesh.testing.clock import ManualClock


class Killed(BaseException):
    """End of a relay at some point; nothing of it runs on."""


class Cluster:
    """Topics of two queues on one broker, with what senders stored in them.

    Attributes:
        topics: Queues of each topic.
        broker: Broker group of all queues.
        queues: Messages by queue, in order.
        refused: Error by topic, for all batches of it.
        stored_and_refused: Error by topic, for batches that are stored all the same.
        unsafe: Topics whose batches are stored, but not safe.
        silent: Error by topic, of the question whether a batch is stored.
        forgets: Keys and index are forgotten, and retention has removed the log.
        most_messages: Messages of a batch at most.
        poison: Body that no batch may have.
        asked: Topics of which was asked whether a batch is stored.
        step: Called before and after each send.
    """

    Killed = Killed

    def __init__(self) -> None:
        self.queues: dict[MessageQueue, list[bytes]] = defaultdict(list)
        self.stored: dict[tuple[int, MessageQueue], dict[int, list[bytes]]] = defaultdict(dict)
        self.topics = {"orders": 2, "bills": 2}
        self.broker = "b"
        self.refused: dict[str, Exception] = {}
        self.stored_and_refused: dict[str, Exception] = {}
        self.unsafe: set[str] = set()
        self.silent: dict[str, Exception] = {}
        self.forgets = False
        self.most_messages = 1_000
        self.poison = b""
        self.asked: list[str] = []
        self.step = lambda: None

    def sender(self, key: bytes) -> FakeSender:
        """Make a sender."""
        return FakeSender(self, producer_id_of(key))

    def bodies(self, topic: str) -> list[bytes]:
        """Everything in a topic, sorted."""
        found = [one for queue, some in self.queues.items() if queue.topic == topic for one in some]
        return sorted(found)


class FakeSender:
    """Twin of ``NumberedSender``."""

    def __init__(self, cluster: Cluster, producer_id: int) -> None:
        self._cluster, self._producer_id = cluster, producer_id

    def log_end(self, queue):
        return sum(map(len, self._cluster.queues.values()))

    def is_sent(self, batch, log_end):
        self._cluster.step()
        topic = batch.queue.topic
        self._cluster.asked.append(topic)
        if topic in self._cluster.silent:
            raise self._cluster.silent[topic]
        if self._cluster.forgets:
            raise SendInDoubt("may be stored or not")
        is_stored = batch.first_sequence in self._cluster.stored[self._producer_id, batch.queue]
        if is_stored and topic in self._cluster.unsafe:
            raise SystemBusy("stored, and not safe")
        return is_stored

    def try_send(self, batches):
        self._cluster.step()
        ended = [(one, self._store(one)) for one in batches]
        self._cluster.step()
        return ended

    def _store(self, batch):
        topic = batch.queue.topic
        bodies = [one.body for one in batch.messages]
        if len(bodies) > self._cluster.most_messages or self._cluster.poison in bodies:
            return LocalProtocolError("too large")
        error = self._cluster.refused.get(topic)
        if error is not None:
            return error
        if batch.queue.queue_id >= self._cluster.topics[topic]:
            return MessageIllegal("no such queue")
        stored = self._cluster.stored[self._producer_id, batch.queue]
        if stored.setdefault(batch.first_sequence, bodies) is not bodies:
            assert stored[batch.first_sequence] == bodies
        else:
            self._cluster.queues[batch.queue] += bodies
        unsafe = SystemBusy("stored, and not safe") if topic in self._cluster.unsafe else None
        return self._cluster.stored_and_refused.get(topic, unsafe)

    def writable_queues(self, topic):
        if topic not in self._cluster.topics:
            raise TopicNotFound(f"no topic {topic!r}")
        error = self._cluster.refused.get("route") or self._cluster.refused.get(f"route {topic}")
        if error is not None:
            raise error
        broker = self._cluster.broker
        return tuple(MessageQueue(topic, broker, at) for at in range(self._cluster.topics[topic]))

    def close(self):
        pass


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def path(tmp_path):
    """Path of a database with the tables."""
    path = tmp_path / "shop.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
        for statement in schema("sqlite"):
            db.execute(statement)
    db.close()
    return path


@pytest.fixture
def db(path):
    """A connection of the program."""
    db = sqlite3.connect(path)
    yield db
    db.close()


@pytest.fixture
def relay_on(cluster, clock, path):
    """Make relays; nothing runs by itself."""
    made = []

    def make(connect=None, **options):
        relay = OutboxRelay(
            connect or (lambda: sqlite3.connect(path)),
            make_sender=cluster.sender,
            clock=clock,
            **options,
        )
        made.append(relay)
        return relay

    yield make
    for relay in made:
        relay.close()
