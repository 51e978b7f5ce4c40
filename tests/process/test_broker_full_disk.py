"""A broker whose disk has no room for offsets, from its start on."""

from __future__ import annotations

import pytest

from mqmesh.errors import BrokerNotAvailable, DiskFull, EndpointUnreachable
from mqmesh.protocol.admin import UpdateTopicRequest
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import QueueOffsetEntry, UpdateConsumerOffsetRequest
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.storage.commitlog.store import CommitLogStore


@pytest.fixture
def broker(wire, short_tmp_path):
    """A broker that saves offsets only when it has to, not started yet."""
    config = BrokerConfig(
        listen_port=0,
        store_path_root_dir=str(short_tmp_path),
        flush_consumer_offset_interval_ms=600_000,
    )
    broker = BrokerServer(config, wire.transport)
    yield broker
    broker.stop()


def test_a_broker_without_room_for_offsets_takes_no_commit_until_there_is_some(
    wire, broker, monkeypatch
):
    def commit():
        update = UpdateConsumerOffsetRequest("g", "client", [QueueOffsetEntry("t", 0, 0)])
        wire.ask(client, RequestCode.UPDATE_CONSUMER_OFFSET, update)

    def refuse(*arguments, **options):
        raise DiskFull("planned: no room")

    with monkeypatch.context() as patch:
        patch.setattr(CommitLogStore, "put", refuse)
        client = wire.client(broker.start())
        topic = UpdateTopicRequest(TopicConfig("t"))
        with pytest.raises(BrokerNotAvailable, match="no room"):
            wire.ask(client, RequestCode.UPDATE_AND_CREATE_TOPIC, topic)
        with pytest.raises(BrokerNotAvailable, match="no room"):
            commit()

    def is_taken():
        try:
            commit()
        except (BrokerNotAvailable, EndpointUnreachable):
            return False  # a loop that stood still for 1.5 s loses its connections
        return True

    wire.until(is_taken)
