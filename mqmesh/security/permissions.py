"""Permissions of users by the access list, with the rule that decides. Pure."""

import datetime
from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.message import DLQ_PREFIX, RETRY_PREFIX, is_closed_topic
from mqmesh.namespaces import is_within
from mqmesh.security.access_list import EVERYTHING, AccessList, Action, Rule, User, UserRole

_READERS: Final = frozenset({UserRole.BROKER, UserRole.SERVICE})
"""A replica has the whole log, and a filter server pulls the messages that it filters."""

MAX_REMEMBERED: Final = 100_000
"""Verdicts that are kept; then all are forgotten."""


class Judgement(msgspec.Struct, frozen=True):
    """Verdict on an action.

    Attributes:
        allowed: The action is permitted.
        reason: Rule or role that decided: ``rule 2 of deny``, ``role admin``, ``no rule allows
            it``.
    """

    allowed: bool
    reason: str


class Permissions:
    """Permissions by an access list on one day.

    Args:
        access_list: A list that was checked.
        today: Day by UTC; a user that has expired has no rights.

    Attributes:
        namespaces: Of each user that is confined to one.
    """

    def __init__(self, access_list: AccessList, today: datetime.date) -> None:
        self.access_list = access_list
        self.today = today
        valid = [user for user in access_list.user if user.is_valid(today)]
        self._by_name = {user.name: user for user in valid}
        self._by_key = {key: user for user in valid for key in user.keys}
        self.namespaces = {user.name: user.namespace for user in valid if user.namespace}
        self._topics: dict[tuple[str, Action, str], Judgement] = {}
        self._groups: dict[tuple[str, Action, str], Judgement] = {}

    def user_of(self, key: str) -> User | None:
        """Return the user of a public key; None if there is none, or the user may not connect."""
        return self._by_key.get(key)

    def user(self, name: str) -> User | None:
        """Return the user of this name; None if there is none that may connect."""
        return self._by_name.get(name)

    def topic(self, name: str, action: Action, topic: str) -> Judgement:
        """Judges an action of a user on a topic."""
        key = (name, action, topic)
        verdict = self._topics.get(key)
        if verdict is None:
            verdict = self._judge(name, action, topic=topic)
            _remember(self._topics, key, verdict)
        return verdict

    def group(self, name: str, action: Action, group: str) -> Judgement:
        """Judges an action of a user as a consumer group."""
        key = (name, action, group)
        verdict = self._groups.get(key)
        if verdict is None:
            verdict = self._judge(name, action, group=group)
            _remember(self._groups, key, verdict)
        return verdict

    def any_of_topic(self, name: str, topic: str) -> bool:
        """Return True if a user may do anything to a topic, so may know that it is there."""
        return any(
            self.topic(name, action, topic).allowed
            for action in (Action.PUB, Action.SUB, Action.CREATE)
        )

    def _judge(self, name: str, action: Action, *, topic: str = "", group: str = "") -> Judgement:
        user = self._by_name.get(name)
        if user is None:
            return Judgement(False, "no such user, or one that is not enabled")
        if not is_within(user.namespace, topic or group):
            return Judgement(False, f"not in namespace {user.namespace!r}")
        if topic and action is Action.SUB and topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            # Retries and dead letters belong to their group, so its rules decide.
            topic, group = "", topic.partition("%")[2].partition("%")[2]
        for kind, rules, allowed in (("deny", user.deny, False), ("allow", user.allow, True)):
            if allowed:
                role = _by_role(user.role, action)
                if role is not None:
                    return role
                if topic and is_closed_topic(topic):
                    return Judgement(False, "a topic of the system")
            for number, rule in enumerate(rules, start=1):
                if _matches(rule, action, topic, group):
                    return Judgement(allowed, f"rule {number} of {kind}")
        return Judgement(False, "no rule allows it")


def _by_role(role: UserRole, action: Action) -> Judgement | None:
    everything = role is UserRole.ADMIN
    reads = role in _READERS and action is Action.SUB
    return Judgement(True, f"role {role.value}") if everything or reads else None


def _matches(rule: Rule, action: Action, topic: str, group: str) -> bool:
    if action not in rule.actions:
        return False
    return name_matches(rule.topics, topic) if topic else name_matches(rule.groups, group)


def name_matches(patterns: Sequence[str], name: str) -> bool:
    """True if a name is one of these, or begins as one that ends with a ``*``."""
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith(EVERYTHING) else name == pattern
        for pattern in patterns
    )


def _remember(
    verdicts: dict[tuple[str, Action, str], Judgement],
    key: tuple[str, Action, str],
    one: Judgement,
) -> None:
    if len(verdicts) >= MAX_REMEMBERED:
        verdicts.clear()  # a client that asks for ever new names fills no memory
    verdicts[key] = one
