"""Fixture ``mqmesh_cluster`` for one test: a cluster, names of its own, clients."""

import itertools
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from mqmesh.message import StoredMessage
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster
from mqmesh.testing.thread_cluster import (
    BROKER,
    RoleThread,
    ThreadCluster,
    small_broker_settings,
    start_schedule,
)

THREADS: Final = "threads"
PROCESSES: Final = "processes"
KINDS: Final = (THREADS, PROCESSES)

NAME_LENGTH: Final = 60
READ_TIMEOUT_MS: Final = 10_000

_numbers = itertools.count(1)


class SharedCluster:
    """One cluster for all tests of a session.

    Args:
        kind: ``threads`` of this process, or ``processes`` of their own.
        broker_settings: Settings of the broker, as after ``--set``.

    Attributes:
        namesrv_addr: Addresses of the name servers, for clients.
        started_in_s: Seconds that its start took.
        admin: Administrator's client, for topics.
    """

    def __init__(self, kind: str, broker_settings: Mapping[str, str] | None = None) -> None:
        began = time.monotonic()
        # The folder also holds Unix sockets, whose paths may have about 100 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="mq-"))
        self._threads: ThreadCluster | None = None
        self._processes: ProcessCluster | None = None
        self._schedule: RoleThread | None = None
        try:
            if kind == PROCESSES:
                settings = {**small_broker_settings(), **(broker_settings or {})}
                self._processes = ProcessCluster(self._folder, broker_settings=settings)
                self.namesrv_addr = self._processes.namesrv_addr
                # No test kills it, and a process would cost half a second.
                self._schedule = start_schedule(self._folder, self.namesrv_addr)
            else:
                self._threads = ThreadCluster(self._folder, broker_settings)
                self.namesrv_addr = self._threads.namesrv_addr
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.admin = AdminClient(self.namesrv_addr)
        self.started_in_s = time.monotonic() - began

    def stop_broker(self, *, kill: bool) -> None:
        """Ends the broker, by SIGTERM, or as a crash would.

        Raises:
            RuntimeError: The broker is to be killed, and is no process of its own.
        """
        if self._processes is not None:
            broker = self._processes.brokers[BROKER]
            if kill:
                broker.kill()
            else:
                broker.stop()
            return
        if kill:
            raise RuntimeError(
                "a broker that is a thread cannot be killed; run pytest with "
                f"--mqmesh-cluster={PROCESSES}"
            )
        assert self._threads is not None
        self._threads.stop_broker()

    def start_broker(self) -> None:
        """Starts the broker again, with its old address and data; nothing if it is there."""
        if self._processes is not None:
            if not self._processes.brokers[BROKER].running:
                self._processes.start_broker(BROKER)
                self._processes.wait_known()
        elif self._threads is not None:
            self._threads.start_broker()

    def close(self) -> None:
        """Ends everything and removes its files."""
        self.admin.close()
        if self._schedule is not None:
            self._schedule.stop()
        if self._processes is not None:
            self._processes.close()
        if self._threads is not None:
            self._threads.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ClusterForTests:
    """A cluster, as one test sees it: with names that no other test has.

    Clients that are made here are closed when the test ends.

    Args:
        shared: The cluster.
        test_name: Name of the test, a part of the names, so that logs show which test made them.

    Attributes:
        namesrv_addr: Name servers for the test's own clients, such as those of ``mqmesh.aio``.
        admin: An ``AdminClient``.
    """

    def __init__(self, shared: SharedCluster, test_name: str) -> None:
        self._shared = shared
        self._label = re.sub(r"[^a-zA-Z0-9_-]+", "-", test_name)[:NAME_LENGTH].strip("-")
        self._closers: list[Callable[[], None]] = []
        self.namesrv_addr = shared.namesrv_addr
        self.admin = shared.admin

    @property
    def started_in_s(self) -> float:
        """Seconds that the start of the shared cluster took."""
        return self._shared.started_in_s

    def name(self, kind: str = "name") -> str:
        """Returns a name that no other test uses, legal for topics and groups."""
        return f"{kind}-{next(_numbers)}-{self._label}"

    def topic(self, queues: int = 4) -> str:
        """Creates a topic of a fresh name.

        Args:
            queues: Queues to write to and to read from.
        """
        topic = self.name("topic")
        self.admin.create_topic(TopicConfig(topic, queues, queues))
        return topic

    def group(self) -> str:
        """Returns a fresh name for a group; groups need not be created."""
        return self.name("group")

    def producer(self, group: str | None = None, **options: Any) -> Producer:
        """Starts a producer; arguments as of ``mqmesh.Producer``."""
        producer = Producer(group or self.group(), namesrv_addr=self.namesrv_addr, **options)
        self._closers.append(producer.close)
        producer.start()
        return producer

    def push_consumer(self, group: str | None = None, **options: Any) -> PushConsumer:
        """Makes a push consumer that begins at the first message; subscribe, then start it.

        Arguments as of ``mqmesh.PushConsumer``.
        """
        options = {"consume_from_where": "FIRST_OFFSET", **options}
        consumer = PushConsumer(group or self.group(), namesrv_addr=self.namesrv_addr, **options)
        self._closers.append(consumer.close)
        return consumer

    def pull_consumer(self, group: str | None = None, **options: Any) -> PullConsumer:
        """Starts a pull consumer that begins at the first message.

        Arguments as of ``mqmesh.PullConsumer``.
        """
        options = {"consume_from_where": "FIRST_OFFSET", **options}
        consumer = PullConsumer(group or self.group(), namesrv_addr=self.namesrv_addr, **options)
        self._closers.append(consumer.close)
        consumer.start()
        return consumer

    def messages(self, topic: str) -> list[StoredMessage]:
        """Reads every message of a topic, queue by queue from the first to the last.

        Raises:
            AssertionError: Messages that must be there cannot be read.
        """
        found: list[StoredMessage] = []
        consumer = self.pull_consumer(auto_commit=False)
        queues = consumer.queues(topic)
        if queues:
            consumer.assign(queues)
            consumer.seek_to_begin()
            left = sum(consumer.lag().values())
            while left > 0:
                some = consumer.poll(READ_TIMEOUT_MS, 1_000)
                assert some, f"{left} messages of topic {topic} cannot be read"
                left -= len(some)
                found += some
        consumer.close()
        return sorted(found, key=lambda one: (one.message_queue, one.queue_offset))

    def stop_broker(self) -> None:
        """Stops the broker as SIGTERM would; at the test's end it is there again."""
        self._shared.stop_broker(kill=False)

    def kill_broker(self) -> None:
        """Kills a broker that is a process with SIGKILL; it runs again at the test's end."""
        self._shared.stop_broker(kill=True)

    def start_broker(self) -> None:
        """Starts the broker again, with its old address and data."""
        self._shared.start_broker()

    def close(self) -> None:
        """Closes the test's clients, the last one first, and lets the broker be there."""
        while self._closers:
            self._closers.pop()()
        self._shared.start_broker()
