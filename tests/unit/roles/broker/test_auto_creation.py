"""How many topics, queues and groups a client makes in a minute by using them."""

import pytest
from harness.peers import KeptPeer

from mqmesh.errors import SystemBusy
from mqmesh.roles.broker import auto_creation
from mqmesh.roles.broker.auto_creation import AutoCreation, CreationRate
from mqmesh.roles.broker.config import BrokerConfig


def make(rates, peer, now_ms):
    rates.check(peer, now_ms)
    rates.note(peer, now_ms)


def test_a_client_has_its_minutes_share_at_once_and_then_bit_by_bit():
    rates = CreationRate("topics", 60)
    for _ in range(60):
        make(rates, b"one", 5_000)
    with pytest.raises(SystemBusy, match="auto_topics_per_minute") as refused:
        make(rates, b"one", 5_000)
    assert refused.value.retry_after_ms == 1_001
    make(rates, b"one", 6_001)
    with pytest.raises(SystemBusy):
        make(rates, b"one", 6_002)
    # Nobody else suffers.
    make(rates, b"other", 6_002)


def test_one_client_may_make_ten_thousand_topics_at_once_and_leaves_room_for_another_one():
    config = BrokerConfig()
    assert config.auto_topics_per_minute >= 10_000
    assert config.auto_queues_per_minute >= 10_000 * config.default_topic_queue_nums
    assert config.max_auto_topics >= 2 * config.auto_topics_per_minute


def test_who_was_told_when_to_come_again_is_served_then():
    rates = CreationRate("topics", 7)
    now_ms = 0
    for _ in range(50):
        try:
            make(rates, b"one", now_ms)
        except SystemBusy as error:
            now_ms += error.retry_after_ms
            make(rates, b"one", now_ms)
    assert 300_000 < now_ms < 400_000


def test_the_clients_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(auto_creation, "MAX_CLIENTS", 3)
    rates = CreationRate("topics", 1)
    for number in range(10):
        make(rates, b"%d" % number, 0)
    assert len(rates) == 3
    with pytest.raises(SystemBusy):
        make(rates, b"9", 0)


def test_a_topic_costs_its_queues_too():
    creation = AutoCreation(topics=100, queues=20, groups=1)
    for _ in range(2):
        creation.check_topic(b"one", 8, 0)
        creation.note_topic(b"one", 8, 0)
    with pytest.raises(
        SystemBusy, match=r"made 16 queues .* 20 a minute \(auto_queues_per_min"
    ) as no:
        creation.check_topic(b"one", 8, 0)
    creation.check_topic(b"one", 8, no.value.retry_after_ms)
    creation.groups.check(b"one", 0)
    assert creation.metrics("made") == {("topics",): 2, ("queues",): 16, ("groups",): 0}
    assert creation.metrics("refused") == {("topics",): 0, ("queues",): 1, ("groups",): 0}


def test_a_topic_of_more_queues_than_a_minute_s_is_made_all_the_same_and_paid_for():
    creation = AutoCreation(topics=100, queues=20, groups=1)
    creation.check_topic(b"one", 40, 0)
    creation.note_topic(b"one", 40, 0)
    with pytest.raises(SystemBusy):
        creation.check_topic(b"one", 1, 60_000)
    creation.check_topic(b"one", 1, 63_000)


def test_a_connection_that_broke_is_not_held_any_more():
    creation, peer = AutoCreation(topics=1, queues=8, groups=1), KeptPeer(b"one")
    creation.note_topic(peer, 8, 0)
    creation.groups.note(peer, 0)
    creation.forget(peer)
    assert [len(creation.topics), len(creation.queues), len(creation.groups)] == [0, 0, 0]
