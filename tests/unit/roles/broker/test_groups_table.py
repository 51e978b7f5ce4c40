"""Settings of consumer groups."""

from __future__ import annotations

import pytest

from mqmesh.errors import CorruptRecord, GroupNotFound, InvalidArgument, NoPermission, SystemBusy
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.route import DataVersion
from mqmesh.roles.broker.features.groups.groups_table import GroupTable


def clustering(group):
    return "CLUSTERING"


def broadcasting(group):
    return "BROADCASTING"


@pytest.fixture
def table():
    table = GroupTable(100)
    table.update(GroupConfig("g"), 1_000)
    return table


def test_every_change_makes_a_new_version_and_nothing_else_does(table):
    versions = [table.version]
    for change in (
        lambda: table.update(GroupConfig("g", retry_max_times=2), 2_000),
        lambda: table.note_used("h", 3_000),
        lambda: table.delete("h", 3_000),
    ):
        assert change()
        versions.append(table.version)
    assert versions == sorted(set(versions))
    for change in (
        lambda: table.update(GroupConfig("g", retry_max_times=2), 9_000),
        lambda: table.note_used("g", 9_000),
        lambda: table.delete("unknown", 9_000),
    ):
        assert not change()
        assert table.version == versions[-1] == DataVersion(3_000, 4)


def test_a_group_gets_settings_when_it_is_used(table):
    assert table.get("new") is None
    table.check_pull("new", clustering)
    assert table.note_used("new", 1)
    assert table.get("new") == GroupConfig("new")
    assert table.names() == ["g", "new"]


def test_without_auto_creation_an_unknown_group_is_refused_with_advice():
    table = GroupTable(auto_create=False)
    for use in (lambda: table.note_used("g", 1), lambda: table.check_pull("g", clustering)):
        with pytest.raises(GroupNotFound, match="mqmesh group create"):
            use()
    table.check_pull("mqmesh-query", clustering)  # our own tools look at single messages
    table.update(GroupConfig("g"), 1, must_be_new=True)
    table.check_pull("g", clustering)
    assert not table.note_used("g", 1)


def test_permissions_are_checked_with_each_pull(table):
    table.update(GroupConfig("g", consume_enable=False), 1)
    with pytest.raises(NoPermission, match="consume_enable"):
        table.check_pull("g", clustering)
    table.update(GroupConfig("g", consume_broadcast_enable=False), 1)
    table.check_pull("g", clustering)
    with pytest.raises(NoPermission, match="consume_broadcast_enable"):
        table.check_pull("g", broadcasting)
    table.update(GroupConfig("g"), 1)
    table.check_pull("g", broadcasting)
    table.update(GroupConfig("g", consume_enable=False), 1)
    table.delete("g", 1)
    table.check_pull("g", clustering)


@pytest.mark.parametrize("name", ["", "a b", "x" * 256, "%RETRY%g", "CID_RMQ_SYS_TOOLS"])
def test_names_that_are_none_are_refused(table, name):
    with pytest.raises(InvalidArgument):
        table.update(GroupConfig(name), 1)


def test_existing_and_missing_groups(table):
    with pytest.raises(InvalidArgument, match="exists already"):
        table.update(GroupConfig("g"), 1, must_be_new=True)
    with pytest.raises(GroupNotFound):
        table.update(GroupConfig("h"), 1, must_exist=True)


def test_how_often_a_message_comes_again_is_the_consumers_choice_unless_the_group_says(table):
    assert table.retry_limit("g", 7) == table.retry_limit("unknown", 7) == 7
    table.update(GroupConfig("g", retry_max_times=0), 1)
    assert table.retry_limit("g", 7) == 0


def test_there_is_an_end_of_groups():
    table = GroupTable(2)
    table.note_used("a", 1)
    table.note_used("b", 1)
    with pytest.raises(SystemBusy, match="max_subscription_groups"):
        table.note_used("c", 1)
    table.update(GroupConfig("a", retry_max_times=1), 1)
    table.delete("b", 1)
    table.note_used("c", 1)


def test_the_document_brings_everything_back(table):
    table.update(GroupConfig("other", consume_enable=False, retry_max_times=5), 7)
    copy = GroupTable()
    copy.load(table.dump())
    assert copy.version == table.version
    assert copy.names() == ["g", "other"]
    assert copy.get("other") == table.get("other")
    with pytest.raises(NoPermission):
        copy.check_pull("other", clustering)


@pytest.mark.parametrize(
    "document",
    [b"", b"{}", b"[" * 10_000, b"\xff", b'{"version":9,"data_version":[0,0],"groups":{}}'],
)
def test_a_document_that_is_none_is_refused(table, document):
    with pytest.raises(CorruptRecord):
        table.load(document)
    assert table.names() == ["g"]
