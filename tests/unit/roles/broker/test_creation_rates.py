"""How many topics a client's messages make in a minute."""

import pytest

from mqmesh.errors import SystemBusy
from mqmesh.roles.broker.features.topics import creation_rates
from mqmesh.roles.broker.features.topics.creation_rates import CreationRates


def make(rates, peer, now_ms):
    rates.check(peer, now_ms)
    rates.note(peer, now_ms)


def test_a_client_has_its_minutes_share_at_once_and_then_bit_by_bit():
    rates = CreationRates(60)
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


def test_who_was_told_when_to_come_again_is_served_then():
    rates = CreationRates(7)
    now_ms = 0
    for _ in range(50):
        try:
            make(rates, b"one", now_ms)
        except SystemBusy as error:
            now_ms += error.retry_after_ms
            make(rates, b"one", now_ms)
    assert 300_000 < now_ms < 400_000


def test_the_clients_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(creation_rates, "MAX_CLIENTS", 3)
    rates = CreationRates(1)
    for number in range(10):
        make(rates, b"%d" % number, 0)
    assert len(rates) == 3
    with pytest.raises(SystemBusy):
        make(rates, b"9", 0)
