"""A simulated cluster for the SDK's tests."""

from __future__ import annotations

import pytest
from harness.simulated_cluster import SimulatedCluster
from harness.simulated_network import SimulatedNetwork

from mqmesh.sdk.producer.producer import Producer


class World:
    """A simulated cluster and producers in it."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self.cluster = SimulatedCluster(network)
        self.producers: list[Producer] = []

    def build(self, **settings) -> None:
        self.cluster = SimulatedCluster(self.network, **settings)

    @property
    def broker(self):
        return next(iter(self.cluster.brokers.values()))

    def producer(self, *, topic: str | None = "t", watches: bool = False, **options) -> Producer:
        """A started producer that knows the route of a topic and has met its brokers.

        With ``watches`` its transport watches channels: asynchronous sends leave at once.
        """
        options = {"close_timeout_ms": 1, **options}
        producer = Producer(
            "g",
            namesrv_addr=self.cluster.namesrv_addr,
            transport=self.network.transport(watches=watches),
            **options,
        )
        self.producers.append(producer)
        producer.start()
        if topic is not None:
            assert self.call(lambda: producer.fetch_publish_queues(topic))
        return producer

    def run(self, duration_ms: int = 20) -> None:
        self.network.run(duration_ms)

    def call(self, function):
        return self.network.call(function)

    def stored(self, topic: str = "t") -> list[bytes]:
        return [message.body for message in self.cluster.messages(topic)]


@pytest.fixture
def world():
    network = SimulatedNetwork()
    world = World(network)
    yield world
    for producer in world.producers:
        producer.close()
        buffer, sender, channels = producer._buffer, producer._sender, producer._direct
        assert buffer.pending_bytes == 0, "room was given back to the byte"
        assert not sender._outbox._flying
        assert sender._posted is None
        assert channels.enter(), "nobody has the channels"
        channels.leave()
        assert all(not lane.in_flight for lane in buffer._lanes.values())
    network.close()
