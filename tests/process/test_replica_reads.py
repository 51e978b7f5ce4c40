"""Consumers read from slaves: where the master says so, and where there is no master."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.patience import until
from harness.replica_group import Group, pair

from mqmesh import Message, Producer, PullConsumer, aio
from mqmesh.sdk.client.options import ClientOptions


@pytest.fixture
def group(short_tmp_path: Path) -> Iterator[Group]:
    group = Group(short_tmp_path)
    yield group
    group.close()


def send(group: Group, *numbers: int) -> None:
    with Producer("shop", namesrv_addr=group.namesrv.endpoint) as producer:
        for number in numbers:
            producer.send(Message("t", b"%d" % number))


def answered_pulls(group: Group, broker_id: int) -> int:
    return int(group.admin.role_info(group.endpoints[broker_id])["get_messages_total"])


def test_who_stands_where_a_slave_is_reads_there_and_at_the_master_when_it_dies(group):
    group.start(0, ha__zone="west")
    group.start(1, group.endpoints[0], ha__zone="east")
    until(group.is_caught_up)
    group.admin.create_topic("t", queues=1)
    until(group.is_caught_up)
    client = ClientOptions(namesrv_addr=group.namesrv.endpoint, zone="east")
    got: list[bytes] = []
    with PullConsumer("g", client=client, consume_from_where="FIRST_OFFSET") as consumer:
        consumer.subscribe("t")

        def get(count: int) -> bool:
            got.extend(message.body for message in consumer.poll(100))
            return len(got) >= count

        send(group, 0)
        until(lambda: get(1))
        at_master = answered_pulls(group, 0)
        send(group, *range(1, 50))
        until(lambda: get(50))
        assert answered_pulls(group, 0) == at_master
        assert answered_pulls(group, 1) >= 49
        assert consumer.counters.replica_pulls > 0
        group.replicas[1].kill()
        send(group, *range(50, 60))
        until(lambda: get(60))
        assert got == [b"%d" % number for number in range(60)]
        assert answered_pulls(group, 0) == at_master + 10


def test_what_is_no_more_in_the_masters_memory_is_read_from_a_slave(group):
    pair(group, ha__access_message_in_memory_max_ratio="0")
    group.admin.create_topic("t", queues=1)
    send(group, *range(40))
    until(group.is_caught_up)

    async def main() -> list[bytes]:
        got: list[bytes] = []
        async with aio.PullConsumer(
            "g",
            namesrv_addr=group.namesrv.endpoint,
            consume_from_where="FIRST_OFFSET",
            pull_max_bytes=1,
        ) as consumer:
            await consumer.subscribe("t")
            while len(got) < 40:
                got += [message.body for message in await consumer.poll(1_000)]
        return got

    assert asyncio.run(asyncio.wait_for(main(), 50)) == [b"%d" % number for number in range(40)]
    assert answered_pulls(group, 1) >= 30


def held_at_slave(group: Group) -> int:
    return int(group.admin.role_info(group.endpoints[1])["ha_held_commits"])


class Outage:
    """A group of consumers that has come to message 40 of 100 when the master dies."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.got: list[int] = []
        pair(group)
        group.admin.create_topic("t", queues=1)
        send(group, *range(100))
        self.consume(40)
        group.admin.create_topic("other", queues=1)  # what is committed goes into the log with it
        until(lambda: group.is_caught_up())
        group.replicas[0].kill()
        until(lambda: group.status(0) is None and not group.status(1).connected)

    def consume(self, until_count: int) -> None:
        """A new member goes on until so many messages were had, commits, and leaves."""
        with PullConsumer(
            "g",
            namesrv_addr=self.group.namesrv.endpoint,
            consume_from_where="FIRST_OFFSET",
            auto_commit=False,
        ) as consumer:
            consumer.subscribe("t")

            def get() -> bool:
                most = until_count - len(self.got)
                self.got.extend(int(one.body) for one in consumer.poll(100, max_messages=most))
                return len(self.got) >= until_count

            until(get)
            consumer.commit()

    def held(self) -> int:
        return held_at_slave(self.group)

    def restart_slave(self) -> None:
        self.group.replicas[1].kill()
        self.group.start(1, self.group.endpoints[0])
        until(lambda: self.group.status(1) is not None)


def test_without_its_master_a_group_goes_on_at_the_slave_and_never_back(group: Group) -> None:
    outage = Outage(group)
    outage.consume(60)
    outage.consume(70)
    kept = group.folder / "r1" / "config" / "held-commits.json"
    until(lambda: kept.exists() and b",70," in kept.read_bytes())
    outage.restart_slave()
    assert outage.held() == 1
    outage.consume(80)
    group.start(0)
    until(lambda: group.is_caught_up() and outage.held() == 0)
    outage.consume(100)
    assert outage.got == list(range(100))
    assert b'"commits":[]' in kept.read_bytes()


def test_a_consumer_that_lives_through_it_gets_everything_once(group: Group) -> None:
    pair(group)
    group.admin.create_topic("t", queues=1)
    send(group, *range(100))
    until(group.is_caught_up)
    got: list[int] = []
    with PullConsumer(
        "g",
        namesrv_addr=group.namesrv.endpoint,
        consume_from_where="FIRST_OFFSET",
        pull_threshold_for_queue=1,  # so that nearly nothing is in flight
        pull_max_bytes=1,
        persist_consumer_offset_interval_ms=100,
    ) as consumer:
        consumer.subscribe("t")

        def get(count: int) -> bool:
            got.extend(int(one.body) for one in consumer.poll(100, max_messages=1))
            return len(got) >= count

        until(lambda: get(40))
        group.replicas[0].kill()
        until(lambda: get(100))
        until(lambda: held_at_slave(group) == 1)
        group.start(0)
        until(lambda: held_at_slave(group) == 0)
        send(group, *range(100, 110))
        until(lambda: get(110))
        (queue,) = consumer.assignment()
        until(lambda: get(110) and consumer.committed(queue) == 110)
    assert got == list(range(110))


def test_a_slave_that_becomes_the_master_keeps_what_groups_committed_there(group: Group) -> None:
    outage = Outage(group)
    outage.consume(70)
    group.admin.promote("broker-a", 1)
    until(lambda: group.status(0) is not None)
    send(group, 100)
    outage.consume(101)
    assert outage.got == list(range(101))
    kept = group.folder / "r1" / "config" / "held-commits.json"
    until(lambda: b'"commits":[]' in kept.read_bytes())
