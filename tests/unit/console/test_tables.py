"""Tables of keys and values: the list, the keys of one, a key with its history."""

from __future__ import annotations

import pytest
from harness.console import ConsoleWorld, open_console
from unit.console.test_messages import calls_of

from mqmesh.protocol.tables import TableEntries, TableEntry
from mqmesh.sdk.tables.entries import KvEntry
from mqmesh.sdk.tables.table_admin import TableStatus

OLD = TableEntry("shop/ulm", 3, 1_700_000_000_000, 0, 0, 4)
GONE = TableEntry("shop/ulm", 5, 1_700_000_001_000, 1, 1_700_086_401_000)
NEW = TableEntry("shop/ulm", 9, 1_700_000_002_000, 0, 1_700_000_900_000, 13)


@pytest.fixture
def world():
    values = {
        number: KvEntry("shop/ulm", value, number, 0)
        for number, value in ((3, b'{"open": 3}'), (5, b""), (9, b'{"open": 9}'))
    }
    return ConsoleWorld(
        {
            "tables": [
                TableStatus("stock", "broker-b", 1, 7, 100, 12),
                TableStatus("settings", "broker-a", 5, 2_500, 3_000_000, 9_000),
            ],
            "table_keys": TableEntries(9, [NEW], "shop/ulm", more=True),
            "table_history": TableEntries(9, [OLD, GONE, NEW], "shop/ulm"),
            "table_value": lambda table, key, revision: values.get(revision),
        }
    )


def test_tables_are_listed_with_what_they_have(world):
    client = open_console(world)
    rows = client.get("/api/v1/tables", params={"sort": "-keys"}).json()["rows"]
    assert [(one["table"], one["keys"], one["broker_name"]) for one in rows] == [
        ("settings", 2_500, "broker-a"),
        ("stock", 7, "broker-b"),
    ]
    page = client.get("/tables", params={"search": "set"}).text
    assert 'href="/tables/settings"' in page
    assert "stock" not in page


def test_keys_come_by_prefix_a_page_at_a_time(world):
    client = open_console(world)
    page = client.get("/tables/settings", params={"prefix": "shop/"}).text
    assert "/tables/settings/key?key=shop" in page
    assert 'data-test="next"' in page
    world.answers["table_keys"] = TableEntries(9, [], "shop/ulm")
    page = client.get("/tables/settings", params={"after": "shop/ulm"}).text
    assert "There are no more keys" in page
    assert 'data-test="next"' not in page
    assert calls_of(world, "table_keys") == [
        (("settings", "shop/"), {"after": "", "limit": 100}),
        (("settings", ""), {"after": "shop/ulm", "limit": 100}),
    ]


def test_a_key_is_shown_with_its_value_and_history(world):
    client = open_console(world)
    path, key = "/tables/settings/key", {"key": "shop/ulm"}
    answer = client.get("/api/v1" + path, params=key).json()
    assert [one["revision"] for one in answer["history"]] == [9, 5, 3]
    assert (answer["shown"]["revision"], answer["value"]["kind"]) == (9, "json")
    page = client.get(path, params={**key, "revision": "3"}).text
    assert "&#34;open&#34;: 3" in page
    assert "DEL" in page
    assert "Value of revision 3" in page
    assert "It is empty" in client.get(path, params={**key, "revision": "5"}).text


def test_a_revision_that_is_not_kept_is_not_found(world):
    client = open_console(world)
    answer = client.get("/tables/settings/key", params={"key": "shop/ulm", "revision": "4"})
    assert answer.status_code == 404
    assert "keeps no revision 4" in answer.text


def test_values_are_not_shown_where_bodies_are_not(world):
    client = open_console(world, allow_body_view=False)
    page = client.get("/tables/settings/key", params={"key": "shop/ulm"}).text
    assert "shows no bodies" in page
    assert "open" not in page.split('id="history"')[1]
