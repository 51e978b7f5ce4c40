"""The topic table."""

from __future__ import annotations

import pytest

from mqmesh.errors import InvalidArgument, MessageIllegal, NoPermission, SystemBusy, TopicNotFound
from mqmesh.message import TRACE_TOPIC
from mqmesh.protocol.route import DataVersion, Perm, TopicConfig
from mqmesh.roles.broker.state_records import TopicRecord
from mqmesh.roles.broker.topic_state import topic_table as topics
from mqmesh.roles.broker.topic_state.topic_table import TopicTable, create_all
from mqmesh.security.access_list import AccessList, Namespace, NamespaceQuota
from mqmesh.security.quotas import Quotas


@pytest.fixture
def table():
    table = TopicTable(100)
    table.update(TopicConfig("t", 8, 4), 1_000)
    return table


def test_every_change_makes_a_new_version(table):
    versions = [table.version]
    for change in (
        lambda: table.update(TopicConfig("t", 8, 5), 2_000),
        lambda: table.create("u", 4, 3_000),
        lambda: table.delete("u", 3_000),
        lambda: table.set(TopicConfig("%RETRY%g", 1, 1), 3_001),
    ):
        change()
        versions.append(table.version)
    assert versions == sorted(set(versions))
    assert table.version == DataVersion(3_001, 5)


def test_a_queue_may_be_written_below_one_count_and_read_below_the_other(table):
    table.require_writable("t", 3)
    table.require_readable("t", 7)
    with pytest.raises(MessageIllegal, match="write_queue_nums = 4"):
        table.require_writable("t", 4)
    with pytest.raises(MessageIllegal, match="read_queue_nums = 8"):
        table.require_readable("t", 8)
    with pytest.raises(TopicNotFound):
        table.require_writable("u", 0)


def test_permissions_are_told_apart(table):
    table.update(TopicConfig("t", 8, 4, Perm.READ.value), 1)
    with pytest.raises(NoPermission, match="writing"):
        table.require_writable("t", 0)
    table.update(TopicConfig("t", 8, 4, Perm.WRITE.value), 1)
    with pytest.raises(NoPermission, match="reading"):
        table.require_readable("t", 0)
    table.update(TopicConfig("t", 8, 4, Perm.NONE.value), 1)
    for check in (table.require_readable, table.require_writable):
        with pytest.raises(NoPermission):
            check("t", 0)


def test_clients_read_system_topics_but_never_write_them(table):
    table.set(TopicConfig("%RETRY%g", 1, 1), 1)
    table.require_readable("%RETRY%g", 0)
    with pytest.raises(NoPermission, match="reserved"):
        table.require_writable("%RETRY%g", 0)
    with pytest.raises(NoPermission):
        table.create("%DLQ%g", 4, 1)
    with pytest.raises(NoPermission):
        table.update(TopicConfig("TRANS_CHECK_MAX_TIME_TOPIC"), 1)
    with pytest.raises(NoPermission):
        table.check_deletable("%RETRY%g")


def test_the_topic_of_the_message_trace_belongs_to_clients(table):
    table.create(TRACE_TOPIC, 1, 1)
    table.require_writable(TRACE_TOPIC, 0)
    table.update(TopicConfig(TRACE_TOPIC, 2, 2), 1)
    table.require_writable(TRACE_TOPIC, 1)
    table.check_deletable(TRACE_TOPIC)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (TopicConfig("a/b"), "topic"),
        (TopicConfig(""), "topic"),
        (TopicConfig("x" * 128), "topic"),
        (TopicConfig("u", 0, 0), "at least 1"),
        (TopicConfig("u", 4, 5), "over read_queue_nums 4"),
        (TopicConfig("u", 4, 4, 1), "perm 1"),
        (TopicConfig("u", 4, 4, 7), "perm 7"),
        (TopicConfig("u", 1, 1, priorities=1), "2 to 32, or 0"),
        (TopicConfig("u", on_expired="burn"), "none of drop, dead-letter"),
        (TopicConfig("u", 8, 4, priorities=8), "8 priorities, and so 8 queues"),
        (TopicConfig("t", 8, 8, priorities=8), "has no priorities, not 8"),
    ],
)
def test_a_topic_that_makes_no_sense_is_refused(table, config, why):
    version = table.version
    with pytest.raises(InvalidArgument, match=why):
        table.update(config, 1)
    assert table.version == version
    assert len(table) == 1


def test_there_is_an_end_of_topics():
    table = TopicTable(2)
    table.create("a", 1, 1)
    table.create("b", 1, 1)
    with pytest.raises(SystemBusy, match="max_topics"):
        table.create("c", 1, 1)
    table.update(TopicConfig("a", 2, 2), 1)
    table.delete("b", 1)
    table.create("c", 1, 1)


def test_what_the_broker_needs_or_has_messages_of_is_made_beyond_that():
    table = TopicTable(1)
    table.create("a", 1, 1)
    table.set(TopicConfig("%RETRY%g"), 1)
    assert table.adopt([("b", 0)], 1, 1) == 1
    table.check_room("b")
    for make in (
        lambda: table.create("c", 1, 1),
        lambda: table.update(TopicConfig("c"), 1),
        lambda: table.check_room("c"),
    ):
        with pytest.raises(SystemBusy, match=r"3 topics.*max_topics"):
            make()


def test_a_name_server_takes_only_so_many(monkeypatch):
    monkeypatch.setattr(topics, "MAX_TOPICS_PER_BROKER", 2)
    table = TopicTable(1)
    table.set(TopicConfig("a"), 1)
    table.set(TopicConfig("b"), 1)
    with pytest.raises(SystemBusy):
        table.set(TopicConfig("c"), 1)


def copied(table, **options):
    """A table with all that is true of another one."""
    copy = TopicTable(100, **options)
    for name in table.state_keys():
        for record in table.records_of(name):
            copy.apply(record)
    return copy


def test_records_bring_everything_back(table):
    table.update(TopicConfig("ordered", 3, 2, Perm.READ.value, True), 5)
    table.set(TopicConfig("%RETRY%g", 1, 1), 6)
    table.update(TopicConfig("jobs", 4, 4, priorities=4), 7)
    copy = copied(table)
    assert copy.configs() == table.configs()
    assert copy.require("ordered").readable_queues == 3
    assert copy.require("ordered").writable_queues == 0
    assert not copy.changed


def test_priorities_never_change(table):
    jobs = TopicConfig("jobs", 4, 4, priorities=4)
    table.update(jobs, 2)
    table.update(TopicConfig("jobs", 4, 4, Perm.READ.value, priorities=4), 3)
    for change in (TopicConfig("jobs", 4, 4), TopicConfig("jobs", 8, 8, priorities=8)):
        with pytest.raises(InvalidArgument, match="never changes"):
            table.update(change, 4)
    with pytest.raises(InvalidArgument, match="4 queues, not 8 to read and 4 to write"):
        table.update(TopicConfig("jobs", 8, 4, priorities=4), 4)


def test_every_change_is_noted_and_a_deletion_is_one(table):
    assert list(table.changed) == ["t"]
    table.changed.clear()
    table.update(TopicConfig("t", 8, 4), 2_000)
    assert not table.changed
    copy = copied(table)
    table.delete("t", 3_000)
    assert list(table.changed) == ["t"]
    copy.apply(*table.records_of("t"))
    assert len(copy) == 0


def test_a_life_begins_with_a_version_of_its_own(table):
    table.begin_life(9_000, 17)
    assert table.version == DataVersion(9_000, 17)
    table.set(TopicConfig("u"), 9_001)
    assert table.version == DataVersion(9_001, 18)


def test_topics_of_the_store_are_adopted_with_queues_enough(table):
    assert table.adopt([("t", 20), ("lost", 9), ("small", 0)], 4, 7_000) == 2
    assert table.require("lost").config == TopicConfig("lost", 10, 10)
    assert table.require("small").config == TopicConfig("small", 4, 4)
    assert table.require("t").config == TopicConfig("t", 8, 4)


def test_topics_that_messages_made_are_bounded_and_leave_room_for_administrators():
    table = TopicTable(100, most_auto=2)
    table.create("a", 4, 1)
    table.create("b", 4, 1)
    with pytest.raises(SystemBusy, match="max_auto_topics"):
        table.create("c", 4, 1)
    table.update(TopicConfig("c", 4, 4), 1)
    table.set(TopicConfig("%RETRY%g", 1, 1), 1)
    # A topic that an administrator changes is theirs from then on.
    table.update(TopicConfig("a", 4, 2), 1)
    table.create("d", 4, 1)
    copy = copied(table, most_auto=2)
    for some in (table, copy):
        with pytest.raises(SystemBusy, match="made 2 topics"):
            some.create("e", 4, 1)
        some.delete("b", 1)
        some.create("e", 4, 1)
    table.delete("c", 1)
    with pytest.raises(SystemBusy):
        table.create("c", 4, 1)


def test_topics_that_were_lost_in_a_crash_count_as_made_by_messages():
    table = TopicTable(100, most_auto=1)
    table.adopt([("lost", 0), ("%RETRY%g", 0)], 4, 1)
    with pytest.raises(SystemBusy, match="made 1 topics"):
        table.create("new", 4, 1)


def test_what_a_broker_knows_of_itself_is_shown_to_nobody(table):
    assert not table.may_read("RMQ_SYS_STATE_TOPIC")
    assert not table.may_read("RMQ_SYS_CARRIED_TOPIC")
    with pytest.raises(NoPermission):
        table.check_readable("t", "RMQ_SYS_STATE_TOPIC")


def test_a_table_says_what_changed_since_a_version():
    table = TopicTable(10)
    versions = [table.version]
    for name in ("t", "u", "t"):
        table.set(TopicConfig(name), 1)
        versions.append(table.version)
    assert table.changes.since(versions[0]) == ["t", "u"]
    assert table.changes.since(versions[1]) == ["t", "u"]
    assert table.changes.since(versions[2]) == ["t"]
    assert table.changes.since(versions[3]) == []
    table.delete("u", 2)
    assert table.changes.since(versions[3]) == ["u"]
    assert table.changes.since(DataVersion(1, 99)) is None, "of another life"
    table.begin_life(9_000, 50)
    assert table.changes.since(versions[3]) is None
    assert table.changes.since(table.version) == []


def test_changes_of_long_ago_are_not_kept(monkeypatch):
    monkeypatch.setattr(topics, "MAX_TOPICS_PER_BROKER", 2)
    table = TopicTable(10)
    versions = [table.version]
    for name in ("t", "u", "v"):
        table.update(TopicConfig(name), 1)
        versions.append(table.version)
    assert table.changes.since(versions[0]) is None
    assert table.changes.since(versions[1]) == ["v", "u"]


def test_many_topics_have_room_together_or_none_is_made():
    table = TopicTable(3)
    table.update(TopicConfig("t"), 1)
    with pytest.raises(SystemBusy, match="no more than 3"):
        create_all(table, [TopicConfig(name) for name in ("u", "v", "w")], 2)
    assert table.state_keys() == ["t"]
    create_all(table, [TopicConfig("u"), TopicConfig("v")], 2)
    create_all(table, [], 3)
    assert table.state_keys() == ["t", "u", "v"]


def test_a_schema_is_kept_with_its_topic_and_comes_back_with_the_record():
    table = TopicTable(10_000)
    table.update(TopicConfig("t", 4, 4), 1)
    table.changed.clear()
    assert table.put_schema("t", "{}")
    assert not table.put_schema("t", "{}")
    assert list(table.changed) == ["t"]
    copy = TopicTable(10)
    for record in table.records_of("t"):
        copy.apply(record)
    assert copy.require("t").schema == "{}"
    table.update(TopicConfig("t", 8, 8), 1)
    assert table.require("t").schema == "{}", "other settings leave it alone"
    with pytest.raises(TopicNotFound):
        table.put_schema("unknown", "{}")
    table.set(TopicConfig("%RETRY%g", 1, 1), 1)
    with pytest.raises(NoPermission):
        table.put_schema("%RETRY%g", "{}")


def test_there_is_an_end_of_schemas():
    table = TopicTable(10_000)
    for number in range(topics.MAX_SCHEMAS + 1):
        table.set(TopicConfig(f"t{number}", 1, 1), 1)
    for number in range(topics.MAX_SCHEMAS):
        table.put_schema(f"t{number}", "{}")
    with pytest.raises(SystemBusy, match="schemas of 1000 topics"):
        table.put_schema(f"t{topics.MAX_SCHEMAS}", "{}")
    table.put_schema("t0", '{"type": "object"}')
    table.put_schema("t0", "")
    table.put_schema(f"t{topics.MAX_SCHEMAS}", "{}")


def limited(**limits) -> Quotas:
    quotas = Quotas()
    quotas.put(AccessList(1, [], [Namespace("ns", NamespaceQuota(**limits))]))
    return quotas


@pytest.fixture
def quotas():
    return limited(topics=2, queues=4)


@pytest.fixture
def tenant(quotas):
    """A table in which the namespace ns may have two topics with four queues."""
    return TopicTable(100, quotas=quotas)


def test_a_namespace_has_no_more_topics_than_its_quota(tenant):
    tenant.create("ns%a", 1, 0)
    tenant.update(TopicConfig("ns%b", 1, 1), 0)
    tenant.set(TopicConfig("%RETRY%ns%g", 9, 9), 0)
    for make in (
        lambda: tenant.create("ns%c", 1, 0),
        lambda: tenant.update(TopicConfig("ns%c", 1, 1), 0),
        lambda: create_all(tenant, [TopicConfig("x", 1, 1), TopicConfig("ns%c", 1, 1)], 0),
    ):
        with pytest.raises(SystemBusy, match="'ns' has 2 of 2 topics at this broker"):
            make()
    assert tenant.get("ns%c") is None
    assert tenant.get("x") is None
    tenant.create("other%a", 9, 0)
    tenant.delete("ns%a", 0)
    tenant.create("ns%c", 1, 0)


def test_a_namespace_has_no_more_queues_than_its_quota(tenant):
    tenant.update(TopicConfig("ns%a", 3, 1), 0)
    with pytest.raises(SystemBusy, match=r"'ns' has 3 of 4 queues .* so 2 more"):
        tenant.create("ns%b", 2, 0)
    with pytest.raises(SystemBusy, match="so 2 more"):
        tenant.update(TopicConfig("ns%a", 5, 5), 0)
    tenant.update(TopicConfig("ns%a", 4, 4), 0)
    tenant.update(TopicConfig("ns%a", 2, 2), 0)
    tenant.create("ns%b", 2, 0)


def test_a_table_that_was_read_again_knows_what_a_namespace_has(tenant):
    tenant.create("ns%a", 1, 0)
    again = TopicTable(100, quotas=limited(topics=1))
    for record in (*tenant.records_of("ns%a"), *tenant.records_of("ns%a")):
        again.apply(record)
    with pytest.raises(SystemBusy, match="1 of 1 topics"):
        again.create("ns%b", 1, 0)
    again.apply(TopicRecord("ns%a"))
    again.create("ns%b", 1, 0)


def test_a_smaller_quota_takes_nothing_away(tenant, quotas):
    tenant.create("ns%a", 4, 0)
    quotas.put(AccessList(2, [], [Namespace("ns", NamespaceQuota(topics=0, queues=2))]))
    tenant.update(TopicConfig("ns%a", 3, 3), 0)
    with pytest.raises(SystemBusy, match="3 of 2 queues"):
        tenant.update(TopicConfig("ns%a", 4, 4), 0)
