"""How pulls find their way through filter servers."""

from __future__ import annotations

import threading

import pytest

from mqmesh.errors import (
    BrokerNotAvailable,
    ClientClosed,
    EndpointUnreachable,
    FilterFailed,
    FilterUnknown,
    NoPermission,
)
from mqmesh.filtering.python_filter import PythonFilter
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.filters import FilterServerInfo, UploadFilterResponse
from mqmesh.protocol.route import BrokerAddress
from mqmesh.sdk.consumer.filter_link import CONNECT_MS, FilterLink

WANTED = PythonFilter("def match(m): return True")
QUEUE = MessageQueue("t", "broker-a", 0)
OTHER = MessageQueue("t", "broker-a", 1)
UPLOAD = RequestCode.REGISTER_MESSAGE_FILTER_CLASS
PULL = RequestCode.PULL_MESSAGE


def answer(header=None):
    data = encode_header(header) if header is not None else b""
    return Command(0, 1, 1, memoryview(data), memoryview(b""))


class Client:
    """A connection to a filter server that a test speaks for."""

    def __init__(self, address, on_connection):
        self.address = address
        self.on_connection = on_connection
        self.connected = True
        self.closed = False
        self.asked = []

    def request(self, code, on_done, *parts, header=b"", timeout_ms):
        if self.closed:
            raise ClientClosed("closed")
        self.asked.append((code, on_done, parts))

    def reply(self, outcome):
        """The oldest request is answered."""
        code, on_done, _ = self.asked.pop(0)
        on_done(outcome)
        return code

    def close(self):
        self.closed = True
        while self.asked:
            self.reply(ClientClosed("closed"))


class Stage:
    """A link whose broker and filter servers a test speaks for."""

    def __init__(self):
        self.finding = []
        self.timers = []
        self.clients = []
        self.outcomes = []
        self.link = FilterLink("g", WANTED, self, self.connect, threading.Event())

    def request(self, broker_name, code, on_done, *, header, timeout_ms):
        assert (broker_name, code) == ("broker-a", RequestCode.GET_FILTER_SERVER)
        self.finding.append(on_done)

    def call_later(self, delay_ms, callback):
        self.timers.append((delay_ms, callback))

    def connect(self, address, on_connection):
        self.clients.append(Client(address, on_connection))
        return self.clients[-1]

    def pull(self, queue=QUEUE):
        self.link.way(queue).request(
            "broker-a", PULL, self.outcomes.append, header=b"", timeout_ms=1
        )

    def found(self, tcp="h:1"):
        self.finding.pop()(answer(FilterServerInfo("f", BrokerAddress(tcp))))
        return self.clients[-1]

    def ready(self):
        """The first pull is at the filter server."""
        self.pull()
        client = self.found()
        assert client.reply(answer(UploadFilterResponse([]))) == UPLOAD
        return client


@pytest.fixture
def stage():
    return Stage()


def test_the_first_pull_finds_the_server_and_uploads_the_filter(stage):
    stage.pull()
    stage.pull(OTHER)
    assert len(stage.finding) == 1
    client = stage.found()
    assert client.address.tcp == "h:1"
    assert client.asked[0][2] == (WANTED.source.encode(),)
    assert not stage.link.decided.is_set()
    client.reply(answer(UploadFilterResponse([])))
    assert stage.link.decided.is_set()
    assert [code for code, _, _ in client.asked] == [PULL, PULL]
    pulled = answer()
    client.reply(pulled)
    assert stage.outcomes == [pulled]


def test_later_pulls_go_straight_there(stage):
    client = stage.ready()
    client.reply(answer())
    stage.pull()
    assert stage.finding == []
    assert client.reply(answer()) == PULL


@pytest.mark.parametrize("error", [NoPermission("no"), BrokerNotAvailable("none is there")])
def test_a_broker_without_filter_servers_fails_the_pull(stage, error):
    stage.pull()
    stage.finding.pop()(error)
    assert stage.outcomes == [error]
    is_news = isinstance(error, NoPermission)
    assert stage.link.decided.is_set() == is_news
    assert stage.link.errors == ({QUEUE: error} if is_news else {})
    stage.pull()
    assert len(stage.finding) == 1  # it is looked for again


def test_a_refused_upload_fails_the_pull_and_is_told_until_it_works(stage):
    stage.pull()
    refusal = FilterFailed("SyntaxError")
    client = stage.found()
    client.reply(refusal)
    assert stage.outcomes == [refusal]
    assert stage.link.errors == {QUEUE: refusal}
    assert client.closed
    stage.ready().reply(answer())
    assert stage.link.errors == {}


@pytest.mark.parametrize("error", [FilterUnknown("forgot"), EndpointUnreachable("gone")])
def test_a_server_that_forgot_or_is_gone_is_looked_for_again(stage, error):
    client = stage.ready()
    client.reply(error)
    assert stage.outcomes == [error]
    assert client.closed
    assert stage.link.errors == {}
    stage.pull()
    assert stage.found("h:2").reply(answer(UploadFilterResponse([]))) == UPLOAD
    assert stage.clients[-1].reply(answer()) == PULL


def test_a_broken_connection_fails_what_was_under_way(stage):
    client = stage.ready()
    client.on_connection(False)
    assert client.closed
    assert isinstance(stage.outcomes[0], ClientClosed)
    stage.pull()
    assert len(stage.finding) == 1


def test_a_server_that_cannot_be_connected_to_is_not_waited_for(stage):
    stage.pull()
    client = stage.found()
    client.connected = False
    ((delay_ms, check),) = stage.timers
    assert delay_ms == CONNECT_MS
    check()
    assert client.closed
    assert isinstance(stage.outcomes[0], ClientClosed)


def test_failures_are_told_by_queue(stage):
    client = stage.ready()
    stage.pull(OTHER)
    raised = FilterFailed("KeyError", retry_after_ms=1_000)
    client.reply(raised)
    client.reply(answer())
    assert stage.link.errors == {QUEUE: raised}


def test_after_closing_nothing_is_asked(stage):
    client = stage.ready()
    stage.link.close()
    assert client.closed
    stage.outcomes.clear()
    stage.pull()
    ((_, later),) = stage.timers[1:]
    later()
    assert isinstance(stage.outcomes[0], ClientClosed)
    assert stage.finding == []
