"""Consumer groups for administrators."""

from __future__ import annotations

import pytest

from mqmesh.errors import (
    GroupNotFound,
    InvalidArgument,
    NoPermission,
    OffsetIllegal,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import SCHEDULE_TOPIC
from mqmesh.protocol.command import ANYBODY, Principal, decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import (
    MAX_GROUPS_PER_ANSWER,
    AllClients,
    AllClientsRequest,
    CloneOffsetRequest,
    ConsumerConnections,
    ConsumerConnectionsRequest,
    ConsumerOffsetReset,
    ConsumeStats,
    ConsumeStatsRequest,
    DeleteGroupRequest,
    GetGroupsRequest,
    GroupConfig,
    GroupNames,
    GroupsProgress,
    GroupsProgressRequest,
    GroupSummaries,
    OffsetChanges,
    ProducerConnections,
    ProducerConnectionsRequest,
    ResetOffsetRequest,
    TopicConsumersRequest,
    TopicProgress,
    UpdateGroupRequest,
)
from mqmesh.protocol.membership import (
    ConsumerData,
    HeartbeatRequest,
    HeartbeatResponse,
    Subscription,
    TopicConsumption,
)
from mqmesh.protocol.pulling import (
    PullRequest,
    PullResponse,
    PullStatus,
    QueueOffsetEntry,
    UpdateConsumerOffsetRequest,
)
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.group_state.group_pulls import ACTIVE_MS
from mqmesh.roles.listings import LISTINGS
from mqmesh.sdk.client.namespaced import ClientNames


def beat(stage, client_id, *expressions, group="g", model="CLUSTERING", peer=None, **fields):
    subscriptions = [Subscription("t", one) for one in expressions or ("*",)]
    heartbeat = HeartbeatRequest(
        client_id,
        consumers=[ConsumerData(group, model, "LAST_OFFSET", subscriptions)],
        **fields,
    )
    peer = client_id.encode() if peer is None else peer
    return stage.ask(RequestCode.HEART_BEAT, heartbeat, HeartbeatResponse, peer=peer)


def commit(stage, offset, queue_id=0, group="g", topic="t"):
    update = UpdateConsumerOffsetRequest(group, "c", [QueueOffsetEntry(topic, queue_id, offset)])
    stage.ask(RequestCode.UPDATE_CONSUMER_OFFSET, update)


def stats(stage, **query):
    return stage.ask(RequestCode.GET_CONSUME_STATS, ConsumeStatsRequest("g", **query), ConsumeStats)


def groups(stage, **query):
    request = GetGroupsRequest(**query)
    return stage.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, request, GroupSummaries)


def reset(stage, where, **fields):
    request = ResetOffsetRequest("g", "t", where, **fields)
    return stage.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, request, OffsetChanges)


def delete(stage, **options):
    stage.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroupRequest("g", **options))


@pytest.fixture
def filled(stage):
    """Ten messages in queue 0 of topic t, a second between each; four queues."""
    for number in range(10):
        stage.send(stage.batch(bodies=(b"%d" % number,)))
        stage.clock.advance(1_000)
    return stage


# ---- Settings ---------------------------------------------------------------------------------


def test_settings_are_answered_when_they_are_on_disk(stage):
    config = GroupConfig("g", retry_max_times=2)
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    assert stage.ask(code, UpdateGroupRequest(config), GroupConfig) == config
    assert stage.saved == ["groups"]
    assert stage.ask(code, UpdateGroupRequest(config), GroupConfig) == config
    assert stage.saved == ["groups"]
    with pytest.raises(InvalidArgument):
        stage.ask(code, UpdateGroupRequest(config, must_be_new=True))


def test_a_heartbeat_and_a_commit_make_a_group(filled):
    beat(filled, "c", group="one")
    commit(filled, 1, group="two")
    filled.pull()  # as group g, which a pull alone does not make
    found = groups(filled)
    assert [one.config.group for one in found.groups] == ["one", "two"]
    assert filled.saved.count("groups") == 2


def test_a_client_makes_so_many_groups_a_minute_by_using_them(make_stage):
    stage = make_stage(auto_groups_per_minute=2)
    stage.send(stage.batch())
    one = {"peer": b"peer"}
    beat(stage, "c", group="one", **one)
    commit(stage, 1, group="two")
    uses = lambda: beat(stage, "c", group="three", **one), lambda: commit(stage, 1, group="three")
    for use in uses:
        with pytest.raises(SystemBusy, match=r"2 a minute \(auto_groups_per_minute\)") as refused:
            use()
    beat(stage, "c", group="two", **one)
    stage.clock.advance(refused.value.retry_after_ms)
    beat(stage, "c", group="three", **one)


def test_without_auto_creation_unknown_groups_are_refused(make_stage):
    stage = make_stage(auto_create_subscription_group=False)
    stage.send(stage.batch())
    for use in (lambda: beat(stage, "c"), lambda: commit(stage, 1), stage.pull):
        with pytest.raises(GroupNotFound, match="auto_create_subscription_group"):
            use()
    assert stage.features.state.groups.client_count == 0
    stage.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, UpdateGroupRequest(GroupConfig("g")))
    beat(stage, "c")
    commit(stage, 1)
    assert stage.pull()[1] == [b"body"]


def test_a_group_that_may_not_consume_gets_nothing(filled):
    filled.features.state.group_table.update(GroupConfig("g", consume_enable=False))
    with pytest.raises(NoPermission):
        filled.pull()
    filled.features.state.group_table.update(GroupConfig("g", consume_broadcast_enable=False))
    filled.pull()
    beat(filled, "c", model="BROADCASTING")
    with pytest.raises(NoPermission):
        filled.pull()


def test_a_pull_that_waits_gets_nothing_once_its_group_may_not_consume(filled):
    waiting = filled.begin_pull(queue_offset=10, suspend_timeout_ms=9_000)
    filled.features.state.group_table.update(GroupConfig("g", consume_enable=False))
    filled.send(filled.batch())
    with pytest.raises(NoPermission):
        filled.pulled(waiting)


def test_members_are_told_of_each_other_unless_the_group_says_no(stage):
    beat(stage, "a")
    assert stage.notices
    stage.notices.clear()
    stage.features.state.group_table.update(
        GroupConfig("g", notify_consumer_ids_changed_enable=False)
    )
    beat(stage, "b")
    assert stage.notices == []


# ---- Lists ------------------------------------------------------------------------------------


def test_a_group_in_a_line(filled):
    commit(filled, 4)
    beat(filled, "a")
    beat(filled, "b", "x")
    for topic, count in (("%DLQ%g", 3), ("%RETRY%g", 2)):
        filled.features.state.topics.set(TopicConfig(topic, 1, 1), 1)
        filled.features.writes.put_encoded(
            [filled.batch(topic, bodies=[b"x"] * count)], lambda _: None
        )
    filled.features.state.admission.readable_ms = filled.clock.monotonic_ms()
    filled.end_tick()
    (one,) = groups(filled, group="g").groups
    assert (one.members, one.message_model, one.topics) == (2, "CLUSTERING", ["t"])
    assert (one.lag, one.dead, one.retrying, one.differing) == (8, 3, 2, 1)
    assert groups(filled, group="unknown").groups == []


def test_a_group_that_fails_is_told_by_its_members(stage):
    own = TopicConsumption("g", "t", recent_ok=1, recent_failed=59, recent_ms=600_000)
    retries = TopicConsumption("g", "%RETRY%g", recent_failed=20, recent_ms=600_000)
    data = ConsumerData(
        "g", "CLUSTERING", "LAST_OFFSET", [Subscription("t"), Subscription("%RETRY%g")]
    )
    stats = [own, retries, TopicConsumption("other", "t", recent_failed=9)]
    heartbeat = HeartbeatRequest("a", consumers=[data], stats=stats)
    stage.ask(RequestCode.HEART_BEAT, heartbeat, HeartbeatResponse, peer=b"a")
    beat(stage, "b", stats=[TopicConsumption("g", "t", recent_failed=6, recent_ms=60_000)])
    (one,) = groups(stage, group="g").groups
    assert (one.failures.deliveries, one.failures.failed) == (86, 85)
    assert one.failures.failed_per_s == pytest.approx(79 / 600 + 6 / 60)


def test_lists_come_in_pages(stage):
    for number in range(300):
        stage.features.state.group_table.note_used(f"g{number:03d}")
    first = groups(stage)
    assert (len(first.groups), first.more) == (256, True)
    rest = groups(stage, after=first.groups[-1].config.group)
    assert (len(rest.groups), rest.more) == (44, False)
    names = [one.config.group for one in first.groups + rest.groups]
    assert names == sorted(set(names))


def test_members_and_how_they_differ(stage):
    beat(stage, "a", language="PYTHON", version="1")
    assert beat(stage, "b").warnings == []
    assert "b" not in str(beat(stage, "c", "x").warnings[0].split("member ")[0])
    stage.clock.advance(500)
    stage.features.state.groups.on_disconnect(stage.peer(b"b"), stage.clock.monotonic_ms())
    request = ConsumerConnectionsRequest("g")
    found = stage.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, request, ConsumerConnections)
    assert [(one.client_id, one.connected, one.silent_ms) for one in found.members] == [
        ("a", True, 500),
        ("b", False, 500),
        ("c", True, 500),
    ]
    assert [one.difference for one in found.members] == ["", "", "topic t: 'x' instead of '*'"]
    with pytest.raises(GroupNotFound):
        stage.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerConnectionsRequest("nobody"))


def test_producers(stage):
    stage.ask(RequestCode.HEART_BEAT, HeartbeatRequest("p", ["shop"]))
    request = ProducerConnectionsRequest("shop")
    found = stage.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, request, ProducerConnections)
    assert [one.client_id for one in found.members] == ["p"]


def test_who_reads_a_topic(filled):
    commit(filled, 4, group="stopped")
    beat(filled, "c", group="running")
    request = TopicConsumersRequest("t")
    found = filled.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, request, GroupNames)
    assert found.groups == ["running", "stopped"]


# ---- Progress ---------------------------------------------------------------------------------


def test_progress_of_each_queue(filled):
    commit(filled, 4)
    filled.pull(queue_offset=4, max_bytes=1)
    found = stats(filled)
    first, second = found.queues[:2]
    assert (first.topic, first.queue_id, first.consumer_offset, first.pull_offset) == ("t", 0, 4, 5)
    assert (first.min_queue_offset, first.max_queue_offset) == (0, 10)
    assert found.now_ms - first.oldest_timestamp == 6_000
    assert (second.consumer_offset, second.pull_offset, second.oldest_timestamp) == (-1, -1, 0)
    assert found.consume_tps == 1.0
    commit(filled, 10)
    assert stats(filled, topic="t").queues[0].oldest_timestamp == 0


def test_what_the_system_holds_back_is_no_lag(filled):
    for topic in (SCHEDULE_TOPIC, "RMQ_SYS_TRANS_HALF_TOPIC", "%DLQ%g"):
        filled.features.state.topics.set(TopicConfig(topic, 1, 1), 1)
        filled.features.state.committed.commit("g", topic, 0, 0)
    filled.features.state.topics.set(TopicConfig("%RETRY%g", 1, 1), 1)
    commit(filled, 4)
    assert {one.topic for one in stats(filled).queues} == {"t", "%RETRY%g"}
    assert groups(filled, group="g").groups[0].topics == ["t"]


def test_progress_comes_in_pages(filled):
    filled.features.state.topics.set(TopicConfig("t", 300, 300), 1)
    filled.features.state.topics.set(TopicConfig("u", 3, 3), 1)
    commit(filled, 4)
    commit(filled, 0, topic="u")
    found, after = [], {}
    while True:
        page = stats(filled, **after)
        found += [(one.topic, one.queue_id) for one in page.queues]
        if not page.more:
            break
        after = {"after_topic": found[-1][0], "after_queue_id": found[-1][1]}
    assert found == [*(("t", n) for n in range(300)), *(("u", n) for n in range(3))]
    with pytest.raises(TopicNotFound):
        stats(filled, topic="unknown")


# ---- Offsets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "fields", "wanted"),
    [
        ("FIRST", {}, 0),
        ("LAST", {}, 10),
        ("TIMESTAMP", {"timestamp_ms": 0}, 0),
        ("OFFSET", {"queue_id": 0, "queue_offset": 7}, 7),
    ],
)
def test_a_group_goes_where_it_is_sent(filled, where, fields, wanted):
    commit(filled, 4)
    filled.saved.clear()
    preview = reset(filled, where, dry_run=True, **fields)
    assert filled.features.state.committed.query("g", "t", 0) == 4
    assert "offsets" not in filled.saved
    assert reset(filled, where, **fields) == preview
    change = preview.queues[0]
    assert (change.old_offset, change.new_offset) == (4, wanted)
    assert (change.min_queue_offset, change.max_queue_offset) == (0, 10)
    assert filled.features.state.committed.query("g", "t", 0) == wanted
    assert filled.saved[-1] == "offsets"


@pytest.mark.parametrize(
    ("where", "fields", "error"),
    [
        ("OFFSET", {"queue_id": 0, "queue_offset": 11}, OffsetIllegal),
        ("OFFSET", {"queue_id": 0}, OffsetIllegal),
        ("OFFSET", {"queue_offset": 5}, InvalidArgument),
        ("MIDDLE", {}, InvalidArgument),
        ("FIRST", {"queue_id": 4}, InvalidArgument),
    ],
)
def test_a_place_that_is_none_changes_nothing(filled, where, fields, error):
    commit(filled, 4)
    with pytest.raises(error):
        reset(filled, where, **fields)
    assert filled.features.state.committed.query("g", "t", 0) == 4


def test_topics_of_many_queues_are_done_in_pieces(filled):
    filled.features.state.topics.set(TopicConfig("t", 300, 300), 1)
    first = reset(filled, "LAST")
    assert (len(first.queues), first.more) == (256, True)
    rest = reset(filled, "LAST", after_queue_id=first.queues[-1].queue_id)
    assert ([one.queue_id for one in rest.queues], rest.more) == (list(range(256, 300)), False)


def test_a_running_consumer_is_told_and_its_old_commits_do_not_count(filled):
    beat(filled, "c")
    commit(filled, 10)
    waiting = filled.begin_pull(queue_offset=10, suspend_timeout_ms=9_000)
    other = filled.begin(
        RequestCode.PULL_MESSAGE,
        _pull("other", 10),
    )
    filled.notices.clear()
    assert reset(filled, "FIRST", queue_id=0).members_notified == 1
    ((peer, code, header),) = filled.notices
    assert (peer, code) == (b"c", RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
    assert decode_header(ConsumerOffsetReset, header).queues == [QueueOffsetEntry("t", 0, 0)]
    told = filled.answer(waiting, PullResponse)
    assert (told.status, told.next_queue_offset) == (PullStatus.OFFSET_RESET, 0)
    assert other not in filled.answers  # another group's pull waits on
    with pytest.raises(OffsetIllegal, match="from before"):
        commit(filled, 10)
    assert filled.features.state.committed.query("g", "t", 0) == 0
    assert filled.pull()[1][0] == b"0"
    commit(filled, 3)
    assert filled.features.state.committed.query("g", "t", 0) == 3


def _pull(group, offset):
    return PullRequest(group, "t", 0, offset, suspend_timeout_ms=9_000)


def test_nobody_is_fenced_off_when_the_group_does_not_run(filled):
    commit(filled, 10)
    reset(filled, "FIRST")
    commit(filled, 2)
    assert filled.pull()[0].status == PullStatus.FOUND


def test_a_consumer_without_heartbeats_is_known_by_its_pulls(filled):
    filled.pull()
    commit(filled, 10)
    reset(filled, "FIRST")
    assert filled.pull(queue_offset=10)[0].status == PullStatus.OFFSET_RESET


def test_a_consumer_without_heartbeats_is_known_however_long_its_pull_found_nothing(filled):
    filled.pull()
    commit(filled, 10)
    filled.clock.advance(10 * ACTIVE_MS)
    waiting = filled.begin_pull(queue_offset=10, suspend_timeout_ms=9_000)
    reset(filled, "FIRST")
    told = filled.answer(waiting, PullResponse)
    assert (told.status, told.next_queue_offset) == (PullStatus.OFFSET_RESET, 0)
    with pytest.raises(OffsetIllegal, match="from before"):
        commit(filled, 10)


def test_of_a_broadcasting_group_no_lag_is_known(filled):
    beat(filled, "c", model="BROADCASTING")
    filled.pull(queue_offset=4, max_bytes=1)
    (summary,) = groups(filled).groups
    assert (summary.message_model, summary.lag) == ("BROADCASTING", 0)
    (found,) = all_groups(filled)[0]
    (topic,) = [one for one in found.topics if one.topic == "t"]
    assert topic == TopicProgress("t", 10, 0, 0)


def test_a_broadcasting_group_is_told_and_nothing_is_kept(filled):
    beat(filled, "c", model="BROADCASTING")
    filled.notices.clear()
    assert reset(filled, "FIRST", queue_id=0).members_notified == 1
    assert len(filled.notices) == 1
    assert filled.features.state.committed.query("g", "t", 0) == -1
    assert filled.pull(queue_offset=5)[0].status == PullStatus.FOUND


def test_a_copy_of_offsets(filled):
    filled.features.state.topics.set(TopicConfig("u", 1, 1), 1)
    filled.features.state.topics.set(TopicConfig("%RETRY%g", 1, 1), 1)
    commit(filled, 4)
    commit(filled, 0, topic="u")
    filled.features.state.committed.commit("g", "%RETRY%g", 0, 0)
    filled.features.state.committed.commit("copy", "t", 0, 9)

    def clone(source="g", target="copy", **fields):
        request = CloneOffsetRequest(source, target, **fields)
        return filled.ask(RequestCode.CLONE_GROUP_OFFSET, request, OffsetChanges).queues

    preview = clone(dry_run=True)
    assert [(one.topic, one.old_offset, one.new_offset) for one in preview] == [
        ("t", 9, 4),
        ("u", -1, 0),
    ]
    assert filled.features.state.committed.query("copy", "t", 0) == 9
    assert clone(topic="u") == preview[1:]
    assert filled.features.state.committed.query("copy", "t", 0) == 9
    clone()
    assert filled.features.state.committed.query("copy", "t", 0) == 4
    assert filled.features.state.group_table.get("copy") == GroupConfig("copy")
    assert clone(topic="never") == []
    with pytest.raises(InvalidArgument):
        clone(target="g")


# ---- Deleting -----------------------------------------------------------------------------------


def test_a_deleted_group_leaves_nothing(filled):
    commit(filled, 4)
    for topic in ("%RETRY%g", "%DLQ%g"):
        filled.features.state.topics.set(TopicConfig(topic, 1, 1), 1)
    filled.pull()
    beat(filled, "c")
    with pytest.raises(InvalidArgument, match="1 members, for example c"):
        delete(filled)
    filled.features.state.groups.on_unregister("c")
    delete(filled)
    assert groups(filled).groups == []
    assert filled.features.state.topics.get("%DLQ%g") is not None
    assert set(filled.saved) >= {"groups", "offsets"}
    delete(filled, remove_topics=True)  # twice does no harm
    assert (
        filled.features.state.topics.get("%DLQ%g")
        is filled.features.state.topics.get("%RETRY%g")
        is None
    )
    assert filled.features.state.topics.get("t") is not None


# ---- All groups ---------------------------------------------------------------------------


def all_groups(stage, **place):
    """What the pages say from there on, and how many they are."""
    request, found, pages = GroupsProgressRequest(**place), [], 0
    while request is not None:
        page = stage.ask(RequestCode.GET_GROUPS_PROGRESS, request, GroupsProgress)
        found, pages = found + page.groups, pages + 1
        place = page.listing, page.next_place, page.after_topic
        request = GroupsProgressRequest(*place) if page.next_place >= 0 else None
    return found, pages


def test_all_groups_come_in_pages_with_what_is_told_of_one(filled):
    filled.features.state.topics.set(TopicConfig("wide", 60, 60), 1)
    for number in range(70):
        commit(filled, number % 3, group=f"g{number:02}")
    commit(filled, 0, topic="wide")
    commit(filled, 1)
    beat(filled, "c1")
    found, pages = all_groups(filled)
    assert pages >= 3
    assert {one.group for one in found} == {"g", *(f"g{number:02}" for number in range(70))}
    topics = {(one.group, topic.topic): topic for one in found for topic in one.topics}
    assert {topic for name, topic in topics if name == "g"} == {"t", "wide"}
    (whole,) = [one for one in found if one.members]
    assert (whole.group, whole.members[0].client_id) == ("g", "c1")
    assert whole.message_model == "CLUSTERING"
    for name in "g", "g07":
        request = ConsumeStatsRequest(name, "t")
        told = filled.ask(RequestCode.GET_CONSUME_STATS, request, ConsumeStats).queues
        part = topics[name, "t"]
        assert part.max_queue_offset == sum(one.max_queue_offset for one in told) > 0
        assert part.consumer_offset == sum(max(one.consumer_offset, 0) for one in told)
        assert part.lag == part.max_queue_offset - part.consumer_offset
        assert part.oldest_timestamp == min(filter(None, (q.oldest_timestamp for q in told)))


def test_a_namespace_that_is_asked_for_is_found_behind_many_others(filled):
    """The client's names are dropped after the page is cut: the broker leaves out the others."""
    for number in range(MAX_GROUPS_PER_ANSWER + 50):
        commit(filled, 1, group=f"bank%g{number:03}")
    for number in range(120):
        beat(filled, f"a{number:03}", group="bank%g001")
    for name in "shop%one", "shop%two":
        commit(filled, 1, group=name)
    beat(filled, "z", group="shop%two")
    found = groups(filled, namespace="shop")
    assert [one.config.group for one in found.groups] == ["shop%one", "shop%two"]
    assert not found.more
    assert len(groups(filled).groups) == MAX_GROUPS_PER_ANSWER
    parts, pages = all_groups(filled, namespace="shop")
    assert ({one.group for one in parts}, pages) == ({"shop%one", "shop%two"}, 1)
    request = AllClientsRequest(namespace="shop")
    (client,) = filled.ask(RequestCode.GET_ALL_CLIENTS, request, AllClients).clients
    assert (client.client_id, client.consumer_groups) == ("z", ["shop%two"])
    filled.peer(b"peer").principal = Principal("u", namespace="shop")
    assert len(groups(filled, namespace="bank").groups) == 2  # the user's own counts


def test_a_page_ends_at_a_topic_whatever_namespace_the_client_has():
    page = GroupsProgress(1, [], 0, "bank%t", 1)
    assert ClientNames("shop").dropped(page).after_topic == "bank%t"
    request = GroupsProgressRequest(1, 0, "bank%t")
    assert ClientNames("shop").added(request).after_topic == "bank%t"


def test_what_was_handed_out_is_in_flight_and_the_oldest_behind_it_is_ready(filled):
    beat(filled, "c1")
    filled.pull()
    ((part,), _) = all_groups(filled)
    (topic,) = part.topics
    assert 0 < topic.in_flight <= topic.lag
    assert topic.ready_timestamp >= topic.oldest_timestamp or topic.in_flight == topic.lag


def test_a_listing_that_is_forgotten_begins_anew(filled):
    def ask(*place):
        request = GroupsProgressRequest(*place)
        return filled.ask(RequestCode.GET_GROUPS_PROGRESS, request, GroupsProgress)

    for number in range(70):
        commit(filled, 1, group=f"g{number:02}")
    first = ask()
    going_on = ask(first.listing, first.next_place)
    assert going_on.listing == first.listing
    assert going_on.groups[0] != first.groups[0]
    filled.peer(b"peer").principal = Principal("another user")
    assert ask(going_on.listing, going_on.next_place).groups == first.groups
    filled.peer(b"peer").principal = ANYBODY
    assert ask(going_on.listing, going_on.next_place).listing == first.listing
    others = [ask() for _ in range(LISTINGS)]
    again = ask(first.listing, first.next_place)
    assert again.listing not in {first.listing, *(one.listing for one in others)}
    assert again.groups == first.groups
