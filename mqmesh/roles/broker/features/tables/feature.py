"""Tables of a running broker: what their producers may send, READ_TABLE, expiry and carrying."""

from collections.abc import Mapping, Sequence
from typing import Final

from mqmesh.batch.delayed_batch import ExpectingMeta
from mqmesh.batch.half_batch import TRANSACTION_TYPE
from mqmesh.batch.record_batch import Attributes, BatchHeader, BatchMeta
from mqmesh.errors import (
    BrokerNotAvailable,
    CorruptBatch,
    MessageIllegal,
    RevisionConflict,
    SystemBusy,
)
from mqmesh.metrics import counter, gauge
from mqmesh.namespaces import namespace_of
from mqmesh.protocol.command import Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.request import Request
from mqmesh.protocol.tables import (
    MAX_KEY_BYTES,
    OPERATIONS,
    PROPERTY_KV_OPERATION,
    ReadTableRequest,
    TableEntries,
)
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.tables.answer import MOST_LOOKED, TableAnswer
from mqmesh.roles.broker.features.tables.carry import Carry, Wish
from mqmesh.roles.broker.features.tables.changes import (
    TableMessage,
    expiry_batch,
    table_messages,
)
from mqmesh.roles.broker.features.tables.row import PUT
from mqmesh.roles.broker.features.tables.row_store import BrokerTable
from mqmesh.roles.broker.features.tables.tables import Tables
from mqmesh.roles.broker.features.tables.unsettled import MOST_UNSETTLED_BYTES
from mqmesh.roles.broker.features.tables.values import TableValues
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable
from mqmesh.roles.broker.writing.writes import Writes, divided
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import BatchToPut, PutResult

MOST_EXPIRED: Final = 5_000
"""Values whose tombstones are written each second."""
_REFUSED: Final = int(Attributes.HAS_DELAY) | TRANSACTION_TYPE


class StagedTables:
    """Batches of tables on the stage of a turn, which have no offsets yet; and what is stored.

    Args:
        tables: Tables.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._write = -1
        self._keys: dict[str, set[bytes]] = {}
        # The header is kept, so that no other one gets its number meanwhile.
        self._messages: dict[int, tuple[BatchHeader, list[TableMessage]]] = {}

    def keys(self, topic: str, write: int) -> set[bytes]:
        """Return the keys of a table that are on the stage.

        Args:
            topic: The table.
            write: Number of the write that is being staged.
        """
        if write != self._write:
            self._write = write
            self._keys.clear()
            self._messages.clear()
        return self._keys.setdefault(topic, set())

    def on_staged(self, batch: BatchToPut, write: int) -> None:
        """Implement ``TableListener.on_staged``."""
        try:
            found = (message.key() for message in table_messages(batch.data, batch.header))
        except CorruptBatch:
            return  # it changes no key; logged once it is stored
        self.keys(batch.topic, write).update(key for key in found if key is not None)

    def add(self, header: BatchHeader, messages: list[TableMessage]) -> None:
        """Keep the messages of a batch until it is stored."""
        self._messages[id(header)] = header, messages

    def on_stored(self, topic: Topic, batch: BatchToPut, result: PutResult) -> None:
        """Implement ``TableListener.on_stored``."""
        known = self._messages.pop(id(batch.header), None)
        messages = known[1] if known is not None and known[0] is batch.header else None
        self.tables.on_stored(topic, batch, result, messages)


class TablesFeature(Feature):
    """Tables: topics of which the broker keeps the newest revisions of each key.

    Args:
        core: The core of the broker.
        topics: Topics.
        staged: Batches of tables on the stage.
        writes: The write turn.
        wish_of_replicas: Returns what retention of the replicas wishes.

    Attributes:
        tables: The tables.
        carry: The carrying of a master.
        conflicts: Writes that were refused, since a key had another revision.
        safe_from: The newest revision that an admission was refused for ends at this commit-log
            offset, if it may still be taken back; else 0.
    """

    works_at_followers = True

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        staged: StagedTables,
        writes: Writes,
        wish_of_replicas: Wish,
    ) -> None:
        self._core = core
        self._clock = core.clock
        self._store = core.store
        self._topics = topics
        self._staged = staged
        self._writes = writes
        self._values = TableValues(core.store)
        self.tables: Tables = staged.tables
        self.carry = Carry(core, self.tables, self._values, writes, wish_of_replicas)
        self.conflicts = 0
        self.safe_from = 0

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.READ_TABLE: self.read_table}

    # ---- Hooks -----------------------------------------------------------------------

    def loaded(self) -> None:
        """Take over the rows of an earlier role."""
        self.tables.load()
        self.tables.hold()

    def tick(self, now_ms: int) -> None:
        """Make rows, settle changes, carry rows, remove rows of deleted tables: a slice of each."""
        tables = self.tables
        tables.look_at_topics()
        if not tables.is_used:
            return
        if not self._core.is_follower:
            if not tables.is_whole:
                end = self._store.stats().max_commitlog_offset
                tables.follow(self._core.commit_point.visible(end))
            tables.settle()
            if tables.is_whole:
                self.carry.tick()
        tables.tidy()
        tables.hold()

    def sample(self) -> None:
        """Write tombstones for expired values; remove the tombstones whose time is over."""
        tables = self.tables
        if not tables.is_used or not tables.is_whole:
            return
        tables.settle()
        now_ms = self._clock.wall_ms()
        by_table: dict[BrokerTable, list[bytes]] = {}
        for table, key in tables.due(now_ms, MOST_EXPIRED):
            if key not in self._staged.keys(table.name, self._writes.number):
                by_table.setdefault(table, []).append(key)
        if self._core.is_follower:
            return
        for table, keys in by_table.items():
            for some in divided(keys, _tombstone_size, self._writes.group_bytes // 2):
                self._writes.put_encoded([expiry_batch(table.name, some, now_ms)], _ignore)

    def topic_deleted(self, topic: str) -> None:
        """Drop the table of a deleted topic."""
        self.tables.look_at_topics()

    def stopping(self) -> None:
        """Settle changes, and store the counts."""
        if not self._core.is_follower:
            self.tables.settle()
        self.tables.close()

    # ---- Sends -----------------------------------------------------------------------

    def admit(
        self,
        topic: Topic,
        header: BatchHeader,
        data: memoryview,
        meta: BatchMeta,
        earlier: Sequence[BatchToPut],
    ) -> None:
        """Check a batch for a table before it goes onto the stage.

        Args:
            topic: The table.
            header: Of the batch.
            data: The batch.
            meta: Its meta.
            earlier: Batches of the same request that are not on the stage yet.

        Raises:
            RevisionConflict: A key has another newest revision than is expected.
            MessageIllegal: A table does not take such messages.
            BrokerNotAvailable: The table is being made again, or the order is not known yet.
            SystemBusy: Too much of the tables is not confirmed.
        """
        name = topic.config.topic
        if header.attributes & _REFUSED:
            raise MessageIllegal(
                f"topic {name!r} is a table, which takes no delayed messages and no half messages"
            )
        table = self.tables.ready(topic)
        unsettled = self.tables.unsettled
        if unsettled.size_bytes >= MOST_UNSETTLED_BYTES:
            raise SystemBusy(
                f"{unsettled.count} changes of tables, {unsettled.size_bytes} bytes, "
                f"wait to be confirmed; {MOST_UNSETTLED_BYTES} may",
                retry_after_ms=self._core.config.busy_retry_after_ms,
            )
        messages = table_messages(data, header)
        keys = _keys_of(messages, name)
        quota = self._core.quotas.namespaces.get(namespace_of(name))
        if quota is not None and quota.table_bytes is not None:
            self._check_quota(table, header, messages, quota.table_bytes)
        staged = self._staged.keys(name, self._writes.number)
        if isinstance(meta, ExpectingMeta):
            if not staged.isdisjoint(keys):
                # Staged messages have no revisions yet.
                self._writes.write()
                staged = self._staged.keys(name, self._writes.number)
                for one in earlier:
                    if self._topics.require(one.topic).is_table:
                        self._staged.on_staged(one, self._writes.number)
            self._compare(table, header, meta, keys, earlier)
        staged.update(keys)
        self._staged.add(header, messages)

    def _compare(
        self,
        table: BrokerTable,
        header: BatchHeader,
        meta: ExpectingMeta,
        keys: list[bytes],
        earlier: Sequence[BatchToPut],
    ) -> None:
        name = table.name
        if len(set(keys)) != len(keys):
            raise MessageIllegal(f"a batch that expects revisions of {name!r} has a key twice")
        if any(one.topic == name for one in earlier):
            raise BrokerNotAvailable(
                f"an earlier batch of the same request for table {name!r} has no revisions yet"
            )
        now_ms = self._clock.wall_ms()
        expected = memoryview(meta.expected).cast("q")
        for key, wanted, (newest, end) in zip(
            keys, expected, self.tables.newest(table, keys), strict=True
        ):
            number = 0 if newest is None else newest.revision
            is_live = newest is not None and newest.is_live(now_ms)
            has_expired = newest is not None and newest.operation == PUT and not is_live
            if (wanted == number and not has_expired) or (not wanted and not is_live):
                continue
            if self._is_stored(name, header):
                return  # the store says where it is
            self.conflicts += 1
            self.safe_from = max(self.safe_from, end)
            raise RevisionConflict(
                f"{key.decode()!r} in table {name!r} has revision {number}"
                f"{', which has expired' if has_expired else ''}, not {wanted}",
                revision=number,
            )

    def _check_quota(
        self, table: BrokerTable, header: BatchHeader, messages: list[TableMessage], limit: int
    ) -> None:
        """Check that the tables of a namespace do not become larger than its quota allows.

        Raises:
            SystemBusy: They would.
        """
        namespace = namespace_of(table.name)
        used = self.tables.bytes_of(namespace)
        puts = [one for one in messages if one.operation() == PUT]
        more = sum(len(one.body) + len(one.keys[0].encode()) for one in puts)
        if used + more <= limit or self._is_stored(table.name, header):
            return
        # The revisions that they replace go; of a table with history the oldest ones.
        keys = [one.keys[0].encode() for one in puts]
        for key, row in dict(zip(keys, self.tables.rows_of(table, keys), strict=True)).items():
            if row is not None and len(row.revisions) >= table.topic.config.history:
                more -= len(key) + row.revisions[-1].size
        self._core.quotas.check_namespace(namespace, {"table_bytes": used}, {"table_bytes": more})

    def _is_stored(self, name: str, header: BatchHeader) -> bool:
        """Return whether a batch was stored before, so that it fails its own comparison."""
        window = self._store.producer_window(name, header.queue_id, header.producer_id)
        return any(
            one.first_sequence == header.first_sequence
            and one.message_count == header.message_count
            for one in window
        )

    # ---- Reads -----------------------------------------------------------------------

    def read_table(self, request: Request, query: ReadTableRequest) -> Reply:
        """Return the newest revisions of keys."""
        topic = self._topics.require_readable(query.topic, 0)
        if not topic.is_table:
            raise MessageIllegal(f"topic {query.topic!r} is no table (history = 0)")
        if query.history and len(query.keys) != 1:
            raise MessageIllegal(f"a history is of one key; {len(query.keys)} are named")
        self.tables.check_settled()
        table = self.tables.ready(topic)  # behind it: damage that it finds makes all tables anew
        answer = TableAnswer(self._values, query, self._clock.wall_ms())
        if query.keys:
            self._read_keys(table, query, answer)
        else:
            self._read_range(table, query, answer)
        header = encode_header(
            TableEntries(table.applied, answer.entries, answer.after, answer.is_full)
        )
        return Reply(header, (b"".join(answer.values),) if answer.values else ())

    def _read_keys(self, table: BrokerTable, query: ReadTableRequest, answer: TableAnswer) -> None:
        keys = [key.encode() for key in query.keys]
        for key in keys:
            if not 0 < len(key) <= MAX_KEY_BYTES:
                raise MessageIllegal(f"a key of {len(key)} bytes; 1 to {MAX_KEY_BYTES} are allowed")
        rows = self.tables.rows_of(table, keys)
        for at, (text, key, row) in enumerate(zip(query.keys, keys, rows, strict=True)):
            if row is not None and not answer.add(text, key, row):
                answer.after = query.keys[at - 1]
                return
        answer.after = query.keys[-1]

    def _read_range(self, table: BrokerTable, query: ReadTableRequest, answer: TableAnswer) -> None:
        prefix = query.prefix.encode()
        start = max(prefix, query.after.encode() + b"\0") if query.after else prefix
        while True:
            wanted = query.limit - len(answer.entries)
            rows = self.tables.rows_behind(table, start, _behind(prefix), wanted)
            for key, row in rows:
                text = key.decode()
                if not answer.add(text, key, row):
                    return
                answer.after = text
            if len(rows) < wanted:
                return
            if len(answer.entries) >= query.limit or answer.looked >= MOST_LOOKED:
                answer.is_full = True
                return
            start = rows[-1][0] + b"\0"

    def log_ratio(self) -> float:
        """Return what part of the log tables keep; 0 before retention had to wait for them."""
        if not self.carry.carried_bytes:
            return 0.0
        stats = self._store.stats()
        size = stats.max_commitlog_offset - stats.min_commitlog_offset
        return self.tables.counts.live_bytes / max(size, 1)

    metrics = (
        counter(
            "table_conflicts_total",
            "writes to tables that were refused, since a key had another revision",
            lambda feature: feature.conflicts,
        ),
        gauge(
            "table_keys",
            "keys of tables that have a value",
            lambda feature: {
                (table.name,): feature.tables.counts.keys.get(table.number, 0)
                for table in feature.tables
            },
            labels=("topic",),
        ),
        gauge(
            "table_live_bytes",
            "bytes of keys and values that a table keeps, of all revisions",
            lambda feature: {
                (table.name,): feature.tables.counts.sizes.get(table.number, 0)
                for table in feature.tables
            },
            labels=("topic",),
        ),
        gauge(
            "table_log_ratio",
            "bytes that tables keep by those of the log, once some were carried",
            lambda feature: feature.log_ratio(),
        ),
        gauge(
            "table_unreadable_values",
            "values that cannot be read from the log, which is kept for them",
            lambda feature: feature.carry.unreadable,
        ),
        gauge(
            "table_revision",
            "newest revision of a table that is readable",
            lambda feature: {(table.name,): table.applied for table in feature.tables},
            labels=("topic",),
        ),
        counter(
            "table_carried_bytes_total",
            "bytes that were written once more, so that a segment of the log may go",
            lambda feature: feature.carry.carried_bytes,
            unit="bytes",
        ),
    )


def _keys_of(messages: list[TableMessage], name: str) -> list[bytes]:
    """Return the key of each message.

    Raises:
        MessageIllegal: One is no message of a table.
    """
    found = []
    for message in messages:
        key = message.key()
        if key is None:
            raise MessageIllegal(
                f"topic {name!r} is a table: a message has one key, of 1 to {MAX_KEY_BYTES} bytes"
            )
        if message.operation() is None:
            raise MessageIllegal(
                f"topic {name!r} is a table: property {PROPERTY_KV_OPERATION} of {key.decode()!r} "
                f"is none of {', '.join(OPERATIONS)}"
            )
        found.append(key)
    return found


def _behind(prefix: bytes) -> bytes | None:
    """Return the end of all keys with a prefix; UTF-8 has no byte 255."""
    return prefix + b"\xff" if prefix else None


def _tombstone_size(key: bytes) -> int:
    return len(key) + 2 * MAX_KEY_BYTES  # its topic and properties among it


def _ignore(outcomes: list[BatchOutcome]) -> None:
    """Do nothing: what was not written is found again in a second."""
