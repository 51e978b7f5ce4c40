"""The name server's route table: events in, effects out."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.errors import (
    BrokerError,
    InvalidArgument,
    NoPermission,
    StaleEpoch,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.route import (
    BrokerAddress,
    DataVersion,
    Perm,
    RegisterBrokerRequest,
    TopicConfig,
    UnregisterBrokerRequest,
    WipeWritePermRequest,
)
from mqmesh.roles.namesrv.effects import Announce, Persist
from mqmesh.roles.namesrv.route_table import MAX_HINT_TOPICS, MAX_MEMBERS_PER_GROUP, RouteTable

EXPIRE_MS = 120_000
HINTS = "tcp://127.0.0.1:1"


def make_table(**options) -> RouteTable:
    limits = {"broker_expire_ms": EXPIRE_MS, "max_brokers": 8, "max_topic_entries": 1_000}
    return RouteTable(**(limits | options))


class Broker:
    """A broker as its name server sees it."""

    def __init__(
        self, table, name="broker-a", broker_id=0, *, cluster="C", instance=1, perm=6, epoch=0
    ) -> None:
        self.table, self.name, self.id = table, name, broker_id
        self.cluster, self.instance, self.perm = cluster, instance, perm
        self.epoch, self.is_elected = epoch, False
        self.peer = f"{name}/{broker_id}/{instance}".encode()
        self.version = DataVersion(1_000, 0)
        self.address = BrokerAddress(f"{name}:{broker_id + 1}")
        self.topics: list[TopicConfig] = []

    def request(self, topics) -> RegisterBrokerRequest:
        return RegisterBrokerRequest(
            self.cluster,
            self.name,
            self.id,
            self.address,
            self.version,
            topics,
            self.perm,
            self.instance,
            self.epoch,
            self.is_elected,
        )

    def register(self, *topics: TopicConfig | str, now_ms=0):
        self.topics = [TopicConfig(one) if isinstance(one, str) else one for one in topics]
        self.version = DataVersion(1_000, self.version.counter + 1)
        return self.table.on_register(self.request(self.topics), self.peer, now_ms)

    def change(self, *changed: TopicConfig | str, deleted=(), since=None):
        """Register what changed since the version that was registered last, or another one."""
        configs = [TopicConfig(one) if isinstance(one, str) else one for one in changed]
        since = since or self.version
        self.version = DataVersion(1_000, self.version.counter + 1)
        request = msgspec.structs.replace(
            self.request(None), since=since, changed=configs, deleted=list(deleted)
        )
        return self.table.on_register(request, self.peer, 0)

    def heartbeat(self, now_ms=0):
        return self.table.on_register(self.request(None), self.peer, now_ms)

    def unregister(self):
        return self.table.on_unregister(
            UnregisterBrokerRequest(self.cluster, self.name, self.id, self.instance)
        )

    def die(self):
        return self.table.on_disconnect(self.peer)


def announced(effects) -> tuple[set[str], set[str]]:
    """Brokers and topics of all announcements."""
    news = [effect for effect in effects if isinstance(effect, Announce)]
    assert all(one.brokers for one in news)
    return (
        {name for one in news for name in one.brokers},
        {topic for one in news for topic in one.topics},
    )


def queues(table, topic):
    return {data.broker_name: data for data in table.route(topic, HINTS).queues}


def test_a_topic_without_brokers_is_not_found():
    table = make_table()
    with pytest.raises(TopicNotFound, match="no topic 't': no broker runs that this name server"):
        table.route("t", HINTS)
    assert table.brokers() == []
    assert table.topics() == []
    Broker(table).register()
    advice = "no topic 'u' on a broker that runs; `mqmesh topic create 'u'` makes it"
    with pytest.raises(TopicNotFound, match=advice):
        table.route("u", HINTS)
    with pytest.raises(TopicNotFound, match=r"no topic '%RETRY%g'$"):
        table.route("%RETRY%g", HINTS)


def test_a_registered_broker_is_in_the_route_of_its_topics_and_announced():
    table = make_table()
    response, effects = Broker(table).register(TopicConfig("t", 8, 4, Perm.READ_WRITE), "u")
    assert (response.need_topics, response.wiped_write_perm) == (False, False)
    assert announced(effects) == ({"broker-a"}, {"t", "u"})
    route = table.route("t", HINTS)
    assert (route.topic, route.hint_endpoint, route.order) == ("t", HINTS, False)
    (data,) = route.queues
    assert (data.broker_name, data.read_queue_nums, data.write_queue_nums, data.perm) == (
        "broker-a",
        8,
        4,
        6,
    )
    (broker,) = route.brokers
    assert (broker.cluster_name, broker.broker_name) == ("C", "broker-a")
    assert broker.addresses == {0: BrokerAddress("broker-a:1")}
    assert table.topics() == ["t", "u"]


def test_a_heartbeat_without_topics_is_enough_while_the_version_is_the_same():
    table = make_table()
    broker = Broker(table)
    broker.register("t")
    response, effects = broker.heartbeat()
    assert not response.need_topics
    assert effects == []


def test_a_heartbeat_of_another_version_asks_for_the_topics_until_they_come():
    table = make_table()
    broker = Broker(table)
    broker.register("t")
    broker.version = DataVersion(1_000, 99)
    assert broker.heartbeat()[0].need_topics
    assert broker.heartbeat()[0].need_topics
    assert queues(table, "t"), "the old topics stay until then"
    response, effects = broker.register("u")
    assert not response.need_topics
    assert announced(effects) == ({"broker-a"}, {"t", "u"})
    assert table.topics() == ["u"]


def test_an_unknown_broker_that_sends_no_topics_is_asked_for_them():
    table = make_table()
    broker = Broker(table)
    response, effects = broker.heartbeat()
    assert response.need_topics
    assert effects == []
    assert [one.broker_name for one in table.brokers()] == ["broker-a"]
    assert announced(broker.register("t")[1]) == ({"broker-a"}, {"t"})


def test_the_same_topics_again_are_no_news():
    table = make_table()
    broker = Broker(table)
    broker.register("t", "u")
    assert broker.register("t", "u")[1] == []


def test_only_changed_topics_are_announced():
    table = make_table()
    broker = Broker(table)
    broker.register("t", "u", "v")
    _, effects = broker.register("t", TopicConfig("u", 16, 16), "w")
    assert announced(effects) == ({"broker-a"}, {"u", "v", "w"})
    assert queues(table, "u")["broker-a"].write_queue_nums == 16


def test_a_new_address_or_permission_concerns_all_topics():
    table = make_table()
    broker = Broker(table)
    broker.register("t", "u")
    broker.address = BrokerAddress("elsewhere:1")
    assert announced(broker.heartbeat()[1]) == ({"broker-a"}, {"t", "u"})
    broker.perm = Perm.READ
    assert announced(broker.heartbeat()[1]) == ({"broker-a"}, {"t", "u"})
    assert queues(table, "t")["broker-a"].perm == Perm.READ


def test_too_many_topics_are_announced_without_their_names():
    table = make_table()
    broker = Broker(table)
    _, effects = broker.register(*[f"t{number}" for number in range(MAX_HINT_TOPICS + 1)])
    assert effects == [Announce(frozenset({"broker-a"}), frozenset())]
    _, effects = broker.register(*[f"t{number}" for number in range(MAX_HINT_TOPICS)])
    assert announced(effects) == ({"broker-a"}, {f"t{MAX_HINT_TOPICS}"})


def test_a_broker_without_topics_is_no_news_but_in_the_cluster():
    table = make_table()
    assert Broker(table).register()[1] == []
    assert [one.broker_name for one in table.brokers()] == ["broker-a"]


@pytest.mark.parametrize("end", ["unregister", "die"])
def test_a_broker_that_goes_is_in_no_route_at_once(end):
    table = make_table()
    one, other = Broker(table, "broker-a"), Broker(table, "broker-b")
    one.register("t", "u")
    other.register("t")
    assert announced(getattr(one, end)()) == ({"broker-a"}, {"t", "u"})
    assert set(queues(table, "t")) == {"broker-b"}
    assert table.topics() == ["t"]
    assert [broker.broker_name for broker in table.brokers()] == ["broker-b"]
    assert getattr(one, end)() == []


def test_a_silent_broker_is_dropped_when_its_time_is_over():
    table = make_table()
    one, other = Broker(table, "broker-a"), Broker(table, "broker-b")
    one.register("t", now_ms=0)
    other.register("t", now_ms=0)
    other.heartbeat(now_ms=1)
    assert table.tick(EXPIRE_MS - 1) == []
    assert announced(table.tick(EXPIRE_MS)) == ({"broker-a"}, {"t"})
    assert set(queues(table, "t")) == {"broker-b"}
    assert announced(table.tick(EXPIRE_MS + 1)) == ({"broker-b"}, {"t"})
    assert one.die() == [], "its connection breaks later"


def test_a_dropped_broker_that_speaks_again_is_asked_for_its_topics():
    table = make_table()
    broker = Broker(table)
    broker.register("t")
    table.tick(EXPIRE_MS)
    assert broker.heartbeat(now_ms=EXPIRE_MS)[0].need_topics


def test_the_end_of_an_old_life_does_not_remove_the_new_one():
    table = make_table()
    old = Broker(table, instance=1)
    old.register("t")
    old.die()
    new = Broker(table, instance=2)
    new.register("t")
    assert old.unregister() == []
    assert old.die() == []
    assert set(queues(table, "t")) == {"broker-a"}


def test_the_end_of_an_old_connection_does_not_remove_one_that_registered_anew():
    table = make_table()
    broker = Broker(table)
    broker.register("t")
    old_peer, broker.peer = broker.peer, b"another connection"
    assert broker.heartbeat()[0].need_topics is False
    assert table.on_disconnect(old_peer) == []
    assert set(queues(table, "t")) == {"broker-a"}
    assert announced(broker.die()) == ({"broker-a"}, {"t"})


def test_a_second_live_process_of_the_same_name_and_id_is_refused():
    table = make_table()
    first, second = Broker(table, instance=1), Broker(table, instance=2)
    first.register("t")
    with pytest.raises(NoPermission, match="another live process") as caught:
        second.register("t")
    assert caught.value.retry_after_ms > 0
    assert queues(table, "t"), "the first is undisturbed"
    assert not first.heartbeat()[0].need_topics
    first.die()
    assert announced(second.register("t")[1]) == ({"broker-a"}, {"t"})


def test_a_group_belongs_to_one_cluster():
    table = make_table()
    Broker(table, cluster="C").register("t")
    with pytest.raises(NoPermission, match="cluster"):
        Broker(table, broker_id=1, cluster="D").register("t")


def test_many_brokers_may_register_by_one_connection():
    table = make_table()
    one, other = Broker(table, "broker-a"), Broker(table, "broker-b")
    other.peer = one.peer
    one.register("t")
    other.register("t")
    assert announced(one.die()) == ({"broker-a", "broker-b"}, {"t"})
    assert table.topics() == []


# ---- Master and slaves -------------------------------------------------------------------


def test_a_group_has_the_addresses_of_all_its_members():
    table = make_table()
    Broker(table, broker_id=1).register("t")
    Broker(table, broker_id=0).register("t")
    (broker,) = table.route("t", HINTS).brokers
    assert list(broker.addresses) == [0, 1]


def test_the_masters_topics_count_and_without_it_those_of_a_slave():
    table = make_table()
    master, slave = Broker(table), Broker(table, broker_id=1)
    slave.register("old")
    assert table.topics() == ["old"]
    assert announced(master.register("new")[1]) == ({"broker-a"}, {"old", "new"})
    assert table.topics() == ["new"]
    assert announced(master.die()) == ({"broker-a"}, {"old", "new"})
    assert table.topics() == ["old"]


def test_a_group_without_master_can_only_be_read():
    table = make_table()
    master, slave = Broker(table), Broker(table, broker_id=1)
    master.register("t")
    assert announced(slave.register("t")[1]) == ({"broker-a"}, {"t"})
    assert queues(table, "t")["broker-a"].perm == Perm.READ_WRITE
    assert announced(master.die()) == ({"broker-a"}, {"t"})
    assert queues(table, "t")["broker-a"].perm == Perm.READ
    assert announced(slave.die()) == ({"broker-a"}, {"t"})
    assert table.topics() == []


# ---- Ordered topics ----------------------------------------------------------------------


def test_an_ordered_topic_keeps_its_queues_while_a_broker_is_down():
    table = make_table()
    one, other = Broker(table, "broker-a"), Broker(table, "broker-b")
    ordered = TopicConfig("o", 4, 4, order=True)
    assert Persist() in one.register(ordered, "t")[1]
    other.register(ordered)
    before = table.route("o", HINTS)
    assert before.order
    assert announced(one.die()) == ({"broker-a"}, {"o", "t"})
    after = table.route("o", HINTS)
    assert after.queues == before.queues
    assert [broker.broker_name for broker in after.brokers] == ["broker-b"]
    assert table.topics() == ["o"]
    other.die()
    assert table.route("o", HINTS).brokers == []
    assert announced(one.register(ordered)[1]) == ({"broker-a"}, {"o"})


def test_a_broker_that_returns_without_its_ordered_topic_ends_it():
    table = make_table()
    broker = Broker(table)
    broker.register(TopicConfig("o", order=True))
    broker.die()
    assert broker.heartbeat()[0].need_topics
    assert table.topics() == ["o"]
    assert Persist() in broker.register("t")[1]
    assert table.topics() == ["t"]


def test_ordered_topics_survive_a_restart_of_the_name_server():
    table = make_table()
    Broker(table, "broker-a").register(TopicConfig("o", 4, 4, order=True), "t")
    gone = Broker(table, "broker-b")
    gone.register(TopicConfig("o", 2, 2, order=True))
    gone.die()
    again = make_table(ordered=table.ordered())
    assert {name: data.write_queue_nums for name, data in queues(again, "o").items()} == {
        "broker-a": 4,
        "broker-b": 2,
    }
    assert again.topics() == ["o"]
    Broker(again, "broker-a").register(TopicConfig("o", 4, 4, order=True))
    assert [one.broker_name for one in again.route("o", HINTS).brokers] == ["broker-a"]


def test_an_ordered_topic_of_a_group_without_master_keeps_its_write_permission():
    table = make_table()
    master, slave = Broker(table), Broker(table, broker_id=1)
    for broker in (master, slave):
        broker.register(TopicConfig("o", order=True))
    master.die()
    assert queues(table, "o")["broker-a"].perm == Perm.READ_WRITE


def test_what_stays_of_absent_brokers_is_bounded():
    table = make_table(max_brokers=2)
    for number in range(5):
        broker = Broker(table, f"broker-{number}")
        broker.register(TopicConfig("o", order=True))
        broker.die()
    assert set(queues(table, "o")) == {"broker-3", "broker-4"}


# ---- Administration ----------------------------------------------------------------------


def test_a_deleted_topic_has_no_route_until_a_broker_that_has_it_says_so():
    table = make_table()
    broker = Broker(table)
    broker.register("t", "u")
    assert announced(table.on_delete_topic("t")) == ({"broker-a"}, {"t"})
    assert table.topics() == ["u"]
    assert table.on_delete_topic("t") == []
    assert broker.heartbeat()[0].need_topics
    broker.register("t", "u")
    assert table.topics() == ["t", "u"]


def test_deleting_ends_the_ordered_topic_of_an_absent_broker():
    table = make_table()
    broker = Broker(table)
    broker.register(TopicConfig("o", order=True), TopicConfig("p", order=True))
    broker.die()
    for topic in ("o", "p"):
        assert Persist() in table.on_delete_topic(topic)
    assert table.topics() == []
    assert table.ordered() == []
    broker.register("t")
    broker.die()


def test_a_drained_broker_can_only_be_read_and_is_told_so():
    table = make_table()
    broker = Broker(table)
    broker.register("t", "u")
    response, effects = table.on_wipe_write_perm(WipeWritePermRequest("broker-a"))
    assert response.topic_count == 2
    assert announced(effects) == ({"broker-a"}, {"t", "u"})
    assert Persist() in effects
    assert queues(table, "t")["broker-a"].perm == Perm.READ
    assert broker.heartbeat()[0].wiped_write_perm
    assert table.on_wipe_write_perm(WipeWritePermRequest("broker-a"))[1] == []
    _, effects = table.on_wipe_write_perm(WipeWritePermRequest("broker-a", restore=True))
    assert announced(effects) == ({"broker-a"}, {"t", "u"})
    assert queues(table, "t")["broker-a"].perm == Perm.READ_WRITE
    assert not broker.heartbeat()[0].wiped_write_perm
    assert table.on_wipe_write_perm(WipeWritePermRequest("broker-a", restore=True))[1] == []


def test_draining_survives_the_broker_and_the_name_server():
    table = make_table()
    broker = Broker(table)
    broker.register("t")
    table.on_wipe_write_perm(WipeWritePermRequest("broker-a"))
    broker.die()
    assert broker.register("t")[0].wiped_write_perm
    again = make_table(drained=table.drained())
    assert Broker(again).register("t")[0].wiped_write_perm
    assert queues(again, "t")["broker-a"].perm == Perm.READ


def test_draining_somebody_unknown_is_refused():
    with pytest.raises(BrokerError) as caught:
        make_table().on_wipe_write_perm(WipeWritePermRequest("broker-z"))
    assert caught.value.code == ResponseCode.QUERY_NOT_FOUND


# ---- Limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", "x" * 256, "é"])
def test_illegal_names_are_refused(name):
    table = make_table()
    with pytest.raises(InvalidArgument):
        Broker(table, name).register("t")
    with pytest.raises(InvalidArgument):
        Broker(table, cluster=name).register("t")
    with pytest.raises(InvalidArgument):
        Broker(table).register(name)
    assert table.brokers() == []
    assert table.topics() == []


def test_a_topic_named_twice_is_refused():
    with pytest.raises(InvalidArgument, match="twice"):
        Broker(make_table()).register("t", "t")


def test_more_groups_than_the_limit_are_refused_by_name_of_the_setting():
    table = make_table(max_brokers=2)
    first = Broker(table, "broker-a")
    first.register("t")
    Broker(table, "broker-b").register("t")
    with pytest.raises(SystemBusy, match="max_brokers = 2"):
        Broker(table, "broker-c").register("t")
    first.register("u")
    first.die()
    Broker(table, "broker-c").register("t")


def test_more_topics_than_the_limit_are_refused_and_the_old_ones_stay():
    table = make_table(max_topic_entries=3)
    one, other = Broker(table, "broker-a"), Broker(table, "broker-b")
    one.register("t", "u")
    other.register("t")
    with pytest.raises(SystemBusy, match="max_topic_entries = 3"):
        other.register("t", "u")
    assert set(queues(table, "u")) == {"broker-a"}
    one.register("x")
    other.register("t", "u")


def test_a_group_has_a_limited_number_of_members():
    table = make_table()
    for number in range(MAX_MEMBERS_PER_GROUP):
        Broker(table, broker_id=number).register("t")
    with pytest.raises(SystemBusy):
        Broker(table, broker_id=MAX_MEMBERS_PER_GROUP).register("t")


def test_a_master_of_a_later_epoch_takes_the_place_of_one_that_is_still_connected():
    table = make_table()
    old, new = Broker(table, epoch=1), Broker(table, instance=2, epoch=2)
    old.address = BrokerAddress("old:1")
    old.register("t")
    new.register("t")
    (data,) = table.route("t", HINTS).brokers
    assert (data.addresses[0], data.epoch) == (new.address, 2)
    with pytest.raises(StaleEpoch, match="epoch 1; the group has had a master of epoch 2"):
        old.heartbeat()
    table.on_disconnect(old.peer)
    assert table.route("t", HINTS).brokers == [data], "its end is not the new one's"


def test_an_old_master_stays_out_while_anybody_of_the_group_is_there():
    table = make_table()
    new, follower = Broker(table, instance=2, epoch=2), Broker(table, broker_id=1, epoch=2)
    new.register("t")
    follower.register("t")
    table.on_disconnect(new.peer)
    with pytest.raises(StaleEpoch):
        Broker(table, instance=3, epoch=1).register("t")
    assert 0 not in table.route("t", HINTS).brokers[0].addresses
    Broker(table, instance=4, epoch=2).register("t")  # the new one again
    assert 0 in table.route("t", HINTS).brokers[0].addresses


def test_of_two_live_masters_of_one_epoch_the_second_is_refused():
    table = make_table()
    Broker(table, epoch=2).register("t")
    with pytest.raises(NoPermission, match="another live process"):
        Broker(table, instance=2, epoch=2).register("t")


@pytest.mark.parametrize("is_elected", [False, True])
def test_a_master_says_whether_its_group_elects_it(is_elected):
    table = make_table()
    master = Broker(table, epoch=1)
    master.is_elected = is_elected
    master.register("t")
    assert table.route("t", HINTS).brokers[0].is_elected is is_elected


def test_followers_say_nothing_of_the_groups_epoch():
    table = make_table()
    Broker(table, broker_id=1, epoch=9).register("t")
    Broker(table, epoch=2).register("t")
    assert table.route("t", HINTS).brokers[0].epoch == 2


def test_a_change_names_the_topics_that_changed_and_only_those_are_announced():
    table = make_table()
    broker = Broker(table)
    broker.register("t", "u", "v")
    response, effects = broker.change(TopicConfig("t", 8, 8), "new", "v", deleted=["u", "never"])
    assert not response.need_topics
    assert announced(effects) == ({"broker-a"}, {"t", "new", "u"}), "v is as it was"
    assert table.topics() == ["new", "t", "v"]
    assert queues(table, "t")["broker-a"].read_queue_nums == 8
    assert not broker.heartbeat()[0].need_topics, "the name server has this version now"
    assert broker.register("t")[1], "the whole table may come at any time"
    assert table.topics() == ["t"]


def test_a_change_of_a_followers_topics_changes_nothing_for_clients():
    table = make_table()
    master, follower = Broker(table), Broker(table, broker_id=1, instance=2)
    master.register("t")
    follower.register("t", "side")
    assert announced(follower.change("early", deleted=["t", "side"])[1]) == (set(), set())
    assert table.topics() == ["t"]
    master.die()
    assert table.topics() == ["early"], "it is all that there is now"


@pytest.mark.parametrize("is_new_life", [False, True])
def test_a_change_of_a_version_that_is_not_here_asks_for_the_whole_table(is_new_life):
    table = make_table()
    broker = Broker(table)
    broker.register("t")
    peer, since = broker.peer, DataVersion(1_000, 77)
    if is_new_life:
        broker, since = Broker(table, instance=2), broker.version
        broker.peer = peer
    response, effects = broker.change("new", since=since)
    assert response.need_topics
    assert table.topics() == ["t"]
    assert announced(effects)[1] <= {"t"}
    assert broker.heartbeat()[0].need_topics, "the version that was announced is not believed"
    broker.register("t", "new")
    assert table.topics() == ["new", "t"]


def test_a_change_of_a_follower_leaves_its_masters_topics_alone():
    table = make_table()
    master, follower = Broker(table), Broker(table, broker_id=1)
    master.register("t", "u")
    follower.register("t", "u", "old")
    assert follower.change("new", deleted=["u", "old"])[1] == []
    assert table.topics() == ["t", "u"]
    assert set(queues(table, "u")) == {"broker-a"}
    master.die()
    assert table.topics() == ["new", "t"], "now the follower is the one to read from"


def test_a_change_is_checked_as_a_table_is():
    table = make_table(max_topic_entries=3)
    broker = Broker(table)
    broker.register("t", "u")
    with pytest.raises(InvalidArgument):
        broker.change("b@d name")
    broker.register("t", "u")
    with pytest.raises(SystemBusy, match="max_topic_entries = 3"):
        broker.change("v", "w")
    assert table.topics() == ["t", "u"]


def test_changed_ordered_topics_are_saved():
    table = make_table()
    broker = Broker(table)
    broker.register("t")
    assert Persist() not in broker.change("u")[1]
    assert Persist() in broker.change(TopicConfig("u", order=True))[1]
    assert Persist() in broker.change(deleted=["u"])[1]
    assert table.ordered() == []


def test_the_work_of_a_change_does_not_grow_with_the_topics_of_the_broker():
    looked_up = []

    class Name(str):
        """A name that notes when it is looked up."""

        __slots__ = ()

        def __hash__(self):
            looked_up.append(str(self))
            return super().__hash__()

    table = make_table()
    broker = Broker(table)
    broker.register(*(TopicConfig(Name(f"t{number}")) for number in range(100)))
    looked_up.clear()
    assert announced(broker.change("new", deleted=["t7"])[1])[1] == {"new", "t7"}
    assert set(looked_up) <= {"t7"}
    assert len(table.topics()) == 100


@pytest.mark.parametrize(
    "address",
    [
        BrokerAddress("127.0.0.1:66x"),
        BrokerAddress("127.0.0.1:0"),
        BrokerAddress("127.0.0.1:65536"),
        BrokerAddress("127.0.0.1:\u0664\u0664"),
        BrokerAddress("127.0.0.1"),
        BrokerAddress(":10911"),
        BrokerAddress("tcp://127.0.0.1:10911"),
        BrokerAddress("two words:10911"),
        BrokerAddress("esc\x1b[2J:10911"),
        BrokerAddress("[::1:10911"),
        BrokerAddress("h" * 256 + ":1"),
        BrokerAddress(""),
        BrokerAddress("h:1", ipc="relative/path"),
        BrokerAddress("h:1", ipc="/tmp/\x1b[2J"),
        BrokerAddress("h:1", host_id="a\nb"),
    ],
)
def test_an_address_that_nobody_can_connect_to_is_refused(address):
    table = make_table()
    Broker(table, "broker-b").register("t")
    broker = Broker(table)
    broker.address = address
    with pytest.raises(InvalidArgument):
        broker.register("t")
    assert [one.broker_name for one in table.brokers()] == ["broker-b"]


@pytest.mark.parametrize("tcp", ["10.0.0.7:10911", "my_host-1.example.:1", "[fe80::1]:65535"])
def test_addresses_are_names_and_numbers(tcp):
    table = make_table()
    broker = Broker(table)
    broker.address = BrokerAddress(tcp, "/run/a b/broker.sock", "0123456789abcdef")
    broker.register("t")
    assert table.brokers()[0].addresses == {0: broker.address}
