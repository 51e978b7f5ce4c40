"""Deny wins, adding an allow takes no right away, and names match by their beginning."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.message import RESERVED_TOPICS, TRACE_TOPIC, dlq_topic, retry_topic
from mqmesh.security import permissions
from mqmesh.security.access_list import AccessList, Action, Rule, User, UserRole
from mqmesh.security.permissions import Permissions, name_matches

TODAY = datetime.date(2026, 11, 24)
KEY = "0" * 40

NAMES = st.text("ab", min_size=1, max_size=3)
PATTERNS = st.one_of(NAMES, NAMES.map(lambda name: name + "*"), st.just("*"))
ACTIONS = st.sampled_from(Action)
RULES = st.builds(
    Rule,
    actions=st.lists(ACTIONS, min_size=1, max_size=2),
    topics=st.lists(PATTERNS, max_size=2),
    groups=st.lists(PATTERNS, max_size=2),
)
RULE_LISTS = st.lists(RULES, max_size=4)


def permit(role=UserRole.NONE, allow=(), deny=(), **more) -> Permissions:
    user = User("shop", [KEY], role, allow=list(allow), deny=list(deny), **more)
    return Permissions(AccessList(1, [user]), TODAY)


def both(one: Permissions, action: Action, name: str) -> tuple[bool, bool]:
    return (one.topic("shop", action, name).allowed, one.group("shop", action, name).allowed)


@given(RULE_LISTS, RULE_LISTS, ACTIONS, NAMES)
def test_it_is_as_the_rules_say(allow, deny, action, name):
    def says(rules, which):
        return any(
            action in rule.actions
            and any(
                name.startswith(one[:-1]) if one[-1] == "*" else name == one
                for one in getattr(rule, which)
            )
            for rule in rules
        )

    expected = tuple(says(allow, which) and not says(deny, which) for which in ("topics", "groups"))
    assert both(permit(allow=allow, deny=deny), action, name) == expected


@given(RULE_LISTS, RULE_LISTS, RULES, ACTIONS, NAMES)
def test_one_more_allow_takes_no_right_away(allow, deny, more, action, name):
    before = both(permit(allow=allow, deny=deny), action, name)
    after = both(permit(allow=[*allow, more], deny=deny), action, name)
    assert all(now or not then for then, now in zip(before, after, strict=True))


@given(RULE_LISTS, RULES, ACTIONS, NAMES, st.sampled_from(UserRole))
def test_one_more_deny_gives_no_right_and_wins(allow, more, action, name, role):
    readers = (UserRole.BROKER, UserRole.SERVICE)
    if role is UserRole.ADMIN or (role in readers and action is Action.SUB):
        allow = []
    denied = both(permit(role, allow, [more]), action, name)
    plain = both(permit(role, allow), action, name)
    assert all(then or not now for then, now in zip(plain, denied, strict=True))
    if action in more.actions:
        assert not (denied[0] and name_matches(more.topics, name))
        assert not (denied[1] and name_matches(more.groups, name))


@given(NAMES, NAMES)
def test_a_star_is_a_beginning(stem, name):
    assert name_matches([stem + "*"], name) == name.startswith(stem)
    assert name_matches([stem], name) == (stem == name)
    assert name_matches(["*"], name)


def test_a_verdict_says_what_decided():
    one = permit(
        allow=[Rule([Action.PUB], ["a*"])],
        deny=[Rule([Action.SUB], ["x"]), Rule([Action.PUB], ["ab"])],
    )
    assert one.topic("shop", Action.PUB, "aa").reason == "rule 1 of allow"
    assert one.topic("shop", Action.PUB, "ab").reason == "rule 2 of deny"
    assert one.topic("shop", Action.PUB, "b").reason == "no rule allows it"
    assert one.topic("thief", Action.PUB, "aa").reason.startswith("no such user")
    assert permit(UserRole.ADMIN).topic("shop", Action.PUB, "b").reason == "role admin"


def test_the_topic_of_the_message_trace_is_for_whom_rules_permit_it():
    one = permit(allow=[Rule([Action.PUB, Action.CREATE], [TRACE_TOPIC])])
    assert one.topic("shop", Action.PUB, TRACE_TOPIC).allowed
    assert one.topic("shop", Action.CREATE, TRACE_TOPIC).allowed
    assert not one.topic("shop", Action.SUB, TRACE_TOPIC).allowed


@pytest.mark.parametrize("topic", sorted(RESERVED_TOPICS - {TRACE_TOPIC}))
def test_topics_of_the_system_are_for_administrators(topic):
    everything = [Rule(list(Action), ["*"], ["*"])]
    for action in Action:
        assert not permit(allow=everything).topic("shop", action, topic).allowed
        assert permit(UserRole.ADMIN).topic("shop", action, topic).allowed


@pytest.mark.parametrize("make", [retry_topic, dlq_topic])
def test_what_a_group_failed_at_is_its_own(make):
    one = permit(allow=[Rule([Action.SUB, Action.PUB], ["*"], ["g%1"])])
    assert one.topic("shop", Action.SUB, make("g%1")).allowed
    assert not one.topic("shop", Action.SUB, make("other")).allowed
    assert not one.topic("shop", Action.PUB, make("g%1")).allowed


def test_a_service_reads_everything_and_sends_nothing():
    one = permit(UserRole.SERVICE)
    assert [action for action in Action if one.topic("shop", action, "t").allowed] == [Action.SUB]
    for role in (UserRole.NONE, UserRole.VIEW):
        assert not any(permit(role).topic("shop", action, "t").allowed for action in Action)


@pytest.mark.parametrize("more", [{"enabled": False}, {"expires": TODAY}])
def test_who_is_disabled_or_expired_is_nobody(more):
    one = permit(UserRole.ADMIN, **more)
    assert one.user("shop") is None
    assert one.user_of(KEY) is None
    assert not one.topic("shop", Action.PUB, "t").allowed


def test_keys_tell_users():
    one = permit()
    assert one.user_of(KEY).name == "shop"
    assert one.user_of("1" * 40) is None


def test_whoever_may_do_something_to_a_topic_may_know_it():
    one = permit(allow=[Rule([Action.PUB], ["a"])])
    assert one.any_of_topic("shop", "a")
    assert not one.any_of_topic("shop", "b")


def test_new_names_for_ever_fill_no_memory(monkeypatch):
    monkeypatch.setattr(permissions, "MAX_REMEMBERED", 10)
    one = permit(allow=[Rule([Action.PUB], ["a*"])])
    for number in range(25):
        assert one.topic("shop", Action.PUB, f"a{number}").allowed
    assert len(one._topics) <= 10
