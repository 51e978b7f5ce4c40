"""A process that sends messages in transactions, and the books that its local transactions are in.

The books are a SQLite database that all workers share; what stands there is final. A plan can
make a worker die, as by ``kill -9``, the n-th time that it comes to a step.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec

from mqmesh.checksum import crc32
from mqmesh.errors import MQMeshError
from mqmesh.message import Message, StoredMessage
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import (
    LocalTransactionState,
    TransactionFuture,
    TransactionListener,
)

STEPS: Final = ("half stored", "local work done", "decision sent", "decision stored")
DONE: Final = "done"
REFUSED: Final = "refused"
GIVEN_UP: Final = "given up"
WINDOW: Final = 40
OUTCOME_TIMEOUT_S: Final = 60.0


class WorkerPlan(msgspec.Struct, frozen=True):
    """Plan of a worker.

    Attributes:
        name: Name of the worker.
        namesrv_addr: Name servers.
        topic: Topic to send to.
        group: Producer group.
        books: File of the books.
        seed: Seed of its random choices.
        die_at: One of ``STEPS``; empty to live.
        die_after: Occurrence of the step at which it dies.
        sends: False to only answer questions.
    """

    name: str
    namesrv_addr: str
    topic: str
    group: str
    books: str
    seed: int
    die_at: str = ""
    die_after: int = 1
    sends: bool = True


class Books:
    """The local database."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._local = threading.local()

    def enter(self, key: str, state: str) -> str:
        """Writes what became of a key, unless that is settled.

        Returns:
            Its outcome.
        """
        connection = self._connection()
        with connection:
            connection.execute("INSERT OR IGNORE INTO fates VALUES (?, ?)", (key, state))
        row = connection.execute("SELECT state FROM fates WHERE key = ?", (key,)).fetchone()
        return str(row[0])

    def all(self) -> dict[str, str]:
        """Returns the outcome of every key."""
        return dict(self._connection().execute("SELECT key, state FROM fates"))

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = sqlite3.connect(self._path, timeout=60)
            # Processes die here, machines do not.
            connection.executescript(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;"
                "CREATE TABLE IF NOT EXISTS fates(key TEXT PRIMARY KEY, state TEXT NOT NULL);"
            )
        return connection


class Bookkeeper(TransactionListener):
    """Local transactions of all kinds: most go well, some are refused, some leave it open."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._books = Books(plan.books)
        self._lock = threading.Lock()
        self._count = 0
        self._chance = random.Random(plan.seed)

    def execute_local_transaction(self, message: StoredMessage, arg: Any) -> LocalTransactionState:
        self.reached("half stored")
        key = message.keys[0]
        kind = crc32(key.encode()) % 20
        if kind == 0:
            raise RuntimeError("planned: nothing was done, and nobody was told")
        state = self._books.enter(key, REFUSED if kind < 4 else DONE)
        self.reached("local work done")
        if kind == 4:
            return LocalTransactionState.UNKNOWN
        self.reached("decision sent")
        return LocalTransactionState.COMMIT if state == DONE else LocalTransactionState.ROLLBACK

    def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        state = self._books.enter(message.keys[0], GIVEN_UP)
        return LocalTransactionState.COMMIT if state == DONE else LocalTransactionState.ROLLBACK

    def reached(self, step: str) -> None:
        """Dies if this is the step for it."""
        if step != self._plan.die_at:
            return
        with self._lock:
            self._count += 1
            if self._count < self._plan.die_after:
                return
        if step == "decision sent":
            # Somewhere between the sending and the answer.
            timer = threading.Timer(self._chance.uniform(0.0, 0.004), _die)
            timer.daemon = True
            timer.start()
            return
        _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(plan: WorkerPlan) -> None:
    """Sends, or only answers, until standard input ends."""
    bookkeeper = Bookkeeper(plan)
    stop = threading.Event()
    threading.Thread(target=_wait_end, args=(stop,), daemon=True).start()
    with TransactionProducer(plan.group, bookkeeper, namesrv_addr=plan.namesrv_addr) as producer:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        waiting: deque[TransactionFuture] = deque()
        number = 0
        while plan.sends and not stop.is_set():
            number += 1
            key = f"{plan.name}-{number}"
            try:
                waiting.append(
                    producer.send_message_in_transaction_async(
                        Message(plan.topic, key.encode(), keys=(key,)),
                        on_done=lambda future: (
                            bookkeeper.reached("decision stored")
                            if future.exception() is None and future.result().is_ended
                            else None
                        ),
                    )
                )
            except MQMeshError:
                stop.wait(0.05)  # the broker is dead; it comes back
            if len(waiting) >= WINDOW:
                _look(waiting.popleft())
        for future in waiting:
            _look(future)
        stop.wait()


def _wait_end(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def _look(future: TransactionFuture) -> None:
    try:
        future.result(OUTCOME_TIMEOUT_S)
    except MQMeshError:
        return  # not stored, or not known: the books and the log will show


class TransactionWorker:
    """A worker's process; it works once this returns.

    Raises:
        RuntimeError: The worker did not come up.
    """

    def __init__(self, plan: WorkerPlan, log_file: Path) -> None:
        self.plan = plan
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, msgspec.json.encode(plan).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n" and not plan.die_at:
            raise RuntimeError(f"worker {plan.name} did not come up, see {log_file}")

    def wait_dead(self, patience_s: float) -> bool:
        """Waits until the process has died by itself; False when it does not."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Lets it end its transactions, and end."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(OUTCOME_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it as a crash would."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    work(msgspec.json.decode(sys.argv[1], type=WorkerPlan))
