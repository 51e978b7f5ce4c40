"""An exporter beside brokers that hang, are killed, and come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from harness.patience import until
from harness.stopwatch import Stopwatch

from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster, RoleProcess

A, B = BROKERS = ("broker-a", "broker-b")
TIMEOUT_MS = 1_000
SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


class Scene:
    """A cluster of two brokers, its exporter, and a producer that sends to both."""

    def __init__(self, cluster: ProcessCluster, exporter: RoleProcess, producer: Producer) -> None:
        self.cluster = cluster
        self.producer = producer
        self._page = exporter.endpoint

    def samples(self) -> dict[tuple[str, str], float]:
        """What is told, by name and labels."""
        with urlopen(self._page) as answer:
            text = answer.read().decode()
        return {(name, labels): float(value) for name, labels, value in SAMPLE.findall(text)}

    def up(self) -> dict[str, float]:
        """Whether each broker answers."""
        of_brokers = [
            (re.search(r'node_id="(.*?)"', labels), value)
            for (name, labels), value in self.samples().items()
            if name == "mqmesh_up" and 'node_type="broker"' in labels
        ]
        return {found[1]: value for found, value in of_brokers if found is not None}

    def totals(self, broker: str) -> dict[tuple[str, str], float]:
        """All counters of a broker, buckets of histograms too."""
        return {
            key: value
            for key, value in self.samples().items()
            if f'node_id="{broker}"' in key[1]
            and key[0].endswith(("_total", "_bucket", "_count", "_sum"))
            # Two of RocketMQ's gauges are called so.
            and not key[0].startswith("rocketmq_brokeruntime_")
        }

    def send(self, broker: str, count: int = 5) -> None:
        queues = self.producer.fetch_publish_queues("orders")
        (queue,) = (one for one in queues if one.broker_name == broker)
        for _ in range(count):
            self.producer.send(Message("orders", b"x"), queue=queue)


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("x")
    with ProcessCluster(folder, brokers=BROKERS) as cluster:
        with AdminClient(cluster.namesrv_addr) as admin:
            admin.create_topic("orders", queues=1)
        settings = {
            "listen_port": "0",
            "namesrv_addr": f'["{cluster.namesrv_addr}"]',
            "min_interval_ms": "0",
            "timeout_ms": str(TIMEOUT_MS),
        }
        exporter = RoleProcess("exporter", settings, folder / "exporter.log")
        try:
            with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
                yield Scene(cluster, exporter, producer)
        finally:
            exporter.stop()


def received(totals: dict[tuple[str, str], float]) -> float:
    """How many messages came to the topic; none before the first."""
    return sum(
        value
        for (name, labels), value in totals.items()
        if name == "rocketmq_messages_in_total" and 'topic="orders"' in labels
    )


def assert_grown(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> None:
    assert before.keys() <= after.keys()
    assert [key for key, value in before.items() if after[key] < value] == []


def test_totals_never_go_back_while_a_broker_lives(scene):
    scene.send(A)
    before = scene.totals(A)
    assert len(before) > 100
    for _ in range(3):
        scene.send(A)
        after = scene.totals(A)
        assert_grown(before, after)
        assert received(after) == received(before) + 5
        before = after


def test_a_broker_that_hangs_is_down_and_holds_the_page_up_no_longer_than_it_may(scene):
    scene.send(A)
    until(lambda: scene.up() == {A: 1, B: 1})
    before = scene.totals(A), scene.totals(B)
    scene.cluster.brokers[B].suspend()
    try:
        until(lambda: scene.up() == {A: 1, B: 0})
        watch = Stopwatch()
        assert_grown(before[0], scene.totals(A))
        assert watch.seconds < 2 * TIMEOUT_MS / 1_000
        assert scene.totals(B) == {}
    finally:
        scene.cluster.brokers[B].resume()
    until(lambda: scene.up() == {A: 1, B: 1})
    assert_grown(before[1], scene.totals(B))


def test_a_broker_that_was_killed_is_down_and_begins_anew_when_it_is_back(scene):
    scene.send(B)
    before = scene.totals(B)
    scene.cluster.brokers[B].kill()
    until(lambda: scene.up() == {A: 1, B: 0})
    scene.cluster.start_broker(B)
    scene.cluster.wait_known()
    until(lambda: scene.up() == {A: 1, B: 1})
    after = scene.totals(B)
    assert received(after) < received(before)
    scene.send(B)
    assert_grown(after, scene.totals(B))
