"""Leases that end: others get their messages at once, not at a tick of the broker."""

from harness.simulation.world import World

from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer
from mqmesh.sdk.producer.producer import Producer

LEASE_MS = 1_000
LATE_MS = 45
"""A slot of deadlines, and the ways there and back."""


def test_a_message_whose_lease_ends_goes_to_who_waits_at_once(tmp_path):
    world = World(1, tmp_path)
    world.add_namesrvs(1)
    world.add_broker("broker-a")
    for process in world.processes():
        process.start()
    world.simulation.run(1_000)
    client = world.client_options()
    with AdminClient(world.namesrv_addr, transport=world.transport("admin")) as admin:
        admin.create_topic("jobs", queues=1)
    members = [
        SimpleConsumer("g", client=client, transport=world.transport(name)) for name in ("a", "b")
    ]
    with Producer("p", client=client, transport=world.transport("p")) as producer:
        for member in members:
            member.subscribe("jobs")
            member.start()
        for number in range(5):
            producer.send(Message("jobs", b"job"))
            (held,) = members[number % 2].receive(1, LEASE_MS)
            begun_ms = world.now_ms
            (again,) = members[1 - number % 2].receive(1)
            assert (held.body, again.delivery_attempt) == (b"job", 2)
            assert world.now_ms - begun_ms <= LEASE_MS + LATE_MS
            members[1 - number % 2].ack(again)
    for member in members:
        member.close()
    for process in world.processes():
        process.release()
