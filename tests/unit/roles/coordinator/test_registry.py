"""The registry of a coordinator: what is decided, what is applied, who is told, and its limits."""

import itertools

import pytest

from mqmesh.errors import SystemBusy
from mqmesh.host import ProcessMark
from mqmesh.protocol.coordination import (
    BeginSessionRequest,
    ChangeRecordRequest,
    ChangeStatus,
    RecordView,
)
from mqmesh.roles.coordinator.registry import LATE_MS, Registry
from mqmesh.storage.lmdb.coordinator_file import KeptChange, KeptRecord, KeptSession

PEER, OTHER = b"\0peer", b"\0other"


def registry(**limits):
    ids = itertools.count()
    settings = {"max_records": 3, "max_sessions": 3, "max_watches": 4} | limits
    return Registry(**settings, new_id=lambda: f"s{next(ids)}")


def begin(one, now_ms=0, owner=1, key="k", ttl_ms=3_000, process=None):
    name, change = one.begin(BeginSessionRequest(key, owner, ttl_ms, b"p", process))
    one.apply(change, now_ms, PEER)
    return name


def change(one, version, value=b"v", key="k", session="", now_ms=0):
    decided = one.change(ChangeRecordRequest(key, version, value, session))
    assert isinstance(decided, KeptChange)
    one.apply(decided, now_ms)


def test_a_decision_changes_nothing_before_it_is_applied():
    one = registry()
    name, begins = one.begin(BeginSessionRequest("k", 1, 3_000))
    decided = one.change(ChangeRecordRequest("k", 0, b"v"))
    assert isinstance(decided, KeptChange)
    assert one.view("k", 0) == RecordView("k")
    one.apply(begins, 0)
    one.apply(decided, 0)
    assert one.end(name) == KeptChange(ended=(name,))
    assert (one.session_count, one.record_count) == (1, 1)


def test_sessions_end_when_their_time_is_over_and_not_before():
    one = registry()
    name = begin(one)
    assert one.next_look_ms() == 3_000
    assert one.expire(2_999) is None
    assert one.keep(name, b"p", PEER, 2_999) == 3_000
    assert one.next_look_ms() == 5_999
    assert one.expire(5_999) == KeptChange(ended=(name,))
    one.apply(KeptChange(ended=(name,)), 5_999)
    assert one.keep(name, b"p", PEER, 6_000) is None
    assert one.next_look_ms() is None
    assert (one.expired_count, one.ended_count) == (1, 0)


def test_a_shorter_session_is_looked_for_earlier():
    one = registry()
    begin(one, owner=1, ttl_ms=600_000)
    assert one.next_look_ms() == 600_000
    begin(one, owner=2, ttl_ms=2_000)
    assert one.next_look_ms() == 2_000


def test_who_stood_still_gives_everybody_time_but_no_more_than_was_promised():
    one = registry()
    first, second = begin(one, owner=1), begin(one, owner=2, ttl_ms=2_000)
    assert one.next_look_ms() == 2_000
    # Something else is served first: that it was held up must not be forgotten by it.
    begin(one, 50_000, owner=3)
    assert one.next_look_ms() == 2_000
    assert one.expire(50_000) is None
    assert one.keep(first, b"p", PEER, 51_000) == 3_000
    assert one.next_look_ms() == 50_000 + 2_000
    assert one.expire(52_000 + LATE_MS) == KeptChange(ended=(second,))


def test_a_restart_gives_every_session_its_whole_time():
    one = registry()
    kept = KeptSession("k", 2, 2_000, b"said", None)
    one.restore({"k": KeptRecord(7, b"v")}, {"old": kept}, 10_000)
    view = one.view("k", 11_000)
    assert (view.version, view.value) == (7, b"v")
    assert [(s.session, s.presence, s.age_ms) for s in view.sessions] == [("old", b"said", 1_000)]
    assert one.next_look_ms() == 12_000
    assert one.change_count == 0


def test_a_session_of_the_same_owner_takes_the_place_in_one_change():
    one = registry()
    first = begin(one)
    name, decided = one.begin(BeginSessionRequest("k", 1, 3_000))
    assert decided.ended == (first,)
    assert list(decided.sessions) == [name]
    one.apply(decided, 0)
    assert [found.session for found in one.view("k", 0).sessions] == [name]
    assert one.ended_count == 1


def test_changes_ask_for_version_and_session():
    one = registry()
    name = begin(one)
    change(one, 0, b"first", session=name)
    refused = one.change(ChangeRecordRequest("k", 0, b"late", name))
    assert (refused.status, refused.version, refused.value) == (ChangeStatus.CONFLICT, 1, b"first")
    for session in ("nobody", begin(one, key="other")):
        refused = one.change(ChangeRecordRequest("k", 1, b"v", session))
        assert refused.status == ChangeStatus.SESSION_LOST
    assert one.conflict_count == 1


def test_each_table_has_its_limit():
    one = registry()
    for owner in (1, 2, 3):
        begin(one, owner=owner)
        change(one, 0, key=f"k{owner}")
    with pytest.raises(SystemBusy, match="max_sessions = 3"):
        one.begin(BeginSessionRequest("k", 4, 3_000))
    with pytest.raises(SystemBusy, match="max_records = 3"):
        one.change(ChangeRecordRequest("k4", 0, b"v"))
    begin(one, owner=3)
    change(one, 1, key="k3")
    one.watches.watch(PEER, ["a", "b"])
    with pytest.raises(SystemBusy, match="max_watches = 4"):
        one.watches.watch(OTHER, ["a", "b", "c"])
    one.watches.watch(PEER, ["a", "b", "c", "d"])
    assert one.watches.count == 4


def test_who_watches_is_told_the_keys_that_changed_once():
    one = registry()
    one.watches.watch(PEER, ["b", "a"])
    assert one.watches.take_changes() == {PEER: ["a", "b"]}
    name = begin(one, key="a")
    change(one, 0, key="a")
    change(one, 0, key="c")
    assert one.watches.take_changes() == {PEER: ["a"]}
    one.keep(name, b"p", PEER, 1)
    assert not one.watches.has_changes, "nothing changed by it"
    one.keep(name, b"other", PEER, 1)
    assert one.watches.take_changes() == {PEER: ["a"]}
    one.apply(KeptChange(ended=(name,)), 2)
    assert one.watches.take_changes() == {PEER: ["a"]}


def test_news_go_out_in_the_order_in_which_connections_began_to_watch():
    """Not in that of a set of their ids, which is another one in each process."""
    one = registry(max_watches=20)
    peers = [b"peer %d" % number for number in range(20)]
    for peer in peers:
        one.watches.watch(peer, ["a"])
    one.watches.take_changes()
    change(one, 0, key="a")
    assert list(one.watches.take_changes()) == peers


def test_who_is_gone_is_told_nothing_and_takes_no_room():
    one = registry()
    one.watches.watch(PEER, ["a"])
    one.watches.watch(OTHER, ["a"])
    one.watches.forget(PEER)
    change(one, 0, key="a")
    assert one.watches.take_changes() == {OTHER: ["a"]}
    one.watches.watch(OTHER, [])
    change(one, 1, key="a")
    assert (one.watches.take_changes(), one.watches.count) == ({}, 0)


def test_a_connection_leaves_the_sessions_that_were_renewed_by_it_last():
    one = registry()
    process = ProcessMark("h", 1, 2)
    stays, goes = begin(one, owner=1, process=process), begin(one, owner=2, process=process)
    begin(one, owner=3)
    one.keep(stays, b"p", OTHER, 1)
    assert one.left_by(PEER) == {goes: process}
    assert one.left_by(OTHER) == {stays: process}
