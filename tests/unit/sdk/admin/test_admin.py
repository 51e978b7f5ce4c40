"""The administrator's client, on channels that need no network."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqmesh.errors import (
    AuthenticationFailed,
    BrokerError,
    ClientClosed,
    EndpointUnreachable,
    InvalidArgument,
    NoRoute,
    NotMaster,
    RemoteProtocolError,
    RequestTimeout,
    SystemBusy,
    TopicNotFound,
    UnsupportedCommand,
)
from mqmesh.metrics import Metric, MetricKind, MetricReading, MetricSample
from mqmesh.protocol import admin as words
from mqmesh.protocol import groups as words_of_groups
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode, not_served
from mqmesh.protocol.gateway import GatewayClients
from mqmesh.protocol.route import (
    BrokerAddress,
    BrokerData,
    ClusterInfo,
    Perm,
    QueueData,
    TopicConfig,
    TopicList,
    TopicRoute,
)
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.broker_admin import BrokerAdmin
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.testing.clock import ManualClock
from mqmesh.transport.requests import no_connection

ONE, TWO = "tcp://ns-1:1", "tcp://ns-2:2"
A, B = "tcp://a:1", "tcp://b:2"
BROKERS = [
    BrokerData("c", "broker-b", {0: BrokerAddress("b:2")}),
    BrokerData("c", "broker-a", {0: BrokerAddress("a:1"), 1: BrokerAddress("a:9")}),
    BrokerData("c", "broker-c", {1: BrokerAddress("c:3")}),
]
ROUTE = TopicRoute("t", [QueueData(name, 4, 4, 6) for name in ("broker-a", "broker-b")], BROKERS)


class Network:
    """The client's transport: what each endpoint answers, and what it was asked."""

    ring = None

    def __init__(self):
        self.answers = {}
        self.asked = []
        self.closed = []
        self.clock = ManualClock()

    def channel(self, endpoint):
        return Channel(self, endpoint)

    def close(self):
        """The client closes its transport."""

    def answer(self, endpoint, code, answer):
        self.answers[endpoint, code] = answer

    def codes(self):
        return [(endpoint, code) for endpoint, code, _ in self.asked]


class Channel:
    """One connection of the client's."""

    def __init__(self, network, endpoint):
        self.endpoint = endpoint
        self._network = network

    def request(self, code, *, header, timeout_ms):
        self._network.asked.append((self.endpoint, code, bytes(header)))
        answer = self._network.answers.get((self.endpoint, code))
        if isinstance(answer, Iterator):
            answer = next(answer)
        if answer is None:
            raise EndpointUnreachable(f"no connection to {self.endpoint} in time")
        if isinstance(answer, Exception):
            raise answer
        encoded = answer if isinstance(answer, bytes) else encode_header(answer)
        return Command(0, 1, 1, memoryview(encoded), memoryview(b""))

    def close(self):
        self._network.closed.append(self.endpoint)


@pytest.fixture
def network():
    network = Network()
    for endpoint in (ONE, TWO):
        network.answer(endpoint, RequestCode.GET_BROKER_CLUSTER_INFO, ClusterInfo(BROKERS))
        network.answer(endpoint, RequestCode.GET_ROUTEINFO_BY_TOPIC, ROUTE)
    return network


@pytest.fixture
def client(network):
    with AdminClient("ns-1:1;ns-2:2", transport=network) as client:
        yield client


def test_the_first_name_server_is_asked(network, client):
    network.answer(ONE, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, TopicList(["b", "a"]))
    assert client.topics() == ["a", "b"]


def test_the_next_name_server_is_asked_when_one_is_silent_and_then_stays_first(network, client):
    code = RequestCode.GET_ROUTEINFO_BY_TOPIC
    network.answer(ONE, code, RequestTimeout("silent"))
    assert client.route("t") == ROUTE
    assert client.route("t") == ROUTE
    assert network.codes() == [(ONE, code), (TWO, code), (TWO, code)]


def test_no_name_server_at_all_is_told_with_advice(network, client):
    network.answers.clear()
    with pytest.raises(
        EndpointUnreachable,
        match=r"no name server answers \(no connection to tcp://ns-1:1 in time; "
        r"no connection to tcp://ns-2:2 in time\); is the cluster running",
    ):
        client.cluster()


def test_a_name_server_that_ends_handshakes_is_there_and_nobody_is_to_start_it(network, client):
    network.answers.clear()
    network.answer(
        ONE,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        no_connection(ONE, "it ends each handshake; where security is on, pass credentials"),
    )
    with pytest.raises(EndpointUnreachable, match="pass credentials") as refused:
        client.cluster()
    assert "is the cluster running" not in str(refused.value)


@pytest.mark.parametrize("refusing", [ONE, TWO])
def test_a_name_server_that_wants_keys_is_named_whichever_it_is(network, client, refusing):
    network.answers.clear()
    network.answer(
        refusing, RequestCode.GET_BROKER_CLUSTER_INFO, AuthenticationFailed("wants CURVE")
    )
    with pytest.raises(AuthenticationFailed, match=r"^wants CURVE$"):
        client.cluster()


def test_a_broker_that_is_asked_as_a_name_server_is_none(network, client):
    code = RequestCode.GET_ROUTEINFO_BY_TOPIC
    network.answer(ONE, code, UnsupportedCommand(not_served(code)))
    with pytest.raises(UnsupportedCommand) as caught:
        client.route("t")
    assert str(caught.value) == (
        "ns-1:1 is no name server: request code 105 (GET_ROUTEINFO_BY_TOPIC) is not served here "
        "but by a name server; is the address right?"
    )


def test_a_refusal_of_a_name_server_is_final(network, client):
    network.answer(ONE, RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicNotFound("no t"))
    with pytest.raises(TopicNotFound):
        client.route("t")
    assert len(network.asked) == 1


def test_a_topic_is_put_on_every_master_and_no_slave(network, client):
    config = TopicConfig("t", 4, 4)
    for endpoint in (A, B):
        network.answer(endpoint, RequestCode.UPDATE_AND_CREATE_TOPIC, config)
    assert client.put_topic(config) == {"broker-a": config, "broker-b": config}
    asked = [one for one in network.asked if one[1] == RequestCode.UPDATE_AND_CREATE_TOPIC]
    assert [endpoint for endpoint, _, _ in asked] == [A, B]
    assert decode_header(words.UpdateTopicRequest, asked[0][2]).config == config


FOUR, EIGHT = TopicConfig("t", 4, 4), TopicConfig("t", 8, 8)


@pytest.mark.parametrize(
    ("at_a", "at_b", "is_new", "if_missing"),
    [
        (None, None, [A, B], [A, B]),
        (FOUR, None, [B], [B]),  # a former try got so far
        (None, FOUR, [A], [A]),
        (FOUR, FOUR, [A, B], []),  # who refuse it
        (EIGHT, None, [A, B], [B]),
        (EIGHT, FOUR, [A], []),
    ],
)
def test_a_new_topic_must_be_new_where_it_is_asked_for(
    network, client, at_a, at_b, is_new, if_missing
):
    for endpoint, found in ((A, at_a), (B, at_b)):
        answer = TopicNotFound("no t") if found is None else words.TopicConfigs([found])
        network.answer(endpoint, RequestCode.GET_TOPIC_CONFIG, answer)
        network.answer(endpoint, RequestCode.UPDATE_AND_CREATE_TOPIC, FOUR)
    for exist_ok, expected in ((False, is_new), (True, if_missing)):
        network.asked.clear()
        made = client.create_topic(FOUR, exist_ok=exist_ok)
        asked = [one for one in network.asked if one[1] == RequestCode.UPDATE_AND_CREATE_TOPIC]
        assert [endpoint for endpoint, _, _ in asked] == expected
        for _, _, header in asked:
            assert decode_header(words.UpdateTopicRequest, header).must_be_new
        assert made.keys() == {"broker-a", "broker-b"}
        if exist_ok:
            assert list(made.values()).count(EIGHT) == (at_a is EIGHT)


def test_a_topic_that_is_there_with_other_settings_than_those_given_is_an_error(network, client):
    for endpoint in (A, B):
        network.answer(endpoint, RequestCode.GET_TOPIC_CONFIG, words.TopicConfigs([FOUR]))
    left = {"broker-a": FOUR, "broker-b": FOUR}
    assert client.create_topic("t", exist_ok=True) == left
    assert client.create_topic("t", queues=4, perm=Perm.READ_WRITE, exist_ok=True) == left
    for given, words_of_it in (
        ({"queues": 8}, "read_queue_nums 4, write_queue_nums 4, not read_queue_nums 8"),
        ({"perm": Perm.READ}, "perm 6, not perm 4"),
        ({"order": True}, "order False, not order True"),
    ):
        with pytest.raises(InvalidArgument, match=words_of_it):
            client.create_topic("t", exist_ok=True, **given)
    assert RequestCode.UPDATE_AND_CREATE_TOPIC not in {one[1] for one in network.asked}


def test_a_broker_is_told_that_messages_may_be_hidden(network, client):
    network.answer(B, RequestCode.UPDATE_AND_CREATE_TOPIC, FOUR)
    for hide in (False, True):
        network.asked.clear()
        client.put_topic({"broker-b": FOUR}, hide_messages=hide)
        (asked,) = [one for one in network.asked if one[1] == RequestCode.UPDATE_AND_CREATE_TOPIC]
        assert decode_header(words.UpdateTopicRequest, asked[2]).may_hide is hide


def test_masters_may_have_different_settings_of_a_topic(network, client):
    network.answer(B, RequestCode.UPDATE_AND_CREATE_TOPIC, FOUR)
    assert client.put_topic({"broker-b": FOUR}) == {"broker-b": FOUR}
    with pytest.raises(NoRoute, match="'broker-x'; there are broker-a, broker-b"):
        client.put_topic({"broker-x": FOUR})


def test_whoever_was_only_asked_has_no_change(network, client):
    network.answer(A, RequestCode.GET_TOPIC_CONFIG, words.TopicConfigs([FOUR]))
    with pytest.raises(
        EndpointUnreachable, match=r"^broker broker-b: no connection to \S+ in time$"
    ):
        client.create_topic("t")


def test_it_waits_until_the_name_servers_announce_the_topic(network, client):
    config = TopicConfig("t", 8, 8)
    for endpoint in (A, B):
        network.answer(endpoint, RequestCode.UPDATE_AND_CREATE_TOPIC, config)
    new = TopicRoute("t", [QueueData(name, 8, 8, 6) for name in ("broker-a", "broker-b")], BROKERS)
    network.answer(ONE, RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicNotFound("not yet"))
    steps = [
        lambda: network.answer(ONE, RequestCode.GET_ROUTEINFO_BY_TOPIC, ROUTE),
        lambda: network.answer(ONE, RequestCode.GET_ROUTEINFO_BY_TOPIC, new),
        lambda: network.answer(TWO, RequestCode.GET_ROUTEINFO_BY_TOPIC, new),
    ]
    network.pause = lambda seconds: steps.pop(0)()
    client.put_topic(config)
    assert steps == []


def test_a_silent_name_server_is_not_waited_for(network, client):
    config = TopicConfig("t", 4, 4)
    for endpoint in (A, B):
        network.answer(endpoint, RequestCode.UPDATE_AND_CREATE_TOPIC, config)
    del network.answers[TWO, RequestCode.GET_ROUTEINFO_BY_TOPIC]
    assert len(client.put_topic(config)) == 2


def test_a_failure_names_the_broker_and_who_was_before(network, client):
    network.answer(A, RequestCode.UPDATE_AND_CREATE_TOPIC, TopicConfig("t"))
    network.answer(B, RequestCode.UPDATE_AND_CREATE_TOPIC, SystemBusy("busy", retry_after_ms=5))
    with pytest.raises(SystemBusy, match=r"^broker broker-b: busy \(done already at broker-a\)$"):
        client.put_topic(TopicConfig("t"))


def test_without_a_master_there_is_no_route(network, client):
    network.answer(ONE, RequestCode.GET_BROKER_CLUSTER_INFO, ClusterInfo(BROKERS[2:]))
    with pytest.raises(NoRoute, match="ns-1:1 knows no running broker"):
        client.put_topic(TopicConfig("t"))


def test_an_illegal_name_is_not_even_sent(network, client):
    for call in (client.route, client.delete_topic, client.topic_configs):
        with pytest.raises(InvalidArgument):
            call("no blanks")
    with pytest.raises(InvalidArgument):
        client.put_topic(TopicConfig(""))
    assert network.asked == []


def test_configurations_of_one_topic_come_from_those_who_have_it(network, client):
    network.answer(A, RequestCode.GET_TOPIC_CONFIG, words.TopicConfigs([TopicConfig("t")]))
    network.answer(B, RequestCode.GET_TOPIC_CONFIG, TopicNotFound("no t"))
    assert client.topic_configs("t") == {"broker-a": [TopicConfig("t")]}
    network.answer(A, RequestCode.GET_TOPIC_CONFIG, TopicNotFound("no t"))
    with pytest.raises(TopicNotFound, match="no topic 't' on a broker that runs"):
        client.topic_configs("t")


def test_configurations_of_all_topics_name_brokers_without_any(network, client):
    for endpoint in (A, B):
        network.answer(endpoint, RequestCode.GET_TOPIC_CONFIG, words.TopicConfigs([]))
    assert client.topic_configs() == {"broker-a": [], "broker-b": []}


def test_statistics_come_from_the_brokers_of_the_route(network, client):
    route = TopicRoute("t", [QueueData("broker-b", 4, 4, 6)], BROKERS)
    stats = words.TopicStats("t", [words.QueueStats(0, 0, 5)])
    network.answer(ONE, RequestCode.GET_ROUTEINFO_BY_TOPIC, route)
    network.answer(B, RequestCode.GET_TOPIC_STATS_INFO, stats)
    assert client.topic_stats("t") == {"broker-b": stats}


def test_metrics_come_from_every_master_with_their_types(network, client):
    readings = [
        MetricReading(Metric(name, MetricKind.GAUGE, "", ""), [MetricSample((), value)])
        for name, value in {"a": 1, "b": 0.5, "c": True}.items()
    ]
    for endpoint in (A, B):
        network.answer(
            endpoint,
            RequestCode.GET_BROKER_RUNTIME_INFO,
            words.RuntimeInfo(readings),
        )
    told = client.runtime_info()
    assert {name: list(one) for name, one in told.items()} == {
        "broker-a": readings,
        "broker-b": readings,
    }
    assert told["broker-b"]["c"] is True
    assert list(client.role_info(A)) == readings


def test_metrics_that_come_in_pages_are_put_together_and_begin_anew_where_they_were_forgotten(
    network, client
):
    def page(number, listing, next_place):
        metric = Metric(f"f{number}", MetricKind.GAUGE, "", "")
        return words.RuntimeInfo(
            [MetricReading(metric, [MetricSample((), number)])], listing, next_place
        )

    pages = [page(1, 5, 1), page(1, 6, 1), page(2, 6, 2), page(3, 6, -1)]
    network.answer(A, RequestCode.GET_BROKER_RUNTIME_INFO, iter(pages))
    told = client.role_info(A)
    assert {one.metric.name: one.samples[0].value for one in told} == {"f1": 1, "f2": 2, "f3": 3}
    asked = [decode_header(words.RuntimeInfoRequest, header) for _, _, header in network.asked]
    places = [(0, 0), (5, 1), (6, 1), (6, 2)]
    assert asked == [words.RuntimeInfoRequest(*place) for place in places]


def test_metrics_that_are_forgotten_again_and_again_are_not_taken_for_all(network, client):
    pages = (words.RuntimeInfo([], listing, 1) for listing in range(1, 9))
    network.answer(A, RequestCode.GET_BROKER_RUNTIME_INFO, pages)
    with pytest.raises(SystemBusy, match=f"{A} forgot 4 times .* ask again"):
        client.role_info(A)


def test_a_topic_is_deleted_from_brokers_then_from_all_name_servers(network, client):
    for endpoint in (A, B):
        network.answer(endpoint, RequestCode.DELETE_TOPIC_IN_BROKER, b"")
    for endpoint in (ONE, TWO):
        network.answer(endpoint, RequestCode.DELETE_TOPIC_IN_NAMESRV, b"")
    done = client.delete_topic("t")
    assert (done.brokers, done.silent_namesrvs) == (["broker-a", "broker-b"], [])
    assert network.codes()[-4:] == [
        (A, RequestCode.DELETE_TOPIC_IN_BROKER),
        (B, RequestCode.DELETE_TOPIC_IN_BROKER),
        (ONE, RequestCode.DELETE_TOPIC_IN_NAMESRV),
        (TWO, RequestCode.DELETE_TOPIC_IN_NAMESRV),
    ]


def test_a_deletion_can_be_repeated_after_it_got_half_way(network, client):
    network.answer(A, RequestCode.DELETE_TOPIC_IN_BROKER, TopicNotFound("gone"))
    network.answer(B, RequestCode.DELETE_TOPIC_IN_BROKER, b"")
    network.answer(ONE, RequestCode.DELETE_TOPIC_IN_NAMESRV, TopicNotFound("gone"))
    done = client.delete_topic("t")
    assert (done.brokers, done.silent_namesrvs) == (["broker-a", "broker-b"], ["ns-2:2"])


def test_a_failed_deletion_leaves_the_name_servers_alone(network, client):
    network.answer(A, RequestCode.DELETE_TOPIC_IN_BROKER, BrokerError("no"))
    with pytest.raises(BrokerError, match="broker broker-a: no"):
        client.delete_topic("t")
    assert not any(code == RequestCode.DELETE_TOPIC_IN_NAMESRV for _, code in network.codes())


def test_a_ping_goes_where_it_is_told(network, client):
    info = words.RoleInfo("broker", "broker-a", "1", 7, "running", 5)
    network.answer(A, RequestCode.PING, info)
    assert client.ping("a:1") == info


def test_a_connection_is_used_again_and_closed_once(network):
    client = AdminClient("ns-1:1", transport=network)
    client.cluster()
    client.cluster()
    client.close()
    client.close()
    assert network.closed == [ONE]
    with pytest.raises(ClientClosed):
        client.cluster()


@pytest.mark.parametrize("addresses", ["", ";", "host", "host:x", ":1"])
def test_a_wrong_address_is_refused(addresses):
    with pytest.raises(InvalidArgument):
        AdminClient(addresses)


def test_a_change_of_settings_goes_to_all_replicas_and_says_which_have_it(network):
    follower, code = "tcp://a:9", RequestCode.UPDATE_BROKER_CONFIG
    changed = words.ConfigChanges([words.ConfigChange("busy_poll_us", "200", "0")])
    network.answer(A, code, changed)
    with BrokerAdmin("ns-1:1;ns-2:2", transport=network) as admin:
        with pytest.raises(
            EndpointUnreachable, match=r"^broker broker-a, id 1: .*\(done already at id 0\)$"
        ):
            admin.set_config("broker-a", {"busy_poll_us": 0})
        network.answer(follower, code, changed)
        done = admin.set_config("broker-a", {"busy_poll_us": 0}, ["log_level"])
        assert done == {0: changed.changes, 1: changed.changes}
        *_, (endpoint, _, header) = network.asked
        request = decode_header(words.UpdateConfigRequest, memoryview(header))
        assert (endpoint, request.settings) == (follower, {"busy_poll_us": "0"})
        assert request.unset == ["log_level"]
        with pytest.raises(NoRoute, match="no broker group 'x'; there are broker-a, broker-b"):
            admin.set_config("x", {"busy_poll_us": 0})


def test_many_topics_are_created_by_one_request_to_each_master(network, client):
    there = words.TopicConfigs([TopicConfig("old", 4, 4), TopicConfig("else", 1, 1)])
    network.answer(A, RequestCode.GET_TOPIC_CONFIG, there)
    network.answer(B, RequestCode.GET_TOPIC_CONFIG, words.TopicConfigs([]))
    for endpoint in (A, B):
        network.answer(endpoint, RequestCode.CREATE_TOPICS, words.TopicConfigs([]))
    names = [f"t{number}" for number in range(words.MAX_TOPICS_PER_CREATION)]
    route = TopicRoute("old", [QueueData(name, 4, 4, 6) for name in ("broker-a", "broker-b")], [])
    for endpoint in (ONE, TWO):
        network.answer(endpoint, RequestCode.GET_ROUTEINFO_BY_TOPIC, route)
    done = client.create_topics([*names, TopicConfig("old", 4, 4)])
    assert list(done) == [*names, "old"]
    assert done["old"] == done["t7"] | dict.fromkeys(done["t7"], TopicConfig("old"))
    asked = [
        (endpoint, [one.topic for one in decode_header(words.CreateTopicsRequest, header).configs])
        for endpoint, code, header in network.asked
        if code == RequestCode.CREATE_TOPICS
    ]
    assert asked == [(A, names), (B, names), (B, ["old"])], "who has it from before keeps it"


def test_topics_that_exist_stop_the_creation_of_many_unless_they_may(network, client):
    there = words.TopicConfigs([TopicConfig("old", 8, 8)])
    for endpoint in (A, B):
        network.answer(endpoint, RequestCode.GET_TOPIC_CONFIG, there)
        network.answer(endpoint, RequestCode.CREATE_TOPICS, InvalidArgument("'old' exists already"))
    with pytest.raises(InvalidArgument, match="broker-a: 'old' exists"):
        client.create_topics(["old"])
    with pytest.raises(InvalidArgument, match="'old' exists on broker-a with read_queue_nums 8"):
        client.create_topics(["old"], queues=4, exist_ok=True)
    kept = client.create_topics([TopicConfig("old")], exist_ok=True)
    assert kept == {"old": dict.fromkeys(("broker-a", "broker-b"), TopicConfig("old", 8, 8))}
    assert client.create_topics([]) == {}
    with pytest.raises(InvalidArgument, match="'t' is named twice"):
        client.create_topics(["t", TopicConfig("t")])


def test_threads_may_share_a_client(network, client):
    busy, overlaps = [], []

    class Slow(Channel):
        def request(self, code, *, header, timeout_ms):
            busy.append(code)
            overlaps.append(len(busy))
            gate.wait(0.001)
            try:
                return super().request(code, header=header, timeout_ms=timeout_ms)
            finally:
                busy.pop()

    gate = threading.Event()
    network.channel = lambda endpoint: Slow(network, endpoint)
    # The second name server is asked each time the first one is silent.
    del network.answers[ONE, RequestCode.GET_BROKER_CLUSTER_INFO]
    network.answer(TWO, RequestCode.GET_BROKER_CLUSTER_INFO, ClusterInfo(BROKERS))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: client.cluster(), range(200)))
    assert found == [ClusterInfo(BROKERS)] * 200
    assert set(overlaps) == {1}


def test_a_broker_with_an_address_that_is_none_is_left_out_and_named(network, client, caplog):
    rogue = BrokerData("c", "rogue", {0: BrokerAddress("127.0.0.1:66x")})
    for endpoint in (ONE, TWO):
        network.answer(
            endpoint, RequestCode.GET_BROKER_CLUSTER_INFO, ClusterInfo([rogue, *BROKERS])
        )
        network.answer(endpoint, RequestCode.GET_ROUTEINFO_BY_TOPIC, ROUTE)
    for endpoint in (A, B):
        network.answer(endpoint, RequestCode.GET_TOPIC_CONFIG, words.TopicConfigs([FOUR]))
        network.answer(endpoint, RequestCode.UPDATE_AND_CREATE_TOPIC, FOUR)
    assert client.cluster().brokers == BROKERS
    assert list(client.topic_configs("t")) == ["broker-a", "broker-b"]
    assert list(client.put_topic(FOUR)) == ["broker-a", "broker-b"]
    assert "'rogue' of a name server is left out: address '127.0.0.1:66x'" in caplog.text


def test_a_refusal_that_names_a_master_nobody_can_reach_is_told_as_it_is(network, client):
    network.answer(A, RequestCode.GET_TOPIC_CONFIG, NotMaster("no", epoch=1, master="h:66x"))
    with pytest.raises(NotMaster, match="broker-a: no"):
        client.topic_configs("t")


# ---- Listings in pages ---------------------------------------------------------------------

GROUP = words_of_groups.GroupSummary(words_of_groups.GroupConfig("g"))
QUEUE = words_of_groups.QueueProgress("t", 3, 0, 9, 4)
CHANGE = words_of_groups.OffsetChange("t", 3, 0, 9, 0, 9)
ENDLESS = {
    "metrics": (
        RequestCode.GET_BROKER_RUNTIME_INFO,
        words.RuntimeInfo([], 7, 5),
        lambda client: client.role_info(A),
    ),
    "clients": (
        RequestCode.GET_ALL_CLIENTS,
        words_of_groups.AllClients([], True),
        lambda client: client.clients("broker-a"),
    ),
    "clients of a gateway": (
        RequestCode.GET_GATEWAY_CLIENTS,
        GatewayClients([], True),
        lambda client: client.gateway_clients(A),
    ),
    "groups": (
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        words_of_groups.GroupSummaries([GROUP], True),
        lambda client: client.groups(),
    ),
    "progress of all groups": (
        RequestCode.GET_GROUPS_PROGRESS,
        words_of_groups.GroupsProgress(7, [], 5, "t", 1),
        lambda client: client.all_progress(),
    ),
    "progress of one group": (
        RequestCode.GET_CONSUME_STATS,
        words_of_groups.ConsumeStats([QUEUE], True, 0.0, 1),
        lambda client: client.progress("g"),
    ),
    "moved offsets": (
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        words_of_groups.OffsetChanges([CHANGE], 0, True),
        lambda client: client.reset_offset("g", "t", words_of_groups.ResetWhere.LAST),
    ),
}


class Everything(GroupAdmin, BrokerAdmin):
    """All listings in one client."""


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_listing_that_does_not_go_on_is_an_error_and_not_asked_for_ever(network, kind):
    code, page, ask = ENDLESS[kind]
    for endpoint in (A, B):
        network.answer(
            endpoint,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            words_of_groups.GroupSummaries([GROUP]),
        )
        network.answer(endpoint, code, page)
    with (
        Everything("ns-1:1", transport=network) as client,
        pytest.raises(RemoteProtocolError, match="more of its listing"),
    ):
        ask(client)
    assert network.codes().count((A, code)) <= 3
