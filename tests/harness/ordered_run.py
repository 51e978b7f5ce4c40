"""Ordered consumption, and groups whose members come and go, in real processes under load.

As a program (``scripts/ordered``) it runs the long forms and prints metrics; tests run short
ones.
"""

import argparse
import csv
import io
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, Self

import msgspec
import zstandard

from harness.failovers import ElectedGroup, fail_over
from harness.ordered_calls import (
    CallLog,
    find_disorder,
    find_key_overlaps,
    find_overlaps,
    find_shared,
    find_skips,
    handovers_s,
    longest_pause_s,
    progress,
)
from harness.ordered_member import NUMBER
from mqmesh.errors import MQMeshError
from mqmesh.message import Message
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

FLIGHTS: Final = Path("examples/data/flights.csv.zst")
TOPIC: Final = "flights"
GROUP: Final = "ordered"
QUEUES: Final = 8
LOOK_S: Final = 0.05
PATIENCE_S: Final = 60.0
"""Time without a newly consumed message after which a run is given up."""
CLOSE_S: Final = 10.0
MEMBERS: Final = (2, 6)
IN_FLIGHT: Final = 20_000
SEND_MS: Final = 30_000
"""A broker that was killed is back long before."""


class Metrics(msgspec.Struct):
    """Result of a run.

    Attributes:
        faults: Broken promises; none if all is well.
        messages: Messages sent.
        repeats: Messages consumed again.
        keys: Sharding keys.
        joins: Members that came during the load.
        leaves: Members that left by themselves.
        kills: Members killed.
        failovers: Masters killed, of a group that elects another one.
        restarts: Brokers killed, and started again.
        seconds: Time from the first message sent to the last one consumed.
        longest_pause_s: Longest time in which no message at all was consumed.
        handover_s: Median time that a queue rested when it went from one member to another.
        longest_handover_s: Longest of these times; after a kill it includes the time of grace.
        progress: Share of the seconds of the load in which a message was consumed.
        queue_progress: The same of each queue.
    """

    faults: list[str]
    messages: int = 0
    repeats: int = 0
    keys: int = 0
    joins: int = 0
    leaves: int = 0
    kills: int = 0
    failovers: int = 0
    restarts: int = 0
    seconds: float = 0.0
    longest_pause_s: float = 0.0
    handover_s: float = 0.0
    longest_handover_s: float = 0.0
    progress: float = 0.0
    queue_progress: float = 0.0

    def text(self) -> str:
        """Formats the result for people."""
        share = self.repeats / max(self.messages, 1)
        return (
            f"{self.messages:,} messages, {self.keys:,} keys, {self.repeats:,} repeats "
            f"({share:.4%}), {self.joins} joins, {self.leaves} leaves, {self.kills} kills, "
            f"{self.failovers} failovers, {self.restarts} restarts, {self.seconds:.1f} s, "
            "longest pause "
            f"{self.longest_pause_s:.2f} s, a queue changes hands in {self.handover_s:.3f} s, at "
            f"most {self.longest_handover_s:.2f} s, progress in {self.progress:.0%} of the "
            f"seconds, {self.queue_progress:.0%} of each queue's; "
            + ("; ".join(self.faults[:10]) or "no fault")
        )


class Group:
    """Consumers in processes of their own.

    Args:
        namesrv_addr: Address of the name server.
        folder: For their files.
        failing: Share of calls that fail.
        mode: ``orderly``, ``concurrently`` or ``fifo``.
    """

    def __init__(self, namesrv_addr: str, folder: Path, *, failing: float, mode: str) -> None:
        self.log = CallLog(folder)
        self.members: list[subprocess.Popen[bytes]] = []
        self._namesrv_addr = namesrv_addr
        self._folder = folder
        self._failing = failing
        self._mode = mode
        self._count = 0
        self._ended: list[subprocess.Popen[bytes]] = []

    def join(self, *, wait: bool = False) -> None:
        """Adds a member."""
        self._count += 1
        path = self._folder / f"m{self._count}.calls"
        errors = self._folder / f"m{self._count}.log"
        with errors.open("wb") as log:
            member = subprocess.Popen(
                [
                    *(sys.executable, "-m", "harness.ordered_member"),
                    *(self._namesrv_addr, TOPIC, GROUP, str(path)),
                    *(str(self._failing), self._mode),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.members.append(member)
        if wait:
            assert member.stdout is not None
            assert member.stdout.readline() == b"ready\n"

    def leave(self, member: subprocess.Popen[bytes]) -> None:
        """Has a member close its consumer and end, in its own time."""
        self.members.remove(member)
        self._ended.append(member)
        member.terminate()

    def kill(self, member: subprocess.Popen[bytes]) -> None:
        """Ends a member as a crash would."""
        self.members.remove(member)
        self._ended.append(member)
        member.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in list(self.members):
            self.leave(member)
        for member in self._ended:
            try:
                member.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                member.send_signal(signal.SIGKILL)
                member.wait()
            if member.stdout is not None:
                member.stdout.close()


class Load:
    """Sends messages from a thread of its own.

    Args:
        namesrv_addr: Address of the name server.
        keys: Sharding key of each message, empty for none.
        rate: Messages a second; 0 for as fast as it goes.
    """

    def __init__(self, namesrv_addr: str, keys: Sequence[str], rate: int = 0) -> None:
        self.failure: MQMeshError | None = None
        self._namesrv_addr = namesrv_addr
        self._keys = keys
        self._rate = rate
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Waits until all was sent."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._send()
        except MQMeshError as error:
            self.failure = error

    def _send(self) -> None:
        began = time.monotonic()
        pause = threading.Event()
        futures = []
        with Producer(
            "ordered-load",
            namesrv_addr=self._namesrv_addr,
            send_msg_timeout_ms=SEND_MS,
            retry_times_when_send_async_failed=100,
        ) as producer:
            for number, key in enumerate(self._keys):
                if self._rate and number % 50 == 0:
                    pause.wait(max(began + number / self._rate - time.monotonic(), 0))
                futures.append(
                    producer.send_async(
                        Message(
                            TOPIC,
                            b"%d" % number,
                            properties={NUMBER: str(number)},
                            sharding_key=key or None,
                        )
                    )
                )
                if len(futures) >= IN_FLIGHT:
                    for future in futures:
                        future.result()
                    futures.clear()
            for future in futures:
                future.result()


def flight_keys(path: Path = FLIGHTS) -> Iterator[str]:
    """Yields the tail number of each flight of the file, empty where it is missing."""
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file)
        for row in csv.DictReader(io.TextIOWrapper(reader, "utf-8", newline="")):
            yield row["tailnum"] if row["tailnum"] != "NA" else ""


def run_flights(folder: Path, keys: Sequence[str], *, failing: float = 0.01) -> Metrics:
    """Runs three consumers in order; kills one and adds one in the middle.

    Args:
        folder: Empty; a short path.
        keys: Sharding key of each message, in the order they are sent.
        failing: Share of calls that fail.
    """
    metrics = Metrics([], messages=len(keys), keys=len(set(keys) - {""}))
    with (
        ProcessCluster(
            folder, broker_settings={"default_topic_queue_nums": str(QUEUES)}
        ) as cluster,
        Group(cluster.namesrv_addr, folder, failing=failing, mode="orderly") as group,
    ):
        _make_topic(cluster.namesrv_addr)
        for _ in range(3):
            group.join(wait=True)
        load = Load(cluster.namesrv_addr, keys)
        load.start()
        for seen in _progress(group, load, len(keys), metrics):
            if seen >= len(keys) // 4 and not metrics.kills:
                group.kill(group.members[0])
                metrics.kills += 1
            if seen >= len(keys) // 2 and metrics.kills and not metrics.joins:
                group.join()
                metrics.joins += 1
    _judge(group, metrics, keys, orderly=True)
    return metrics


def run_churn(
    folder: Path,
    *,
    seconds: float,
    events_a_minute: int = 50,
    rate: int = 2_000,
    orderly: bool = True,
    kill_share: float = 0.0,
    brokers: int = 1,
    failover_s: float = 0.0,
    seed: int = 1,
) -> Metrics:
    """Members come and go under load, and masters where the brokers are replicas.

    Args:
        folder: Empty; a short path.
        seconds: Duration of the load, in seconds.
        events_a_minute: Joins and leaves.
        rate: Messages a second.
        orderly: True if the members consume in order.
        kill_share: Share of the leaves that are kills.
        brokers: Broker groups, 1 to 4; each counts generations of its own.
        failover_s: Time between kills of the master of one group of three replicas, which elect
            another one; 0 for brokers without replicas.
        seed: Seed of joins and leaves.
    """
    chance = random.Random(seed)
    keys = [f"key-{chance.randrange(500)}" for _ in range(int(seconds * rate))]
    metrics = Metrics([], messages=len(keys), keys=len(set(keys)))
    with ExitStack() as stack:
        elected: ElectedGroup | None = None
        if failover_s:
            elected = stack.enter_context(closing(ElectedGroup(folder)))
            namesrv_addr = elected.namesrv.endpoint
        else:
            names = tuple(f"broker-{name}" for name in "abcd"[:brokers])
            cluster = ProcessCluster(folder, brokers=names)
            namesrv_addr = stack.enter_context(cluster).namesrv_addr
        mode = "orderly" if orderly else "concurrently"
        group = stack.enter_context(Group(namesrv_addr, folder, failing=0.0, mode=mode))
        _make_topic(namesrv_addr)
        for _ in range(3):
            group.join(wait=True)
        load = Load(namesrv_addr, keys, rate)
        load.start()
        due, began_ns = time.monotonic(), time.monotonic_ns()
        ends, failover_due = due + seconds, due + failover_s
        for _ in _progress(group, load, len(keys), metrics):
            now = time.monotonic()
            if elected is not None and failover_due < now < ends and fail_over(elected):
                metrics.failovers += 1
                failover_due = now + failover_s
            if now < due or now > ends:
                continue
            due += 60 / events_a_minute
            count = len(group.members)
            if count <= MEMBERS[0] or (count < MEMBERS[1] and chance.random() < 0.5):
                group.join()
                metrics.joins += 1
            elif chance.random() < kill_share:
                group.kill(chance.choice(group.members))
                metrics.kills += 1
            else:
                group.leave(chance.choice(group.members))
                metrics.leaves += 1
    _judge(group, metrics, keys, orderly=orderly)
    metrics.progress, metrics.queue_progress = progress(
        group.log.calls, began_ns, max(int(seconds), 1)
    )
    # Not as it was looked at: that stands still while a replica is started.
    metrics.longest_pause_s = longest_pause_s(group.log.calls, began_ns)
    return metrics


def run_keys(
    folder: Path,
    keys: Sequence[str],
    *,
    members: int = 16,
    failing: float = 0.01,
    kills: int = 4,
    restarts: int = 2,
) -> Metrics:
    """Has members share one queue in the order of keys; kills some of them, and adds as many.

    The broker is killed meanwhile, too.

    Args:
        folder: Empty; a short path.
        keys: Sharding key of each message, in the order they are sent.
        members: Members at a time.
        failing: Share of calls that fail.
        kills: Members killed, one after the other.
        restarts: Kills of the broker.
    """
    metrics = Metrics([], messages=len(keys), keys=len(set(keys) - {""}))
    with (
        ProcessCluster(folder) as cluster,
        Group(cluster.namesrv_addr, folder, failing=failing, mode="fifo") as group,
    ):
        _make_topic(cluster.namesrv_addr, queues=1)
        with GroupAdmin(cluster.namesrv_addr) as admin:
            admin.put_group(
                GroupConfig(GROUP, delivery="fifo", retry_delays="20ms", lost_grace_ms=500)
            )
        for _ in range(members):
            group.join(wait=True)
        load = Load(cluster.namesrv_addr, keys)
        load.start()
        for seen in _progress(group, load, len(keys), metrics):
            if metrics.kills < kills and seen >= len(keys) * (metrics.kills + 1) // (kills + 1):
                group.kill(group.members[0])
                metrics.kills += 1
                group.join()
                metrics.joins += 1
            # Between two kills of members.
            if metrics.restarts < restarts and seen * restarts * 2 >= len(keys) * (
                2 * metrics.restarts + 1
            ):
                cluster.brokers["broker-a"].kill()
                cluster.start_broker()
                metrics.restarts += 1
    group.log.read()
    calls = group.log.calls
    metrics.repeats = len(calls) - len(group.log.numbers)
    metrics.faults += find_key_overlaps(calls, keys) + find_disorder(calls, keys)
    idle = [one for one in range(1, members + 1) if not any(c.member == f"m{one}" for c in calls)]
    metrics.faults += [f"members {idle} got nothing"] if idle else []
    return metrics


def _make_topic(namesrv_addr: str, queues: int = QUEUES) -> None:
    with AdminClient(namesrv_addr) as admin:
        admin.put_topic(TopicConfig(TOPIC, queues, queues))


def _progress(group: Group, load: Load, count: int, metrics: Metrics) -> Iterator[int]:
    """Looks until all messages were consumed; yields how many were so far."""
    pause = threading.Event()
    began = moved = time.monotonic()
    seen = 0
    while seen < count:
        pause.wait(LOOK_S)
        group.log.read()
        now = time.monotonic()
        if len(group.log.numbers) > seen:
            metrics.longest_pause_s = max(metrics.longest_pause_s, now - moved)
            seen, moved = len(group.log.numbers), now
        metrics.seconds = now - began
        if load.failure is not None:
            metrics.faults.append(f"sending failed: {load.failure}")
            return
        if now - moved > PATIENCE_S:
            metrics.faults.append(f"{count - seen} messages do not come")
            return
        yield seen


def _judge(group: Group, metrics: Metrics, keys: Sequence[str], *, orderly: bool) -> None:
    group.log.read()
    calls = group.log.calls
    metrics.repeats = len(calls) - len(group.log.numbers)
    metrics.faults += find_shared(calls)
    rests = handovers_s(calls)
    if rests:
        metrics.handover_s = rests[len(rests) // 2]
        metrics.longest_handover_s = rests[-1]
    if orderly:
        metrics.faults += find_skips(calls) + find_overlaps(calls) + find_disorder(calls, keys)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line's test and prints metrics; returns 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="scripts/ordered", description=__doc__)
    parser.add_argument("what", choices=["flights", "keys", "churn"])
    parser.add_argument("--members", type=int, default=16, help="of keys")
    parser.add_argument("--failing", type=float, default=0.01, help="share of calls, of keys")
    parser.add_argument("--kills", type=int, default=4, help="members killed, of keys")
    parser.add_argument("--restarts", type=int, default=2, help="kills of the broker, of keys")
    parser.add_argument("--seconds", type=float, default=120.0, help="of churn")
    parser.add_argument("--rate", type=int, default=2_000, help="messages a second of churn")
    parser.add_argument("--events", type=int, default=50, help="joins and leaves a minute")
    parser.add_argument("--kill-share", type=float, default=0.0, help="of the leaves")
    parser.add_argument("--brokers", type=int, default=1, help="broker groups, 1 to 4")
    parser.add_argument(
        "--failover-s",
        type=float,
        default=0.0,
        help="of churn: three replicas, whose master is killed each so many seconds",
    )
    parser.add_argument("--concurrently", action="store_true", help="churn without order")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mqmesh-") as folder:
        if options.what == "flights":
            metrics = run_flights(Path(folder), list(flight_keys()))
        elif options.what == "keys":
            metrics = run_keys(
                Path(folder),
                list(flight_keys()),
                members=options.members,
                failing=options.failing,
                kills=options.kills,
                restarts=options.restarts,
            )
        else:
            metrics = run_churn(
                Path(folder),
                seconds=options.seconds,
                events_a_minute=options.events,
                rate=options.rate,
                orderly=not options.concurrently,
                kill_share=options.kill_share,
                brokers=options.brokers,
                failover_s=options.failover_s,
                seed=options.seed,
            )
    sys.stdout.write(f"{options.what}: {metrics.text()}\n")
    return 1 if metrics.faults else 0


if __name__ == "__main__":
    sys.exit(main())
