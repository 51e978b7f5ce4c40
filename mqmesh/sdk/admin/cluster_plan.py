"""Setup of a cluster as one document, and the plan that changes a cluster to it. Pure."""

import codecs
import enum
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.protocol.policies import KEEP

FORMAT: Final = 1

_T = TypeVar("_T")


class TopicSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A topic on one broker group; see ``TopicConfig``."""

    read_queue_nums: int
    write_queue_nums: int
    perm: int
    order: bool
    retention_ms: int = 0
    retention_messages: int = 0
    priorities: int = 0
    message_ttl: bool = False
    on_expired: str = "drop"
    history: int = 0
    schema: str = ""


class GroupSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A consumer group's settings on one broker group; see ``GroupConfig``."""

    consume_enable: bool
    consume_broadcast_enable: bool
    retry_max_times: int
    notify_consumer_ids_changed_enable: bool
    retry_delays: str = ""
    dead_letter: str = KEEP
    paused_until: int = 0
    paused_topics: dict[str, int] = {}
    max_messages_per_s: int = 0
    delivery: str = "queue"
    invisible_ms: int = 60_000
    max_unsettled: int = 10_000
    lost_grace_ms: int = 10_000
    priority_fairness: int = 0


class BrokerSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Setup of a broker group.

    Attributes:
        topics: By name; no system topics.
        groups: By name.
        drained: Producers have left it.
        settings: Settings that are not the default, by dotted key, for people only: an import does
            not use them. None where they were not requested.
    """

    topics: dict[str, TopicSetup] = {}
    groups: dict[str, GroupSetup] = {}
    drained: bool = False
    settings: dict[str, Any] | None = None


class ClusterSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document: no messages, no offsets, no secrets.

    Attributes:
        format: 1.
        exported_at: Wall clock, ISO 8601, UTC; "" for unknown.
        brokers: By name of the broker group.
        kv: Key/value configuration, by namespace.
        access_list: TOML; "" without security.
    """

    format: int = FORMAT
    exported_at: str = ""
    brokers: dict[str, BrokerSetup] = {}
    kv: dict[str, dict[str, str]] = {}
    access_list: str = ""


class ImportAction(enum.StrEnum):
    """Action of an import step."""

    CREATE = "create"
    CHANGE = "change"
    LEAVE = "leave"
    DELETE = "delete"
    CONFLICT = "conflict"
    """The step cannot be done, or not without losing something."""


class ImportThing(enum.StrEnum):
    """Kinds of things."""

    BROKER = "broker"
    TOPIC = "topic"
    GROUP = "group"
    KV = "kv"
    DRAINED = "drained"
    ACCESS_LIST = "access list"


class ImportStep(msgspec.Struct, frozen=True):
    """One thing of a plan.

    Attributes:
        action: Action on it.
        thing: Kind of thing.
        broker_name: Broker group; "" for the whole cluster.
        name: Of the topic or group, or ``namespace/key``.
        detail: Changes, or the reason of a conflict.
    """

    action: ImportAction
    thing: ImportThing
    broker_name: str
    name: str
    detail: str = ""


def read_setup(data: bytes, source: str) -> ClusterSetup:
    """Reads a document.

    Args:
        data: JSON.
        source: Name of it in errors.

    Raises:
        ConfigError: It is none, or of another format.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        head = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not what `mqmesh cluster export` writes: {error}") from error
    if head.get("format") != FORMAT:
        raise ConfigError(f"{source}: format {head.get('format')}, this version reads {FORMAT}")
    try:
        return msgspec.convert(head, ClusterSetup)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def write_setup(setup: ClusterSetup) -> bytes:
    """Return the document, with all names in order, so that two of them can be compared."""
    return msgspec.json.format(msgspec.json.encode(setup, order="deterministic")) + b"\n"


def make_plan(
    wanted: ClusterSetup,
    found: ClusterSetup,
    *,
    prune: bool = False,
    force: bool = False,
    filled: Mapping[str, frozenset[str]] | None = None,
) -> list[ImportStep]:
    """Return the steps that set a cluster up as a document says.

    Args:
        wanted: The document.
        found: Present setup of the cluster.
        prune: Delete topics and groups that the document does not have.
        force: Plan steps that lose messages, too: fewer queues, topics with messages deleted.
        filled: Topics with messages, by broker group.
    """
    steps: list[ImportStep] = []
    for name in sorted(wanted.brokers.keys() | found.brokers.keys()):
        here, there = wanted.brokers.get(name), found.brokers.get(name)
        if there is None:
            reason = "there is no such broker group; start it first"
            steps.append(ImportStep(ImportAction.CONFLICT, ImportThing.BROKER, name, name, reason))
        elif here is not None:
            full = (filled or {}).get(name, frozenset())
            steps += _of_broker(name, here, there, prune=prune, force=force, filled=full)
    steps += _of_kv(wanted.kv, found.kv, prune=prune)
    if wanted.access_list:
        steps.append(_of_access_list(wanted.access_list, found.access_list))
    return steps


def _of_broker(
    name: str,
    wanted: BrokerSetup,
    found: BrokerSetup,
    *,
    prune: bool,
    force: bool,
    filled: frozenset[str],
) -> Iterator[ImportStep]:
    for topic, here, there in _pairs(wanted.topics, found.topics):
        if here is None:
            if prune and (force or topic not in filled):
                yield ImportStep(ImportAction.DELETE, ImportThing.TOPIC, name, topic)
            elif prune:
                reason = "it has messages; --force deletes it all the same"
                yield ImportStep(ImportAction.CONFLICT, ImportThing.TOPIC, name, topic, reason)
        elif there is not None and not force and _loses(here, there):
            reason = (
                f"{_difference(here, there)}: messages in the last queues are not read any more"
            )
            yield ImportStep(
                ImportAction.CONFLICT, ImportThing.TOPIC, name, topic, f"{reason}; --force does it"
            )
        else:
            yield _step(ImportThing.TOPIC, name, topic, here, there)
    for group, mine, theirs in _pairs(wanted.groups, found.groups):
        if mine is not None:
            yield _step(ImportThing.GROUP, name, group, mine, theirs)
        elif prune:
            yield ImportStep(ImportAction.DELETE, ImportThing.GROUP, name, group)
    if wanted.drained is not found.drained:
        detail = "producers leave it" if wanted.drained else "producers come back"
        yield ImportStep(ImportAction.CHANGE, ImportThing.DRAINED, name, name, detail)


def _of_kv(
    wanted: dict[str, dict[str, str]], found: dict[str, dict[str, str]], *, prune: bool
) -> Iterator[ImportStep]:
    for space in sorted(wanted.keys() | found.keys()):
        for key, here, there in _pairs(wanted.get(space, {}), found.get(space, {})):
            name = f"{space}/{key}"
            if here is None:
                if prune:
                    yield ImportStep(ImportAction.DELETE, ImportThing.KV, "", name)
            elif there is None:
                yield ImportStep(ImportAction.CREATE, ImportThing.KV, "", name)
            elif here != there:
                yield ImportStep(ImportAction.CHANGE, ImportThing.KV, "", name)
            else:
                yield ImportStep(ImportAction.LEAVE, ImportThing.KV, "", name)


def _of_access_list(wanted: str, found: str) -> ImportStep:
    action = ImportAction.LEAVE if wanted == found else ImportAction.CONFLICT
    reason = "" if wanted == found else "it is another one here; `mqmesh acl apply` changes it"
    return ImportStep(action, ImportThing.ACCESS_LIST, "", "access list", reason)


def _pairs(
    wanted: Mapping[str, _T], found: Mapping[str, _T]
) -> Iterator[tuple[str, _T | None, _T | None]]:
    for name in sorted(wanted.keys() | found.keys()):
        yield name, wanted.get(name), found.get(name)


def _step(
    thing: ImportThing, broker: str, name: str, wanted: msgspec.Struct, found: msgspec.Struct | None
) -> ImportStep:
    if found is None:
        return ImportStep(ImportAction.CREATE, thing, broker, name)
    if wanted == found:
        return ImportStep(ImportAction.LEAVE, thing, broker, name)
    return ImportStep(ImportAction.CHANGE, thing, broker, name, _difference(wanted, found))


def _loses(wanted: TopicSetup, found: TopicSetup) -> bool:
    return wanted.read_queue_nums < found.read_queue_nums


def _difference(wanted: msgspec.Struct, found: msgspec.Struct) -> str:
    before, after = msgspec.structs.asdict(found), msgspec.structs.asdict(wanted)
    return ", ".join(
        f"{key} {_text(before[key])} -> {_text(after[key])}"
        for key in before
        if before[key] != after[key]
    )


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
