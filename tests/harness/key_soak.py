"""A cluster with security on, whose access list is changed and whose keys are rotated under load.

Run as a program (``scripts/chaos --keys``). A user sends and consumes all the while; nothing that
it does may fail.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final, Self

import msgspec

from harness.chaos import say, show
from harness.fuzz import percentiles
from harness.keys import credentials, user
from harness.listening import private_bytes
from harness.secured import BROKER, CLIENT, NAMESRV, put_users, secured_folder
from mqmesh.errors import MQMeshError
from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.admin.access import AccessClient
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.security.access_list import (
    AccessList,
    Action,
    Rule,
    User,
    read_access_list,
    write_access_list,
)
from mqmesh.security.keys import Credentials, load_credentials
from mqmesh.testing.processes import ProcessCluster
from mqmesh.units import MIB

USER: Final = "shop"
TOPIC: Final = "orders"
GROUP: Final = "billing"
RULES: Final = [
    Rule([Action.PUB, Action.SUB, Action.CREATE], topics=[TOPIC]),
    Rule([Action.SUB], groups=[GROUP]),
]
MINUTES: Final = 10.0
EVERY_S: Final = 2.0
RELOADS_PER_KEY: Final = 5
PAUSE_S: Final = 0.002
PATIENCE_S: Final = 30.0


class Soaked(msgspec.Struct):
    """Result of a run.

    Attributes:
        reloads: Access lists that were put in force.
        rotations: Keys that were replaced by another one.
        took_ms: Time of each send, in ms.
        failures: Errors of sends, and of changes of the access list.
        unconsumed: Messages that were sent and never came.
        grown: Bytes by which each role's memory grew from the beginning to the end.
    """

    reloads: int = 0
    rotations: int = 0
    took_ms: list[float] = []
    failures: list[str] = []
    unconsumed: int = 0
    grown: dict[str, int] = {}


class Books:
    """Messages sent and consumed by all clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._sent: set[bytes] = set()
        self._consumed: set[bytes] = set()
        self.took_ms: list[float] = []
        self.failures: list[str] = []

    def send(self, producer: Producer) -> None:
        """Sends one message, and notes its outcome."""
        with self._lock:
            self._count += 1
            body = b"%d" % self._count
        began = time.monotonic()
        try:
            producer.send(Message(TOPIC, body))
        except MQMeshError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return
        self.took_ms.append((time.monotonic() - began) * 1_000)
        self._sent.add(body)

    def take(self, messages: list[StoredMessage]) -> ConsumeResult:
        """Notes consumed messages; the listener of the consumers."""
        self._consumed.update(bytes(message.body) for message in messages)
        return ConsumeResult.SUCCESS

    def unconsumed(self) -> int:
        """Returns the number of messages that were sent and did not come yet."""
        return len(self._sent - self._consumed)


class Member:
    """The user with one of its keys: a producer that sends all the while, and a consumer.

    Args:
        namesrv_addr: Name server.
        own: Keys.
        books: Records of its sends and messages.
    """

    def __init__(self, namesrv_addr: str, own: Credentials, books: Books) -> None:
        self.own = own
        self._books = books
        self._producer = Producer("soak", namesrv_addr=namesrv_addr, credentials=own)
        self._consumer = PushConsumer(
            GROUP,
            namesrv_addr=namesrv_addr,
            credentials=own,
            # A message is sent before the first consumer is there.
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        )
        self._consumer.subscribe(TOPIC, listener=books.take)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._producer.start()
        self._books.send(self._producer)
        self._consumer.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.send_no_more()
        self._consumer.close()
        self._producer.close()

    def send_no_more(self) -> None:
        """Ends the sends; consuming goes on."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            self._books.send(self._producer)


class Administrator:
    """Puts ever new access lists in force at all roles.

    Args:
        client: Client for the requests.
        others: Users that stay as they are.
        result: Result of the run.
    """

    def __init__(self, client: AccessClient, others: list[User], result: Soaked) -> None:
        self._client = client
        self._others = others
        self._result = result
        self._version = client.access_list().version

    def put(self, *keys: Credentials) -> None:
        """Gives the user these keys from now on, with the same rights as ever."""
        own = msgspec.structs.replace(
            user(keys[0], allow=RULES), keys=[one.public_key for one in keys]
        )
        new = AccessList(self._version + 1, [*self._others, own])
        failed = self._client.put_access_list(write_access_list(new), self._version)
        self._result.failures += [f"access list at {one.where}: {one.problem}" for one in failed]
        self._result.reloads += 1
        self._version += 1


def soak(folder: Path, seconds: float, every_s: float = EVERY_S) -> Soaked:
    """Changes the access list again and again, and now and then the user's key.

    Args:
        folder: For keys, stores and logs; a short path.
        seconds: Duration of the run, in seconds.
        every_s: Time from one access list to the next one, in seconds.
    """
    keys, result, books = secured_folder(folder), Soaked(), Books()
    own = new_key(keys)
    put_users(keys, [user(own, allow=RULES)])
    with (
        ProcessCluster(folder, keys=keys) as cluster,
        AccessClient(cluster.namesrv_addr, credentials=str(keys / f"{CLIENT}.toml")) as client,
    ):
        pids = {"namesrv": cluster.namesrvs[0].pid, "broker": cluster.brokers[BROKER].pid}
        member = Member(cluster.namesrv_addr, own, books).__enter__()
        before = {name: private_bytes(pid) for name, pid in pids.items()}
        administrator = Administrator(client, read_users(client), result)
        end = time.monotonic() + seconds
        pause = threading.Event()
        while time.monotonic() < end:
            pause.wait(every_s)
            if result.reloads % RELOADS_PER_KEY != RELOADS_PER_KEY - 1:
                administrator.put(member.own)
                show(f"{len(books.took_ms):,} sends, {result.reloads} access lists")
                continue
            new = new_key(keys)
            administrator.put(member.own, new)
            following = Member(cluster.namesrv_addr, new, books).__enter__()
            member.__exit__()
            administrator.put(new)
            member = following
            result.rotations += 1
        member.send_no_more()
        wait_until = time.monotonic() + PATIENCE_S
        while books.unconsumed() and time.monotonic() < wait_until:
            pause.wait(PAUSE_S)
        member.__exit__()
        states = {(one.version, one.digest) for one in client.access_states()}
        if len(states) != 1:
            result.failures.append(f"the access list is not the same everywhere: {states}")
        result.grown = {name: private_bytes(pid) - before[name] for name, pid in pids.items()}
    result.took_ms, result.unconsumed = books.took_ms, books.unconsumed()
    result.failures += books.failures
    return result


def new_key(keys: Path) -> Credentials:
    """Makes another key of the user."""
    return credentials(USER, load_credentials(keys / f"{NAMESRV}.toml"))


def read_users(client: AccessClient) -> list[User]:
    """Returns all users but the one whose key changes."""
    now = read_access_list(client.access_list().text, "", datetime.date.min)
    return [one for one in now.user if one.name != USER]


def main(arguments: list[str] | None = None) -> int:
    """Runs the program.

    Returns:
        Exit code: 0 when nothing failed, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="scripts/chaos --keys",
        description="Changes the access list and rotates keys of a cluster under load.",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long (%(default)s)")
    parser.add_argument(
        "--every", type=float, default=EVERY_S, help="seconds from list to list (%(default)s)"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="keys-") as folder:
        result = soak(Path(folder), options.minutes * 60, options.every)
    p50, p99 = percentiles(result.took_ms)
    say(
        f"{len(result.took_ms):,} sends, {len(result.failures)} failures, {result.unconsumed} not "
        f"consumed; {result.reloads} access lists, {result.rotations} keys rotated; p50 {p50:.2f} "
        f"ms, p99 {p99:.2f} ms"
    )
    say(", ".join(f"{name} {size / MIB:+.1f} MiB" for name, size in result.grown.items()))
    for one in result.failures[:20]:
        say(f"FAILED: {one}")
    return 1 if result.failures or result.unconsumed else 0


if __name__ == "__main__":
    sys.exit(main())
