"""Which filters there are, and how many there may be."""

from __future__ import annotations

import pytest

from mqmesh.errors import FilterFailed, FilterUnknown, MessageIllegal, SystemBusy
from mqmesh.filtering.python_filter import MAX_SOURCE_BYTES, filter_id
from mqmesh.metrics import MetricBoard, Readings
from mqmesh.roles.filtersrv.filter_runner import FilterState
from mqmesh.roles.filtersrv.filter_table import EVICT_IDLE_MS, FILTER_METRICS, FilterTable
from mqmesh.sandbox.frames import Status


@pytest.fixture
def make_table(stage):
    def make(**settings):
        def runner(user, group, name, source):
            return stage.runner(group, name, source, user=user, **settings)

        return FilterTable(stage.config(**settings), runner)

    return make


def upload(table, group, source, user=""):
    told = []
    data = source.encode()
    table.upload(user or f"group {group}", group, filter_id(data), data, told.append)
    return filter_id(data), told


def test_a_filter_belongs_to_its_group_alone(make_table):
    table = make_table()
    name, _ = upload(table, "a", "x")
    assert table.get("a", name).group == "a"
    with pytest.raises(FilterUnknown, match="has not uploaded"):
        table.get("b", name)


def test_each_group_has_a_process_of_its_own_for_the_same_filter(make_table, stage):
    table = make_table()
    for group in ("a", "b", "a"):
        upload(table, group, "x")
    assert len(stage.workers) == 2


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("zz", b"x", "no filter id"),
        (filter_id(b"x").upper(), b"x", "no filter id"),
        (filter_id(b"y"), b"x", "not the one"),
        (filter_id(b""), b"", "0 bytes"),
        (filter_id(bytes(MAX_SOURCE_BYTES + 1)), bytes(MAX_SOURCE_BYTES + 1), "65537 bytes"),
        (filter_id(b"\xff"), b"\xff", "no UTF-8"),
    ],
)
def test_an_illegal_upload_is_refused(make_table, stage, name, data, words):
    with pytest.raises(MessageIllegal, match=words):
        make_table().upload("u", "g", name, data, [].append)
    assert stage.workers == []


def test_a_refused_filter_may_be_uploaded_again(make_table, stage):
    table = make_table()
    name, told = upload(table, "g", "bad")
    stage.workers[0].says(Status.FAILED, b"SyntaxError")
    assert isinstance(told[0], FilterFailed)
    with pytest.raises(FilterFailed):
        table.get("g", name).begin_pull()
    _, told = upload(table, "g", "bad")
    stage.workers[1].ready()
    assert told == [["rlimits", "seccomp"]]


def test_a_group_cannot_take_all_places(make_table, stage):
    table = make_table(max_filters=4, max_filters_per_group=2)
    upload(table, "a", "1")
    upload(table, "a", "2")
    with pytest.raises(SystemBusy, match="max_filters_per_group"):
        upload(table, "a", "3")
    for group in "bcd":
        upload(table, group, "1")
    assert len(table) == 4, "a user of one filter has its place from the one with two"
    with pytest.raises(SystemBusy, match=r"\(max_filters\)"):
        upload(table, "e", "1")
    assert len(table) == 4


def test_the_filter_that_was_idle_for_longest_gives_up_its_place(make_table, stage):
    table = make_table(max_filters_per_group=2)
    first, _ = upload(table, "a", "1")
    stage.clock.advance(5)
    second, _ = upload(table, "a", "2")
    for worker in stage.workers:
        worker.ready()
    stage.clock.advance(EVICT_IDLE_MS)
    upload(table, "a", "3")
    assert stage.workers[0].closed
    table.get("a", second)
    with pytest.raises(FilterUnknown):
        table.get("a", first)


def test_a_filter_that_nobody_uses_is_forgotten(make_table, stage):
    table = make_table(filter_idle_ms=1_000)
    name, _ = upload(table, "a", "1")
    used, _ = upload(table, "a", "2")
    for worker in stage.workers:
        worker.ready()
    table.get("a", used).begin_pull()
    stage.clock.advance(1_000)
    table.tick()
    assert stage.workers[0].closed
    with pytest.raises(FilterUnknown):
        table.get("a", name)
    table.get("a", used)


def test_closing_ends_every_process(make_table, stage):
    table = make_table()
    upload(table, "a", "1")
    upload(table, "b", "1")
    table.close()
    assert all(worker.closed for worker in stage.workers)
    assert len(table) == 0


def test_what_waits_for_all_filters_together_is_bounded(make_table, stage):
    mib = 1024 * 1024
    table = make_table(max_total_pending_bytes=16 * mib)
    table.check_room("c", 32 * mib)  # one pull has room, whatever its size
    for group in ("a", "b"):
        name, _ = upload(table, group, "x")
        table.get(group, name).match([memoryview(bytes(7 * mib))], 1, [].append)
    table.check_room("c", 2 * mib)
    with pytest.raises(SystemBusy, match="max_total_pending_bytes"):
        table.check_room("c", 2 * mib + 1)


def test_what_waits_for_the_filters_of_one_user_leaves_room_for_others(make_table):
    mib = 1024 * 1024
    table = make_table(max_total_pending_bytes=16 * mib)
    for group in ("a", "b"):
        name, _ = upload(table, group, "x", "greedy")
        table.get(group, name).match([memoryview(bytes(4 * mib))], 1, [].append)
    with pytest.raises(SystemBusy, match="8388608 of them for those of greedy"):
        table.check_room("greedy", 1)
    table.check_room("modest", 8 * mib)


def test_filters_of_one_user_make_room_for_those_of_others(make_table):
    table = make_table(max_filters=4, max_filters_per_group=4)
    for number in range(4):
        upload(table, "a", str(number), "greedy")
    upload(table, "b", "x", "modest")
    upload(table, "c", "y", "modest")
    assert len(table) == 4
    with pytest.raises(SystemBusy, match="max_filters"):
        upload(table, "d", "z", "modest")
    with pytest.raises(SystemBusy, match="max_filters"):
        upload(table, "e", "z", "greedy")


def test_what_became_of_messages_is_counted_beyond_a_filters_life(make_table, stage):
    table = make_table(failures_to_park=1)
    name, _ = upload(table, "a", "x")
    (worker,) = stage.workers
    worker.ready()
    table.get("a", name).match([b"b"], 3, [].append)
    worker.says(Status.MATCHED, b"\1\0\1")
    assert told(table) == (FilterState.READY, 2, 1, 0)
    worker.dies()
    assert told(table) == (FilterState.PARKED, 2, 1, 1)
    table.close()
    assert told(table) == (None, 2, 1, 1)


def told(table):
    """The state of the one filter that there is, matches, misses, deaths."""
    board = MetricBoard()
    board.add(FILTER_METRICS, table.status)
    metrics = Readings(board.read())
    states = [one for one in FilterState if metrics.number("filters", one.value)]
    assert len(states) == len(table)
    return (
        states[0] if states else None,
        metrics["filter_matches_total"],
        metrics["filter_misses_total"],
        metrics["filter_process_deaths_total"],
    )
