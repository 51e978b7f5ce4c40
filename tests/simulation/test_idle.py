"""What has nothing to do sleeps: so seeds are cheap, and so are machines that are mostly idle."""

from harness.simulation.books import PUSH, TOPICS, Books
from harness.simulation.load import Client, SimulatedProducer, SimulatedPush
from harness.simulation.world import World

from mqmesh.sdk.admin.admin import AdminClient

SETTLE_MS = 10_000
IDLE_S = 60
MOST_TURNS = {
    "namesrv-0": 0.5,
    "broker-a": 12,
    "schedule-broker-a": 2.5,
    "producer": 0.5,
    "push": 1.5,
}
"""Turns of its loop that a process takes in a second, at most."""


def test_an_idle_cluster_sleeps(tmp_path):
    world = World(1, tmp_path)
    books = Books(lambda: float(world.now_ms))
    world.add_namesrvs(1)
    world.add_broker("broker-a")
    world.add_schedule("broker-a")
    for process in world.processes():
        process.start()
    world.simulation.run(1_000)
    with AdminClient(world.namesrv_addr, transport=world.transport("admin")) as admin:
        for topic in TOPICS:
            admin.create_topic(topic, queues=2)
    world.transports.pop()
    clients: list[Client] = [
        SimulatedProducer(world, books, "producer"),
        SimulatedPush(world, books, "push", PUSH),
    ]
    for client in clients:
        client.sending = False
        client.start()
    world.simulation.run(SETTLE_MS)
    begun = {one.node.name: one.loop.turn_count for one in world.transports}
    world.simulation.run(IDLE_S * 1_000)
    turns = {
        one.node.name: (one.loop.turn_count - begun[one.node.name]) / IDLE_S
        for one in world.transports
    }
    assert turns.keys() == MOST_TURNS.keys()
    assert not {name: count for name, count in turns.items() if count > MOST_TURNS[name]}
    for client in clients:
        client.transport.node.kill()
        client.abandon()
    for process in world.processes():
        process.release()
