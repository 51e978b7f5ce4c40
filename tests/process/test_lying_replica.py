"""A follower that says what cannot be is refused; what counts as acknowledged stays as it was."""

from __future__ import annotations

import random

import pytest

from mqmesh.log_identity import LogIdentity
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    REPLICATION_VERSION,
    AckReplication,
    HaStatus,
    HaStatusRequest,
    OpenReplicationRequest,
    OpenReplicationResponse,
    ReplicationMode,
)
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha_config import HaConfig, HaMode
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.storage.commitlog.log_copy import decode_log_start
from mqmesh.storage.log.store_key import StoreKey

MOST = 2**63 - 1


@pytest.fixture
def broker(wire, short_tmp_path):
    """A master whose sends wait for a follower."""
    config = BrokerConfig(
        listen_port=0,
        store_path_root_dir=str(short_tmp_path),
        ha=HaConfig(mode=HaMode.MANUAL, ack_replicas="one"),
    )
    broker = BrokerServer(config, wire.transport)
    yield broker
    broker.stop()


def opened(wire, client) -> OpenReplicationResponse:
    """Opens as a copy that has nothing yet, with what the master tells of its log."""

    def ask(log):
        asked = OpenReplicationRequest("broker-a", 1, 7, REPLICATION_VERSION, log)
        return wire.ask(client, RequestCode.OPEN_REPLICATION, asked)

    begin = decode_log_start(bytes(ask(LogIdentity(1, b"x", 0, 0, [])).body))
    log = LogIdentity(
        begin.store_id, StoreKey(begin.key).proof(), begin.log_start, begin.log_start, []
    )
    return decode_header(OpenReplicationResponse, ask(log).header)


@pytest.mark.parametrize(
    "lie",
    [
        encode_header(AckReplication(MOST, MOST)),
        encode_header(AckReplication(MOST // 2, 0)),
        encode_header(AckReplication(0, MOST)),
        random.Random(1).randbytes(60),
        random.Random(2).randbytes(10_000),
        b"",
    ],
    ids=["huge", "far", "synced", "random", "long", "empty"],
)
def test_what_cannot_be_is_refused_and_moves_nothing(wire, broker, lie):
    endpoint = broker.start()
    liar, witness = wire.client(endpoint), wire.client(endpoint)
    assert opened(wire, liar).mode == ReplicationMode.STREAM

    def positions():
        status = wire.ask(witness, RequestCode.GET_HA_STATUS, HaStatusRequest(), HaStatus)
        return [(one.written, one.synced) for one in status.replicas]

    wire.until(lambda: positions() == [(0, 0)])
    liar.oneway(RequestCode.ACK_REPLICATION, header=lie)
    answers = []  # also that his connection was closed is one
    asked = encode_header(HaStatusRequest())
    liar.request(RequestCode.GET_HA_STATUS, answers.append, header=asked)
    wire.until(lambda: answers)
    assert positions() in ([], [(0, 0)])
