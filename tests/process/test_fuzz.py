"""Hostile frames to all that a cluster listens at: the short form of scripts/fuzz."""

from __future__ import annotations

import pytest
from harness.fuzz import crowd, fuzz, strangers, table
from harness.listening import family, listening

from mqmesh.errors import BrokerError
from mqmesh.message import Message
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.queries import AdvanceIndexRequest
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

FRAMES = 8_000
SECURED_FRAMES = 3_000


@pytest.mark.timeout(180)
def test_hostile_frames_stop_nothing_and_take_no_memory(short_tmp_path):
    result = fuzz(short_tmp_path, seed=1, frames=FRAMES, idle_sends=20)
    assert sum(place.frames for place in result.places) == FRAMES
    roles = {place.place.split()[0] for place in result.places}
    assert roles == {"namesrv", "broker", "broker/1", "schedule", "filtersrv", "coordinator"}
    # Name servers publish hints at a second port, which answers nothing.
    silent = [place for place in result.places if not place.answers]
    assert len(silent) == 1
    for place in result.places:
        assert place.answers.get("MESSAGE_ILLEGAL", 0) > 0 or place in silent
    assert result.sends > 20
    assert "MESSAGE_ILLEGAL" in table(result)


@pytest.mark.timeout(180)
def test_hostile_frames_stop_nothing_where_keys_are_needed(short_tmp_path):
    """Before the handshake, and by who has a key, with all rights or none."""
    result = fuzz(short_tmp_path, seed=3, frames=SECURED_FRAMES, idle_sends=20, secure=True)
    assert sum(place.frames for place in result.places) == SECURED_FRAMES
    answered = {place.place.split()[0] for place in result.places if place.answers}
    assert answered == {"namesrv", "broker", "schedule", "coordinator", "filtersrv"}
    for place in result.places:
        assert place.kinds["broken handshake"] > 0
        assert place.answers.get("NO_PERMISSION", 0) > 0 or not place.answers
    assert sum(not place.answers for place in result.places) == 1, "the port for hints"


@pytest.mark.timeout(180)
def test_a_crowd_of_idle_and_deaf_clients_takes_no_memory(short_tmp_path):
    """How much slower a producer is needs an idle machine: scripts/fuzz --crowd."""
    result = crowd(short_tmp_path, idle=200, deaf=20, sends=100)
    assert result.sends > 200


@pytest.mark.timeout(180)
def test_strangers_have_no_message_taken_and_stop_nobody(short_tmp_path):
    """How much slower a producer is needs an idle machine: scripts/fuzz --strangers."""
    assert strangers(short_tmp_path, count=150, sends=100).sends > 200


def test_an_index_process_follows_no_other_store(wire, short_tmp_path):
    """To follow one would be to throw the index away and to read the whole log again."""
    with ProcessCluster(short_tmp_path) as cluster:
        broker = cluster.brokers["broker-a"].pid
        wire.until(lambda: any(listening(pid) for pid in family(broker)[1:]))
        (place,) = [place for pid in family(broker)[1:] for place in listening(pid)]
        client = wire.client(place)
        with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
            producer.send(Message("t", b"x"))
        with AdminClient(cluster.namesrv_addr) as admin:
            wire.until(lambda: admin.runtime_info()["broker-a"]["index_lag_bytes"] == 0)
        with pytest.raises(BrokerError, match="this is the index of store"):
            wire.ask(client, RequestCode.ADVANCE_INDEX, AdvanceIndexRequest(2**62, 0, 0))


# ---- What it is made of ---------------------------------------------------------------
