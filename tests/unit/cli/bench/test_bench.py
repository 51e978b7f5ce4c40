"""What `mqmesh bench` makes of the reports of its clients."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.cli.bench.result import latency_rows, rate_rows, summarize
from mqmesh.cli.bench.words import (
    MIN_STAMPED_BYTES,
    ClientFailure,
    ClientProgress,
    ClientReady,
    ClientReport,
    Latencies,
    Word,
    age_us,
    stamp,
)


def latencies(*values_us):
    found = Latencies()
    for value in values_us:
        found.add(value)
    return found


@pytest.mark.parametrize("value", [0.0, 1.0, 37.5, 1_000.0, 123_456.0, 60_000_000.0])
def test_a_percentile_is_never_too_low_and_little_too_high(value):
    found = latencies(*[value] * 10, value * 1_000)
    assert value <= found.percentile_us(50) <= max(value * 1.022, 1.0)


def test_percentiles_are_those_of_the_ranks():
    found = latencies(*range(100, 1_100))
    assert found.percentile_us(50) == pytest.approx(599, rel=0.022)
    assert found.percentile_us(99) == pytest.approx(1_089, rel=0.022)
    assert found.percentile_us(100) == 1_099
    assert found.count == 1_000


def test_latencies_of_clients_add_up_to_those_of_one():
    one, other = latencies(5, 80, 900), latencies(80, 7_000)
    one.add_all(other)
    assert one == latencies(5, 80, 900, 80, 7_000)


def test_nothing_has_no_percentile():
    assert Latencies().percentile_us(99) == 0.0


def test_a_stamped_body_has_an_age_for_its_own_run_only():
    body = stamp(2**64 - 1, bytes(MIN_STAMPED_BYTES) + b"rest")
    assert body.endswith(b"rest")
    assert len(body) == MIN_STAMPED_BYTES + 4
    made_ns = int.from_bytes(body[8:16], "little")
    assert age_us(2**64 - 1, body, made_ns + 5_000) == 5.0
    assert age_us(1, body, made_ns) is None
    assert age_us(1, b"short", made_ns) is None


@pytest.mark.parametrize(
    "word",
    [
        ClientReady(),
        ClientProgress(5),
        ClientFailure("no"),
        ClientReport(done=3, send=latencies(7, 9_000)),
    ],
)
def test_words_of_clients_survive_their_line(word):
    line = msgspec.json.encode(word)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Word) == word


def test_the_total_goes_from_the_first_to_the_last_of_all_clients():
    reports = [
        ClientReport(done=100, body_bytes=1 << 20, begin_s=10.0, end_s=12.0, cpu_s=0.5),
        ClientReport(done=300, body_bytes=3 << 20, begin_s=11.0, end_s=14.0, cpu_s=0.7, failed=2),
        ClientReport(begin_s=1.0, end_s=1.0, cpu_s=0.1),
    ]
    result = summarize("produce", "t", reports)
    assert result.total.messages == 400
    assert result.total.failed == 2
    assert result.total.seconds == 4.0
    assert result.total.messages_per_second == 100.0
    assert result.total.mib_per_second == 1.0
    assert result.total.cpu_seconds == 1.3
    assert [one.messages_per_second for one in result.clients] == [50.0, 100.0, 0.0]
    assert [row[0] for row in rate_rows(result)] == ["1", "2", "3", "all"]
    assert [row[0] for row in rate_rows(summarize("produce", "t", reports[:1]))] == ["all"]


def test_what_was_sent_and_did_not_come_is_missing():
    senders = [ClientReport(done=5, send=latencies(1_000)), ClientReport(done=5)]
    readers = [ClientReport(done=7, delivery=latencies(2_000))]
    result = summarize("latency", "t", senders, readers)
    assert result.missing == 3
    assert set(result.latency_ms) == {"send", "delivery"}
    assert result.latency_ms["send"] == {
        "p50": 1.0,
        "p90": 1.0,
        "p99": 1.0,
        "p99_9": 1.0,
        "max": 1.0,
    }
    assert latency_rows(result)[1] == ("delivery", *["2.000"] * 5)
