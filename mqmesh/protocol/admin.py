"""Structs of administration: topics, statistics, and information about processes."""

from typing import Annotated, Final

import msgspec

from mqmesh.metrics import MetricReading
from mqmesh.protocol.names import TopicName
from mqmesh.protocol.pulling import QueueId
from mqmesh.protocol.route import TopicConfig, TopicNames
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
    """UPDATE_AND_CREATE_TOPIC: creates a topic, or changes its queue counts, permission and order
    flag; answered with the settings in force, once they are on disk.

    Read queues may outnumber write queues, so that nothing is lost while a topic shrinks.

    Attributes:
        config: Wanted.
        must_exist: Refuse to create.
        must_be_new: Refuse to change.
        may_hide: Take queues away from consumers although they hold unread messages.

    Errors:
        MESSAGE_ILLEGAL: The name, counts or permission; or it exists and must be new.
        TOPIC_NOT_EXIST: It does not exist and must.
        NO_PERMISSION: A reserved name.
        SYSTEM_BUSY: ``max_topics`` is reached.
        DISK_FULL: No room to write.
    """

    config: TopicConfig
    must_exist: bool = False
    must_be_new: bool = False
    may_hide: bool = False


class CreateTopicsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CREATE_TOPICS: creates topics, all of them or none; answered once they are on disk.

    Attributes:
        configs: Up to 10,000 topics, all of which are new.

    Errors:
        MESSAGE_ILLEGAL: A name, number of queues or permission is wrong, a topic exists or is named
            twice.
        NO_PERMISSION: A reserved name.
        SYSTEM_BUSY: ``max_topics`` is reached.
    """

    configs: Annotated[list[TopicConfig], msgspec.Meta(max_length=MAX_TOPICS_PER_CREATION)]


class GetTopicConfigRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_TOPIC_CONFIG: settings of one topic, or of all.

    Attributes:
        topic: Topic wanted; empty for all.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
    """

    topic: TopicName = ""


class TopicConfigs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Topic configurations, by name.

    Attributes:
        topics: Sorted by name.
        with_schema: Of all topics, names of those that have a schema.
    """

    topics: list[TopicConfig]
    with_schema: TopicNames = []


class TopicStatsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_TOPIC_STATS_INFO: offsets and times of the queues of a topic.

    Attributes:
        topic: Topic wanted.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
    """

    topic: TopicName


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
    """Queues of a topic on one broker.

    Attributes:
        topic: Topic of the request.
        queues: One for each queue id, in order.
    """

    topic: TopicName
    queues: list[QueueStats]


class RuntimeInfoRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_BROKER_RUNTIME_INFO: metrics of a process, in pages.

    Each metric comes with its name, kind, unit and help, so that a display needs no list of its
    own. A page ends when 1,000 sets of labels were looked at, so that no reader holds the process
    up; its values are those of when it was made. The process keeps four readings that are not at
    their end. Answered also while a broker recovers, with fewer metrics.

    Attributes:
        listing: Of the former answer; 0 for the first one.
        place: As its ``next_place``.
    """

    listing: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)] = 0
    place: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)] = 0


class RuntimeInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A page of a process's metrics; ``docs/reference/metrics.md`` lists them.

    Attributes:
        metrics: Up to 1,024 in any order, with names that are unique in all pages. A metric may go
            on in the next page.
        listing: Number of this reading. If it is not the requested one, the reading is new, and
            this is its first page.
        next_place: Place to ask for next; -1 at the end.
    """

    metrics: Annotated[list[MetricReading], msgspec.Meta(max_length=1_024)]
    listing: int = 0
    next_place: int = -1


MAX_LIST_CHARACTERS: Final = 1 << 20

ListText = Annotated[str, msgspec.Meta(max_length=MAX_LIST_CHARACTERS)]
ListVersion = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]


class GetAccessListRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ACCESS_LIST: the access list that a role has in force; see docs/security.md. Only roles
    with security serve it.

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
    """UPDATE_ACCESS_LIST: puts another access list in force at one role.

    Answered with an empty header once the list is in force, and on disk. A list that is in force
    already changes nothing.

    Attributes:
        text: TOML.
        expected_version: That was changed to make this one. It is refused if another is in force,
            unless that says the same as this one.

    Errors:
        MESSAGE_ILLEGAL: No access list, or another one is in force than the one that was changed.
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
        is_overridden: An administrator has changed it since, or set it to its old value.
        is_changeable: Changes are taken while the process runs.
    """

    key: str
    value: str
    default: str
    at_start: str
    is_overridden: bool
    is_changeable: bool


class ConfigEntries(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All settings of a process.

    Attributes:
        entries: Each setting, tables inside by dotted names.
    """

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
    """A setting that has another value now; values are JSON.

    Attributes:
        key: Setting.
        before: Its value until now.
        after: Its value from now on.
    """

    key: str
    before: str
    after: str


class ConfigChanges(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to UPDATE_BROKER_CONFIG: settings that changed; equal ones are left out.

    Attributes:
        changes: Settings that have another value now.
    """

    changes: list[ConfigChange]


MAX_QUEUE_ENTRIES: Final = 1_000
MAX_CLEANED_TOPICS: Final = 1_000
MAX_CLEANED_SEGMENTS: Final = 10_000


class QueueEntriesRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_CONSUME_QUEUE: entries of a consume queue as they are stored, also damaged ones; see
    docs/storage-format.md.

    Attributes:
        topic: Physical topic.
        queue_id: From 0.
        queue_offset: Of the first one; where the queue begins later, there.
        count: Most.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        REQUEST_CODE_NOT_SUPPORTED: The store is not of the backend ``commitlog``.
    """

    topic: TopicName
    queue_id: QueueId
    queue_offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_QUEUE_ENTRIES)]


class QueueEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One entry of a consume queue.

    Attributes:
        queue_offset: Of its message.
        commitlog_offset: Where the message's batch begins, as the entry says; -1 if it does not.
        size: Of the batch in bytes.
        tag_hash: 0 for no tag; up to 2^64-1.
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
    """DELETE_EXPIRED_COMMITLOG: one pass of retention now, regardless of ``storage.delete_when``;
    its other limits count. Answered when it is over.

    Attributes:
        dry_run: Only report the segments that would be removed.

    Errors:
        SYSTEM_BUSY: A pass is under way.
        SYSTEM_ERROR: The pass stopped.
        SERVICE_NOT_AVAILABLE: The broker stops.
        REQUEST_CODE_NOT_SUPPORTED: The store is not of the backend ``commitlog``.
    """

    dry_run: bool = False


class CleanedSegment(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A segment of the log that went: where it began, and its bytes.

    Attributes:
        commitlog_offset: Where it began.
        size: Its bytes.
    """

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

    topic: TopicName
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
