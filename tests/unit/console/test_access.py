"""Access: users without secrets, versions, quotas and their use, audit log; a diff first."""

from __future__ import annotations

import datetime

import msgspec
import pytest
from harness.console import KEY, ConsoleWorld, open_console, users_of

from mqmesh.console.cluster_view import QUOTA_MESSAGES, ClusterReadings
from mqmesh.console.queries.access import AUDIT_BYTES, fingerprint
from mqmesh.errors import NoPermission, UnsupportedCommand
from mqmesh.protocol.admin import AccessListInfo
from mqmesh.roles.audit_log import AuditLine
from mqmesh.sdk.admin.access import AccessListState
from mqmesh.security.access_list import (
    AccessList,
    Action,
    Quota,
    Rule,
    User,
    UserRole,
    read_access_list,
    write_access_list,
)

OTHER = KEY.replace("rq", "qr")
THIRD = KEY.replace("rq", "rr")
TODAY = datetime.date(2020, 9, 13)
LIST = AccessList(
    7,
    [
        User("admin", [OTHER], UserRole.ADMIN),
        User("viewer", [THIRD], UserRole.VIEW),
        User(
            "shop",
            [KEY],
            allow=[Rule([Action.PUB], ["others"])],
            deny=[Rule([Action.SUB], ["*"])],
            quota=Quota(send_messages_per_s=100, connections=5),
            expires=datetime.date(2020, 9, 13),
        ),
    ],
)


@pytest.fixture
def world():
    readings = ClusterReadings(
        {},
        {},
        [],
        {},
        {(QUOTA_MESSAGES, "shop", "in"): 90.0},
        {"shop": 4.0},
        {("broker-a", "no_permission"): 3.0},
    )
    world = ConsoleWorld(
        {
            "access_list": AccessListInfo(7, LIST.digest(), write_access_list(LIST)),
            "access_states": [
                AccessListState("h:1", 7, "d"),
                AccessListState("h:2", 0, "", "no answer within 3 s"),
            ],
            "put_access_list": [],
        },
        readings=readings,
    )
    return world


def log_in(world, name, **settings):
    world.access_list = LIST
    client = open_console(world, users_of(name), **settings)
    client.log_in(name)
    return client


def put(world):
    """Return the list that was put, and the version that it was made of."""
    (call,) = (call for call in world.calls if call[1] == "put_access_list")
    text, expected = call[2]
    return read_access_list(text, "put", TODAY), expected


def test_users_are_shown_with_fingerprints_and_without_keys(world):
    client = open_console(world)
    found = client.get("/api/v1/access").json()
    assert found["version"] == 7
    assert found["is_same"] is False
    rows = {one["name"]: one for one in found["users"]["rows"]}
    assert rows["shop"]["state"] == "expired"
    assert (rows["shop"]["fullest"], rows["shop"]["held_up"]) == (0.9, 4)
    assert rows["shop"]["keys"] == [fingerprint(KEY)]
    assert found["refusals"] == [{"node": "broker-a", "response_code": "no_permission", "count": 3}]
    pages = [client.get(path).text for path in ("/access", "/access/users/shop", "/access/check")]
    assert not any(key in page for key in (KEY, OTHER, THIRD) for page in pages)
    assert "no answer within 3 s" in pages[0]


def test_a_user_has_its_rules_and_what_it_uses(world):
    found = open_console(world).get("/api/v1/access/users/shop").json()
    assert [(one["effect"], one["number"]) for one in found["rules"]] == [("deny", 1), ("allow", 1)]
    assert found["limits"] == [
        {"name": "send messages", "unit": "messages", "limit": 100, "used": 90.0}
    ]
    assert found["connections"] == 5
    assert open_console(world).get("/access/users/nobody").status_code == 400


def test_without_security_it_says_so(world):
    world.answers["access_list"] = UnsupportedCommand("security is off")
    page = open_console(world).get("/access").text
    assert 'data-test="off"' in page
    assert 'data-test="new-user"' not in page


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"user": "viewer", "topic": "orders"}, "may not PUB topic orders: no rule allows it"),
        ({"user": "admin", "topic": "orders"}, "may PUB topic orders: role admin"),
        ({"user": "admin", "action": "SUB", "group": "g"}, "may SUB group g: role admin"),
        ({"user": "admin"}, "say a topic, or a group"),
    ],
)
def test_a_question_is_answered_with_the_rule(world, asked, sentence):
    assert sentence in open_console(world).get("/access/check", params=asked).text


def test_a_rule_is_shown_as_a_diff_and_put_in_force(world):
    client = open_console(world)
    path = "/access/users/shop/rule"
    csrf = client.csrf(path)
    fields = {"actions": "pub, create", "topics": "orders, bills*"}
    plan = client.act(path, csrf, "plan", **fields).text
    assert "<td>+</td>" in plan
    assert "&#34;bills*&#34;" in plan
    assert "version 8" in plan
    assert KEY not in plan
    assert not [call for call in world.calls if call[1] == "put_access_list"]
    assert "version 8" in client.act(path, csrf, **fields).text
    new, expected = put(world)
    assert (new.version, expected) == (8, 7)
    rules = [
        Rule([Action.PUB], ["others"]),
        Rule([Action.PUB, Action.CREATE], ["orders", "bills*"]),
    ]
    assert new.find("shop") == msgspec.structs.replace(LIST.find("shop"), allow=rules)


def test_a_change_is_made_by_the_keys_of_the_user_who_wants_it(world):
    client = log_in(world, "admin")
    path = "/access/users/shop/rule"
    client.act(path, client.csrf(path), topics="orders")
    assert {call[0] for call in world.calls} == {"admin"}
    assert put(world)[0].version == 8


def test_a_rule_is_replaced_and_deleted(world):
    client = open_console(world)
    page = client.get("/access/users/shop").text
    assert "/access/users/shop/rule?effect=allow&amp;number=1&amp;actions=PUB" in page
    path = "/access/users/shop/rule"
    csrf = client.csrf(path)
    client.act(path, csrf, effect="allow", number="1", actions="PUB", topics="orders")
    assert put(world)[0].find("shop").allow == [Rule([Action.PUB], ["orders"])]
    world.calls.clear()
    client.act("/access/users/shop/delete-rule", csrf, effect="deny", number="1")
    assert put(world)[0].find("shop").deny == []


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"actions": "SEND", "topics": "x"}, "is not a valid Action"),
        ({"actions": ",", "topics": "x"}, "write at least one"),
        ({"actions": "PUB"}, "neither topics nor groups"),
        ({"actions": "PUB", "topics": "a b"}, "neither a name"),
        ({"number": "9", "topics": "x"}, "no rule 9 of allow"),
        (
            {"effect": "allow", "number": "1", "actions": "PUB", "topics": "others"},
            "Nothing changes",
        ),
    ],
)
def test_a_rule_that_cannot_be_is_a_sentence(world, fields, sentence):
    client = open_console(world)
    path = "/access/users/shop/rule"
    assert sentence in client.act(path, client.csrf(path), "plan", **fields).text


def test_a_user_is_added_by_its_public_key(world):
    client = open_console(world)
    key = KEY.replace("rq", "zz")
    csrf = client.csrf("/new/user")
    fields = {"name": "billing", "key": key, "subscribes": "orders", "groups": "billing"}
    assert fingerprint(key) in client.act("/new/user", csrf, "plan", **fields).text
    client.act("/new/user", csrf, **fields)
    assert put(world)[0].find("billing").allow[0] == Rule([Action.SUB], ["orders"], ["billing"])
    assert client.act("/new/user", csrf, "plan", name="shop", key=key).status_code == 400
    assert client.act("/new/user", csrf, "plan", name="b2", key="no key").status_code == 400
    assert client.act("/new/user", csrf, "plan", name="b2", key=KEY).status_code == 400


def test_a_user_gets_another_quota_and_term(world):
    client = open_console(world)
    path = "/access/users/shop/change"
    assert 'value="100"' in client.get(path).text
    csrf = client.csrf(path)
    fields = {"role": "none", "enabled": "on", "read_bytes_per_s": "1000"}
    client.act(path, csrf, expires="2030-12-31", **fields)
    user = put(world)[0].find("shop")
    assert (user.quota, user.expires) == (
        Quota(read_bytes_per_s=1_000),
        datetime.date(2030, 12, 31),
    )
    assert "is no day" in client.act(path, csrf, "plan", expires="soon", **fields).text
    assert "Its connections end" in client.act(path, csrf, "plan", role="none").text


def test_the_last_administrator_stays(world):
    client = open_console(world)
    path = "/access/users/admin/delete"
    assert client.get(path).status_code == 400
    path = "/access/users/shop/delete"
    csrf = client.csrf(path)
    assert client.act(path, csrf, typed="sho").status_code == 400
    client.act(path, csrf, typed="shop")
    assert [one.name for one in put(world)[0].user] == ["admin", "viewer"]


def test_keys_are_replaced_one_after_the_other(world):
    client = open_console(world)
    new = KEY.replace("rq", "zz")
    csrf = client.csrf("/access/users/shop/add-key")
    client.act("/access/users/shop/add-key", csrf, key=new)
    two, _ = put(world)
    assert two.find("shop").keys == [KEY, new]
    path = "/access/users/shop/remove-key"
    assert "no other key" in client.act(path, csrf, "plan", key=fingerprint(KEY)).text
    world.answers["access_list"] = AccessListInfo(8, two.digest(), write_access_list(two))
    world.calls.clear()
    client.act(path, csrf, key=fingerprint(KEY))
    assert put(world)[0].find("shop").keys == [new]
    assert "has no key x" in client.act(path, csrf, "plan", key="x").text


def test_a_role_that_took_no_list_is_named(world):
    world.answers["put_access_list"] = [AccessListState("h:2", 0, "", "no answer")]
    client = open_console(world)
    path = "/access/users/shop/delete-rule"
    done = client.act(path, client.csrf(path), effect="deny", number="1").text
    assert "h:2 has the former list still: no answer" in done


def test_what_brokers_refuse_is_forbidden_and_says_why(world):
    world.answers["put_access_list"] = NoPermission("user viewer lacks the role admin")
    client = open_console(world)
    path = "/access/users/shop/delete-rule"
    answer = client.act(path, client.csrf(path), effect="deny", number="1")
    assert answer.status_code == 403
    assert "lacks the role admin" in answer.text


@pytest.fixture
def audit(tmp_path):
    """Write the audit log of a cluster on this machine; returns the function that adds a line."""
    path = tmp_path / "security" / "audit.jsonl"
    path.parent.mkdir()

    def add(second, user, result="SUCCESS", **others):
        time = f"2023-11-14T00:00:{second:02d}.000Z"
        line = AuditLine(time, "broker b", user, "h:1", "DELETE_TOPIC", ["<b>"], result=result)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(msgspec.structs.replace(line, **others)) + b"\n")

    return add


def test_the_audit_log_is_shown_to_administrators(world, audit, tmp_path):
    audit(1, "admin")
    audit(2, "viewer", "NO_PERMISSION", remark="user viewer lacks the role admin")
    client = open_console(world, data_dir=str(tmp_path))
    lines = client.get("/api/v1/access/audit").json()["rows"]
    assert [one["user"] for one in lines] == ["viewer", "admin"]
    refused = client.get("/access/audit", params={"kind": "refused"}).text
    assert "lacks the role admin" in refused
    assert "&lt;b&gt;" in refused
    assert 'data-test="audit"' in client.get("/access").text
    client = log_in(world, "viewer", data_dir=str(tmp_path))
    assert client.get("/access/audit").status_code == 403
    assert 'data-test="audit"' not in client.get("/access").text


def test_of_a_long_audit_log_the_end_is_shown(world, audit, tmp_path):
    audit(1, "first", what="x" * 300)
    path = tmp_path / "security" / "audit.jsonl"
    path.write_bytes(path.read_bytes() * (AUDIT_BYTES // 300) + b'{"time": "cut')
    audit(2, "torn")
    audit(3, "last")
    found = open_console(world, data_dir=str(tmp_path)).get("/api/v1/access/audit").json()
    assert found["rows"][0]["user"] == "last"
    assert "older lines" in found["cut"]


@pytest.mark.parametrize("settings", [{}, {"data_dir": "/nonexistent"}])
def test_an_audit_log_elsewhere_is_said_where(world, settings):
    answer = open_console(world, **settings).get("/access/audit")
    assert answer.status_code == 400
    assert "not on this machine" in answer.text
