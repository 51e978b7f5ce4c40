"""Permitted commands by caller, worked out from the tables and not from the code that checks.

Callers have some rights to one topic and one group; every command needs some. Pure.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import msgspec

from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.filled_headers import NAMED, filled
from harness.keys import credentials, user
from mqmesh.batch.record_batch import encode_batch
from mqmesh.message import Message, format_message_id
from mqmesh.protocol.command import encode_frame, encode_header
from mqmesh.protocol.commands import IN_BODY, LOOKED_UP, CommandSpec, RequestCode, Right
from mqmesh.protocol.messaging import encode_send
from mqmesh.protocol.names import names_in
from mqmesh.protocol.transactions import Decision, End, encode_ends
from mqmesh.security.access_list import Action, Rule, User, UserRole
from mqmesh.security.keys import Credentials

NAMESPACE: Final = "shop"
OTHER_NAMESPACE: Final = "bank"
TOPIC: Final = "shop%orders"
GROUP: Final = "shop%billing"
PUB, SUB_TOPIC, SUB_GROUP, FILTER, VIEW, ADMIN, INTERNAL, OF_NAMED, KNOWN = range(9)
"""Rights of a caller: send to the topic, read it, read as the group, upload for the group, see,
change, be a process of the cluster, speak for the broker that requests name, know of the topic."""
_NEEDS: Final = {
    Right.NONE: set[int](),
    Right.PUB: {PUB},
    Right.VIEW_OWN: {VIEW},
    Right.VIEW: {VIEW},
    Right.ADMIN_OWN: {ADMIN},
    Right.ADMIN: {ADMIN},
    Right.INTERNAL: {INTERNAL},
}
_OWN: Final = frozenset({Right.VIEW_OWN, Right.ADMIN_OWN})
_RULES: Final = frozenset({PUB, SUB_TOPIC, SUB_GROUP, FILTER, KNOWN})


class Caller(msgspec.Struct, frozen=True):
    """Caller of commands.

    Attributes:
        credentials: Keys.
        user: Entry in the access list; None for nobody's keys.
        holds: Rights of the caller, of what it is confined to.
    """

    credentials: Credentials
    user: User | None
    holds: frozenset[int] = frozenset()

    @property
    def namespace(self) -> str:
        """Namespace that it is confined to; "" for none."""
        return "" if self.user is None else self.user.namespace

    @property
    def name(self) -> str:
        """For people."""
        return self.credentials.user


class Found(msgspec.Struct, frozen=True):
    """Data for the commands that look topics up, all of it of the topic.

    Attributes:
        commitlog_offset: Commit-log offset of a message.
        message_id: Message id of the same message.
        half_offset: Queue offset of a half message that ``PRODUCER_ID`` sent first.
        delayed: Producer and sequence of delayed messages, one for each caller.
    """

    commitlog_offset: int
    message_id: str
    half_offset: int
    delayed: list[tuple[int, int]]


def callers(topic: str = TOPIC, group: str = GROUP) -> list[Caller]:
    """Returns all callers that may connect; those last that disturb the others.

    Args:
        topic: Topic that they have rights to.
        group: Group that they have rights to.
    """
    rules = partial(_rules, topic=topic, group=group)
    return [
        _caller("stranger"),
        _caller("of-others", allow=_rules(Action, "others*", "others*")),
        _caller("denied", allow=_rules(Action, "*", "*"), deny=rules(Action)),
        _caller("pub", {PUB, KNOWN}, allow=rules({Action.PUB})),
        _caller("sub", {SUB_TOPIC, SUB_GROUP, KNOWN}, allow=rules({Action.SUB})),
        _caller("sub-of-topic", {SUB_TOPIC, KNOWN}, allow=rules({Action.SUB}, group="")),
        _caller("sub-of-group", {SUB_GROUP}, allow=rules({Action.SUB}, topic="")),
        _caller("create", {KNOWN}, allow=rules({Action.CREATE})),
        _caller("filter", {FILTER}, allow=rules({Action.FILTER})),
        _caller("view", {VIEW, KNOWN}, UserRole.VIEW),
        _all_but(Action.PUB, {PUB}, rules),
        _all_but(Action.SUB, {SUB_TOPIC, SUB_GROUP}, rules),
        _all_but(Action.FILTER, {FILTER}, rules),
        _caller("all-but-view", _RULES, allow=rules(Action)),
        _caller("admin", {*_RULES, VIEW, ADMIN}, UserRole.ADMIN),
        _caller("admin-denied", {VIEW, ADMIN, KNOWN}, UserRole.ADMIN, deny=rules(Action)),
        _tenant("tenant", NAMESPACE),
        _tenant("another-tenant", OTHER_NAMESPACE),
        _process("broker", {OF_NAMED}, UserRole.BROKER, brokers=[NAMED]),
        _process("another-broker", set(), UserRole.BROKER, brokers=["other"]),
        _process("service", set(), UserRole.SERVICE),
    ]


def intruders() -> list[Caller]:
    """Returns all callers that have keys and may not even connect."""
    yesterday = datetime.date(2020, 1, 1)
    return [
        Caller(credentials("unknown-key"), None),
        _caller("disabled", role=UserRole.ADMIN, enabled=False),
        _caller("expired", role=UserRole.ADMIN, expires=yesterday),
    ]


def may(caller: Caller, spec: CommandSpec) -> bool:
    """Return True if a caller may have a command that is about the topic and the group."""
    if caller.namespace and not _is_within(caller, spec):
        return False
    if spec.right in _OWN and INTERNAL not in caller.holds and _reads(spec) <= caller.holds:
        return True
    return _needs(spec) <= caller.holds


def _is_within(caller: Caller, spec: CommandSpec) -> bool:
    """Return True if a command is about nothing but what its caller is confined to."""
    if spec.right is Right.ADMIN and spec.topics == (LOOKED_UP,) and not spec.groups:
        return True  # it finds nothing here; unit/roles/broker/features/test_permits.py
    if spec.topics or (spec.request is not None and names_in(filled(spec.request))):
        return caller.namespace == NAMESPACE
    return spec.scoped or spec.right in (Right.NONE, Right.PUB, Right.SUB, Right.FILTER)


def _reads(spec: CommandSpec) -> set[int]:
    topics = [one for one in spec.topics if one not in (IN_BODY, LOOKED_UP)]
    return {one for one, at in ((SUB_TOPIC, topics), (SUB_GROUP, spec.groups)) if at}


def _needs(spec: CommandSpec) -> set[int]:
    if spec.right is Right.SUB:
        return {one for one, at in ((SUB_TOPIC, spec.topics), (SUB_GROUP, spec.groups)) if at}
    if spec.right is Right.FILTER:
        return {FILTER}
    needed = set(_NEEDS[spec.right])
    if spec.broker:
        needed.add(OF_NAMED)
    if spec.right is Right.NONE and spec.topics:
        needed.add(KNOWN)
    return needed


def frame_of(spec: CommandSpec, number: int, found: Found) -> bytes:
    """Makes a request for a command, about the topic and the group.

    Args:
        spec: The command.
        number: Number of the caller.
        found: Data that it may be about.

    Raises:
        LookupError: The command finds topics by itself, and there is no such request here.
    """
    header, body = b"", b""
    if spec.code in _EXAMPLES:
        header, body = _EXAMPLES[spec.code](number, found)
    elif spec.right in (Right.PUB, Right.SUB) and {IN_BODY, LOOKED_UP} & {*spec.topics}:
        raise LookupError(f"{spec.code.name} finds out topics for itself: it needs an example")
    elif spec.request is not None:
        names = {"topic": TOPIC, "group": GROUP, "dead letters": TOPIC}
        if spec.right in (Right.ADMIN, Right.INTERNAL):  # they delete it, and are for any
            names = dict.fromkeys(names, f"{NAMESPACE}%{NAMED}")
        header = encode_header(filled(spec.request, names))
    return encode_frame(spec.code, spec.code, body, header=header)


def _send(number: int, found: Found) -> tuple[bytes, bytes]:
    batch = encode_batch(
        [Message(TOPIC, b"x")],
        topic=TOPIC,
        queue_id=0,
        producer_id=PRODUCER_ID,
        first_sequence=1_000 + number,
        born_timestamp=1,
    )
    return encode_send(3_000, 1, PRODUCER_KEY), batch


def _end(number: int, found: Found) -> tuple[bytes, bytes]:
    wrong_proof = bytes(16)
    end = End(found.half_offset, PRODUCER_ID, 0, 0, 1, int(Decision.COMMIT), wrong_proof)
    return _packed(GROUP), encode_ends([end])


_EXAMPLES: Final[dict[RequestCode, Callable[[int, Found], tuple[bytes, bytes]]]] = {
    RequestCode.SEND_MESSAGE: _send,
    RequestCode.END_TRANSACTION: _end,
    RequestCode.VIEW_MESSAGE: lambda _, found: (_packed(found.commitlog_offset), b""),
    RequestCode.QUERY_MESSAGE_BY_ID: lambda _, found: (_packed(found.message_id), b""),
    RequestCode.GET_ROUTES_OF_TOPICS: lambda *_: (_packed([TOPIC]), b""),
    RequestCode.CANCEL_DELAYED: lambda number, found: (_packed(*found.delayed[number]), b""),
}
"""Header and body of requests that name their topic nowhere in the header."""


def _packed(*values: Any) -> bytes:
    return msgspec.msgpack.encode(values)


def _caller(
    name: str, holds: Iterable[int] = (), role: UserRole = UserRole.NONE, **more: Any
) -> Caller:
    own = credentials(name)
    return Caller(own, user(own, role, **more), frozenset(holds))


def _tenant(name: str, namespace: str) -> Caller:
    """Returns a caller that may do everything, within a namespace."""
    everything = _rules(Action, "*", "*")
    holds = {*_RULES, VIEW, ADMIN}
    return _caller(name, holds, UserRole.ADMIN, namespace=namespace, allow=everything)


def _all_but(action: Action, gone: set[int], rules: Callable[[set[Action]], list[Rule]]) -> Caller:
    allowed = rules(set(Action) - {action})
    return _caller(
        f"all-but-{action.value.lower()}", {*_RULES, VIEW} - gone, UserRole.VIEW, allow=allowed
    )


def _process(name: str, more: set[int], role: UserRole, **fields: Any) -> Caller:
    return _caller(name, {SUB_TOPIC, SUB_GROUP, VIEW, INTERNAL, KNOWN, *more}, role, **fields)


def _rules(actions: Iterable[Action], topic: str, group: str) -> list[Rule]:
    """Returns the rules that permit actions on a topic and a group, as far as such exist."""
    asked = set(actions)
    of_topics = sorted(asked & {Action.PUB, Action.SUB, Action.CREATE}) if topic else []
    of_groups = sorted(asked & {Action.SUB, Action.FILTER}) if group else []
    rules = [Rule(of_topics, topics=[topic])] if of_topics else []
    return rules + ([Rule(of_groups, groups=[group])] if of_groups else [])


def message_id_of(sequence: int) -> str:
    """Returns the id of a message that ``PRODUCER_ID`` sent."""
    return format_message_id(PRODUCER_ID, sequence)
