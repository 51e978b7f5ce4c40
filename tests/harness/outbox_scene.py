"""Relays of an outbox that are killed and stopped while rows are added, and others with them."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from harness.checker import Report, Verdict
from harness.forks import Forks
from harness.patience import until
from harness.topic_reader import read_topic
from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sql.outbox import Outbox
from mqmesh.sql.relay_table import RelayTable
from mqmesh.sql.schema import schema
from mqmesh.sql.statements import DEFAULT_NAMES, connect
from mqmesh.testing.processes import ProcessCluster

TOPIC: Final = "outbox"
KEYS: Final = "abcdefgh"
BROKER_SHARE: Final = 0.2
"""Share of the rounds in which the broker dies, too."""
DATABASE_SHARE: Final = 0.1
"""Share of the rounds in which the database dies, too, if it can."""
STOP_SHARE: Final = 0.3
"""Share of the rounds in which a relay is not killed but stopped until another one has taken over;
with SQLite it would keep the lock of the file."""
ROLLBACK_SHARE: Final = 0.1
ROWS: Final = 40
AFTER_S: Final = 0.2
"""Longest time from the first sign of life of a relay to its death."""
LEASE_MS: Final = 1_000
PATIENCE_S: Final = 60.0


class OutboxScene:
    """A program that adds rows, and the relays of the moment.

    Args:
        cluster: Cluster with a broker.
        url: Database, without tables of ours.
        log: File for what relays say.
        chance: Source of all choices.
        restart_broker: Kills the broker and starts it again.
        relays: Relays that run at a time.
        crash_database: Kills the database and starts it again; None where that cannot be.
    """

    def __init__(
        self,
        cluster: ProcessCluster,
        url: str,
        log: Path,
        chance: random.Random,
        restart_broker: Callable[[], None],
        *,
        relays: int = 1,
        crash_database: Callable[[], None] | None = None,
    ) -> None:
        self._cluster, self._url, self._log = cluster, url, log
        self._chance, self._restart_broker = chance, restart_broker
        self._table = RelayTable(lambda: connect(url), DEFAULT_NAMES)
        self._relays, self._crash_database = relays, crash_database
        self._living: list[int] = []
        self._connection = self._open()
        self._sent: list[tuple[str, int]] = []
        self._forks: Forks
        for statement in schema("sqlite" if url.startswith("sqlite") else "postgresql"):
            self._connection.execute(statement)
        self._connection.commit()
        with AdminClient(cluster.namesrv_addr) as admin:
            admin.create_topic(TOPIC, queues=3)

    def run(self, rounds: int) -> Report:
        """Kill a relay in each round, send the rest, and judge what is in the topic."""
        arguments = self._url, self._cluster.namesrv_addr, str(LEASE_MS)
        self._forks = Forks("harness.outbox_worker", *arguments, log=self._log)
        with closing(self._table), closing(self), closing(self._forks):
            for _ in range(rounds):
                self._round()
            self._start()
            self._until(lambda: not self._backlog())
            for relay in self._living:
                os.kill(relay, signal.SIGKILL)
        return self._judge()

    def close(self) -> None:
        """Close the connection to the database, which is another one after a crash of it."""
        self._connection.close()

    def _start(self) -> None:
        """Start relays until as many run as should."""
        while len(self._living) < self._relays:
            self._living.append(self._forks.start())

    def _round(self) -> None:
        self._add()
        self._start()
        self._until(lambda: self._working() > 0)
        kill_s = time.monotonic() + self._chance.uniform(0, AFTER_S)
        while time.monotonic() < kill_s:
            self._add()
        if self._chance.random() < BROKER_SHARE:
            self._restart_broker()
        if self._crash_database is not None and self._chance.random() < DATABASE_SHARE:
            self._crash_database()
            self._table.close()
            self._connection = self._open()
        victim = self._working() or self._chance.choice(self._living)
        if self._crash_database is not None and self._chance.random() < STOP_SHARE:
            os.kill(victim, signal.SIGSTOP)
            self._until(lambda: self._working() not in (0, victim))
            self._add()
            os.kill(victim, signal.SIGCONT)
        else:
            os.kill(victim, signal.SIGKILL)
            self._living.remove(victim)

    def _open(self) -> Any:
        connection = connect(self._url)
        if self._crash_database is not None:
            connection.execute("SET synchronous_commit = on")  # what it adds is not lost
            connection.commit()
        return connection

    def _add(self) -> None:
        rows = []
        for number in range(len(self._sent), len(self._sent) + ROWS):
            rows.append((self._chance.choice(KEYS), number))
        messages = [
            Message(TOPIC, b"%s %d" % (key.encode(), one), sharding_key=key) for key, one in rows
        ]
        Outbox().add(self._connection, *messages)
        if self._chance.random() < ROLLBACK_SHARE:
            self._connection.rollback()
        else:
            self._connection.commit()
            self._sent += rows

    def _working(self) -> int:
        """Return the process id of the relay that works; 0 if it does not live."""
        with self._table.transaction():
            holder = self._table.holder().holder
        return next((relay for relay in self._living if f":{relay}:" in holder), 0)

    def _backlog(self) -> int:
        with self._table.transaction():
            return self._table.backlog()[0]

    def _until(self, condition: Callable[[], bool]) -> None:
        try:
            until(condition, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(self._log.read_text()[-2_000:]) from error

    def _judge(self) -> Report:
        found: list[tuple[str, int]] = []
        for message in read_topic(self._cluster.namesrv_addr, TOPIC):
            key, number = message.body.decode().split()
            found.append((key, int(number)))
        counted = Counter(found)
        missing = [
            f"row {one} was committed and is not there" for one in self._sent if not counted[one]
        ]
        others = [
            f"row {one} is there without a commit" for one in counted.keys() - set(self._sent)
        ]
        twice = [f"row {one} is there {times} times" for one, times in counted.items() if times > 1]
        mixed = [
            f"rows of key {key} are not in order"
            for key in KEYS
            if (own := [one for name, one in found if name == key]) != sorted(own)
        ]
        return Report(
            [Verdict("C1", missing + others), Verdict("C4", mixed), Verdict("C5", twice)],
            {"acked": len(self._sent), "stored": len(found)},
        )
