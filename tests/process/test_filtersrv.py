"""Filters in Python against a real cluster: right rows, and nobody else hurt."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack

import psutil
import pytest
from harness.commands import run_command
from harness.stopwatch import Stopwatch

from mqmesh import ConsumeResult, Message, Producer, PullConsumer, PushConsumer, PythonFilter, aio
from mqmesh.errors import FilterFailed, NoPermission
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.testing.processes import ProcessCluster, RoleProcess
from mqmesh.units import GIB

PATIENCE_S = 40.0
TOPIC = "flights"
ROWS = 20_000
BATCH = 200
LATE = PythonFilter(
    "def match(message):\n"
    "    delay = message.property('dep_delay')\n"
    "    if delay is None or not float(delay) > 60:\n"
    "        return False\n"
    "    return message.property('origin') in ('JFK', 'EWR')\n"
)
EVEN = PythonFilter("def match(m): return int(m.body) % 2 == 0")
LOOP = PythonFilter("def match(m):\n while True: pass")
PRELUDE = (
    "def module(name):\n"
    "  for c in object.__subclasses__():\n"
    "    if c.__name__ == '_wrap_close':\n"
    "      return c.__init__.__globals__['sys'].modules[name]\n"
    "os = module('os')\n"
)


class Filtered:
    """A cluster with a filter server beside its broker."""

    def __init__(self, folder, *, allowed=True, **settings):
        self.folder = folder
        self.settings = settings
        self._stack = ExitStack()
        self.cluster = self._stack.enter_context(
            ProcessCluster(folder, broker_settings={"filter_server_enable": str(allowed).lower()})
        )
        self.namesrv_addr = self.cluster.namesrv_addr
        self.server = self.start_server() if allowed else None

    def start_server(self):
        """Start a filter server, at another port than the one before."""
        settings = {
            "enable": "true",
            "broker_addr": self.cluster.brokers["broker-a"].endpoint,
            "match_timeout_ms": "500",
            "park_ms": "2000",
            **self.settings,
        }
        self.server = RoleProcess("filtersrv", settings, self.folder / "filtersrv.log")
        return self.server

    def log(self):
        """What the filter server logged."""
        return (self.folder / "filtersrv.log").read_text(errors="replace")

    def workers(self):
        """Its confined processes."""
        return psutil.Process(self.server.pid).children(recursive=True)

    def close(self):
        if self.server is not None:
            self.server.stop()
        self._stack.close()


@pytest.fixture(scope="module")
def flights(project_root):
    """Rows of the file with their messages."""
    module = runpy.run_path(str(project_root / "examples" / "flights.py"))
    rows = []
    for row in module["rows"]():
        message = module["to_message"](row)
        message.sharding_key = None
        rows.append((row, message))
        if len(rows) == ROWS:
            break
    return rows


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, flights):
    """A cluster that no test harms, with the flights in it."""
    cluster = Filtered(tmp_path_factory.mktemp("cluster"), match_timeout_ms="10000")
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        sends = [
            producer.send_batch_async([message for _, message in flights[start : start + BATCH]])
            for start in range(0, ROWS, BATCH)
        ]
        for send in sends:
            send.result()
    yield cluster
    cluster.close()


@pytest.fixture
def own_cluster(short_tmp_path):
    """A cluster that the test may harm."""
    clusters = []

    def make(**settings):
        clusters.append(Filtered(short_tmp_path, **settings))
        return clusters[-1]

    yield make
    for one in clusters:
        one.close()


class Collector:
    """A listener that keeps what it gets."""

    def __init__(self):
        self.changed = threading.Condition()
        self.bodies = Counter()
        self.messages = []

    def __call__(self, messages):
        with self.changed:
            self.messages += messages
            self.bodies.update(message.body for message in messages)
            self.changed.notify_all()
        return ConsumeResult.SUCCESS

    def wait_for(self, wanted, patience_s=PATIENCE_S):
        """Waits until all wanted bodies came."""
        with self.changed:
            self.changed.wait_for(lambda: not Counter(wanted) - self.bodies, patience_s)
        assert Counter(wanted) - self.bodies == Counter()


def until(condition, patience_s=PATIENCE_S):
    """Looks until something is so; returns how long that took."""
    began = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < began + patience_s, "waited in vain"
        pause.wait(0.01)
    return time.monotonic() - began


def options(cluster, **more):
    return {"namesrv_addr": cluster.namesrv_addr, "consume_from_where": "FIRST_OFFSET", **more}


def send_numbers(cluster, topic, numbers):
    with Producer("numbers", namesrv_addr=cluster.namesrv_addr) as producer:
        producer.send_batch([Message(topic, b"%d" % number) for number in numbers])


def make_topic(cluster, topic, count):
    """Sends numbers, and waits until consumers can find them."""
    send_numbers(cluster, topic, range(count))
    with PullConsumer("first", **options(cluster)) as consumer:
        consumer.subscribe(topic)
        assert len(poll_all(consumer, count)) == count


def evens(numbers):
    return [b"%d" % number for number in numbers if number % 2 == 0]


def test_a_filter_in_python_gives_the_rows_of_a_plain_scan(cluster, flights):
    expected = Counter(
        message.body
        for row, message in flights
        if row["dep_delay"] not in ("", "NA")
        and float(row["dep_delay"]) > 60
        and row["origin"] in ("JFK", "EWR")
    )
    got = Collector()
    consumer = PushConsumer("scan", **options(cluster), consume_message_batch_max_size=32)
    consumer.subscribe(TOPIC, LATE, listener=got)
    with consumer:
        got.wait_for(expected)
        assert consumer.filter_errors == {}
    assert got.bodies == expected
    # All is done, also what was passed over: the next member finds nothing more.
    with PullConsumer("scan", **options(cluster)) as check:
        check.subscribe(TOPIC, LATE)
        assert check.poll(300) == []
        assert sum(check.lag().values()) == 0


def test_what_passes_is_just_what_was_stored(cluster, flights):
    with PullConsumer("whole", **options(cluster)) as whole:
        whole.subscribe(TOPIC)
        everything = {message.message_id: message for message in poll_all(whole, ROWS)}
    some = PythonFilter(
        "import json\ndef match(m): return json.loads(m.body)['carrier'] == 'HA' and m.tag == 'HA'"
    )
    count = sum(row["carrier"] == "HA" for row, _ in flights)
    with PullConsumer("some", **options(cluster)) as consumer:
        consumer.subscribe(TOPIC, some)
        found = poll_all(consumer, count)
        assert consumer.poll(200) == []
    assert len(found) == count > 10
    for message in found:
        twin = everything[message.message_id]
        assert (message, message.info) == (twin, twin.info)
        assert message.offset_message_id == twin.offset_message_id


def poll_all(consumer, count):
    found = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        found += consumer.poll(500, max_messages=2_000)
    return found


def test_new_messages_come_at_once(cluster):
    got = Collector()
    consumer = PushConsumer("fresh", **options(cluster))
    consumer.subscribe("fresh", EVEN, listener=got)
    with consumer:
        for round_ in range(5):
            numbers = range(round_ * 10, round_ * 10 + 10)
            watch = Stopwatch()
            send_numbers(cluster, "fresh", numbers)
            got.wait_for(evens(numbers))
            assert watch.seconds < 3.0
    assert got.bodies == Counter(evens(range(50)))


def test_coroutines_and_the_command_line_filter_too(cluster, tmp_path):
    make_topic(cluster, "both", 10)

    async def main():
        async with aio.PullConsumer("both", **options(cluster)) as consumer:
            await consumer.subscribe("both", EVEN)
            found = []
            while len(found) < 5:
                found += await consumer.poll(5_000)
            assert consumer.filter_errors == {}
            return found

    assert {message.body for message in asyncio.run(main())} == set(evens(range(10)))

    path = tmp_path / "even.py"
    path.write_text(EVEN.source)
    command = run_command(
        "--namesrv", cluster.namesrv_addr, "consume", "both", "--from", "first",
        "--python", str(path), "--max", "5", "--body", "--timeout", "20",
    )  # fmt: skip
    assert command.code == 0
    assert set(command.out) == {body.decode() for body in evens(range(10))}


def test_without_permission_a_consumer_is_told_which_setting_gives_it(own_cluster):
    cluster = own_cluster(allowed=False)
    make_topic(cluster, "t", 3)
    consumer = PushConsumer("g", **options(cluster))
    consumer.subscribe("t", EVEN, listener=Collector())
    with pytest.raises(NoPermission, match=r"filter_server\.enable = true"):
        consumer.start()
    poller = PullConsumer("g", **options(cluster))
    poller.subscribe("t", EVEN)
    with pytest.raises(NoPermission, match=r"filter_server\.enable = true"):
        poller.start()


def test_a_filter_server_that_is_not_allowed_does_not_start(tmp_path):
    with pytest.raises(RuntimeError, match="allow it by enable = true"):
        RoleProcess("filtersrv", {}, tmp_path / "log")


def test_a_filter_that_raises_pauses_its_group_and_loses_nothing(cluster):
    send_numbers(cluster, "raises", range(20))
    got = Collector()
    broken = PythonFilter("def match(m): return {b'13': 1}[m.body] == 1")
    consumer = PushConsumer("raises", **options(cluster))
    consumer.subscribe("raises", broken, listener=got)
    with consumer:
        until(lambda: consumer.filter_errors)
        assert "KeyError" in str(consumer.filter_errors["raises"])
        # Mended while the consumer runs.
        consumer.unsubscribe("raises")
        consumer.subscribe("raises", EVEN, listener=got)
        got.wait_for(evens(range(20)))
        until(lambda: not consumer.filter_errors)
    assert got.bodies == Counter(evens(range(20)))


HOSTILE = {
    "file": "def match(m): return os.open('/etc/passwd', 0) > 0",
    "socket": "def match(m): return module('ctypes').CDLL(None).socket(2, 1, 0) > 0",
    "fork": "def match(m):\n while True: os.fork()",
    "exec": "def match(m): os.execv('/bin/true', ['true'])",
    "memory": "def match(m):\n x = []\n while True: x.append(bytes(1 << 20))",
    "loop": "def match(m):\n while True: pass",
    "stack": "def match(m):\n x = ()\n for _ in range(10**6): x = (x,)\n return hash(x) == 0",
    "kill": "def match(m): os.kill(os.getppid(), 9)",
    "flood": "def match(m):\n while True: os.write(1, bytes(1 << 16))",
    "forge": "def match(m):\n os.write(1, bytes(13)); return True",
    "threads": "def match(m):\n while True: module('_thread').start_new_thread(len, ('',))",
    "loads for ever": "while True: pass",
}


@pytest.mark.timeout(120)
def test_hostile_filters_are_contained_and_other_groups_do_not_feel_them(own_cluster):
    cluster = own_cluster(load_timeout_ms="5000", max_total_worker_memory_bytes=str(16 * GIB))
    send_numbers(cluster, "t", range(100))
    plain, filtered = Collector(), Collector()
    with ExitStack() as stack:

        def consume(group, wanted, listener):
            consumer = PushConsumer(group, **options(cluster), start_timeout_ms=100)
            consumer.subscribe("t", wanted, listener=listener)
            return stack.enter_context(consumer)

        consume("plain", "*", plain)
        consume("filtered", EVEN, filtered)
        filtered.wait_for(evens(range(100)))
        victims = Collector()
        bad = {
            name: consume(f"bad-{number}", PythonFilter(PRELUDE + source), victims)
            for number, (name, source) in enumerate(HOSTILE.items())
        }
        slowest = 0.0
        told: set[str] = set()
        round_ = 0
        began = time.monotonic()
        while len(told) < len(bad):
            assert time.monotonic() < began + PATIENCE_S, set(bad) - told
            round_ += 1
            numbers = range(round_ * 100, round_ * 100 + 100)
            sent = time.monotonic()
            send_numbers(cluster, "t", numbers)
            filtered.wait_for(evens(numbers))
            slowest = max(slowest, time.monotonic() - sent)
            told |= {name for name, consumer in bad.items() if consumer.filter_errors}
        assert all(isinstance(one.filter_errors["t"], FilterFailed) for one in bad.values())
        plain.wait_for(b"%d" % number for number in range(round_ * 100))
    assert victims.bodies == Counter()
    # Nothing was skipped: mended, the groups get all of it.
    got = Collector()
    with PushConsumer("bad-0", **options(cluster)) as mended:
        mended.subscribe("t", EVEN, listener=got)
        got.wait_for(evens(range((round_ + 1) * 100)))
    assert cluster.server.running
    assert slowest < 10.0


@pytest.mark.timeout(120)
def test_a_filter_that_dies_again_and_again_is_parked(own_cluster):
    cluster = own_cluster(failures_to_park="2", park_ms="60000")
    send_numbers(cluster, "t", range(10))
    consumer = PushConsumer("g", **options(cluster))
    consumer.subscribe("t", LOOP, listener=Collector())
    with consumer:
        until(lambda: "is parked" in str(consumer.filter_errors.get("t")))
        assert "no answer within 500 ms" in str(consumer.filter_errors["t"])
        with AdminClient(cluster.namesrv_addr) as admin:
            until(lambda: admin.runtime_info()["broker-a"]["filters_parked"] == 1)
    assert "is parked for 60 s" in cluster.log()
    assert cluster.workers() == []


@pytest.mark.timeout(120)
def test_a_filter_server_that_is_killed_takes_its_workers_along_and_is_found_again(own_cluster):
    cluster = own_cluster()
    got = Collector()
    consumer = PushConsumer("g", **options(cluster))
    consumer.subscribe("t", EVEN, listener=got)
    send_numbers(cluster, "t", range(10))
    with consumer:
        got.wait_for(evens(range(10)))
        workers = cluster.workers()
        assert len(workers) == 1
        # Also one that is too busy to see that its pipe was closed.
        busy = PushConsumer("busy", **options(cluster))
        busy.subscribe("t", LOOP, listener=Collector())
        with busy:
            until(lambda: len(cluster.workers()) == 2)
            workers = cluster.workers()
            cluster.server.kill()
            assert psutil.wait_procs(workers, timeout=5)[1] == []
        send_numbers(cluster, "t", range(10, 20))
        cluster.start_server()
        got.wait_for(evens(range(20)))
    assert got.bodies == Counter(evens(range(20)))


def test_a_filter_server_that_hangs_holds_up_its_own_pulls_alone(own_cluster):
    cluster = own_cluster()
    plain, filtered = Collector(), Collector()
    send_numbers(cluster, "t", range(10))
    with ExitStack() as stack:
        for group, wanted, listener in (("p", "*", plain), ("f", EVEN, filtered)):
            consumer = PushConsumer(group, **options(cluster))
            consumer.subscribe("t", wanted, listener=listener)
            stack.enter_context(consumer)
        filtered.wait_for(evens(range(10)))
        cluster.server.suspend()
        try:
            watch = Stopwatch()
            send_numbers(cluster, "t", range(10, 20))
            plain.wait_for(b"%d" % number for number in range(20))
            assert watch.seconds < 5.0
        finally:
            cluster.server.resume()
        filtered.wait_for(evens(range(20)))
    assert filtered.bodies == Counter(evens(range(20)))


def test_a_broker_that_is_killed_is_found_again_by_its_filter_server(own_cluster):
    cluster = own_cluster()
    got = Collector()
    consumer = PushConsumer("g", **options(cluster))
    consumer.subscribe("t", EVEN, listener=got)
    send_numbers(cluster, "t", range(10))
    with consumer:
        got.wait_for(evens(range(10)))
        os.kill(cluster.cluster.brokers["broker-a"].pid, signal.SIGKILL)
        cluster.cluster.brokers["broker-a"].kill()
        cluster.cluster.start_broker()
        send_numbers(cluster, "t", range(10, 20))
        got.wait_for(evens(range(20)))
