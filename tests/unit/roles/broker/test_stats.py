"""Totals and rates."""

from __future__ import annotations

from mqmesh.roles.broker.stats import WINDOW_SAMPLES, BrokerStats


def test_a_rate_is_that_of_the_last_samples():
    stats = BrokerStats()
    assert stats.rate("put_messages") == 0
    stats.sample(0)
    assert stats.rate("put_messages") == 0
    stats.total.put_messages += 500
    stats.sample(1_000)
    assert stats.rate("put_messages") == 500
    for second in range(2, WINDOW_SAMPLES + 3):
        stats.sample(second * 1_000)
    assert stats.rate("put_messages") == 0, "long ago"
