"""The guard of a server: admits connections and requests by the access list in force."""

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from mqmesh.errors import NoPermission, TopicNotFound
from mqmesh.message import AUTO_CREATE_TOPIC, DLQ_PREFIX, RETRY_PREFIX
from mqmesh.metrics import Measured, counter
from mqmesh.namespaces import is_within
from mqmesh.protocol.command import Principal
from mqmesh.protocol.commands import LOOKED_UP, CommandSpec, Right
from mqmesh.protocol.groups import only_looks
from mqmesh.protocol.names import names_in
from mqmesh.protocol.policies import DROP, KEEP
from mqmesh.security.access_list import AccessList, Action, UserRole
from mqmesh.security.permissions import Judgement, Permissions, name_matches
from mqmesh.security.quotas import Quotas

MAX_PASSED: Final = 100_000
"""Permitted requests that are remembered; then all are forgotten."""

_INTERNAL: Final = frozenset({UserRole.BROKER, UserRole.SERVICE})
_VIEWS: Final = _INTERNAL | {UserRole.VIEW, UserRole.ADMIN}
_ROLES: Final = {
    Right.NONE: frozenset(UserRole),
    Right.VIEW_OWN: _VIEWS,
    Right.VIEW: _VIEWS,
    Right.ADMIN_OWN: frozenset({UserRole.ADMIN}),
    Right.ADMIN: frozenset({UserRole.ADMIN}),
    Right.INTERNAL: _INTERNAL,
}
_OWN: Final = frozenset({Right.VIEW_OWN, Right.ADMIN_OWN})
_OF_ROLES: Final = _OWN | {Right.VIEW, Right.ADMIN, Right.INTERNAL}
# As plain names: to look a member up in its enumeration takes longer than the rest of a check.
_NONE, _PUB, _SUB, _FILTER = Right.NONE, Right.PUB, Right.SUB, Right.FILTER
_ACTIONS: Final = {Right.PUB: Action.PUB, Right.SUB: Action.SUB, Right.FILTER: Action.FILTER}


class Guard:
    """Guard of one process: decides which users may connect and which requests they may send; pure
    but for its clock.

    The default is refusal: of an unknown key, a right without a rule, a user that is gone.

    Args:
        access_list: Access list that is in force at first.
        today: Returns the day by UTC; a user that has expired may not connect.
        path: File that the list is kept in; None for none.
        audited: True to write an audit log beside that file: changes, and refusals.

    Attributes:
        path, audited: As given.
        quotas: Usage of users with quotas.
        refused_connections: Connections with a key of no user; the ZAP handler counts them.
    """

    def __init__(
        self,
        access_list: AccessList,
        today: Callable[[], datetime.date],
        path: Path | None = None,
        *,
        audited: bool = False,
    ) -> None:
        self.path = path
        self.audited = audited
        self.quotas = Quotas()
        self.quotas.put(access_list)
        self.refused_connections = 0
        self._today = today
        self._permissions = Permissions(access_list, today())
        self._passed: set[tuple[str, str, str, bool]] = set()

    @property
    def access_list(self) -> AccessList:
        """Access list in force."""
        return self._permissions.access_list

    @property
    def permissions(self) -> Permissions:
        """Permissions of the access list in force."""
        return self._permissions

    def put(self, access_list: AccessList) -> None:
        """Puts another access list in force; decisions by the old one count no more."""
        self._permissions = Permissions(access_list, self._today())
        self.quotas.put(access_list)
        self._passed.clear()

    def look_at_date(self) -> bool:
        """Returns True if a day began, so that users may have expired."""
        if self._today() == self._permissions.today:
            return False
        self.put(self.access_list)
        return True

    def principal(self, user_id: str) -> Principal | None:
        """Return the principal of a connection.

        Args:
            user_id: The public key that its handshake proved.

        Returns:
            The principal; None if no user may connect with this key.
        """
        user = self._permissions.user_of(user_id)
        return None if user is None else Principal(user.name, user_id, user.namespace)

    def is_broker(self, key: str, broker_name: str) -> bool:
        """Return True if the owner of this public key may be a replica of a broker group."""
        user = self._permissions.user_of(key)
        return (
            user is not None
            and user.role is UserRole.BROKER
            and name_matches(user.brokers, broker_name)
        )

    def check(self, principal: Principal, spec: CommandSpec, header: Any) -> None:
        """Looks up the right that a command needs; see ``mqmesh.roles.dispatch.Authorizer``."""
        name, right = principal.name, spec.right
        if self._permissions.namespaces:
            self._check_names(name, spec, header)
        if right is _SUB or right is _FILTER:
            for group in spec.group_names(header) if spec.groups else ():
                if (name, spec.word, group, True) not in self._passed:
                    self._check_group(name, spec, group)
        elif right is not _PUB:
            # No group is named "", so that says that the role was looked at.
            if spec.broker or (name, spec.word, "", True) not in self._passed:
                if right not in _OWN or not self._owns(name, spec, header):
                    self._check_role(name, spec, header)
            if right is not _NONE:
                return
        if spec.topics:
            for topic in spec.topic_names(header):
                if (name, spec.word, topic, False) not in self._passed:
                    self.check_topic(principal, spec, topic)

    def check_topic(self, principal: Principal, spec: CommandSpec, topic: str) -> None:
        """Looks up the same right to a topic that the header does not name."""
        key = (principal.name, spec.word, topic, False)
        if key in self._passed:
            return
        name, right, permissions = principal.name, spec.right, self._permissions
        if permissions.namespaces:
            self._check_within(name, spec, "topic", topic)
        action = _ACTIONS.get(right)
        if action is not None:
            _require(permissions.topic(name, action, topic), name, action.value, "topic", topic)
        elif right is Right.NONE and not _may_know(permissions, name, topic):
            raise _hidden(name, topic)
        elif right is Right.ADMIN_OWN and not self._has_role(name, right):
            # A member of the group that is no administrator sends to the topic by this command.
            verdict = permissions.topic(name, Action.PUB, topic)
            _require(verdict, name, Action.PUB.value, "topic", topic)
        self._pass(key)

    def check_group(self, principal: Principal, spec: CommandSpec, group: str) -> None:
        """Checks that a group which the header does not name is in the namespace of a user."""
        self._check_within(principal.name, spec, "group", group)

    def check_creation(self, principal: Principal, topic: str) -> None:
        """Checks the right to have a topic made by sending to it.

        Raises:
            NoPermission: Not by this principal.
        """
        name = principal.name
        judgement = self._permissions.topic(name, Action.CREATE, topic)
        _require(judgement, name, "CREATE", "topic", topic)

    def _check_names(self, name: str, spec: CommandSpec, header: Any) -> None:
        """Checks that all names of a request are in its user's namespace, if the user has one.

        A request without names is about the whole cluster, unless its answer is limited to the
        namespace.
        """
        if name not in self._permissions.namespaces:
            return
        if spec.right is _NONE and LOOKED_UP in spec.topics:
            return  # those of others are missing from the answer
        names = [] if spec.request is None else names_in(header)
        for kind, one in names:
            self._check_within(name, spec, kind, one)
        if spec.right in _OF_ROLES and not (names or spec.scoped or LOOKED_UP in spec.topics):
            namespace = self._permissions.namespaces[name]
            raise NoPermission(
                f"user {name!r} may not {spec.code.name}: it is about the whole cluster, and the "
                f"user is of namespace {namespace!r}"
            )

    def _check_within(self, name: str, spec: CommandSpec, kind: str, what: str) -> None:
        namespace = self._permissions.namespaces.get(name, "")
        if is_within(namespace, what):
            return
        if kind == "dead letters" and what in (KEEP, DROP):
            return
        if kind == "group" and spec.right is _SUB and only_looks(what):
            return
        if spec.right is _NONE:
            if what == AUTO_CREATE_TOPIC:
                return  # producers ask for the pattern of new topics
            raise _hidden(name, what)
        raise NoPermission(
            f"user {name!r} may not {spec.code.name}: {kind} {what!r:.300} is not in its namespace "
            f"{namespace!r}"
        )

    def _check_group(self, name: str, spec: CommandSpec, group: str) -> None:
        action = _ACTIONS[spec.right]
        if spec.right is not _SUB or not only_looks(group):
            verdict = self._permissions.group(name, action, group)
            _require(verdict, name, action.value, "group", group)
        self._pass((name, spec.word, group, True))

    def _owns(self, name: str, spec: CommandSpec, header: Any) -> bool:
        """Return True if a user may read all that a request names, and it names a group if it can.

        A request that names nothing is about everything.
        """
        user = self._permissions.user(name)
        if user is None or user.role in _INTERNAL:
            return False
        if not (spec.group_names(header) if spec.groups else spec.topic_names(header)):
            return False
        return all(verdict.allowed for _, _, verdict in self._readings(name, spec, header))

    def _readings(
        self, name: str, spec: CommandSpec, header: Any
    ) -> Iterator[tuple[str, str, Judgement]]:
        """Yield each group and topic that a request names, and whether a user may read it."""
        for group in spec.group_names(header) if spec.groups else ():
            yield "group", group, self._permissions.group(name, Action.SUB, group)
        for topic in spec.topic_names(header) if spec.topics else ():
            verdict = self._permissions.topic(name, Action.SUB, topic)
            if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
                yield "group", topic.split("%", 2)[2], verdict
            else:
                yield "topic", topic, verdict

    def _has_role(self, name: str, right: Right) -> bool:
        user = self._permissions.user(name)
        return user is not None and user.role in _ROLES[right]

    def _check_role(self, name: str, spec: CommandSpec, header: Any) -> None:
        user, right = self._permissions.user(name), spec.right
        if user is None:
            raise NoPermission(f"user {name!r} is not in the access list, or not enabled")
        if not self._has_role(name, right):
            for kind, what, verdict in self._readings(name, spec, header) if right in _OWN else ():
                _require(verdict, name, Action.SUB.value, kind, what)
            raise NoPermission(
                f"user {name!r} may not {spec.code.name}: it needs the right {right.value}, and "
                f"the user's role is {user.role.value}"
            )
        if spec.broker:
            broker = getattr(header, spec.broker)
            if not name_matches(user.brokers, broker):
                raise NoPermission(f"user {name!r} may not speak for broker {broker!r:.300}")
        self._pass((name, spec.word, "", True))

    def _pass(self, key: tuple[str, str, str, bool]) -> None:
        if len(self._passed) >= MAX_PASSED:
            self._passed.clear()
        self._passed.add(key)


def _hidden(name: str, topic: str) -> TopicNotFound:
    """Return the error of a topic that a user may not know: as if it were not there."""
    return TopicNotFound(f"no topic {topic!r:.300}, or it is not for user {name!r}")


def _may_know(permissions: Permissions, name: str, topic: str) -> bool:
    user = permissions.user(name)
    if user is not None and user.role in _VIEWS:
        return True  # lists show it all names
    # Producers look up the pattern of new topics; their right to create one is checked later.
    return topic == AUTO_CREATE_TOPIC or permissions.any_of_topic(name, topic)


def _require(verdict: Judgement, name: str, action: str, kind: str, what: str) -> None:
    if not verdict.allowed:
        raise NoPermission(
            f"user {name!r} may not {action} {kind} {what!r:.300} ({verdict.reason})"
        )


METRICS: Final[tuple[Measured[Guard], ...]] = (
    counter(
        "refused_connections_total",
        "connections whose keys the access list does not know",
        lambda guard: guard.refused_connections,
    ),
)
"""Metrics of a server with security on."""
