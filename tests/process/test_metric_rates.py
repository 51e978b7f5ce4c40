"""Rates that the exporter tells, and Prometheus', are those that clients counted meanwhile.

Clients note when they did what; what they counted between two moments is compared, not the pace
that they meant to have. A metric was read at some time between request and answer, so that a slow
machine makes the bounds wider, and no difference.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from harness.patience import until
from harness.prometheus import Prometheus

from mqmesh import ClientOptions, Message, Producer, PushConsumer
from mqmesh.testing.processes import ProcessCluster, RoleProcess

TOPIC, GROUP = "paced", "counting"
PAUSE_S = 0.02
LASTS_S = 18
"""Longer than what any rate is of, 10 s, and than it takes until it is told."""
WINDOW_S = 12
TOLERANCE = 0.05


class Clients:
    """A producer and a consumer, and when they did what, seconds since 1970.

    Attributes:
        began_s: When they began, as these moments.
        begun: When each send began; what is stored at a moment is no more.
        acked: When it was acknowledged; what is stored is no less.
        done: When the consumer had each message.
    """

    def __init__(self, namesrv_addr: str) -> None:
        self.began_s = time.time()
        self.begun: list[float] = []
        self.acked: list[float] = []
        self.done: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._closing = ExitStack()
        client = ClientOptions(namesrv_addr=namesrv_addr, heartbeat_broker_interval_ms=1_000)
        self._producer = self._closing.enter_context(Producer("steady", client=client))
        consumer = PushConsumer(GROUP, client=client, consume_from_where="FIRST_OFFSET")
        consumer.subscribe(TOPIC, listener=lambda _: self.done.append(time.time()))
        self._closing.enter_context(consumer)
        self._thread.start()

    def _send(self) -> None:
        while not self._stop.wait(PAUSE_S):
            self.begun.append(time.time())
            self._producer.send(Message(TOPIC, b"-"))
            self.acked.append(time.time())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._closing.close()


@dataclass(frozen=True)
class Look:
    """A page, and between which moments it was made."""

    text: str
    from_s: float
    until_s: float

    def value(self, name: str) -> float:
        """The value of the only series that is not of another topic or group."""
        found = re.findall(rf"^{name}(\{{.*\}}) (\S+)$", self.text, re.M)
        (value,) = [value for labels, value in found if '="%' not in labels]
        return float(value)


@dataclass(frozen=True)
class Scene:
    """A cluster with one broker, an exporter that a test alone asks, and clients."""

    page: str
    prometheus: Prometheus
    clients: Clients

    def look(self) -> Look:
        from_s = time.time()
        with urlopen(self.page) as answer:
            text = answer.read().decode()
        return Look(text, from_s, time.time())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        cluster = stack.enter_context(ProcessCluster(tmp_path_factory.mktemp("c")))
        pages = []
        for name in "own", "scraped":
            settings = {
                "listen_port": "0",
                "namesrv_addr": f'["{cluster.namesrv_addr}"]',
                "min_interval_ms": "0",
            }
            exporter = RoleProcess("exporter", settings, cluster.folder / f"{name}.log")
            stack.callback(exporter.stop)
            pages.append(exporter.endpoint)
        clients = stack.enter_context(closing(Clients(cluster.namesrv_addr)))
        target = pages[1].removeprefix("http://").removesuffix("/metrics")
        rules = project_root / "mqmesh/roles/exporter/boards/mqmesh.rules.yml"
        prometheus = Prometheus(tmp_path_factory.mktemp("p"), target, rules, {})
        stack.enter_context(closing(prometheus))
        until(lambda: len(clients.done) > 2)
        yield Scene(pages[0], prometheus, clients)


@pytest.fixture(scope="module")
def looks(scene: Scene) -> tuple[Look, Look]:
    """The first time that the exporter was asked, and the second."""
    first = scene.look()
    until(lambda: time.time() - first.until_s > LASTS_S)
    return first, scene.look()


def is_near(value: float, least: float, most: float) -> bool:
    return least * (1 - TOLERANCE) <= value <= most * (1 + TOLERANCE)


def grown(
    least: list[float], most: list[float], first: tuple[float, float], last: tuple[float, float]
) -> tuple[int, int]:
    """How much a total grew, at least and at most, between two moments that are not quite known."""
    return (
        bisect_right(least, last[0]) - bisect_right(most, first[1]),
        bisect_right(most, last[1]) - bisect_right(least, first[0]),
    )


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_what_the_exporter_has_counted_between_two_looks(scene, looks, who):
    first, last = looks
    spans = (last.from_s - first.until_s, last.until_s - first.from_s)
    clients = scene.clients
    counted = clients.acked if who == "producer" else clients.done
    moments = [(look.from_s, look.until_s) for look in looks]
    least, most = grown(counted, clients.begun, *moments)
    assert least > 100
    tps = last.value(f"rocketmq_{who}_tps")
    assert is_near(tps, least / spans[1], most / spans[0])

    way = "in" if who == "producer" else "out"
    total = f"rocketmq_throughput_{way}_total"
    grown_bytes = last.value(total) - first.value(total)
    size = last.value(f"rocketmq_{who}_message_size")
    assert is_near(size, grown_bytes / spans[1], grown_bytes / spans[0])


def paces(times: list[float], look: Look, lengths_s: range) -> list[float]:
    """What was done a second in windows of such lengths that end shortly before a look.

    When exactly a process looked at its totals nobody tells; each second, if it came to that.
    """
    found = []
    for length_s in lengths_s:
        for late in range(30):
            until_s = look.from_s - late / 10
            count = bisect_left(times, until_s) - bisect_left(times, until_s - length_s)
            found.append(count / length_s)
    return found


def test_what_the_broker_and_the_consumer_tell_of_the_last_seconds(scene, looks):
    last, clients = looks[1], scene.clients
    age_s = int(last.from_s - clients.began_s)
    for names, times, lengths_s in (
        (["broker_tps", "brokeruntime_put_tps10"], clients.acked, range(9, 15)),
        (["broker_qps", "brokeruntime_getfound_tps10"], clients.done, range(9, 15)),
        # Of half a minute, or since the consumer is there.
        (["client_consume_ok_msg_tps", "client_consumer_pull_tps"], clients.done, range(12, age_s)),
    ):
        seen = paces(times, last, lengths_s)
        for name in names:
            value = last.value(f"rocketmq_{name}")
            assert is_near(value, min(seen), max(seen)), (name, value, min(seen), max(seen))


@pytest.mark.parametrize("way", ["in", "out"])
def test_what_prometheus_makes_of_totals(scene, looks, way):
    prometheus, clients = scene.prometheus, scene.clients
    total = f'rocketmq_messages_{way}_total{{topic="{TOPIC}"}}'
    (series,) = prometheus.query(f"{total}[{WINDOW_S}s]")
    (first_s, first), *_, (last_s, last) = series["values"]

    def moment(at_s: float) -> tuple[float, float]:
        (took,) = prometheus.query("scrape_duration_seconds", at_s)
        return at_s, at_s + float(took["value"][1])

    span_s = last_s - first_s
    counted = clients.acked if way == "in" else clients.done
    least, most = grown(counted, clients.begun, moment(first_s), moment(last_s))
    assert least > 100
    assert least <= float(last) - float(first) <= most, "exactly, as far as anybody knows"
    # One ms more, or the first one would be left out: nothing is guessed beyond the samples.
    (rate,) = prometheus.query(f"rate({total}[{round(span_s * 1_000) + 1}ms])", last_s)
    assert is_near(float(rate["value"][1]), least / span_s, most / span_s)
