"""The table of `scripts/bench --archive`: what the measurements say about the goals."""

from __future__ import annotations

import hashlib
import json

import pytest

from mqmesh.units import GIB, MIB


@pytest.fixture
def figures(load_archive_benchmark):
    return load_archive_benchmark("figures")


def under_load(figures, **changes):
    """A snapshot from second 10 to 11 that meets all goals."""
    values = {
        "began_s": 10.0,
        "ended_s": 11.0,
        "took_s": 0.9,
        "log_bytes": 10 * GIB,
        "own_bytes": GIB,
        "live_index_bytes": MIB,
        "sends_before_ms": [1.0] * 100,
        "sends_ms": [2.0] * 100,
    }
    return figures.UnderLoad(**values | changes)


def met(rows):
    return [one.met for one in rows]


def judge(figures, taken, holds=()):
    return figures.snapshot_figures(taken, holds, segment_bytes=GIB, quiet_s=3.0)


def test_a_snapshot_at_its_goals_meets_them(figures):
    assert met(judge(figures, [under_load(figures)])) == [True] * 4


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (0, {"took_s": 3.1}),
        (1, {"sends_ms": [1.0] * 98 + [2.1] * 2}),
        (3, {"own_bytes": GIB + MIB + 1}),
    ],
)
def test_one_snapshot_beyond_a_goal_is_told_in_its_row(figures, row, changes):
    taken = [under_load(figures), under_load(figures, **changes)]
    if row == 1:
        taken = taken[1:]
    assert [number for number, ok in enumerate(met(judge(figures, taken))) if not ok] == [row]


def test_only_what_held_the_loop_up_in_a_snapshot_counts_without_waits_for_a_processor(figures):
    hold = figures.Hold
    earlier, later = hold(9.5, 50.0, 0.0), hold(11.5, 60.0, 0.0)
    row = judge(figures, [under_load(figures)], [earlier, hold(10.5, 30.0, 26.0), later])[2]
    assert row.met
    assert row.value == "4.0 ms by the broker (30.0 ms with waits for a processor); 50.0 ms before"
    assert not judge(figures, [under_load(figures)], [hold(10.5, 5.2, 0.1)])[2].met


def test_a_snapshot_that_spark_and_the_dump_read_otherwise_is_no_match(figures):
    one = figures.Content(500, 7, 1.0)
    assert figures.content_figure(one, one, 500).met
    assert not figures.content_figure(one, one, 501).met
    assert not figures.content_figure(one, one._replace(hashed=8), 500).met
    assert not figures.content_figure(one, one._replace(count=499), 500).met


def test_an_ingest_is_judged_by_rate_and_by_memory(figures):
    used = figures.Used(10.0, 20.0, GIB, 100 * MIB)
    assert met(figures.ingest_figures(used, 800_000)) == [True, True]
    assert met(figures.ingest_figures(used, 799_000)) == [False, True]
    assert met(figures.ingest_figures(used._replace(java_bytes=3 * GIB), 800_000)) == [True, False]
    # Nothing was seen of it, so nothing is known.
    assert met(figures.ingest_figures(used._replace(worker_bytes=0), 800_000)) == [True, False]


def test_an_ingest_without_java_is_judged_by_goals_of_its_own(figures):
    used = figures.Used(10.0, 12.0, own_bytes=300 * MIB)
    assert met(figures.local_figures(used, 600_000)) == [True, True]
    assert met(figures.local_figures(used, 599_000)) == [False, True]
    large = figures.Used(10.0, 12.0, own_bytes=2 * GIB)
    assert met(figures.local_figures(large, 600_000)) == [True, False]


def test_look_ups_must_find_what_was_sent_not_only_be_quick(figures):
    taken = [figures.Used(0.5, 0.4), figures.Used(9.0, 0.4), figures.Used(0.6, 0.4)]
    assert figures.find_figure("key", taken, 3, 1_000).met
    missed = figures.find_figure("key", taken, 2, 1_000)
    assert not missed.met
    assert "1 found something else" in missed.value
    assert not figures.find_figure("id", taken[1:2], 1, 1_000).met
    assert figures.sql_figure(taken[1], 1_000, 1_000).met
    assert not figures.sql_figure(taken[1], 999, 1_000).met


def test_rows_that_are_there_twice_or_not_are_told(figures):
    assert figures.once_figure(1_000, True, 1_000).met
    assert not figures.once_figure(1_000, False, 1_000).met
    assert not figures.once_figure(1_001, True, 1_000).met


def test_the_archive_is_compared_with_the_log_that_is_not_compressed(figures):
    row = figures.size_figure(figures.Layers(200_000, 300_000, 100_000, 35_000), 1_000)
    assert row.met
    assert row.value == "0.45 × (0.68 × of the bodies)"
    assert row.what.endswith("body 200, log 300, messages 100, keys 35")
    assert not figures.size_figure(figures.Layers(200_000, 300_000, 100_000, 36_000), 1_000).met


def test_a_module_that_does_not_load_is_named(figures):
    assert figures.core_figure(300, []).met
    row = figures.core_figure(300, ["mqmesh.x: no pyarrow"])
    assert not row.met
    assert row.value == "299 of 300; mqmesh.x: no pyarrow"


def test_the_hash_of_a_dump_knows_places_and_bodies_and_no_order(load_archive_benchmark):
    dump = load_archive_benchmark("dump_content")

    def line(place, ordinal, body):
        return json.dumps({"commitlog_offset": place, "ordinal": ordinal, "body": body}).encode()

    first, second = line(0, 0, "a"), line(0, 1, "ü")
    wanted = 0
    for text in ("0/0/a", "0/1/ü"):
        wanted ^= int(hashlib.md5(text.encode()).hexdigest()[:15], 16)
    assert dump.hash_lines([first, second]) == (2, wanted)
    assert dump.hash_lines([second, first]) == (2, wanted)
    assert dump.hash_lines([line(0, 1, "a"), line(0, 0, "ü")]) != (2, wanted)
