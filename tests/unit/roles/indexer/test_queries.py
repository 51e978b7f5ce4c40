"""Queries that an index process is working on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.indexed_store import IndexedStore

from mqmesh.errors import InvalidArgument, SystemBusy
from mqmesh.message import Message, format_message_id
from mqmesh.protocol.command import decode_frame, decode_header, encode_frame, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.queries import (
    QueryMessageByIdRequest,
    QueryMessageRequest,
    QueryMessageResponse,
    decode_found,
)
from mqmesh.protocol.request import Request
from mqmesh.roles.indexer.queries import CATCH_UP_MS, PendingQueries


class Desk:
    """An indexed store, and queries about it by hand."""

    def __init__(self, directory: Path, **options) -> None:
        self.indexed = IndexedStore(directory)
        self.queries = PendingQueries(most=3, timeout_ms=options.get("timeout_ms", 1_000))
        self.now_ms = 0

    def ask(self, header, *, wanted: int | None = None, peer: bytes = b"broker") -> int:
        code = RequestCode.QUERY_MESSAGE
        if isinstance(header, QueryMessageByIdRequest):
            code = RequestCode.QUERY_MESSAGE_BY_ID
        frame = encode_frame(code, 7, header=encode_header(header))
        position = self.indexed.dispatcher.visible if wanted is None else wanted
        self.queries.add(Request(peer, decode_frame(frame)), header, position, self.now_ms)
        return len(self.queries)

    def step(self):
        done = self.queries.step(self.indexed.index, self.indexed.dispatcher, self.now_ms)
        if done is None:
            return None
        pending, reply = done
        assert pending.opaque == 7
        found = decode_found(reply.body[0], broker_name="b", store_host="h:1")
        return decode_header(QueryMessageResponse, reply.header), found

    def answer(self):
        for _ in range(10_000):
            done = self.step()
            if done is not None:
                return done
        raise AssertionError("it is never answered")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "store")
    for number in range(5):
        desk.indexed.put([Message("t", b"body", keys=("a", f"k{number}"), tag="x")] * 2)
    desk.indexed.catch_up()
    yield desk
    desk.indexed.close()


def test_messages_are_answered_with_all_that_is_known_of_them(desk):
    desk.ask(QueryMessageRequest("t", "k3"))
    response, found = desk.answer()
    assert response == QueryMessageResponse(2)
    expected = [one for one in desk.indexed.scan() if "k3" in one.keys][::-1]
    assert [one.offset_message_id.partition("#")[0] for one in found] == ["h:1", "h:1"]
    assert [one.broker_name for one in found] == ["b", "b"]
    for one, other in zip(found, expected, strict=True):
        assert one.to_message() == other.to_message()
        assert one.message_id == other.message_id
        assert one.queue_offset == other.queue_offset
        assert one.store_timestamp == other.store_timestamp
        assert one.info.payload_crc == other.info.payload_crc


def test_a_query_by_id_finds_the_one_message(desk):
    desk.ask(QueryMessageByIdRequest(format_message_id(1, 5)))
    response, (found,) = desk.answer()
    assert response.message_count == 1
    assert found.message_id == format_message_id(1, 5)


def test_bounds_are_kept(desk):
    desk.ask(QueryMessageRequest("t", "a", max_count=3))
    response, found = desk.answer()
    assert (len(found), response.more) == (3, True)
    desk.ask(QueryMessageRequest("t", "a", max_bytes=1))
    response, found = desk.answer()
    assert (len(found), response.more) == (1, True)


def test_times_beyond_the_calendar_mean_for_ever(desk):
    desk.ask(QueryMessageRequest("t", "a", end_timestamp=2**63 - 1))
    assert desk.answer()[0].message_count == 10


def test_a_query_waits_for_the_index_but_not_for_ever(desk):
    desk.ask(QueryMessageRequest("t", "a"), wanted=1 << 40)
    assert not desk.queries.is_ready(desk.indexed.dispatcher, desk.now_ms)
    assert desk.step() is None
    desk.now_ms = CATCH_UP_MS
    assert desk.queries.is_ready(desk.indexed.dispatcher, desk.now_ms)
    assert desk.answer()[0].message_count == 10


def test_one_that_waits_does_not_hold_up_another(desk):
    desk.ask(QueryMessageRequest("t", "a"), wanted=1 << 40)
    desk.ask(QueryMessageRequest("t", "k1"))
    assert desk.answer()[0].message_count == 2
    assert len(desk.queries) == 1


def test_long_ones_take_turns(desk):
    for _ in range(300):
        desk.indexed.put([Message("t", b"body", keys=("hot",))])
    desk.indexed.catch_up()
    desk.ask(QueryMessageRequest("t", "hot", max_count=1_000))
    desk.ask(QueryMessageRequest("t", "k1"))
    assert desk.answer()[0].message_count == 2, "the short one is answered first"
    assert desk.answer()[0].message_count == 300


def test_a_query_that_takes_too_long_is_answered_with_what_was_found(desk):
    for _ in range(300):
        desk.indexed.put([Message("t", b"body", keys=("hot",))])
    desk.indexed.catch_up()
    desk.ask(QueryMessageRequest("t", "hot", max_count=1_000))
    for _ in range(50):
        assert desk.step() is None
    desk.now_ms = 1_000
    response, found = desk.answer()
    assert response.more
    assert 10 < len(found) < 300


def test_what_the_index_does_not_cover_is_told(desk):
    desk.indexed.put([Message("t", b"body", keys=("late",))])
    desk.indexed.tell()
    desk.ask(QueryMessageRequest("t", "late"), wanted=0)
    response, found = desk.answer()
    assert (response.missing_bytes, found) == (desk.indexed.dispatcher.lag_bytes, [])
    assert response.missing_bytes > 0


def test_queries_are_bounded_and_go_with_their_broker(desk):
    for _ in range(3):
        desk.ask(QueryMessageRequest("t", "a"))
    with pytest.raises(SystemBusy, match="max_queries"):
        desk.ask(QueryMessageRequest("t", "a"))
    desk.queries.drop_peer(b"another")
    assert len(desk.queries) == 3
    desk.queries.drop_peer(b"broker")
    assert len(desk.queries) == 0
    assert desk.step() is None


def test_what_is_no_query_is_refused(desk):
    with pytest.raises(InvalidArgument):
        desk.ask(QueryMessageByIdRequest("no id"))
    assert len(desk.queries) == 0
