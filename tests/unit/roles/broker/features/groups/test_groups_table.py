"""Settings of consumer groups."""

from __future__ import annotations

import pytest

from mqmesh.errors import GroupNotFound, InvalidArgument, NoPermission, SystemBusy
from mqmesh.protocol.groups import GroupConfig
from mqmesh.roles.broker.group_state.group_table import GroupTable


def clustering(group):
    return "CLUSTERING"


def broadcasting(group):
    return "BROADCASTING"


@pytest.fixture
def table():
    table = GroupTable(100)
    table.update(GroupConfig("g"))
    return table


def test_every_change_is_noted_once_and_nothing_else_is(table):
    for change in (
        lambda: table.update(GroupConfig("g", retry_max_times=2)),
        lambda: table.note_used("h"),
        lambda: table.delete("h"),
    ):
        table.changed.clear()
        change()
        assert len(table.changed) == 1
    table.changed.clear()
    for change in (
        lambda: table.update(GroupConfig("g", retry_max_times=2)),
        lambda: table.note_used("g"),
        lambda: table.delete("unknown"),
    ):
        assert not change()
        assert not table.changed


def test_a_group_gets_settings_when_it_is_used(table):
    assert table.get("new") is None
    table.check_pull("new", clustering)
    table.note_used("new")
    assert table.get("new") == GroupConfig("new")
    assert table.names() == ["g", "new"]


def test_permissions_are_checked_with_each_pull(table):
    table.update(GroupConfig("g", consume_enable=False))
    with pytest.raises(NoPermission, match="consume_enable"):
        table.check_pull("g", clustering)
    table.update(GroupConfig("g", consume_broadcast_enable=False))
    table.check_pull("g", clustering)
    with pytest.raises(NoPermission, match="consume_broadcast_enable"):
        table.check_pull("g", broadcasting)
    table.update(GroupConfig("g"))
    table.check_pull("g", broadcasting)
    table.update(GroupConfig("g", consume_enable=False))
    table.delete("g")
    table.check_pull("g", clustering)


@pytest.mark.parametrize("name", ["", "a b", "x" * 256, "%RETRY%g", "CID_RMQ_SYS_TOOLS"])
def test_names_that_are_none_are_refused(table, name):
    with pytest.raises(InvalidArgument):
        table.update(GroupConfig(name))


def test_existing_and_missing_groups(table):
    with pytest.raises(InvalidArgument, match="exists already"):
        table.update(GroupConfig("g"), must_be_new=True)
    with pytest.raises(GroupNotFound):
        table.update(GroupConfig("h"), must_exist=True)


def test_there_is_an_end_of_groups():
    table = GroupTable(2)
    table.note_used("a")
    table.note_used("b")
    with pytest.raises(SystemBusy, match="max_subscription_groups"):
        table.note_used("c")
    table.update(GroupConfig("a", retry_max_times=1))
    table.delete("b")
    table.note_used("c")


def test_records_bring_everything_back(table):
    table.update(GroupConfig("other", consume_enable=False, retry_max_times=5))
    table.note_used("gone")
    copy = GroupTable()
    for group in table.state_keys():
        for record in table.records_of(group):
            copy.apply(record)
    table.delete("gone")
    copy.apply(*table.records_of("gone"))
    assert copy.names() == ["g", "other"]
    assert copy.get("other") == table.get("other")
    with pytest.raises(NoPermission):
        copy.check_pull("other", clustering)
    assert not copy.changed
