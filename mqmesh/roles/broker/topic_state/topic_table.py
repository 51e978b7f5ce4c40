"""Topics of this broker: which it carries, with how many queues, and who may use them.

The table is kept in the log, see ``state_log``.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from mqmesh.errors import (
    InvalidArgument,
    MessageIllegal,
    NoPermission,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import (
    DLQ_PREFIX,
    HIDDEN_TOPICS,
    RETRY_PREFIX,
    check_topic,
    is_closed_topic,
    is_system_topic,
)
from mqmesh.metrics import SIZE_BOUNDS_BYTES, Histogram
from mqmesh.namespaces import SEPARATOR, namespace_of
from mqmesh.protocol.route import (
    MAX_PRIORITIES,
    MAX_TOPICS_PER_BROKER,
    DataVersion,
    OnExpired,
    Perm,
    TopicConfig,
)
from mqmesh.roles.broker.state_records import TopicRecord, TopicSettings
from mqmesh.roles.broker.stats import Before
from mqmesh.security.quotas import Quotas
from mqmesh.units import TimestampMs

MAX_SCHEMAS: Final = 1_000
"""Topics with a schema: all of them are written once more with each snapshot of the state."""

_READ: Final = Perm.READ.value
_WRITE: Final = Perm.WRITE.value


class Topic(msgspec.Struct):
    """One topic, prepared for the checks of each request.

    Attributes:
        config: Settings, as administrators and name servers know them.
        is_auto: A message to an unknown topic made it, and no administrator has touched it.
        writable_queues: Ids below this may be sent to; 0 without permission.
        readable_queues: Ids below this may be pulled from; 0 without permission.
        last_update: Store time of the last message of a queue, where known.
        first: Offset and store time of the first one, likewise.
        schema: Document about its bodies; "" for none.
        retains: It has a retention of its own; see ``topic_retention``.
        expires: Messages in it may have a time to live.
        is_table: It keeps the newest revisions of each key; see ``features/tables``.
        table_id: Distinguishes tables of one name: when it was made, wall clock, ms.
        shown: First offset of a queue that is young enough, and when that was looked at.
        put_messages: Stored since the broker was started.
        put_bytes: Their batches' bytes.
        before: Former values of ``put_messages``.
        sizes: Of its stored messages; those of a batch count as equally large.
        get_messages: Handed out since the broker was started.
        get_bytes: Their batches' bytes.
    """

    config: TopicConfig
    is_auto: bool = False
    writable_queues: int = 0
    readable_queues: int = 0
    last_update: dict[int, TimestampMs] = {}
    first: dict[int, tuple[int, TimestampMs]] = {}
    schema: str = ""
    retains: bool = False
    expires: bool = False
    is_table: bool = False
    table_id: int = 0
    shown: dict[int, tuple[int, int]] = {}
    put_messages: int = 0
    put_bytes: int = 0
    before: Before = msgspec.field(default_factory=Before)
    sizes: Histogram = msgspec.field(default_factory=lambda: Histogram(SIZE_BOUNDS_BYTES))
    get_messages: int = 0
    get_bytes: int = 0

    @property
    def queue_count(self) -> int:
        """Queues that are written or read."""
        return queues_of(self.config)


def queues_of(config: TopicConfig) -> int:
    """Return how many queues of a topic are written or read."""
    return max(config.read_queue_nums, config.write_queue_nums)


def _nothing(topic: str) -> None:
    return None


class TopicTable:
    """The topics of one broker. Every change gives the table a new version.

    Args:
        most: Topics allowed.
        most_auto: Of them, topics that messages made.
        quotas: Limits of namespaces.
        busy_retry_after_ms: Retry delay of clients when there are too many.

    Attributes:
        changed: Topics that are to be written into the log; see ``state_log``.
        get: Returns the topic of a name, or None.
        version: Another one after each change.
        changes: Topics that changed last.
        on_deleting: Called with the name of a topic that is about to go; an error keeps the topic.
        on_deleted: Called with the name of a topic that is gone.
    """

    def __init__(
        self,
        most: int,
        busy_retry_after_ms: int = 100,
        *,
        most_auto: int | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._most = most
        self._most_auto = most if most_auto is None else most_auto
        self._auto_count = 0
        self._quotas = quotas or Quotas()
        self._used: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._busy_retry_after_ms = busy_retry_after_ms
        self._topics: dict[str, Topic] = {}
        # The dictionary's own: asked for with every batch.
        self.get: Callable[[str], Topic | None] = self._topics.get
        self.changed: dict[str, None] = {}
        self.version = DataVersion()
        self.changes = TopicChanges()
        self.on_deleting: Callable[[str], None] = _nothing
        self.on_deleted: Callable[[str], None] = _nothing

    def __len__(self) -> int:
        return len(self._topics)

    def __iter__(self) -> Iterator[Topic]:
        # Others may come and go meanwhile.
        return iter(list(self._topics.values()))

    def require(self, name: str) -> Topic:
        """One topic.

        Raises:
            TopicNotFound: There is none of that name.
        """
        topic = self._topics.get(name)
        if topic is None:
            raise TopicNotFound(f"no topic {name[:300]!r}")
        return topic

    def configs(self) -> list[TopicConfig]:
        """All topics, by name."""
        return [self._topics[name].config for name in sorted(self._topics)]

    def require_writable(self, name: str, queue_id: int) -> Topic:
        """A topic, if a client may send to one of its queues.

        Raises:
            TopicNotFound, NoPermission, MessageIllegal: Why it may not.
        """
        topic = self.require(name)
        if queue_id < topic.writable_queues:
            return topic
        if is_closed_topic(name):
            raise NoPermission(f"topic {name!r} is reserved; clients may not send to it")
        if not topic.config.perm & _WRITE:
            raise NoPermission(f"topic {name!r} does not permit writing")
        raise MessageIllegal(
            f"queue {queue_id} of topic {name!r} does not exist: "
            f"write_queue_nums = {topic.config.write_queue_nums}"
        )

    def require_readable(self, name: str, queue_id: int) -> Topic:
        """A topic, if a client may read one of its queues.

        Raises:
            TopicNotFound, NoPermission, MessageIllegal: Why it may not.
        """
        topic = self.require(name)
        if queue_id < topic.readable_queues:
            return topic
        if name in HIDDEN_TOPICS:
            raise NoPermission(f"topic {name!r} is the broker's own; nobody may read it")
        if not topic.config.perm & _READ:
            raise NoPermission(f"topic {name!r} does not permit reading")
        raise MessageIllegal(
            f"queue {queue_id} of topic {name!r} does not exist: "
            f"read_queue_nums = {topic.config.read_queue_nums}"
        )

    def may_read(self, name: str) -> bool:
        """False for a topic that does not permit reading; what was deleted forbids nothing."""
        if name in HIDDEN_TOPICS:  # the broker's own
            return False
        topic = self._topics.get(name)
        return topic is None or bool(topic.config.perm & _READ)

    def check_readable(self, *names: str) -> None:
        """Refuses to show messages of topics, of which one does not permit reading.

        Raises:
            NoPermission: The first of them.
        """
        for name in names:
            if not self.may_read(name):
                raise NoPermission(f"topic {name!r} does not permit reading")

    def create(self, name: str, queue_nums: int, now_ms: TimestampMs) -> Topic:
        """Creates a topic because a message for it came.

        Args:
            name: New, and no system topic.
            queue_nums: Queues to write and to read.
            now_ms: Wall clock.

        Raises:
            InvalidArgument: The name is not legal.
            NoPermission: It is reserved.
            SystemBusy: There are too many topics, or too many that were made so, or the quota of
                its namespace is used up.
        """
        check_topic(name)
        if is_closed_topic(name):
            raise NoPermission(f"topic {name!r} is reserved; clients may not send to it")
        self._check_room(name, self._most)
        self.check_quotas([TopicConfig(name, queue_nums, queue_nums)])
        if self._auto_count >= self._most_auto:
            raise SystemBusy(
                f"messages to unknown topics made {self._auto_count} topics on this broker, and no "
                f"more than {self._most_auto} may be made so (max_auto_topics); create "
                f"{name[:300]!r} by hand, or raise the setting",
                retry_after_ms=self._busy_retry_after_ms,
            )
        return self._put(TopicConfig(name, queue_nums, queue_nums), now_ms, is_auto=True)

    def update(
        self,
        config: TopicConfig,
        now_ms: TimestampMs,
        *,
        must_exist: bool = False,
        must_be_new: bool = False,
    ) -> Topic:
        """Creates or changes a topic because an administrator wants it.

        Args:
            config: Wanted.
            now_ms: Wall clock.
            must_exist: Refuse to create.
            must_be_new: Refuse to change.

        Raises:
            InvalidArgument: A name, permission or number of queues that makes no sense, or
                a topic that exists already.
            NoPermission: The name is reserved.
            TopicNotFound: ``must_exist``, and it does not.
            SystemBusy: There are too many topics, or the quota of its namespace is used up.
        """
        old = self._topics.get(config.topic)
        _check_config(config)
        _check_unchanged(config, old)
        if must_exist and old is None:
            raise TopicNotFound(f"no topic {config.topic!r}")
        if must_be_new and old is not None:
            raise InvalidArgument(f"topic {config.topic!r} exists already")
        if old is not None and old.config == config:
            return old
        self._check_room(config.topic, self._most)
        self.check_quotas([config])
        return self._put(config, now_ms)

    def put_schema(self, name: str, schema: str) -> bool:
        """Keeps a document about the bodies of a topic, because an administrator wants it.

        Args:
            name: Topic.
            schema: The document; empty to remove it.

        Returns:
            True when anything changed.

        Raises:
            TopicNotFound: There is none of that name.
            NoPermission: The name is reserved.
            SystemBusy: There are too many schemas.
        """
        topic = self.require(name)
        if is_closed_topic(name):
            raise NoPermission(f"topic {name!r} is reserved; it looks after itself")
        if topic.schema == schema:
            return False
        if not topic.schema and sum(bool(one.schema) for one in self) >= MAX_SCHEMAS:
            raise SystemBusy(
                f"this broker keeps schemas of {MAX_SCHEMAS} topics, no more",
                retry_after_ms=self._busy_retry_after_ms,
            )
        topic.schema = schema
        self.changed[name] = None
        return True

    def set(self, config: TopicConfig, now_ms: TimestampMs) -> Topic:
        """Creates or changes a topic as the broker itself likes, system topics included.

        A message that was acknowledged may need it, so it is made beyond ``max_topics``, too; a
        name server takes no more than ``MAX_TOPICS_PER_BROKER`` of a broker.

        Raises:
            SystemBusy: There are so many topics.
        """
        self._check_room(config.topic, MAX_TOPICS_PER_BROKER)
        return self._put(config, now_ms)

    def check_room(self, name: str, count: int = 1) -> None:
        """Check that a topic is there, or may be made within ``max_topics``.

        Args:
            name: Topic.
            count: So many are to be made, this one first; from 1.

        Raises:
            SystemBusy: There are too many topics.
        """
        self._check_room(name, self._most - count + 1)

    def check_quotas(self, configs: Iterable[TopicConfig]) -> None:
        """Check that topics may be made or changed within the quotas of their namespaces.

        Args:
            configs: Wanted; each topic once.

        Raises:
            SystemBusy: They would be too many, or have too many queues.
        """
        more: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for config in configs:
            namespace = namespace_of(config.topic)
            if namespace in self._quotas.namespaces:
                old = self._topics.get(config.topic)
                more[namespace]["topics"] += old is None
                more[namespace]["queues"] += queues_of(config)
                if old is not None:
                    more[namespace]["queues"] -= old.queue_count
        for namespace, wanted in more.items():
            self._quotas.check_namespace(namespace, self._used[namespace], wanted)

    def check_deletable(self, name: str) -> None:
        """Check that an administrator may delete a topic.

        Raises:
            TopicNotFound: There is none of that name.
            NoPermission: It is a system topic, other than one of dead letters.
        """
        self.require(name)
        if is_closed_topic(name) and not name.startswith(DLQ_PREFIX):
            raise NoPermission(f"topic {name!r} is reserved; it cannot be deleted")

    def delete(self, name: str, now_ms: TimestampMs) -> None:
        """Forgets a topic, which is there, and has all forget it who know of it."""
        self.on_deleting(name)
        gone = self._topics.pop(name)
        self._auto_count -= gone.is_auto
        self._count(gone.config, -1)
        self._note_change(name, now_ms)
        self.on_deleted(name)

    def adopt(self, queues: Iterable[tuple[str, int]], queue_nums: int, now_ms: TimestampMs) -> int:
        """Takes in topics that the store has messages of, and the table lost in a crash.

        Args:
            queues: Each topic of the store and its highest queue id.
            queue_nums: Queues that an adopted topic has at least.
            now_ms: Wall clock.

        Returns:
            How many were taken in.
        """
        adopted = 0
        for name, highest_queue_id in queues:
            if name not in self._topics:
                count = max(queue_nums, highest_queue_id + 1)
                is_auto = not is_system_topic(name)
                self._put(TopicConfig(name, count, count), now_ms, is_auto=is_auto)
                adopted += 1
        return adopted

    def begin_life(self, now_ms: TimestampMs, counter: int) -> None:
        """Gives the table a version that no earlier life of the broker had.

        Args:
            now_ms: Wall clock.
            counter: At least as large as in earlier lives.
        """
        self.version = DataVersion(now_ms, counter)
        self.changes = TopicChanges(counter)

    def state_keys(self) -> list[str]:
        """Names of all topics."""
        return list(self._topics)

    def records_of(self, name: str) -> tuple[TopicRecord]:
        """Return the state record of a topic."""
        topic = self._topics.get(name)
        if topic is None:
            return (TopicRecord(name),)
        config = topic.config
        return (
            TopicRecord(
                name,
                TopicSettings(
                    config.read_queue_nums,
                    config.write_queue_nums,
                    config.perm,
                    config.order,
                    topic.is_auto,
                    config.retention_ms,
                    config.retention_messages,
                    topic.schema,
                    config.priorities,
                    config.message_ttl,
                    config.on_expired,
                    config.history,
                    topic.table_id,
                ),
            ),
        )

    def apply(self, record: TopicRecord) -> None:
        """Takes over what a record says."""
        name, one = record.topic, record.settings
        old = self._topics.pop(name, None)
        if old is not None:
            self._auto_count -= old.is_auto
            self._count(old.config, -1)
        if one is not None:
            config = TopicConfig(
                name,
                one.read_queue_nums,
                one.write_queue_nums,
                one.perm,
                one.order,
                one.retention_ms,
                one.retention_messages,
                one.priorities,
                one.message_ttl,
                one.on_expired,
                one.history,
            )
            topic = self._topics[name] = Topic(
                config, one.is_auto, schema=one.schema, table_id=one.table_id
            )
            self._auto_count += one.is_auto
            self._count(config, 1)
            _prepare(topic, config)
        self._next_version(name, self.version.timestamp_ms)

    def _check_room(self, name: str, most: int) -> None:
        if name not in self._topics and len(self._topics) >= most:
            raise SystemBusy(
                f"this broker carries {len(self._topics)} topics, and may make no more than "
                f"{self._most} (max_topics)",
                retry_after_ms=self._busy_retry_after_ms,
            )

    def _put(self, config: TopicConfig, now_ms: TimestampMs, *, is_auto: bool = False) -> Topic:
        topic = self._topics.get(config.topic)
        if topic is None:
            table_id = int(now_ms) if config.history else 0
            topic = self._topics[config.topic] = Topic(config, table_id=table_id)
        else:
            self._count(topic.config, -1)
        self._count(config, 1)
        self._auto_count += is_auto - topic.is_auto
        topic.is_auto = is_auto
        _prepare(topic, config)
        self._note_change(config.topic, now_ms)
        return topic

    def _count(self, config: TopicConfig, sign: int) -> None:
        """Count a topic of a namespace; those of retries and dead letters come with its groups."""
        if SEPARATOR in config.topic and not is_system_topic(config.topic):
            namespace = namespace_of(config.topic)
            used = self._used[namespace]
            used["topics"] += sign
            used["queues"] += sign * queues_of(config)
            if not used["topics"]:
                del self._used[namespace]

    def _note_change(self, name: str, now_ms: TimestampMs) -> None:
        self.changed[name] = None
        self._next_version(name, now_ms)

    def _next_version(self, name: str, now_ms: TimestampMs | int) -> None:
        self.version = DataVersion(now_ms, self.version.counter + 1)
        self.changes.note(name, self.version.counter)


def create_all(table: TopicTable, configs: Sequence[TopicConfig], now_ms: TimestampMs) -> None:
    """Creates topics because an administrator wants them: all of them, or none.

    Args:
        table: Where to.
        configs: Wanted; each topic once.
        now_ms: Wall clock.

    Raises:
        InvalidArgument: A name, permission or number of queues that makes no sense, a topic that
            exists already, or one that is named twice.
        NoPermission: A name is reserved.
        SystemBusy: There would be too many topics, or the quota of a namespace is used up.
    """
    names = set()
    for config in configs:
        _check_config(config)
        _check_unchanged(config, None)
        if table.get(config.topic) is not None:
            raise InvalidArgument(f"topic {config.topic!r} exists already")
        if config.topic in names:
            raise InvalidArgument(f"topic {config.topic!r} is named twice")
        names.add(config.topic)
    for config in configs[:1]:
        table.check_room(config.topic, len(configs))
    table.check_quotas(configs)
    for config in configs:
        table.update(config, now_ms, must_be_new=True)


def _check_config(config: TopicConfig) -> None:
    name = check_topic(config.topic)
    if is_closed_topic(name):
        raise NoPermission(f"topic {name!r} is reserved; it looks after itself")
    if config.perm & ~Perm.READ_WRITE.value:
        raise InvalidArgument(
            f"perm {config.perm} of topic {name!r} is none of 0, 2 (write), 4 (read), 6 (both)"
        )
    if config.read_queue_nums < 1:
        raise InvalidArgument(f"topic {name!r} needs at least 1 read queue")
    if config.on_expired not in list(OnExpired):
        raise InvalidArgument(
            f"on_expired {config.on_expired!r} of topic {name!r} is none of {', '.join(OnExpired)}"
        )
    if config.write_queue_nums > config.read_queue_nums:
        raise InvalidArgument(
            f"topic {name!r}: write_queue_nums {config.write_queue_nums} is over "
            f"read_queue_nums {config.read_queue_nums}; nobody would get the messages of the "
            "queues between"
        )


def _check_unchanged(config: TopicConfig, old: Topic | None) -> None:
    """Check settings that are those of a topic for ever: its priorities, and being a table."""
    name, count = config.topic, config.priorities
    had = count if old is None else old.config.priorities
    if count != had:
        raise InvalidArgument(
            f"topic {name!r} has {had or 'no'} priorities, not {count}, and that never changes: "
            "the messages there are would have others; make another topic"
        )
    if count == 1:
        raise InvalidArgument(
            f"topic {name!r}: priorities = 1, which needs none; 2 to {MAX_PRIORITIES}, or 0"
        )
    if count and not config.read_queue_nums == config.write_queue_nums == count:
        raise InvalidArgument(
            f"topic {name!r} has {count} priorities, and so {count} queues, not "
            f"{config.read_queue_nums} to read and {config.write_queue_nums} to write"
        )
    if old is not None and bool(config.history) != old.is_table:
        is_what = "a table" if old.is_table else "no table"
        raise InvalidArgument(
            f"topic {name!r} is {is_what}, and that never changes (history); make another topic"
        )
    if config.history and (
        not config.read_queue_nums == config.write_queue_nums == 1
        or config.retention_ms
        or config.retention_messages
    ):
        raise InvalidArgument(
            f"topic {name!r} is a table (history = {config.history}): it has 1 queue, not "
            f"{config.read_queue_nums} to read and {config.write_queue_nums} to write, and no "
            "retention of its own"
        )


class TopicChanges:
    """The last changes of a topic table, of ``MAX_TOPICS_PER_BROKER`` topics at most.

    Args:
        counter: Of the version of the table now.
    """

    def __init__(self, counter: int = 0) -> None:
        self._known_from = self._counter = counter
        self._counters: dict[str, int] = {}

    def note(self, name: str, counter: int) -> None:
        """A topic was created, changed or deleted, which made a version with this counter."""
        self._counter = counter
        # The newest change stands last.
        self._counters.pop(name, None)
        self._counters[name] = counter
        if len(self._counters) > MAX_TOPICS_PER_BROKER:
            self._known_from = self._counters.pop(next(iter(self._counters)))

    def since(self, version: DataVersion) -> list[str] | None:
        """Return the topics that were created, changed or deleted since a version.

        Args:
            version: An earlier ``version`` of the table.

        Returns:
            Names, each once; None where that was too long ago, or in an earlier life of the table.
        """
        if not self._known_from <= version.counter <= self._counter:
            return None
        names = []
        for name in reversed(self._counters):
            if self._counters[name] <= version.counter:
                break
            names.append(name)
        return names


def _prepare(topic: Topic, config: TopicConfig) -> None:
    topic.config = config
    may_write = config.perm & _WRITE and not is_closed_topic(config.topic)
    topic.writable_queues = config.write_queue_nums if may_write else 0
    may_read = config.perm & _READ and config.topic not in HIDDEN_TOPICS
    topic.readable_queues = config.read_queue_nums if may_read else 0
    topic.retains = bool(config.retention_ms or config.retention_messages)
    # A retry keeps the time to live of its message.
    topic.is_table = config.history > 0
    topic.expires = config.message_ttl or topic.is_table or config.topic.startswith(RETRY_PREFIX)
    topic.shown = {}
