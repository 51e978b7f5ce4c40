from __future__ import annotations

from types import SimpleNamespace

import pytest
from sqlalchemy import create_engine

from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.sql import inbox as inbox_module
from mqmesh.sql.inbox import Inbox
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

NOW = TimestampMs(1)


def message(sequence):
    """A message as a consumer receives it."""
    batch = BatchInfo(
        "t", 0, "b", QueueOffset(0), CommitLogOffset(0), 0, NOW, NOW, "", "", 1, sequence, 0
    )
    return StoredMessage("t", b"x", queue_offset=QueueOffset(0), batch=batch)


def test_a_message_is_new_once_for_each_group_and_only_if_the_transaction_commits(db):
    billing, shipping = Inbox("billing"), Inbox("shipping")
    with db:
        assert billing.first_time(db, message(1))
        db.rollback()
    with db:
        assert billing.first_time(db, message(1))
        assert billing.first_time(db, message(2))
        assert not billing.first_time(db, message(1))
    with db:
        assert not billing.first_time(db, message(1))
        assert shipping.first_time(db, message(1))


def test_sqlalchemy_says_the_same(path):
    engine = create_engine(f"sqlite:///{path}")
    found = []
    for _ in range(2):
        with engine.begin() as connection:
            found.append(Inbox("billing").first_time(connection, message(1)))
    engine.dispose()
    assert found == [True, False]


def test_a_library_that_does_not_count_is_no_first_time(db, monkeypatch):
    monkeypatch.setattr(inbox_module, "execute", lambda *_: SimpleNamespace(rowcount=-1))
    with pytest.raises(ConfigError, match="says that -1 rows were inserted, not 0 or 1"):
        Inbox("billing").first_time(db, message(1))


def test_ids_are_kept_for_thirty_days(db, clock):
    inbox = Inbox("billing", clock=clock)
    assert inbox.first_time(db, message(1))
    clock.advance(30 * 86_400_000)
    assert inbox.clean(db) == 0
    clock.advance(1)
    assert inbox.clean(db) == 1


def test_old_ids_are_deleted_in_slices(db, clock):
    inbox, other = Inbox("billing", clock=clock), Inbox("shipping", clock=clock)
    for sequence in range(5):
        assert inbox.first_time(db, message(sequence))
        assert other.first_time(db, message(sequence))
        clock.advance(1_000)
    assert inbox.clean(db, keep_ms=2_500, most=2) == 2
    assert inbox.clean(db, keep_ms=2_500, most=2) == 1
    assert inbox.clean(db, keep_ms=2_500) == 0
    assert [inbox.first_time(db, message(one)) for one in range(5)] == [True] * 3 + [False] * 2
    assert not other.first_time(db, message(0))
    with pytest.raises(InvalidArgument, match="keep_ms = 0 and most = 1 must be 1 or more"):
        inbox.clean(db, keep_ms=0, most=1)
