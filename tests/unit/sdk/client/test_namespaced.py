"""Names leave a client with its namespace, and come to it without."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from harness.filled_headers import filled

from mqmesh.errors import RequestTimeout
from mqmesh.message import AUTO_CREATE_TOPIC
from mqmesh.protocol.client_rpc import RunningInfoRequest
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import COMMANDS, RequestCode
from mqmesh.protocol.groups import (
    LOOK_GROUP_PREFIX,
    ConsumerOffsetReset,
    GroupConfig,
    GroupSummaries,
    GroupSummary,
    UpdateGroupRequest,
)
from mqmesh.protocol.membership import ConsumerIdsChanged, ConsumerListRequest
from mqmesh.protocol.names import has_names, names_in
from mqmesh.protocol.pulling import PullRequest, QueueOffsetEntry
from mqmesh.protocol.route import GetRouteRequest, TopicList, TopicRoute
from mqmesh.sdk.client.namespaced import ClientNames, in_namespace
from mqmesh.sdk.client.options import ClientOptions, client_options, find_namespace

PULL = RequestCode.PULL_MESSAGE
TOPICS = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER


def answer_of(header: msgspec.Struct | bytes) -> Command:
    data = header if isinstance(header, bytes) else encode_header(header)
    return Command(0, 1, 1, memoryview(data), memoryview(b"body"))


class Inner:
    """A transport, a connection and a channel, which note what they get."""

    def __init__(self) -> None:
        self.told: list = []
        self.answer = answer_of(TopicList(["shop%a", "bank%b", "c", "%RETRY%shop%g"]))
        self.endpoint = "tcp://h:1"

    def connect(self, endpoint, *, on_command=None, on_connection=None, by_loop=False):
        self.on_command = on_command
        return self

    def channel(self, endpoint, *, busy_poll_us=0):
        return self

    def watch(self, channel, callback):
        self.told.append(channel)

    def request(self, code, *rest, header=b"", timeout_ms=0):
        self.told.append((code, header))
        if rest and callable(rest[0]):
            rest[0](self.answer)
        return self.answer

    def oneway(self, code, *parts, header=b""):
        self.told.append((code, header))

    def post(self, code, *parts, header=b"", timeout_ms=0):
        self.told.append((code, header))
        return True

    def take(self):
        return self.answer


@pytest.fixture
def inner():
    return Inner()


@pytest.fixture
def transport(inner):
    return in_namespace(inner, "shop")


def test_without_a_namespace_nothing_stands_between(inner):
    assert in_namespace(inner, "") is inner


def test_what_is_asked_has_the_namespace_and_the_answer_has_none(inner, transport):
    header = encode_header(PullRequest("g", "%RETRY%g", 0, 0))
    whole = encode_header(PullRequest("shop%g", "%RETRY%shop%g", 0, 0))
    connection, channel = transport.connect("e"), transport.channel("e")
    got: list = []
    connection.request(TOPICS, got.append)
    connection.request(PULL, lambda _: None, b"part", header=header)
    connection.oneway(PULL, header=header)
    assert inner.told == [(TOPICS, b""), (PULL, whole), (PULL, whole)]
    got.append(channel.request(TOPICS, timeout_ms=1))
    assert channel.post(TOPICS, timeout_ms=1)
    got.append(channel.take())
    for one in got:
        assert decode_header(TopicList, one.header).topics == ["a", "%RETRY%g"]
        assert bytes(one.body) == b"body"
    assert (connection.endpoint, channel.endpoint) == ("tcp://h:1", "tcp://h:1")
    transport.watch(channel, lambda: None)
    assert inner.told[-1] is inner


def test_errors_and_nothing_pass_through(inner, transport):
    got: list = []
    inner.answer = error = RequestTimeout("late")
    transport.connect("e").request(TOPICS, got.append)
    assert got == [error]
    inner.answer = None
    assert transport.channel("e").take() is None


def test_what_a_server_sends_by_itself_has_no_namespace(inner, transport):
    got: list = []
    transport.connect("e", on_command=got.append)
    reset = ConsumerOffsetReset("shop%g", [QueueOffsetEntry("shop%t", 0, 5)])
    changed = encode_header(ConsumerIdsChanged("shop%g", 3))
    for code, header in (
        (RequestCode.RESET_CONSUMER_CLIENT_OFFSET, encode_header(reset)),
        (RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, changed),
        (60_000, b"\xc1"),
        (RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, b"\xc1"),
    ):
        inner.on_command(Command(code, 0, 2, memoryview(header), memoryview(b"")))
    own = decode_header(ConsumerOffsetReset, got[0].header)
    assert (own.group, own.queues[0].topic) == ("g", "t")
    assert decode_header(ConsumerIdsChanged, got[1].header).group == "g"
    assert [bytes(one.header) for one in got[2:]] == [b"\xc1", b"\xc1"]
    transport.connect("e")
    assert inner.on_command is None


@pytest.mark.parametrize(
    "header",
    [
        GetRouteRequest(AUTO_CREATE_TOPIC),
        ConsumerListRequest(f"{LOOK_GROUP_PREFIX}1"),
        GroupConfig("", dead_letter="keep"),
        GroupConfig("", dead_letter="drop"),
    ],
)
def test_some_names_are_the_same_in_all_namespaces(header):
    names = ClientNames("shop")
    assert names.added(header) == names.dropped(header) == header


def test_a_topic_of_dead_letters_is_in_the_namespace():
    config = GroupConfig("g", dead_letter="failed", paused_topics={"t": 1})
    whole = ClientNames("shop").added(UpdateGroupRequest(config))
    assert whole.config == GroupConfig(
        "shop%g", dead_letter="shop%failed", paused_topics={"shop%t": 1}
    )


def test_a_group_is_shown_wherever_its_dead_letters_go():
    summaries = GroupSummaries([GroupSummary(GroupConfig("shop%g", dead_letter="bank%d"))])
    (shown,) = ClientNames("shop").dropped(summaries).groups
    assert (shown.config.group, shown.config.dead_letter) == ("g", "bank%d")


def test_the_route_of_new_topics_is_found_in_every_namespace():
    names, header = ClientNames("shop"), encode_header(GetRouteRequest(AUTO_CREATE_TOPIC))
    assert names.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header) == header
    route = answer_of(TopicRoute(AUTO_CREATE_TOPIC, [], []))
    told = names.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)
    assert decode_header(TopicRoute, told.header).topic == AUTO_CREATE_TOPIC


def test_what_an_administrator_asks_by_way_of_a_broker_has_no_namespace():
    names = ClientNames("shop")
    question = encode_header(RunningInfoRequest("shop%g", "client"))
    own = names.question(RequestCode.GET_CONSUMER_RUNNING_INFO, question)
    assert decode_header(RunningInfoRequest, memoryview(own)).group == "g"
    assert names.question(60_000, b"x") == b"x"
    assert ClientNames("").question(RequestCode.GET_CONSUMER_RUNNING_INFO, question) == question


@pytest.mark.parametrize("spec", COMMANDS.values(), ids=lambda spec: spec.code.name)
def test_every_name_of_every_command_goes_and_comes_back(spec):
    names = ClientNames("shop")
    if spec.request is not None and spec.fixed is None:
        own = filled(spec.request, {"topic": "t", "group": "g", "dead letters": "d"})
        whole = decode_header(
            spec.request, memoryview(names.request(spec.code, encode_header(own)))
        )
        assert all(name.startswith("shop%") for _, name in names_in(whole))
        assert names.dropped(whole) == own
    if spec.reply is not None and has_names(spec.reply):
        told = filled(spec.reply, {"topic": "shop%t", "group": "shop%g", "dead letters": "drop"})
        shown = decode_header(spec.reply, names.answer(spec.code, answer_of(told)).header)
        assert {name for _, name in names_in(shown)} <= {"t", "g", "drop"}


def test_the_environment_names_the_namespace_of_who_says_none(monkeypatch):
    monkeypatch.setenv("MQMESH_NAMESPACE", "bank")
    assert find_namespace(None) == client_options(None, None).namespace == "bank"
    assert client_options(ClientOptions(namespace="shop"), None).namespace == "shop"
    assert client_options(ClientOptions(namespace="shop"), None, None, "a").namespace == "a"
    none = client_options(ClientOptions(namespace=""), None)
    assert client_options(none, None).namespace == find_namespace("") == ""


def test_other_attributes_are_those_of_the_transport():
    inner = SimpleNamespace(ring=5, with_keys=lambda ring: SimpleNamespace(ring=ring))
    transport = in_namespace(inner, "shop")
    assert transport.ring == 5
    assert transport.with_keys(6).ring == 6
