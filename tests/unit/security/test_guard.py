"""Whose requests are served: by every row of the command table."""

from __future__ import annotations

import datetime
import re
from types import SimpleNamespace

import pytest
from harness.filled_headers import filled
from harness.keys import TODAY, credentials, guard, user

from mqmesh.errors import NoPermission, TopicNotFound
from mqmesh.message import AUTO_CREATE_TOPIC
from mqmesh.protocol.command import ANYBODY, Principal
from mqmesh.protocol.commands import COMMANDS, LOOKED_UP, RequestCode, Right
from mqmesh.protocol.groups import LOOK_GROUP_PREFIX, GroupConfig, UpdateGroupRequest
from mqmesh.protocol.names import names_in
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.route import GetRouteRequest
from mqmesh.security import guard as guard_module
from mqmesh.security.access_list import AccessList, Action, Namespace, Rule, UserRole
from mqmesh.security.guard import Guard

OWNERS = {role: credentials(role.value) for role in UserRole}
SHOP = credentials("shop")
RULES = [Rule([Action.PUB, Action.CREATE], ["orders*"]), Rule([Action.SUB], ["pay"], ["billing"])]


@pytest.fixture
def gate() -> Guard:
    roles = [
        user(OWNERS[role], role, brokers=["broker-a"] if role is UserRole.BROKER else [])
        for role in UserRole
    ]
    return guard(*roles, user(SHOP, allow=RULES))


def who(gate: Guard, of) -> Principal:
    return gate.principal(of.public_key)


class Naming:
    """A header that names these topics and groups at any place."""

    def __init__(self, topic="", group="", broker=""):
        self._names = {"topic": topic, "group": group, "broker_name": broker}

    def __getattr__(self, name):
        if name in ("topic", "group", "broker_name", "source", "target"):
            return self._names.get(name, self._names["group"])
        one = Naming(self._names["topic"], self._names["group"], self._names["broker_name"])
        return one if name == "config" else [one]


def may(gate: Guard, principal: Principal, spec, **names) -> bool:
    try:
        gate.check(principal, spec, Naming(**names))
    except (NoPermission, TopicNotFound):
        return False
    return True


@pytest.mark.parametrize("spec", COMMANDS.values(), ids=lambda spec: spec.code.name)
def test_each_command_is_for_those_roles(gate, spec):
    allowed = {
        Right.NONE: set(UserRole),
        Right.PUB: {UserRole.ADMIN},
        Right.SUB: {UserRole.ADMIN, UserRole.BROKER, UserRole.SERVICE},
        Right.FILTER: {UserRole.ADMIN},
        Right.VIEW_OWN: {*UserRole} - {UserRole.NONE},
        Right.VIEW: {*UserRole} - {UserRole.NONE},
        Right.ADMIN_OWN: {UserRole.ADMIN},
        Right.ADMIN: {UserRole.ADMIN},
        Right.INTERNAL: {UserRole.BROKER} if spec.broker else {UserRole.BROKER, UserRole.SERVICE},
    }[spec.right]
    if spec.right is Right.NONE and spec.topics:
        allowed = {*UserRole} - {UserRole.NONE}
    assert spec.topics or spec.groups or spec.right not in (Right.PUB, Right.SUB)
    found = {
        role
        for role in UserRole
        if may(gate, who(gate, OWNERS[role]), spec, topic="t", group="g", broker="broker-a")
    }
    by_name = not {"body", "looked-up"} & {*spec.topics}
    if by_name:
        assert found == allowed
    else:  # a topic that stands elsewhere is checked when it is known
        found = set()
        for role in UserRole:
            try:
                gate.check_topic(who(gate, OWNERS[role]), spec, "t")
                gate.check(who(gate, OWNERS[role]), spec, Naming())
            except (NoPermission, TopicNotFound):
                continue
            found.add(role)
        assert found == allowed


@pytest.mark.parametrize("spec", COMMANDS.values(), ids=lambda spec: spec.code.name)
@pytest.mark.parametrize("stranger", [ANYBODY, Principal("gone"), Principal("")])
def test_who_is_not_in_the_list_may_nothing(gate, spec, stranger):
    if "body" in spec.topics or "looked-up" in spec.topics:
        with pytest.raises(NoPermission):
            gate.check(stranger, spec, Naming("t", "g"))
            gate.check_topic(stranger, spec, "t")
    else:
        assert not may(gate, stranger, spec, topic="t", group="g", broker="broker-a")


def test_a_subscriber_needs_the_topic_and_the_group(gate):
    pull, shop = COMMANDS[RequestCode.PULL_MESSAGE], who(gate, SHOP)
    for _ in range(2):  # also when it is remembered
        assert may(gate, shop, pull, topic="pay", group="billing")
        assert not may(gate, shop, pull, topic="pay", group="other")
        assert not may(gate, shop, pull, topic="orders", group="billing")


OWN_VIEW = ("GET_CONSUME_STATS", "GET_CONSUMER_CONNECTION_LIST", "GET_TOPIC_STATS_INFO")
OWN_ADMIN = ("RESEND_DEAD_LETTERS", "INVOKE_BROKER_TO_RESET_OFFSET")


@pytest.mark.parametrize("code", [*OWN_VIEW, *OWN_ADMIN, "GET_ALL_SUBSCRIPTIONGROUP_CONFIG"])
def test_what_belongs_to_a_group_is_its_members(gate, code):
    spec, shop = COMMANDS[RequestCode[code]], who(gate, SHOP)
    topic = "pay" if {"topic"} & {*spec.topics} else ""
    assert may(gate, shop, spec, topic=topic, group="billing")
    assert may(gate, shop, spec, topic="%DLQ%billing" if topic else "", group="billing")
    if spec.groups:
        assert not may(gate, shop, spec, topic=topic, group="other")
        assert not may(gate, shop, spec, topic=topic), "without a group it is about all of them"
    if topic:
        assert not may(gate, shop, spec, topic="orders-1", group="billing"), "it may only send"
        assert not may(gate, shop, spec, topic="%DLQ%other", group="billing")
    service = may(gate, who(gate, OWNERS[UserRole.SERVICE]), spec, topic=topic, group="billing")
    assert service is (spec.right is Right.VIEW_OWN), "it reads everything, and changes nothing"


def test_a_member_that_resends_to_a_topic_needs_the_right_to_send(gate):
    resend, shop = COMMANDS[RequestCode.RESEND_DEAD_LETTERS], who(gate, SHOP)
    gate.check(shop, resend, Naming(group="billing"))
    gate.check_topic(shop, resend, "orders-1")
    for _ in range(2):
        with pytest.raises(NoPermission, match="may not PUB topic 'pay'"):
            gate.check_topic(shop, resend, "pay")
    gate.check_topic(who(gate, OWNERS[UserRole.ADMIN]), resend, "pay")


@pytest.mark.parametrize("group", ["mqmesh-query", "mqmesh-consume-1a2b"])
def test_who_only_looks_on_needs_the_topic_alone(gate, group):
    pull, shop = COMMANDS[RequestCode.PULL_MESSAGE], who(gate, SHOP)
    assert may(gate, shop, pull, topic="pay", group=group)
    assert may(gate, shop, pull, topic="%DLQ%billing", group=group)
    assert not may(gate, shop, pull, topic="%DLQ%other", group=group)
    assert not may(gate, shop, pull, topic="orders", group=group)


def test_a_refusal_says_who_may_not_do_what_and_why(gate):
    send = COMMANDS[RequestCode.SEND_MESSAGE]
    with pytest.raises(NoPermission, match=r"user 'shop' may not PUB topic 'pay' \(no rule"):
        gate.check_topic(who(gate, SHOP), send, "pay")
    with pytest.raises(
        NoPermission, match=r"'shop' may not DELETE_TOPIC_IN_BROKER: .* admin, .* none"
    ):
        gate.check(who(gate, SHOP), COMMANDS[RequestCode.DELETE_TOPIC_IN_BROKER], Naming("orders"))


@pytest.mark.parametrize(
    ("code", "header", "refused"),
    [
        ("GET_TOPIC_STATS_INFO", Naming(topic="%DLQ%other"), "SUB group 'other' (no rule"),
        ("GET_TOPIC_STATS_INFO", Naming(topic="orders-1"), "SUB topic 'orders-1' (no rule"),
        ("GET_CONSUME_STATS", Naming(group="other"), "SUB group 'other' (no rule"),
        ("GET_ALL_SUBSCRIPTIONGROUP_CONFIG", Naming(), "GET_ALL_SUBSCRIPTIONGROUP_CONFIG: "),
    ],
)
def test_a_refusal_names_the_group_or_topic_of_others(gate, code, header, refused):
    with pytest.raises(NoPermission, match=re.escape(f"user 'shop' may not {refused}")):
        gate.check(who(gate, SHOP), COMMANDS[RequestCode[code]], header)


def test_a_topic_without_any_right_is_not_there(gate):
    route, shop = COMMANDS[RequestCode.GET_ROUTEINFO_BY_TOPIC], who(gate, SHOP)
    gate.check(shop, route, GetRouteRequest("orders1"))
    gate.check(shop, route, GetRouteRequest("pay"))
    gate.check(shop, route, GetRouteRequest(AUTO_CREATE_TOPIC))
    with pytest.raises(TopicNotFound):
        gate.check(shop, route, GetRouteRequest("secret"))
    viewer = who(gate, OWNERS[UserRole.VIEW])
    gate.check(viewer, route, GetRouteRequest("secret"))  # lists show it all names


def test_a_broker_speaks_for_its_groups_only(gate):
    broker = who(gate, OWNERS[UserRole.BROKER])
    register = COMMANDS[RequestCode.REGISTER_BROKER]
    assert may(gate, broker, register, broker="broker-a")
    assert not may(gate, broker, register, broker="broker-b")
    assert not may(gate, who(gate, OWNERS[UserRole.SERVICE]), register, broker="broker-a")


def test_a_key_is_a_broker_s_where_the_list_says_so(gate):
    key = OWNERS[UserRole.BROKER].public_key
    assert gate.is_broker(key, "broker-a")
    assert not gate.is_broker(key, "broker-b")
    for role in set(UserRole) - {UserRole.BROKER}:
        assert not gate.is_broker(OWNERS[role].public_key, "broker-a")
    assert not gate.is_broker(credentials("stranger").public_key, "broker-a")


def test_topics_are_made_by_who_may_create_them(gate):
    gate.check_creation(who(gate, SHOP), "orders-new")
    with pytest.raises(NoPermission, match="may not CREATE topic 'pay'"):
        gate.check_creation(who(gate, SHOP), "pay")


def test_another_list_counts_at_once(gate):
    pull, shop = COMMANDS[RequestCode.PULL_MESSAGE], who(gate, SHOP)
    assert may(gate, shop, pull, topic="pay", group="billing")
    gate.put(AccessList(2, [user(SHOP)]))
    assert not may(gate, shop, pull, topic="pay", group="billing")
    gate.put(AccessList(3, []))
    assert gate.principal(SHOP.public_key) is None


def test_users_expire_when_their_day_comes():
    now = SimpleNamespace(day=TODAY)
    tomorrow = TODAY + datetime.timedelta(days=1)
    gate = Guard(AccessList(1, [user(SHOP, expires=tomorrow)]), lambda: now.day)
    assert not gate.look_at_date()
    assert gate.principal(SHOP.public_key) is not None
    now.day = tomorrow
    assert gate.look_at_date()
    assert gate.principal(SHOP.public_key) is None


def test_new_names_for_ever_fill_no_memory(gate, monkeypatch):
    monkeypatch.setattr(guard_module, "MAX_PASSED", 10)
    for number in range(25):
        gate.check_topic(who(gate, SHOP), COMMANDS[RequestCode.SEND_MESSAGE], f"orders{number}")
    assert len(gate._passed) <= 10


EVERYTHING = [Rule(list(Action), ["*"], ["*"])]


@pytest.fixture
def confined() -> Guard:
    return guard(
        user(OWNERS[UserRole.ADMIN], UserRole.ADMIN),
        user(SHOP, UserRole.ADMIN, namespace="shop", allow=EVERYTHING),
    )


@pytest.mark.parametrize("spec", COMMANDS.values(), ids=lambda spec: spec.code.name)
def test_a_confined_user_names_nothing_of_others_whatever_it_may(confined, spec):
    if spec.fixed is not None or spec.request is None:
        return
    own, admin = who(confined, SHOP), who(confined, OWNERS[UserRole.ADMIN])
    assert own.namespace == "shop"
    names = dict.fromkeys(["topic", "group", "dead letters"], "shop%x")
    header = filled(spec.request, names)
    if not names_in(header):
        return
    if spec.right is not Right.INTERNAL:
        confined.check(own, spec, header)
    is_looked_up = spec.right is Right.NONE and LOOKED_UP in spec.topics
    for kind in names:
        for other in ("bank%x", "x", "%RETRY%bank%x", "SCHEDULE_TOPIC_XXXX"):
            header = filled(spec.request, {**names, kind: other})
            if kind in {one for one, _ in names_in(header)} and not is_looked_up:
                with pytest.raises((NoPermission, TopicNotFound)):
                    confined.check(own, spec, header)
            if spec.right is not Right.INTERNAL:
                confined.check(admin, spec, header)


@pytest.mark.parametrize("spec", COMMANDS.values(), ids=lambda spec: spec.code.name)
def test_a_confined_administrator_has_no_command_about_the_whole_cluster(confined, spec):
    if spec.fixed is not None or (spec.request and names_in(filled(spec.request))):
        return
    header = None if spec.request is None else filled(spec.request)
    is_of_all = not spec.scoped and LOOKED_UP not in spec.topics
    if spec.right in (Right.VIEW, Right.ADMIN, Right.INTERNAL) and is_of_all:
        with pytest.raises(NoPermission, match="whole cluster"):
            confined.check(who(confined, SHOP), spec, header)
    elif spec.right is not Right.INTERNAL:
        confined.check(who(confined, SHOP), spec, header)


def test_what_a_handler_finds_out_is_within_the_namespace_of_the_user(confined):
    own, admin = who(confined, SHOP), who(confined, OWNERS[UserRole.ADMIN])
    for code in (RequestCode.SEND_MESSAGE, RequestCode.VIEW_HALF_MESSAGE, RequestCode.VIEW_MESSAGE):
        spec = COMMANDS[code]
        for topic in ("shop%x", "%RETRY%shop%x"):
            confined.check_topic(own, spec, topic)
        for _ in range(2):
            with pytest.raises(NoPermission, match=r"not in (its )?namespace 'shop'"):
                confined.check_topic(own, spec, "bank%x")
        confined.check_topic(admin, spec, "bank%x")
    routes = COMMANDS[RequestCode.GET_ROUTES_OF_TOPICS]
    with pytest.raises(TopicNotFound, match="not for user 'shop'"):
        confined.check_topic(own, routes, "bank%x")
    confined.check_topic(own, routes, AUTO_CREATE_TOPIC)
    send = COMMANDS[RequestCode.SEND_MESSAGE]
    confined.check_group(own, send, "shop%g")
    confined.check_group(admin, send, "bank%g")
    with pytest.raises(NoPermission, match="group 'bank%g'"):
        confined.check_group(own, send, "bank%g")
    confined.check_creation(own, "shop%new")
    with pytest.raises(NoPermission, match="not in namespace"):
        confined.check_creation(own, "new")


def test_another_namespace_counts_from_the_next_list_on(confined):
    own, pull = who(confined, SHOP), COMMANDS[RequestCode.PULL_MESSAGE]
    confined.check(own, pull, PullRequest("shop%g", "shop%t", 0, 0))
    users = [
        user(OWNERS[UserRole.ADMIN], UserRole.ADMIN),
        user(SHOP, namespace="bank", allow=EVERYTHING),
    ]
    confined.put(AccessList(2, users, [Namespace("bank")]))
    confined.check(own, pull, PullRequest("bank%g", "bank%t", 0, 0))
    with pytest.raises(NoPermission, match="'bank'"):
        confined.check(own, pull, PullRequest("shop%g", "shop%t", 0, 0))


def test_who_only_looks_needs_no_group_of_the_namespace(confined):
    own, pull = who(confined, SHOP), COMMANDS[RequestCode.PULL_MESSAGE]
    confined.check(own, pull, PullRequest(f"{LOOK_GROUP_PREFIX}1", "shop%t", 0, 0))
    make = COMMANDS[RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP]
    with pytest.raises(NoPermission, match="namespace"):
        confined.check(own, make, UpdateGroupRequest(GroupConfig(f"{LOOK_GROUP_PREFIX}1")))
    confined.check(own, make, UpdateGroupRequest(GroupConfig("shop%g", dead_letter="drop")))
    with pytest.raises(NoPermission, match="dead letters 'bank%d'"):
        confined.check(own, make, UpdateGroupRequest(GroupConfig("shop%g", dead_letter="bank%d")))
