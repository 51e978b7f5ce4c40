"""Clients, groups, and who is told of what."""

from __future__ import annotations

import logging

import msgspec
import pytest

from mqmesh.errors import GroupNotFound, SystemBusy
from mqmesh.protocol.membership import ConsumerData, HeartbeatRequest, Subscription
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups


def make(**options):
    return ConsumerGroups(
        **({"grace_ms": 1_000, "expiry_ms": 120_000, "most_clients": 100} | options)
    )


def beat(groups, client_id, *names, peer=None, now_ms=0, topic="t"):
    consumers = [
        ConsumerData(name, "CLUSTERING", "LAST_OFFSET", [Subscription(topic)]) for name in names
    ]
    heartbeat = HeartbeatRequest(client_id, consumers=consumers)
    groups.on_heartbeat(peer or client_id.encode(), heartbeat, now_ms)


def told(groups):
    return sorted((notice.peer, notice.group) for notice in groups.take_notices())


def members(groups, name="g"):
    return sorted(groups.group(name).members)


def test_whoever_joins_makes_a_new_generation_and_all_are_told_once():
    groups = make(first_generation=50)
    for number in range(4):
        beat(groups, f"c{number}", "g")
    assert told(groups) == [(b"c0", "g"), (b"c1", "g"), (b"c2", "g"), (b"c3", "g")]
    assert groups.group("g").generation > 50
    assert told(groups) == []


def test_a_heartbeat_that_says_nothing_new_changes_nothing():
    groups = make()
    beat(groups, "c", "g")
    told(groups)
    generation = groups.group("g").generation
    beat(groups, "c", "g", now_ms=5)
    assert (told(groups), groups.group("g").generation) == ([], generation)


def test_generations_grow_across_the_death_of_a_group():
    groups = make()
    beat(groups, "c", "g")
    before = groups.group("g").generation
    groups.on_unregister("c")
    with pytest.raises(GroupNotFound):
        groups.group("g")
    beat(groups, "c", "g")
    assert groups.group("g").generation > before


def test_a_client_may_join_and_leave_groups_one_by_one():
    groups = make()
    beat(groups, "c", "g", "h")
    beat(groups, "d", "g", "h")
    told(groups)
    beat(groups, "c", "h", "i")
    assert members(groups, "g") == ["d"]
    assert told(groups) == [(b"c", "i"), (b"d", "g")]


def test_a_broken_connection_is_forgiven_for_the_time_of_grace():
    groups = make()
    beat(groups, "c", "g")
    beat(groups, "d", "g")
    told(groups)
    groups.on_disconnect(b"c", now_ms=100)
    groups.tick(1_099)
    assert members(groups) == ["c", "d"]
    groups.tick(1_100)
    assert members(groups) == ["d"]
    assert told(groups) == [(b"d", "g")]


def test_whoever_returns_in_time_stays_a_member_and_hears_what_it_missed():
    groups = make()
    beat(groups, "c", "g")
    beat(groups, "d", "g")
    told(groups)
    groups.on_disconnect(b"c", now_ms=100)
    beat(groups, "e", "g", now_ms=200)
    assert told(groups) == [(b"d", "g"), (b"e", "g")]
    beat(groups, "c", "g", peer=b"new", now_ms=500)
    groups.tick(10_000)
    assert members(groups) == ["c", "d", "e"]
    assert told(groups) == [(b"new", "g")]


def test_the_end_of_an_old_connection_does_not_matter_after_a_new_one_began():
    groups = make()
    beat(groups, "c", "g")
    beat(groups, "c", "g", peer=b"new", now_ms=10)
    groups.on_disconnect(b"c", now_ms=20)
    groups.tick(5_000)
    assert members(groups) == ["c"]
    groups.on_disconnect(b"new", now_ms=6_000)
    groups.tick(7_000)
    assert groups.client_count == groups.group_count == 0


def test_two_clients_may_share_a_connection():
    groups = make()
    beat(groups, "c", "g", peer=b"p")
    beat(groups, "d", "g", peer=b"p")
    groups.on_unregister("c")
    groups.on_disconnect(b"p", now_ms=0)
    groups.tick(1_000)
    assert groups.client_count == 0


def test_silence_ends_a_membership_though_the_connection_stands():
    groups = make()
    beat(groups, "c", "g", now_ms=0)
    beat(groups, "d", "g", now_ms=60_000)
    groups.tick(119_999)
    assert members(groups) == ["c", "d"]
    groups.tick(130_000)
    assert members(groups) == ["d"]


def test_the_number_of_clients_is_limited():
    groups = make(most_clients=1)
    beat(groups, "c", "g")
    with pytest.raises(SystemBusy, match="max_clients"):
        beat(groups, "d", "g")
    beat(groups, "c", "h")
    assert groups.group_count == 1


def test_a_member_that_subscribes_differently_is_reported(caplog):
    groups = make()
    beat(groups, "c", "g")
    with caplog.at_level(logging.WARNING):
        beat(groups, "d", "g")
        assert not caplog.records
        beat(groups, "e", "g", topic="other")
    assert "member e subscribes differently from the group" in caplog.text


def test_connected_members_of_a_producer_group_are_found():
    groups = make()
    for client_id in ("c", "d"):
        heartbeat = HeartbeatRequest(client_id, producer_groups=["p"])
        groups.on_heartbeat(client_id.encode(), heartbeat, 0)
    groups.on_disconnect(b"c", now_ms=0)
    assert groups.producers("p") == [b"d"]
    assert groups.producers("q") == []


def test_owners_are_those_of_when_a_generation_was_first_asked_for():
    groups = make()
    for client_id in "ab":
        beat(groups, client_id, "g")
    groups.claims.claim("g", "t", 2, "b", 1)
    assert groups.owners("g") == {"t": [-1, -1, 1]}
    groups.claims.claim("g", "t", 0, "a", 1)
    assert groups.owners("g") == {"t": [-1, -1, 1]}
    beat(groups, "c", "g")
    assert groups.owners("g") == {"t": [0, -1, 1]}


def test_no_owners_are_named_while_a_member_divides_by_numbers_alone():
    groups = make()
    beat(groups, "a", "g")
    groups.claims.claim("g", "t", 0, "a", 1)
    data = ConsumerData("g", "CLUSTERING", "LAST_OFFSET", [Subscription("t")])
    foreign = msgspec.structs.replace(data, divides_by_number=True)
    groups.on_heartbeat(b"java", HeartbeatRequest("java", consumers=[foreign]), 0)
    assert groups.owners("g") == {}
    groups.on_unregister("java")
    assert groups.owners("g") == {"t": [0]}
