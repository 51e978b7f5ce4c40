"""Bits of the log flip under a broker that runs: consumers get everything else."""

from __future__ import annotations

import time

import pytest

from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 30.0
BATCHES, SIZE, ROTTEN = 5, 40, 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A broker that has a batch whose body is damaged."""
    folder = tmp_path_factory.mktemp("damage")
    with (
        ProcessCluster(folder, broker_settings={"default_topic_queue_nums": "1"}) as cluster,
        Producer("p", namesrv_addr=cluster.namesrv_addr) as producer,
    ):
        places = [
            producer.send_batch([message(SIZE * batch + n) for n in range(SIZE)]).commitlog_offset
            for batch in range(BATCHES)
        ]
        (segment,) = folder.glob("broker-a/**/commitlog/" + "0" * 20)
        with open(segment, "r+b") as file:
            file.seek(places[ROTTEN + 1] - 5)
            byte = file.read(1)[0]
            file.seek(places[ROTTEN + 1] - 5)
            file.write(bytes((byte ^ 4,)))
        yield cluster


def message(number: int) -> Message:
    return Message("t", b"%d" % number, "AB"[number % 2], properties={"n": str(number)})


def consume(cluster: ProcessCluster, group: str, selector: MessageSelector, count: int):
    """The first messages that a new group gets."""
    found: list[int] = []
    deadline = time.monotonic() + PATIENCE_S
    with PullConsumer(
        group, namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    ) as consumer:
        consumer.subscribe("t", selector)
        while len(found) < count:
            assert time.monotonic() < deadline, found
            found += [int(one.body) for one in consumer.poll(1_000, 500)]
    return found


LOST = range(SIZE * ROTTEN, SIZE * (ROTTEN + 1))
SOUND = [number for number in range(SIZE * BATCHES) if number not in LOST]


@pytest.mark.parametrize(
    ("group", "selector", "wanted"),
    [
        # The first one finds it.
        ("sql", MessageSelector.by_sql("n >= 10"), SOUND[10:]),
        ("tag", MessageSelector.by_tag("A"), SOUND[::2]),
        ("everything", MessageSelector(), SOUND),
    ],
)
def test_a_damaged_body_costs_only_its_batch(cluster, group, selector, wanted):
    assert consume(cluster, group, selector, len(wanted)) == wanted


def test_the_administrator_sees_it(cluster):
    assert consume(cluster, "audit", MessageSelector(), len(SOUND)) == SOUND
    with AdminClient(cluster.namesrv_addr) as admin:
        assert admin.runtime_info()["broker-a"]["store_damaged"] == 1
