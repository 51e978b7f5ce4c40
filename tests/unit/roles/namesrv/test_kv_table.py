"""The name server's key/value configuration."""

from __future__ import annotations

import pytest

from mqmesh.errors import BrokerError, InvalidArgument, SystemBusy
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.route import KvRequest
from mqmesh.roles.namesrv.effects import Persist
from mqmesh.roles.namesrv.kv_table import KvTable


def test_what_was_put_is_got_listed_and_deleted():
    table = KvTable(10_000)
    assert table.put(KvRequest("ns", "key", "value")) == [Persist()]
    assert table.put(KvRequest("ns", "key", "value")) == [], "nothing new"
    assert table.put(KvRequest("ns", "other", "")) == [Persist()]
    assert table.get(KvRequest("ns", "key")) == {"key": "value"}
    assert table.list_namespace(KvRequest("ns")) == {"key": "value", "other": ""}
    assert table.delete(KvRequest("ns", "key")) == [Persist()]
    assert table.delete(KvRequest("ns", "key")) == []
    assert table.dump() == {"ns": {"other": ""}}
    table.delete(KvRequest("ns", "other"))
    assert table.dump() == {}


def test_namespaces_do_not_see_one_another():
    table = KvTable(10_000)
    table.put(KvRequest("one", "key", "1"))
    table.put(KvRequest("two", "key", "2"))
    assert table.get(KvRequest("one", "key")) == {"key": "1"}
    assert table.list_namespace(KvRequest("two")) == {"key": "2"}


@pytest.mark.parametrize("ask", [KvTable.get, KvTable.list_namespace])
def test_what_is_not_there_is_not_found(ask):
    with pytest.raises(BrokerError) as caught:
        ask(KvTable(10_000), KvRequest("ns", "key"))
    assert caught.value.code == ResponseCode.QUERY_NOT_FOUND


@pytest.mark.parametrize("ask", [KvTable.put, KvTable.get, KvTable.delete])
def test_an_empty_key_is_refused(ask):
    with pytest.raises(InvalidArgument):
        ask(KvTable(10_000), KvRequest("ns"))


def test_all_pairs_together_are_bounded_and_room_comes_back():
    table = KvTable(1_000)
    table.put(KvRequest("ns", "a", "x" * 400))
    with pytest.raises(SystemBusy, match="max_kv_bytes = 1000"):
        table.put(KvRequest("ns", "b", "x" * 600))
    table.put(KvRequest("ns", "a", "x" * 700))
    table.put(KvRequest("ns", "a", "x"))
    table.put(KvRequest("ns", "b", "x" * 600))
    table.delete(KvRequest("ns", "b"))
    table.put(KvRequest("ns", "c", "x" * 700))
    again = KvTable(1_000, table.dump())
    with pytest.raises(SystemBusy):
        again.put(KvRequest("ns", "d", "x" * 200))


def test_namespaces_are_listed_and_none_has_no_name():
    table = KvTable(10_000)
    for namespace in ("b", "a"):
        table.put(KvRequest(namespace, "k", "v"))
    assert sorted(table.namespaces()) == ["a", "b"]
    with pytest.raises(InvalidArgument, match="namespace is empty"):
        table.put(KvRequest("", "k", "v"))
