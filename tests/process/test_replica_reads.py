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
