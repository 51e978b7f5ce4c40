"""The access list: users, their keys, and their rights. Pure."""

import datetime
import enum
import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.config import dump_toml, parse_config
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.message import check_group
from mqmesh.namespaces import check_namespace
from mqmesh.security.keys import Key

MAX_USERS: Final = 10_000
MAX_NAMESPACES: Final = 1_000
MAX_KEYS: Final = 4
"""Most keys of one user: a new one is added before the old one is taken away."""
MAX_RULES: Final = 1_000
"""Most rules of one user, those that allow and those that deny each."""
MAX_NAMES: Final = 1_000
"""Most topics, and most groups, of one rule."""
MAX_RATE: Final = 1_000_000_000_000
"""Highest rate of a quota, a second."""
MAX_VERSION: Final = (1 << 53) - 1
EVERYTHING: Final = "*"

Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Patterns = Annotated[list[Pattern], msgspec.Meta(max_length=MAX_NAMES)]


class UserRole(enum.StrEnum):
    """Rights of a user beside those that its rules give."""

    NONE = "none"
    VIEW = "view"
    """Sees how everything is, and changes nothing. Reads no messages."""
    ADMIN = "admin"
    """May do everything but the commands that processes of the cluster send each other."""
    BROKER = "broker"
    """A replica of one of its ``brokers``, or a process beside one that has the same key."""
    SERVICE = "service"
    """A process beside brokers: a schedule service, a filter server. Reads every topic."""


class Action(enum.StrEnum):
    """Actions that a rule allows or denies."""

    PUB = "PUB"
    """Send to topics."""
    SUB = "SUB"
    """Read topics; do so as groups."""
    CREATE = "CREATE"
    """Have topics made by sending to them, where brokers do that."""
    FILTER = "FILTER"
    """Upload filters in Python for groups."""


_OF_TOPICS: Final = frozenset({Action.PUB, Action.SUB, Action.CREATE})
_OF_GROUPS: Final = frozenset({Action.SUB, Action.FILTER})


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rule that allows or denies actions.

    Attributes:
        actions: Which.
        topics: On these topics: names; beginnings of names, with a * at the end; or "*".
        groups: As these consumer groups.
    """

    actions: Annotated[list[Action], msgspec.Meta(min_length=1, max_length=len(Action))]
    topics: Patterns = []
    groups: Patterns = []


Rate = Annotated[int, msgspec.Meta(ge=1, le=MAX_RATE)]


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quota of a user at one server; a limit that is left out does not exist.

    Attributes:
        send_messages_per_s: Sent to one broker, over time.
        send_bytes_per_s: The same in bytes of batches, as they come by the wire.
        read_messages_per_s: Pulled from one broker, over time.
        read_bytes_per_s: The same in bytes of batches.
        connections: To one server at a time; each client has one, and a producer that sends
            synchronously another.
    """

    send_messages_per_s: Rate | None = None
    send_bytes_per_s: Rate | None = None
    read_messages_per_s: Rate | None = None
    read_bytes_per_s: Rate | None = None
    connections: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None


Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_RATE)]


class NamespaceQuota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quota of a namespace at one broker; a limit that is left out does not exist.

    Attributes:
        send_bytes_per_s: Sent by all of its users together, over time, in bytes of batches as they
            come by the wire. Messages that are sent back, resent or replayed count, too, and never
            wait.
        topics: Topics, without those of retries and dead letters.
        queues: Queues of these topics.
        groups: Consumer groups.
        unsettled_messages: Messages that are leased to members of its groups which acknowledge each
            message, and those that wait to be handed out once more.
        table_bytes: Keys and values of all revisions that its tables of keys and values keep.
    """

    send_bytes_per_s: Rate | None = None
    topics: Count | None = None
    queues: Count | None = None
    groups: Count | None = None
    unsettled_messages: Count | None = None
    table_bytes: Count | None = None


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Namespace: topics and groups of one tenant.

    Attributes:
        name: Text before the ``%`` of their names.
        quota: How much all of it may use.
    """

    name: str
    quota: NamespaceQuota = NamespaceQuota()


class User(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user.

    Attributes:
        name: As a consumer group may be named.
        keys: Public keys, 1 to 4. A client that has the secret half of one is this user.
        role: Rights beside its rules.
        enabled: False: no client can connect as this user.
        expires: First day, by UTC, on which no client can connect as this user any more.
        brokers: Broker groups that it may register as; of role ``broker``.
        namespace: The only namespace whose topics and groups it may use or see, even if rules allow
            others; "" for all. Not of the roles ``broker`` and ``service``.
        allow: Rules that allow actions.
        deny: Rules that forbid actions; they override all that allow some.
        quota: Its limits of use; not of the roles ``broker`` and ``service``.
    """

    name: str
    keys: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    role: UserRole = UserRole.NONE
    enabled: bool = True
    expires: datetime.date | None = None
    brokers: Patterns = []
    namespace: str = ""
    allow: Annotated[list[Rule], msgspec.Meta(max_length=MAX_RULES)] = []
    deny: Annotated[list[Rule], msgspec.Meta(max_length=MAX_RULES)] = []
    quota: Quota | None = None

    def is_valid(self, today: datetime.date) -> bool:
        """Return True if a connection may be this user, on this day by UTC."""
        return self.enabled and (self.expires is None or today < self.expires)


class AccessList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Access list of a cluster: users and their rights.

    Attributes:
        version: Grows by one with each change.
        user: All users, up to 10,000.
        namespace: Namespaces that users are confined to, up to 1,000.
    """

    version: Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSION)] = 1
    user: Annotated[list[User], msgspec.Meta(max_length=MAX_USERS)] = []
    namespace: Annotated[list[Namespace], msgspec.Meta(max_length=MAX_NAMESPACES)] = []

    def find(self, name: str) -> User:
        """Return the user of this name.

        Raises:
            ConfigError: No user has this name.
        """
        for user in self.user:
            if user.name == name:
                return user
        raise ConfigError(f"the access list has no user {name!r}; `mqmesh user list` shows all")

    def digest(self) -> str:
        """Return a digest that is equal for lists that say the same."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()

    def with_user(self, user: User) -> "AccessList":
        """Return the next version, in which a user is new or replaced."""
        others = [one for one in self.user if one.name != user.name]
        place = next((i for i, one in enumerate(self.user) if one.name == user.name), len(others))
        return self._next([*others[:place], user, *others[place:]])

    def without_user(self, name: str) -> "AccessList":
        """Return the next version, without a user.

        Raises:
            ConfigError: No user has this name.
        """
        gone = self.find(name)
        return self._next([one for one in self.user if one is not gone])

    def _next(self, users: list[User]) -> "AccessList":
        return AccessList(self.version + 1, users, self.namespace)


def read_access_list(text: str, source: str, today: datetime.date) -> AccessList:
    """Reads an access list, and checks it.

    Args:
        text: TOML.
        source: Name of the text in an error.
        today: By UTC.

    Raises:
        ConfigError: The text is no sound list: one line that says what to correct.
    """
    access_list = parse_config(AccessList, text, source)
    problem = next(_problems(access_list, today), None)
    if problem is not None:
        raise ConfigError(f"{source}: {problem}")
    return access_list


def write_access_list(access_list: AccessList) -> str:
    """Return the text that ``read_access_list`` reads."""
    return dump_toml(access_list)


def _problems(access_list: AccessList, today: datetime.date) -> Iterator[str]:
    yield from _wrong_namespaces(access_list)
    names: set[str] = set()
    owners: dict[str, str] = {}
    for user in access_list.user:
        if user.name in names:
            yield f"there are two users {user.name!r}"
        names.add(user.name)
        try:
            check_group(user.name)
        except ConfigError as error:
            yield f"user {user.name!r:.300}: no legal name: {error}"
        for key in user.keys:
            if key in owners:
                yield f"users {owners[key]!r} and {user.name!r} have one key, {key}"
            owners[key] = user.name
        if user.brokers and user.role is not UserRole.BROKER:
            yield f"user {user.name!r}: brokers is of role broker, not {user.role.value}"
        if user.role is UserRole.BROKER and not user.brokers:
            yield f"user {user.name!r}: of role broker, but brokers names no broker group"
        if user.quota is not None and user.role in (UserRole.BROKER, UserRole.SERVICE):
            yield f"user {user.name!r}: a quota would hold up the cluster's own processes"
        yield from (f"user {user.name!r}: {what}" for what in _wrong_patterns(user.brokers))
        for kind, rules in (("allow", user.allow), ("deny", user.deny)):
            for number, rule in enumerate(rules, start=1):
                place = f"user {user.name!r}, rule {number} of {kind}"
                yield from (f"{place}: {what}" for what in _wrong_rule(rule))
    if not any(
        one.role is UserRole.ADMIN and not one.namespace and one.is_valid(today)
        for one in access_list.user
    ):
        yield (
            "no enabled user of role admin is left that is of no namespace, so nobody could change "
            "the list any more"
        )


def _wrong_namespaces(access_list: AccessList) -> Iterator[str]:
    known: set[str] = set()
    for one in access_list.namespace:
        if one.name in known:
            yield f"there are two namespaces {one.name!r}"
        known.add(one.name)
        try:
            check_namespace(one.name)
        except InvalidArgument as error:
            yield str(error)
    for user in access_list.user:
        if user.namespace and user.namespace not in known:
            yield (
                f"user {user.name!r}: there is no [[namespace]] with name = {user.namespace!r:.100}"
            )
        if user.namespace and user.role in (UserRole.BROKER, UserRole.SERVICE):
            yield f"user {user.name!r}: a namespace would hide what the cluster's processes need"


def _wrong_rule(rule: Rule) -> Iterator[str]:
    if not rule.topics and not rule.groups:
        yield "it names neither topics nor groups"
    for names, known, what in (
        (rule.topics, _OF_TOPICS, "topics"),
        (rule.groups, _OF_GROUPS, "groups"),
    ):
        if names and not known & set(rule.actions):
            possible = ", ".join(sorted(known))
            yield f"{what} are for {possible}, so {what} = {names!r:.100} can match nothing"
    yield from _wrong_patterns([*rule.topics, *rule.groups])


def _wrong_patterns(patterns: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        stem = pattern.removesuffix(EVERYTHING)
        try:
            if stem:
                check_group(stem)
        except ConfigError:
            yield (
                f"{pattern!r} is neither a name, nor the beginning of one with a * behind it, "
                'nor "*"'
            )
