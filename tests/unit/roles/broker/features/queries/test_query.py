"""Queries that the broker passes on to its index process."""

from __future__ import annotations

import pytest

from mqmesh.errors import (
    BrokerNotAvailable,
    InvalidArgument,
    NoPermission,
    RemoteProtocolError,
    TopicNotFound,
    UnsupportedCommand,
)
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.protocol.admin import UpdateTopicRequest
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.queries import (
    QueryMessageByIdRequest,
    QueryMessageRequest,
    QueryMessageResponse,
    decode_found,
    encode_found,
)
from mqmesh.protocol.route import Perm, TopicConfig
from mqmesh.units import QueueOffset


def stored(topic, body, place=None):
    message = StoredMessage(topic, body)
    message.queue_offset = QueueOffset(0)
    message.batch = BatchInfo(place or topic, 0, "", 0, 0, 1, 1, 1, "h:1", "", 1, 1, 0)
    return message


class Index:
    def __init__(self) -> None:
        self.asked: list[tuple[int, bytes, object]] = []

    def query(self, code, header, on_answer):
        self.asked.append((code, header, on_answer))


@pytest.fixture
def index(stage) -> Index:
    """An index process that answers when the test says so."""
    index = Index()
    stage.index = index
    stage.restart()
    stage.send(stage.batch("orders"))
    return index


def test_a_query_is_passed_on_and_its_answer_passed_back(stage, index):
    query = QueryMessageRequest("orders", "4711", 5, 9)
    opaque = stage.begin(RequestCode.QUERY_MESSAGE, query)
    ((code, header, on_answer),) = index.asked
    assert (code, header) == (RequestCode.QUERY_MESSAGE, encode_header(query))
    assert opaque not in stage.answers
    answer = memoryview(encode_header(QueryMessageResponse(1, True, 77)))
    body = encode_found([stored("orders", b"found")])
    on_answer(Command(0, 1, 1, answer, memoryview(body)))
    found = stage.answer(opaque, QueryMessageResponse)
    assert (found.more, found.missing_bytes) == (True, 77)
    assert bytes(stage.answers[opaque].body[0]) == body


def test_a_query_by_id_is_passed_on_whatever_the_topic(stage, index):
    stage.begin(RequestCode.QUERY_MESSAGE_BY_ID, QueryMessageByIdRequest("0A" * 16))
    assert [code for code, _, _ in index.asked] == [RequestCode.QUERY_MESSAGE_BY_ID]


def forbid_reading(stage, topic):
    config = TopicConfig(topic, 4, 4, perm=Perm.WRITE)
    wanted = UpdateTopicRequest(config, may_hide=True)
    stage.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, wanted)


def test_messages_of_a_topic_that_nobody_may_read_are_not_found(stage, index):
    forbid_reading(stage, "orders")
    with pytest.raises(NoPermission, match="'orders' does not permit reading"):
        stage.ask(RequestCode.QUERY_MESSAGE, QueryMessageRequest("orders", "4711"))
    opaque = stage.begin(RequestCode.QUERY_MESSAGE_BY_ID, QueryMessageByIdRequest("0A" * 16))
    ((_, _, on_answer),) = index.asked
    hidden = [stored("orders", b"no"), stored("orders", b"no", place="%RETRY%g")]
    body = encode_found([*hidden, stored("others", b"yes"), stored("u", b"no", place="orders")])
    answer = memoryview(encode_header(QueryMessageResponse(4, True, 77)))
    on_answer(Command(0, 1, 1, answer, memoryview(body)))
    assert stage.answer(opaque, QueryMessageResponse) == QueryMessageResponse(1, True, 77)
    (left,) = decode_found(stage.answers[opaque].body[0], broker_name="b", store_host="h:1")
    assert left.body == b"yes"


def test_messages_of_a_topic_that_the_asker_may_not_read_are_not_found(stage, index):
    stage.guard.forbidden.add("orders")
    opaque = stage.begin(RequestCode.QUERY_MESSAGE_BY_ID, QueryMessageByIdRequest("0A" * 16))
    ((_, _, on_answer),) = index.asked
    body = encode_found([stored("orders", b"no"), stored("others", b"yes")])
    answer = memoryview(encode_header(QueryMessageResponse(2, True, 77)))
    on_answer(Command(0, 1, 1, answer, memoryview(body)))
    (left,) = decode_found(stage.answers[opaque].body[0], broker_name="b", store_host="h:1")
    assert left.body == b"yes"


def test_an_answer_that_is_none_is_refused(stage, index):
    opaque = stage.begin(RequestCode.QUERY_MESSAGE_BY_ID, QueryMessageByIdRequest("0A" * 16))
    index.asked[0][2](Command(0, 1, 1, memoryview(b"\x90"), memoryview(b"messages")))
    with pytest.raises(RemoteProtocolError):
        stage.answer(opaque)


def test_what_the_index_refuses_is_refused(stage, index):
    opaque = stage.begin(RequestCode.QUERY_MESSAGE, QueryMessageRequest("orders", "a"))
    index.asked[0][2](BrokerNotAvailable("just starting"))
    with pytest.raises(BrokerNotAvailable):
        stage.answer(opaque)


def test_an_unknown_topic_is_told_without_asking(stage, index):
    with pytest.raises(TopicNotFound):
        stage.ask(RequestCode.QUERY_MESSAGE, QueryMessageRequest("nothing", "a"))
    assert index.asked == []


@pytest.mark.parametrize("text", ["", "xyz", "0" * 31, "g" * 32])
def test_an_id_that_is_none_is_told_without_asking(stage, index, text):
    with pytest.raises(InvalidArgument):
        stage.ask(RequestCode.QUERY_MESSAGE_BY_ID, QueryMessageByIdRequest(text))
    assert index.asked == []


@pytest.mark.parametrize(
    "header",
    [
        QueryMessageRequest("orders", ""),
        QueryMessageRequest("orders", "k" * 256),
        QueryMessageRequest("orders", "a", max_count=0),
        QueryMessageRequest("orders", "a", max_count=1_025),
        QueryMessageRequest("orders", "a", -1),
    ],
)
def test_a_query_out_of_bounds_is_refused(stage, index, header):
    with pytest.raises(RemoteProtocolError):
        stage.ask(RequestCode.QUERY_MESSAGE, header)
    assert index.asked == []


def test_without_an_index_the_setting_is_named(stage):
    stage.send(stage.batch("orders"))
    with pytest.raises(UnsupportedCommand, match=r"index\.enable"):
        stage.ask(RequestCode.QUERY_MESSAGE, QueryMessageRequest("orders", "a"))
