"""Which snapshots a broker removes, and which archives still need."""

from __future__ import annotations

import errno
import fcntl

import pytest
from harness.snapshots import take_snapshot
from harness.store_files import StoreFiles, put_bodies
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import StorageError
from mqmesh.storage.files.disk_space import Space
from mqmesh.storage.tools import snapshot_keeping
from mqmesh.storage.tools.snapshot import delete_snapshot
from mqmesh.storage.tools.snapshot_keeping import (
    WaitingReport,
    WaitingSnapshot,
    clean_waiting,
    hold_snapshot,
    needed_snapshots,
    remove_older,
    waiting_snapshots,
)

LONG = "x" * 2_000
EMPTY = Space(0, 100)
FULL = Space(80, 20)


@pytest.fixture
def files(tmp_path):
    files = StoreFiles(tmp_path / "store")
    yield files
    files.close()


class Scene:
    """A store that grows between snapshots, and loses its oldest segments."""

    def __init__(self, files, root) -> None:
        self.files = files
        self.root = root
        self.store = files.open()
        self.count = 0

    def take(self, archive="", *, bodies=40, keep=0):
        put_bodies(self.store, [f"{number} {LONG}" for number in range(bodies)])
        self.count += 1
        name = f"broker-a.{self.count}.0"
        path, _ = take_snapshot(
            self.store, self.files.directory, self.root, name=name, archive=archive, keep=keep
        )
        return path

    def clean(self, *, most_bytes=0, space=EMPTY) -> WaitingReport:
        return clean_waiting(
            self.root,
            "broker-a",
            most_bytes=most_bytes,
            most_used_percent=75,
            space_of=lambda path: space,
        )

    def names(self):
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture
def scene(files, tmp_path):
    return Scene(files, tmp_path / "snapshots")


def test_a_snapshot_for_an_archive_stays_when_newer_ones_replace_others(scene):
    first = scene.take("/archive", keep=1)
    for _ in range(3):
        scene.take(keep=1)
    assert scene.names() == ["broker-a.1.0", "broker-a.4.0"]
    assert waiting_snapshots(scene.root, "broker-a", "/archive") == [(first, True)]
    assert waiting_snapshots(scene.root, "broker-a", "/other") == []
    assert waiting_snapshots(scene.root, "broker", "/archive") == []
    report = scene.clean()
    assert (report.count, report.oldest_ms, report.dropped) == (1, 1, ())
    delete_snapshot(first)
    assert scene.clean() == WaitingReport()


def test_one_that_a_newer_one_covers_goes_unless_it_is_being_read(scene):
    first = scene.take("/archive")
    scene.take("/archive")
    with hold_snapshot(first):
        scene.clean()
        assert len(scene.names()) == 2
    scene.take("/other")
    assert scene.clean().count == 2
    assert scene.names() == ["broker-a.2.0", "broker-a.3.0"]


def test_what_is_being_read_is_not_replaced(scene):
    first = scene.take()
    with hold_snapshot(first):
        scene.take(keep=1)
        assert first.exists()
    remove_older(scene.root, "broker-a", 1)
    assert scene.names() == ["broker-a.2.0"]
    with pytest.raises(StorageError, match="cannot be read"), hold_snapshot(first):
        pass


def test_the_oldest_goes_where_only_snapshots_hold_too_much(scene):
    scene.take("/archive", bodies=200)
    # As retention does it: the segments go from the store, and the snapshot has them still.
    for number in range(2):
        scene.files.segment(number).unlink()
    scene.take("/archive", bodies=200)
    held = scene.clean().own_bytes
    assert scene.clean(most_bytes=held).dropped == ()
    assert scene.names() == ["broker-a.1.0", "broker-a.2.0"]
    report = scene.clean(most_bytes=held - 1)
    assert (report.dropped, report.count) == (("broker-a.1.0",), 1)
    assert report.own_bytes < held
    assert scene.clean().dropped == ()
    with hold_snapshot(scene.root / "broker-a.2.0"):
        assert scene.clean(space=FULL).count == 1
    report = scene.clean(space=FULL)
    assert (report.dropped, report.count, report.own_bytes) == (("broker-a.2.0",), 0, 0)


def test_while_the_oldest_is_being_read_none_goes_for_room_and_then_one_at_a_look(scene):
    for _ in range(3):
        snapshot = scene.take("/archive", bodies=200)
        for path in sorted((snapshot / "commitlog").iterdir())[:-1]:
            (scene.files.directory / "commitlog" / path.name).unlink()
    with hold_snapshot(scene.root / "broker-a.1.0"):
        report = scene.clean(space=FULL)
        assert (report.dropped, report.count, report.oldest_ms) == ((), 3, 1)
    assert [scene.clean(space=FULL).dropped for _ in range(2)] == [
        ("broker-a.1.0",),
        ("broker-a.2.0",),
    ]


def test_one_that_is_covered_and_being_read_still_counts(scene):
    first = scene.take("/archive")
    second = scene.take("/archive")
    assert waiting_snapshots(scene.root, "broker-a", "/archive") == [(first, False), (second, True)]
    with hold_snapshot(first):
        assert scene.clean().count == 2
    assert scene.clean().count == 1


def test_without_locks_of_the_file_system_snapshots_go_as_before(scene, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    first = scene.take()
    with hold_snapshot(first):
        scene.take(keep=1)
    assert scene.names() == ["broker-a.2.0"]


def test_a_snapshot_is_whole_though_older_ones_cannot_be_removed(scene, monkeypatch, caplog):
    def fail(*arguments):
        raise StorageError("read-only")

    scene.take()
    monkeypatch.setattr(snapshot_keeping, "delete_snapshot", fail)
    assert scene.take(keep=1).is_dir()
    assert "older snapshots of broker-a cannot be removed: read-only" in caplog.text


def test_without_snapshots_there_is_nothing_to_do(tmp_path):
    report = clean_waiting(tmp_path / "none", "broker-a", most_bytes=1, most_used_percent=75)
    assert report == WaitingReport()


def reached(snapshots, archived):
    taken = set(range(archived))
    for one in snapshots:
        taken |= set(range(one.start_offset, one.end_offset))
    return taken


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=8),
    st.integers(0, 50),
)
def test_needed_snapshots_have_the_log_that_all_have(grown, archived):
    """A log grows at its end and loses its beginning; an archive takes what begins where it is."""
    found = []
    start = end = 0
    for number, (lost, more) in enumerate(grown):
        start, end = min(start + lost, end), end + more
        one = WaitingSnapshot(
            archive="a", start_offset=start, end_offset=end, name=f"{number}", created_ms=number
        )
        found.append(one)

    needed = needed_snapshots(found)
    assert reached(needed, archived) == reached(found, archived)
    for left, right in zip(needed, needed[2:], strict=False):
        assert left.end_offset < right.start_offset


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=8))
def test_needed_snapshots_have_the_log_that_all_have_also_after_a_restore(stretches):
    """A store that was restored from a backup ends earlier, and may begin earlier."""
    found = [
        WaitingSnapshot(archive="a", start_offset=start, end_offset=start + size, name=f"{number}")
        for number, (start, size) in enumerate(stretches)
    ]
    assert reached(needed_snapshots(found), 0) == reached(found, 0)
