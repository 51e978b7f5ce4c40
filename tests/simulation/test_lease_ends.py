"""Leases and waits that end: at once, not at a tick of the broker."""

import pytest
from harness.simulation.world import World

from mqmesh.message import Message
from mqmesh.protocol.groups import GroupConfig
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer
from mqmesh.sdk.producer.producer import Producer

LEASE_MS = 1_000
LATE_MS = 45
"""A slot of deadlines, and the ways there and back."""
SHORT_MS = 30
START_MS = 50


@pytest.fixture
def world(tmp_path):
    """A broker with the topic jobs of one queue, whose group g tries again after a short wait."""
    found = World(1, tmp_path)
    found.add_namesrvs(1)
    found.add_broker("broker-a")
    for process in found.processes():
        process.start()
    found.simulation.run(1_000)
    with GroupAdmin(found.namesrv_addr, transport=found.transport("admin")) as admin:
        admin.create_topic("jobs", queues=1)
        admin.create_group(
            GroupConfig("g", delivery="message", retry_delays=f"{SHORT_MS}ms {LEASE_MS}ms")
        )
    yield found
    for process in found.processes():
        process.release()


@pytest.fixture
def members(world):
    """Two members of the group."""
    client = world.client_options()
    found = [
        SimpleConsumer("g", client=client, transport=world.transport(name)) for name in ("a", "b")
    ]
    for member in found:
        member.subscribe("jobs")
        member.start()
    yield found
    for member in found:
        member.close()


@pytest.fixture
def producer(world):
    with Producer("p", client=world.client_options(), transport=world.transport("p")) as found:
        yield found


@pytest.mark.parametrize("group", ["g", "new"])
def test_a_member_has_its_first_message_as_soon_as_the_broker_knows_it(world, producer, group):
    producer.send(Message("jobs", b"job"))
    member = SimpleConsumer(group, client=world.client_options(), transport=world.transport("c"))
    member.subscribe("jobs")
    begun_ms = world.now_ms
    with member:
        (message,) = member.receive(1)
    assert message.body == b"job"
    assert world.now_ms - begun_ms <= START_MS


def test_a_message_whose_lease_ends_goes_to_who_waits_at_once(world, members, producer):
    for number in range(5):
        producer.send(Message("jobs", b"job"))
        (held,) = members[number % 2].receive(1, LEASE_MS)
        begun_ms = world.now_ms
        (again,) = members[1 - number % 2].receive(1)
        assert (held.body, again.delivery_attempt) == (b"job", 2)
        assert world.now_ms - begun_ms <= LEASE_MS + LATE_MS
        members[1 - number % 2].ack(again)


def test_short_waits_end_as_exactly_as_long_ones(world, members, producer):
    member = members[0]
    for delay_ms in (SHORT_MS, SHORT_MS, LEASE_MS, None, None):
        producer.send(Message("jobs", b"job"))
        (held,) = member.receive(1)
        begun_ms = world.now_ms
        member.nack(held, delay_ms)
        (again,) = member.receive(1)
        assert 0 <= world.now_ms - begun_ms - (delay_ms or SHORT_MS) <= LATE_MS
        member.ack(again)


def test_a_receive_waits_as_long_as_it_was_asked_to(world, members):
    (member, _) = members
    member.receive(wait_ms=0)  # until it is a member
    for wait_ms in (SHORT_MS, SHORT_MS, LEASE_MS):
        begun_ms = world.now_ms
        assert member.receive(1, wait_ms=wait_ms) == []
        assert 0 <= world.now_ms - begun_ms - wait_ms <= LATE_MS
