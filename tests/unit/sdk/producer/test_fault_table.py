from __future__ import annotations

import pytest

from mqmesh.sdk.producer.publish_routes import ISOLATION_MS, FaultTable, not_available_ms


@pytest.mark.parametrize(
    ("latency_ms", "away_ms"),
    [
        (0, 0),
        (49, 0),
        (50, 0),
        (100, 0),
        (549, 0),
        (550, 30_000),
        (1_000, 60_000),
        (2_000, 120_000),
        (2_999, 120_000),
        (3_000, 180_000),
        (14_999, 180_000),
        (15_000, 600_000),
        (10**9, 600_000),
    ],
)
def test_the_slower_a_send_the_longer_its_broker_is_avoided(latency_ms: int, away_ms: int) -> None:
    assert not_available_ms(latency_ms) == away_ms


def test_a_slow_broker_comes_back_after_its_time_or_after_a_quick_send() -> None:
    table = FaultTable()
    assert table.is_available("a", 0)
    table.on_sent("a", 600, 1_000)
    assert not table.is_available("a", 30_999)
    assert table.is_available("b", 1_000)
    assert table.is_available("a", 31_000)
    table.on_sent("a", 600, 1_000)
    table.on_sent("a", 10, 2_000)
    assert table.is_available("a", 2_000)


def test_a_failure_isolates_a_broker() -> None:
    table = FaultTable()
    table.on_failed("a", 500)
    assert not table.is_available("a", 500 + ISOLATION_MS - 1)
    assert table.is_available("a", 500 + ISOLATION_MS)
