"""Rows of tables: the newest revisions of a key, in whatever order the log gives them."""

import itertools
import runpy
from pathlib import Path

import pytest

from mqmesh.errors import CorruptRecord
from mqmesh.roles.broker.features.tables.row import (
    MOST_INLINE_BYTES,
    Revision,
    Row,
    due_key,
    due_until,
    pack,
    read_due,
    row_key,
    unpack,
    unpack_row,
    with_revision,
)


def put(number, place=None, size=1):
    return Revision(number, 100 * number if place is None else place, 1_000 + number, size=size)


def test_a_row_keeps_the_newest_revisions_in_whatever_order_they_come():
    for order in itertools.permutations(range(1, 5)):
        row = None
        for number in order:
            row = with_revision(row, put(number), b"%d" % number, 2) or row
        assert [one.revision for one in row.revisions] == [4, 3]
        assert row.value == b"4"


def test_a_revision_that_was_carried_changes_its_place_and_nothing_else():
    row = with_revision(with_revision(None, put(1), b"a", 2), put(2), b"b", 2)
    moved = with_revision(row, put(1, place=900), b"a", 2)
    assert moved.revisions == [put(2), put(1, place=900)]
    assert moved.value == b"b"
    assert with_revision(moved, put(1), b"a", 2) is None, "the older copy says nothing new"


def test_an_older_revision_than_those_that_are_kept_changes_nothing():
    row = with_revision(None, put(5), b"e", 1)
    assert with_revision(row, put(4, place=900), b"d", 1) is None


def test_a_revision_that_was_lost_is_a_tombstone_from_then_on():
    row = with_revision(None, put(1), b"a", 1)
    lost = Revision(1, 900, 1_001, operation=1, expires_ms=5_000)
    assert with_revision(row, lost, b"", 1) == Row([lost], None)


def test_a_long_value_stays_in_the_log():
    size = MOST_INLINE_BYTES + 1
    row = with_revision(None, put(1, size=size), bytes(size), 1)
    assert row.value is None


def test_a_value_is_read_until_it_expires():
    revision = Revision(1, 0, 1_000, expires_ms=2_000)
    assert revision.is_live(1_999)
    assert not revision.is_live(2_000)
    assert not Revision(1, 0, 1_000, operation=2).is_live(1_000)


def test_a_row_that_was_changed_on_the_disk_is_noticed():
    key = row_key(3, b"k")
    data = pack(key, Row([put(1)], b"a"))
    assert unpack_row(key, data) == Row([put(1)], b"a")
    with pytest.raises(CorruptRecord, match="checksum"):
        unpack_row(row_key(4, b"k"), data)


def test_what_is_due_stands_in_the_order_of_its_time():
    first, second = due_key(255, 1, b"z"), due_key(256, 1, b"a")
    assert first < due_until(255) <= second < due_until(256)
    assert read_due(first) == (1, b"z")


def test_rows_are_written_as_they_once_were():
    golden = runpy.run_path(str(Path(__file__).parents[5] / "data" / "make_golden.py"))
    assert golden["encode_rows"]() == golden["ROWS_FILE"].read_bytes(), (
        "a new form needs a new version and a new file"
    )
    for key, row in golden["ROWS"].items():
        assert unpack(key, pack(key, row), type(row)) == row
