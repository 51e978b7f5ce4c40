"""What an access list may say, and what is refused with the place."""

from __future__ import annotations

import datetime

import pytest

from mqmesh.errors import ConfigError
from mqmesh.security.access_list import (
    AccessList,
    Action,
    Rule,
    User,
    UserRole,
    read_access_list,
    write_access_list,
)

TODAY = datetime.date(2026, 11, 24)
KEYS = [f"{number:040d}" for number in range(10)]
ROOT = f'[[user]]\nname = "root"\nkeys = ["{KEYS[0]}"]\nrole = "admin"\n'
SHOP = f'[[user]]\nname = "shop"\nkeys = ["{KEYS[1]}"]\n'


def read(text: str) -> AccessList:
    return read_access_list(text, "acl.toml", TODAY)


def test_what_is_written_is_read_back():
    rule = Rule([Action.SUB], ["pay*"], ["billing"])
    shop = User("shop", KEYS[1:3], expires=datetime.date(2027, 1, 31), allow=[rule], deny=[rule])
    master = User("broker-a", [KEYS[3]], UserRole.BROKER, brokers=["broker-a"])
    one = AccessList(7, [User("root", [KEYS[0]], UserRole.ADMIN), shop, master])
    assert read(write_access_list(one)) == one
    assert read(write_access_list(one)).digest() == one.digest()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version = 0", "version = 0"),
        ("version = 1", "no enabled user of role admin is left"),
        (ROOT.replace("admin", "boss"), r'user.0.role = .boss.: must be one of none, view, admin'),
        (ROOT + 'enabled = false', "no enabled user of role admin is left"),
        (ROOT + 'expires = 2026-11-24', "no enabled user of role admin is left"),
        (ROOT + "admin = true", "unknown key user.0.admin"),
        (ROOT + ROOT, "there are two users 'root'"),
        (ROOT + SHOP.replace(KEYS[1], KEYS[0]), "users 'root' and 'shop' have one key, 0000"),
        (ROOT + SHOP.replace(KEYS[1], "short"), r"user.1.keys.0 = 'short'"),
        (ROOT + '[[user]]\nname = "a/b"\nkeys = ["' + KEYS[1] + '"]', "user 'a/b': no legal name"),
        (ROOT + '[[user]]\nname = "a"\nkeys = []', r"user.1.keys = \[\]"),
        (ROOT + SHOP + 'brokers = ["broker-a"]', "brokers is of role broker, not none"),
        (ROOT + SHOP + 'role = "broker"', "of role broker, but brokers names no broker group"),
        (ROOT + SHOP + '[[user.allow]]\nactions = ["PUB"]', "rule 1 of allow: it names neither"),
        (ROOT + SHOP + '[[user.deny]]\ntopics = ["a"]\nactions = []', "actions"),
        (ROOT + SHOP + '[[user.deny]]\ntopics = ["a"]\nactions = ["ALL"]', "of PUB, SUB, CREATE"),
        (
            ROOT + SHOP + '[[user.allow]]\ngroups = ["a"]\nactions = ["PUB"]',
            "groups are for FILTER, SUB, so groups = .*can match nothing",
        ),
        (
            ROOT + SHOP + '[[user.allow]]\ntopics = ["or*ders"]\nactions = ["PUB"]',
            "'or.ders' is neither a name",
        ),
        (
            ROOT + SHOP + '[[user.deny]]\ntopics = ["orders**"]\nactions = ["PUB"]',
            "rule 1 of deny: 'orders..' is neither a name",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(text, said):
    with pytest.raises(ConfigError, match=said) as refused:
        read(text)
    assert str(refused.value).startswith("acl.toml: ")


def test_a_change_makes_the_next_version():
    one = read(ROOT + SHOP)
    changed = one.with_user(User("shop", [KEYS[2]]))
    assert (changed.version, [user.name for user in changed.user]) == (2, ["root", "shop"])
    assert changed.find("shop").keys == [KEYS[2]]
    more = changed.with_user(User("new", [KEYS[3]]))
    assert [user.name for user in more.user] == ["root", "shop", "new"]
    assert [user.name for user in more.without_user("shop").user] == ["root", "new"]
    assert more.without_user("shop").version == 4
    assert more.digest() != changed.digest()


def test_who_is_not_there_is_not_taken_away():
    with pytest.raises(ConfigError, match="no user 'nobody'"):
        read(ROOT).without_user("nobody")


def test_a_user_is_valid_until_the_day_it_expires():
    one = User("shop", [KEYS[1]], expires=TODAY)
    assert not one.is_valid(TODAY)
    assert one.is_valid(TODAY - datetime.timedelta(days=1))
    assert not User("shop", [KEYS[1]], enabled=False).is_valid(TODAY)
