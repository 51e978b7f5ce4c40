"""Structs of administration: topics, statistics, what a process says of itself."""

from typing import Annotated, Final

import msgspec

from mqmesh.metrics import MetricReading
from mqmesh.protocol.pulling import QueueId
from mqmesh.protocol.route import Name, TopicConfig
from mqmesh.units import MAX_OFFSET

MAX_TOPICS_PER_CREATION: Final = 10_000


class RoleInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to PING, of every role.

    Attributes:
        role: ``namesrv``, ``broker``, …
        name: Name of the instance.
        version: mqmesh version.
        pid: Process id.
        state: ``starting``, ``recovering``, ``running``, ``stopping``.
        uptime_ms: Since the process was ready.
    """

    role: str
    name: str
    version: str
    pid: int
    state: str
    uptime_ms: int


class UpdateTopicRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UPDATE_AND_CREATE_TOPIC; answered with the ``TopicConfig`` that is now in force.

    Attributes:
        config: Wanted.
        must_exist: Refuse to create.
        must_be_new: Refuse to change.
        may_hide: Take queues away from consumers although they hold unread messages.
    """

    config: TopicConfig
    must_exist: bool = False
    must_be_new: bool = False
    may_hide: bool = False


class CreateTopicsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CREATE_TOPICS: all of them or none; answered with ``TopicConfigs`` once they are on disk.

    Attributes:
        configs: 0 to 10,000 topics, all of which are new.
    """

    configs: Annotated[list[TopicConfig], msgspec.Meta(max_length=MAX_TOPICS_PER_CREATION)]


class GetTopicConfigRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_TOPIC_CONFIG: one topic, or all for an empty name; answered with ``TopicConfigs``."""

    topic: Name = ""


class TopicConfigs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Topic configurations, by name."""

    topics: list[TopicConfig]


class TopicStatsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_TOPIC_STATS_INFO, answered with ``TopicStats``."""

    topic: Name


class QueueStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One queue of a topic.

    Attributes:
        queue_id: From 0.
        min_queue_offset: First message.
        max_queue_offset: Behind the last.
        last_update_timestamp: Store time of the last message in ms, 0 for none.
        first_timestamp: Store time of the first message in ms, 0 for none.
        unread_messages: Messages that a group of the topic has not done, of the group that lacks
            most; all messages where no group has an offset in the topic.
    """

    queue_id: int
    min_queue_offset: int
    max_queue_offset: int
    last_update_timestamp: int = 0
    first_timestamp: int = 0
    unread_messages: int = 0


class TopicStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Queues of a topic on one broker."""

    topic: str
    queues: list[QueueStats]


class RuntimeInfoRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_BROKER_RUNTIME_INFO, answered with ``RuntimeInfo``.

    Attributes:
        listing: Of the former answer; 0 for the first one.
        place: As its ``next_place``.
    """

    listing: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)] = 0
    place: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)] = 0


class RuntimeInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A page of a process's metrics; ``docs/operations.md`` lists them.

    Attributes:
        metrics: Each with its values; those of one process may come in several answers.
        listing: Of this reading; if it is not the one that was asked for, that one is forgotten,
            and this page is the first of a new one.
        next_place: Place to ask for next; -1 at the end.
    """

    metrics: Annotated[list[MetricReading], msgspec.Meta(max_length=1_024)]
    listing: int = 0
    next_place: int = -1


MAX_LIST_CHARACTERS: Final = 1 << 20

ListText = Annotated[str, msgspec.Meta(max_length=MAX_LIST_CHARACTERS)]
ListVersion = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]


class GetAccessListRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ACCESS_LIST, answered with ``AccessListInfo``.

    Attributes:
        known_version: The text is wanted if the version is higher.
    """

    known_version: ListVersion = 0


class AccessListInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_ACCESS_LIST.

    Attributes:
        version: In force.
        digest: Equal for lists that say the same.
        text: TOML; "" if it was not wanted.
    """

    version: int
    digest: str
    text: str = ""


class UpdateAccessListRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UPDATE_ACCESS_LIST, answered with an empty header once the list is in force, and on disk.

    Attributes:
        text: TOML.
        expected_version: That was changed to make this one. It is refused if another is in force,
            unless that says the same as this one.
    """

    text: ListText
    expected_version: ListVersion


MAX_SETTINGS: Final = 1_024
MAX_CHANGES: Final = 64
MAX_VALUE_CHARACTERS: Final = 65_536

SettingName = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
SettingText = Annotated[str, msgspec.Meta(max_length=MAX_VALUE_CHARACTERS)]


class GetConfigRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_BROKER_CONFIG and GET_NAMESRV_CONFIG, answered with ``ConfigEntries``."""


class ConfigEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A setting of a process; values are JSON.

    Attributes:
        key: With the names of its tables: ``storage.delete_when``.
        value: In force.
        default: When nothing is said.
        at_start: Value at the start of the process.
        is_overridden: An administrator has changed it since, or set it to what it was.
        is_changeable: Changes are taken while the process runs.
    """

    key: str
    value: str
    default: str
    at_start: str
    is_overridden: bool
    is_changeable: bool


class ConfigEntries(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All settings of a process."""

    entries: Annotated[list[ConfigEntry], msgspec.Meta(max_length=MAX_SETTINGS)]


class UpdateConfigRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UPDATE_BROKER_CONFIG and UPDATE_NAMESRV_CONFIG, answered with ``ConfigChanges``.

    All of it is done, or nothing. The answer comes once it is in force, and on disk.

    Attributes:
        settings: Keys, and new values as they stand behind ``--set key=``.
        unset: Keys that are to have the value of the start again.
    """

    settings: Annotated[dict[SettingName, SettingText], msgspec.Meta(max_length=MAX_CHANGES)]
    unset: Annotated[list[SettingName], msgspec.Meta(max_length=MAX_CHANGES)] = []


class ConfigChange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A setting that has another value now; values are JSON."""

    key: str
    before: str
    after: str


class ConfigChanges(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to UPDATE_BROKER_CONFIG: settings that changed; equal ones are left out."""

    changes: list[ConfigChange]


MAX_QUEUE_ENTRIES: Final = 1_000
MAX_CLEANED_TOPICS: Final = 1_000
MAX_CLEANED_SEGMENTS: Final = 10_000


class QueueEntriesRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_CONSUME_QUEUE: entries of a queue as they are; answered with ``QueueEntries``.

    Attributes:
        topic: Physical topic.
        queue_id: From 0.
        queue_offset: Of the first one.
        count: Most.
    """

    topic: Name
    queue_id: QueueId
    queue_offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_QUEUE_ENTRIES)]


class QueueEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One entry of a consume queue.

    Attributes:
        queue_offset: Of its message.
        commitlog_offset: Where the message's batch begins, as the entry says; -1 if it does not.
        size: Of the batch in bytes.
        tag_hash: 0 for no tag.
        problem: Fault of the entry; "" for none.
    """

    queue_offset: int
    commitlog_offset: int
    size: int
    tag_hash: int
    problem: str = ""


class QueueEntries(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Entries of a queue.

    Attributes:
        min_queue_offset: First message of the queue.
        max_queue_offset: Behind the last one.
        entries: Ascending.
    """

    min_queue_offset: int
    max_queue_offset: int
    entries: Annotated[list[QueueEntry], msgspec.Meta(max_length=MAX_QUEUE_ENTRIES)]


class CleanRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """DELETE_EXPIRED_COMMITLOG: one pass of retention now, answered with ``CleanResult``.

    Attributes:
        dry_run: Only report what would be removed.
    """

    dry_run: bool = False


class CleanedSegment(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A segment of the log that went: where it began, and its bytes."""

    commitlog_offset: int
    size: int


class CleanedTopic(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Loss that consumers of a topic suffer when segments are removed.

    Attributes:
        topic: Physical topic.
        queues: Of its queues, those that begin later.
        messages: Messages that cannot be read any more.
        min_before: Lowest first offset of these queues before.
        min_after: And after.
    """

    topic: str
    queues: int
    messages: int
    min_before: int
    min_after: int


class CleanResult(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Result of a pass of retention, or of its dry run.

    Attributes:
        segments: Segments that were removed, oldest first.
        reason: Why they did, or why none did.
        forced: Segments were removed before their time.
        topics: Most messages first.
        more_topics: Topics beyond these.
    """

    segments: Annotated[list[CleanedSegment], msgspec.Meta(max_length=MAX_CLEANED_SEGMENTS)]
    reason: str
    forced: bool
    topics: Annotated[list[CleanedTopic], msgspec.Meta(max_length=MAX_CLEANED_TOPICS)]
    more_topics: int = 0
