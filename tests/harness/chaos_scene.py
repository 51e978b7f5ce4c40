"""A cluster under load that is to be harmed, and the history of what its clients saw."""

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from harness.checker import Commit, Delivery, History, Report, check
from harness.commands import CommandProcess, free_ports, up_arguments
from harness.history import Outage, Resources
from harness.observations import came_back, look_up, recovery_degradations, resources_of
from harness.secured import CLIENT, keys_in
from harness.topic_reader import read_topic
from harness.workload import Plan, Worker, describe, now_ms, read_attempts, read_deliveries
from mqmesh.errors import MQMeshError, NoRoute
from mqmesh.metrics import Readings
from mqmesh.protocol.admin import TopicStats, TopicStatsRequest
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import ConsumerOffsets, QueryConsumerOffsetRequest, QueueOffsetEntry
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.supervisor.run_file import read_record
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.security.keys import KeyRing, load_credentials
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.channel import BlockingChannel

BROKER: Final = "broker-a"
TOPIC: Final = "chaos"
GROUP: Final = "chaos"
QUEUES: Final = 8
PATIENCE_S: Final = 60.0
IMPATIENT_MS: Final = 500
"""Timeout of single sends: shorter than a restart, so that outcomes stay unknown."""
PATIENT_MS: Final = 60_000
"""Timeout of the others: they find out what became of every message."""
POLL_S: Final = 0.02
CONSUMING: Final = ("consume", "receive")
"""Kinds of workers, see ``Plan``, that consume."""
LOOK_INTERVAL_S: Final = 0.2
LOOK_TIMEOUT_MS: Final = 500
LOOKUPS: Final = 40
"""Messages that are looked up by id and by key at the end."""
QUERY_TIMEOUT_MS: Final = 10_000
OFFSETS_SAVED_MS: Final = 1_000
"""Interval of the broker's saves of committed offsets in these scenes."""
OFFSETS_SLACK_MS: Final = 1_500
"""Time that a save itself may take on a busy machine."""


class ChaosFailure(AssertionError):
    """Raised when clients do not go on, or something else does not come in time."""


class Cluster(Protocol):
    """Interface of a cluster for scenes."""

    @property
    def namesrv_addr(self) -> str:
        """Addresses of the name servers, as clients take them."""

    @property
    def broker_endpoint(self) -> str:
        """``host:port`` of the broker."""


class UpCluster:
    """`mqmesh up` on free ports, whose roles may be killed: it starts them again.

    Args:
        folder: Data folder; a short path, since it also holds Unix sockets. With keys beside it
            nobody gets in without one.
        settings: Further settings of the broker, by key.
    """

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self._ports = free_ports(3)
        self._settings = settings
        keys = keys_in(folder.parent)
        self._secure = ["--secure"] if keys is not None else []
        if keys is not None:
            shutil.copytree(keys, folder / keys.name)
        self.namesrv_addr = f"127.0.0.1:{self._ports[0]};127.0.0.1:{self._ports[1]}"
        self.broker_endpoint = f"127.0.0.1:{self._ports[2]}"
        self._command = self._up()

    def broker_pid(self) -> int:
        """Process id of the broker; 0 while there is none."""
        record = read_record(self.folder)
        roles = record.roles if record is not None else []
        return next((role.pid for role in roles if role.name == BROKER), 0)

    def wait_started(self) -> None:
        """Waits until the broker has a process, which may be far from ready."""
        wait_until("the broker to be started", self.broker_pid)

    def kill_broker(self) -> None:
        """Ends the broker as a crash would; waits first until there is one."""
        wait_until("a broker to kill", self._kill)

    def wait_killed(self) -> None:
        """Waits until the supervisor has seen that the broker is dead."""
        self._command.expect(f"{BROKER} ended: ", PATIENCE_S)

    def wait_ready(self) -> None:
        """Waits until the broker serves again."""
        self._command.expect(f"broker {BROKER} is ready", PATIENCE_S)

    def restart(self) -> None:
        """Stops everything cleanly and starts it again on the same data."""
        self._command.send_signal(signal.SIGTERM)
        code = self._command.wait()
        self._command.close()
        if code:
            raise ChaosFailure(f"`mqmesh up` stopped with exit code {code}")
        self._command = self._up()

    def close(self) -> None:
        """Stops everything."""
        self._command.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _kill(self) -> bool:
        pid = self.broker_pid()
        if pid == 0:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False  # the record still names the one before
        return True

    def _up(self) -> CommandProcess:
        arguments = [*up_arguments(self.folder, self._ports), *self._secure]
        for key, value in self._settings.items():
            arguments += ["--set", f"broker.0.{key}={value}"]
        command = CommandProcess(*arguments)
        try:
            command.expect("cluster is ready", PATIENCE_S)
        except BaseException:
            command.close()
            raise
        return command


class Scene:
    """Producers and consumers at a cluster, and what they saw.

    Args:
        cluster: The cluster, running.
        folder: For the workers' files.
        seed: Seed of all random choices.

    Attributes:
        chance: The scene's own source of chance.
        producers: Workers that send, dead ones too.
        outages: Times without service, to be judged at the end.
        consumers: Workers that consume, dead ones too.
        kills_ms: Times at which the broker was killed.
    """

    def __init__(self, cluster: Cluster, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.producers: list[Worker] = []
        self.consumers: list[Worker] = []
        self.kills_ms: list[float] = []
        self.outages: list[Outage] = []
        self._cluster = cluster
        self._folder = folder
        self._dead: set[str] = set()
        self._looks = Looks(cluster.broker_endpoint, keys_in(folder))
        with AdminClient(cluster.namesrv_addr) as admin:
            wait_until("the broker to be known", partial(_has_topic, admin))
            self._before = self._resources(_metrics(admin))
        self._looks.start()

    # ---- Load ------------------------------------------------------------------------

    def start(self, kind: str, count: int = 1, *, rate: int = 400) -> list[Worker]:
        """Starts workers of a kind, see ``Plan``."""
        group = self.consumers if kind in CONSUMING else self.producers
        new = []
        for _ in range(count):
            name = f"{kind}-{len(self.producers) + len(self.consumers)}"
            plan = Plan(
                name=name,
                kind=kind,
                namesrv_addr=self._cluster.namesrv_addr,
                topic=TOPIC,
                file=str(self._folder / f"{name}.jsonl"),
                seed=self.chance.randrange(1 << 32),
                group=GROUP,
                rate=rate,
                timeout_ms=IMPATIENT_MS if kind == "sync" else PATIENT_MS,
            )
            new.append(Worker(plan))
            group.append(new[-1])
        return new

    def start_all(self, consumers: int = 2) -> None:
        """Starts a producer of each kind and consumers, and waits until all work."""
        self.start("consume", consumers)
        for kind in ("sync", "async", "batch"):
            self.start(kind)
        self.wait_progress()

    def kill(self, worker: Worker) -> None:
        """Ends a worker as a crash would."""
        worker.kill()
        self._dead.add(worker.plan.name)

    @property
    def clients_killed(self) -> int:
        """Number of killed workers."""
        return len(self._dead)

    def living(self, workers: Iterable[Worker]) -> list[Worker]:
        """Returns the workers that were not killed."""
        return [one for one in workers if one.plan.name not in self._dead]

    def wait_progress(self) -> float:
        """Waits until every producer had something acknowledged, and something was consumed.

        Returns:
            How many seconds that took.

        Raises:
            ChaosFailure: A client or process does not go on.
        """
        began = time.monotonic()
        before = {one.plan.name: one.count("acked") for one in self.living(self.producers)}
        for producer in self.living(self.producers):
            wait_until(
                f"{producer.plan.name} to go on",
                partial(_is_beyond, [producer], "acked", before[producer.plan.name]),
            )
        taken_s = time.monotonic() - began
        got = sum(one.count("got") for one in self.consumers)
        wait_until("consumers to go on", partial(_is_beyond, self.consumers, "got", got))
        return taken_s

    def wait_shares(self, *wanted: int) -> float:
        """Waits until the living consumers have so many queues each, and all queues once.

        Returns:
            How many seconds that took.

        Raises:
            ChaosFailure: The consumers did not get these shares in time.
        """
        began = time.monotonic()
        wait_until(f"consumers to have {wanted} queues", lambda: self._shares() == sorted(wanted))
        return time.monotonic() - began

    def run_for(self, seconds: float) -> None:
        """Lets the load go on for a while."""
        threading.Event().wait(seconds)

    # ---- The end ---------------------------------------------------------------------

    def finish(self) -> Report:
        """Lets the load end, reads the log and judges what was seen.

        Raises:
            ChaosFailure: Consumers did not reach the end of the log in time.
            RuntimeError: A worker failed.
        """
        for producer in self.living(self.producers):
            producer.stop()
        wait_until("consumers to reach the end", partial(self._looks.are_at_end, now_ms()))
        for consumer in self.living(self.consumers):
            consumer.stop()
        self._looks.stop()
        stored = read_log(self._cluster.namesrv_addr)
        with QueryClient(self._cluster.namesrv_addr, timeout_ms=QUERY_TIMEOUT_MS) as query:
            lookups = look_up(query, TOPIC, stored, self.chance, LOOKUPS)
            metrics = _metrics(query)
        after = self._resources(metrics)
        history = History(
            attempts=[
                attempt
                for one in self.producers
                for attempt in read_attempts(one.plan.name, one.lines())
            ],
            deliveries=[
                delivery
                for one in self.consumers
                for delivery in read_deliveries(one.plan.name, one.lines())
            ],
            stored=stored,
            commits=self._looks.seen,
            kills_ms=self.kills_ms,
            offset_window_ms=OFFSETS_SAVED_MS + OFFSETS_SLACK_MS,
            lookups=lookups,
            returns=[
                came_back(self._before, after, int(metrics.number("store_max_commitlog_offset")))
            ],
            outages=self.outages,
            degradations=recovery_degradations(metrics, self._log()),
        )
        return check(history)

    def close(self) -> None:
        """Ends all workers."""
        self._looks.stop()
        for worker in (*self.producers, *self.consumers):
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _resources(self, metrics: Readings) -> Resources:
        return resources_of(BROKER, int(metrics.number("pid")), self._folder)

    def _log(self) -> str:
        """Returns the broker's log of all its lives."""
        logs = sorted(self._folder.rglob(f"{BROKER}.log*"))
        return "".join(one.read_text(encoding="utf-8", errors="replace") for one in logs)

    def _shares(self) -> list[int]:
        has: list[list[str]] = []
        for one in self.living(self.consumers):
            changes = [line.queues for line in one.lines() if line.event == "queues"]
            has.append(changes[-1] if changes else [])
        together = [queue for queues in has for queue in queues]
        is_whole = len(together) == len(set(together)) == QUEUES
        return sorted(map(len, has)) if is_whole else []


class Looks:
    """Looks at the group's committed offsets all the time, from a thread of its own.

    Args:
        endpoint: ``host:port`` of the broker.
        keys: Folder of keys; None without security.

    Attributes:
        seen: Observed offsets, in the order of time.
    """

    def __init__(self, endpoint: str, keys: Path | None) -> None:
        self.seen: list[Commit] = []
        self._endpoint = endpoint
        self._ring: KeyRing | None = None
        if keys is not None:
            own, broker = (load_credentials(keys / f"{name}.toml") for name in (CLIENT, BROKER))
            self._ring = KeyRing(own, broker.public_key)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looks", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends; further calls do nothing."""
        self._stopping.set()
        self._thread.join()

    def are_at_end(self, since_ms: float) -> bool:
        """Returns True if a look since then found every queue consumed and committed to its end."""
        last = self.seen[-QUEUES:]
        return len(last) == QUEUES and all(
            one.time_ms > since_ms and one.queue_offset >= one.end_offset for one in last
        )

    def _run(self) -> None:
        context = sockets.new_context()
        channel = BlockingChannel(context, endpoint_of(self._endpoint), ring=self._ring)
        while not self._stopping.wait(LOOK_INTERVAL_S):
            try:
                self.seen += self._look(channel)
            except MQMeshError:
                continue  # the broker is dead; its life is another one's concern
        channel.close()
        context.destroy(linger=0)

    def _look(self, channel: BlockingChannel) -> list[Commit]:
        asked = QueryConsumerOffsetRequest(
            GROUP, [QueueOffsetEntry(TOPIC, queue_id) for queue_id in range(QUEUES)]
        )
        answer = channel.request(
            RequestCode.QUERY_CONSUMER_OFFSET,
            header=encode_header(asked),
            timeout_ms=LOOK_TIMEOUT_MS,
        )
        time_ms = now_ms()
        offsets = decode_header(ConsumerOffsets, answer.header).queues
        answer = channel.request(
            RequestCode.GET_TOPIC_STATS_INFO,
            header=encode_header(TopicStatsRequest(TOPIC)),
            timeout_ms=LOOK_TIMEOUT_MS,
        )
        queues = decode_header(TopicStats, answer.header).queues
        ends = {queue.queue_id: queue.max_queue_offset for queue in queues}
        return [
            # A group without an offset begins at 0.
            Commit(
                GROUP,
                f"{BROKER}/{entry.queue_id}",
                max(entry.queue_offset, 0),
                ends.get(entry.queue_id, 0),
                time_ms,
            )
            for entry in offsets
        ]


def _has_topic(admin: AdminClient) -> bool:
    """Makes the topic; False while no name server knows the broker."""
    try:
        admin.put_topic(TopicConfig(TOPIC, QUEUES, QUEUES))
    except NoRoute:
        return False
    return True


def _metrics(admin: AdminClient) -> Readings:
    return admin.runtime_info()[BROKER]


def _is_beyond(workers: list[Worker], event: str, before: int) -> bool:
    return sum(one.count(event) for one in workers) > before


def read_log(namesrv_addr: str) -> list[Delivery]:
    """Reads every message of the topic, queue by queue from the first to the last.

    Raises:
        AssertionError: A message that must be there does not come.
    """
    return sorted(map(describe, read_topic(namesrv_addr, TOPIC)), key=lambda one: one.place)


def wait_until(what: str, condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Looks until something is so.

    Raises:
        ChaosFailure: The condition did not become true in time.
    """
    deadline = time.monotonic() + patience_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise ChaosFailure(f"waited {patience_s:.0f} s in vain for {what}")
        pause.wait(POLL_S)
