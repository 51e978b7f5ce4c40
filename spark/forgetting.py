"""Deletes messages of an archive, and their keys: old days, or chosen messages. Without Spark.

First the messages are deleted, then their keys: a command that was stopped in between is repeated,
and finds the keys that are left. A search by such a key finds no message. Old versions of the
tables have the messages until ``vacuum`` removes their files.
"""

from collections.abc import Iterator
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from mqmesh.errors import ConfigError
from mqmesh.message import check_topic

from .compaction import date_of
from .deletion import delete_rows
from .maintenance import query
from .settings import load_settings
from .tables import (
    KEYS,
    MESSAGES,
    ArchivedTopic,
    by_topic,
    by_topic_and_day,
    dataset_of,
    key_hash,
    open_table,
    require_table,
    sources,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_PLACES: Final = 2_000_000
"""Messages that are chosen at a time, at some 400 bytes of memory each."""

PLACE: Final = ("dt", "topic", "broker", "store_id", "commitlog_offset", "ordinal")
"""Columns that identify a message in both tables, and the files that may have it."""
_IDENTITY: Final = ("broker", "store_id", "commitlog_offset", "ordinal")


class Choice(msgspec.Struct, frozen=True):
    """Messages that would be deleted.

    Attributes:
        topics: Numbers of them, by topic.
        places: Their places, in the columns ``PLACE``; None for all messages of the one topic.
    """

    topics: list[ArchivedTopic]
    places: pa.Table | None = None

    @property
    def messages(self) -> int:
        """Number of messages."""
        return sum(one.messages for one in self.topics)


def expire(archive: str, *, before: str, topic: str = "") -> int:
    """Forgets whole days, and their keys.

    Args:
        archive: Directory of the archive.
        before: The first day to keep, ``2026-03-01``.
        topic: Only of this topic; empty for all.

    Returns:
        Messages that went. Their files go with ``vacuum``.

    Raises:
        ConfigError: The directory is no archive, or ``before`` is no day.
        InvalidArgument: There is no such topic name.
    """
    condition = ds.field("dt") < date_of(before)
    if topic:
        check_topic(topic)
        condition &= ds.field("topic") == topic
    return _delete_where(archive, condition)


def expire_by_settings(archive: str, today: date) -> int:
    """Forgets messages older than ``expire_days`` of the archive's settings.

    Args:
        archive: Directory of the archive.
        today: Present day in UTC; so many days before it are kept.

    Returns:
        Messages that went.

    Raises:
        ConfigError: The directory is no archive, or its settings are wrong.
    """
    settings = load_settings(archive)
    if not settings.expire_days:
        return 0
    newest = today - timedelta(days=min(settings.expire_days.values()))
    days = _days_before(archive, newest)
    gone = 0
    for span in sorted(set(settings.expire_days.values()), reverse=True):
        before = today - timedelta(days=span)
        old = {topic for topic, day in days if day < before}
        expired = {topic for topic in old if (settings.days_of(topic) or span + 1) <= span}
        if expired:
            condition = ds.field("dt") < before
            # An ingest may add old days of any topic meanwhile.
            if set(settings.expire_days) != {"*"}:
                condition &= ds.field("topic").isin(sorted(expired))
            gone += _delete_where(archive, condition)
            days = {one for one in days if one[0] not in expired or one[1] >= before}
    return gone


def choose(
    archive: str,
    *,
    topic: str = "",
    key: str = "",
    message_id: str = "",
    where: str = "",
    spark: "SparkSession | None" = None,
) -> Choice:
    """Finds messages to forget: those that fulfil all of the given conditions.

    Args:
        archive: Directory of the archive.
        topic: Of this topic.
        key: With this key.
        message_id: With this id.
        where: Condition of Spark's SQL over the view ``messages``.
        spark: A session, for ``where``.

    Raises:
        ConfigError: The directory is no archive, there is no condition, more messages fulfil them
            than ``MOST_PLACES``, or the table of keys is behind, so that some would be missed.
    """
    if not (topic or key or message_id or where):
        raise ConfigError("say what to forget: --topic, --key, --id or --where")
    table = require_table(archive, KEYS if key and not where else MESSAGES)
    if where:
        assert spark is not None
        places = _by_sql(spark, archive, where, topic, key, message_id)
        return Choice(by_topic([places]), places)
    condition = ds.scalar(True)
    if topic:
        condition &= ds.field("topic") == topic
    if message_id:
        condition &= ds.field("message_id") == message_id.upper()
    if key:
        behind = [one.broker for one in sources(archive) if one.keys_position < one.position]
        if behind:
            raise ConfigError(
                f"the table of keys lacks keys of {', '.join(behind)}, so messages would be "
                "missed; the next `mqmesh archive ingest` adds them"
            )
        condition &= (ds.field("key_hash") == key_hash(key)) & (ds.field("key") == key)
    by_place = bool(key or message_id)
    choice = _choice(dataset_of(table), condition, by_place=by_place)
    keys = None if key or choice.messages else open_table(archive, KEYS)
    if keys is not None:
        # A command that was stopped leaves keys of messages that are gone.
        return _choice(dataset_of(keys), condition, by_place=by_place)
    return choice


def _choice(dataset: ds.Dataset, condition: ds.Expression, *, by_place: bool) -> Choice:
    if not by_place:
        return Choice(by_topic(dataset.to_batches(filter=condition, columns=["dt", "topic"])))
    found = []
    count = 0
    for batch in dataset.to_batches(filter=condition, columns=list(PLACE)):
        count += batch.num_rows
        _check_count(count)
        found.append(batch)
    schema = pa.schema([dataset.schema.field(name) for name in PLACE])
    # A message may have a key twice; each place has to come once.
    places = pa.Table.from_batches(found, schema).group_by(list(PLACE)).aggregate([])
    return Choice(by_topic([places]), places)


def forget(archive: str, choice: Choice) -> int:
    """Deletes chosen messages, and their keys.

    Args:
        archive: Directory of the archive.
        choice: Answer of ``choose``.

    Returns:
        Number of deleted messages. ``vacuum`` removes their files.

    Raises:
        StorageError: Others commit all the time.
    """
    if not choice.messages:
        return 0
    if choice.places is None:
        (one,) = choice.topics
        return _delete_where(archive, ds.field("topic") == one.topic)
    gone = _delete_places(archive, MESSAGES, choice.places)
    if open_table(archive, KEYS) is not None:
        _delete_places(archive, KEYS, choice.places)
    return gone


def _by_sql(
    spark: "SparkSession", archive: str, where: str, topic: str, key: str, message_id: str
) -> pa.Table:
    from pyspark.sql.functions import array_contains, col

    frame = query(spark, archive, f"SELECT * FROM messages WHERE (\n{where}\n)")
    if topic:
        frame = frame.where(col("topic") == topic)
    if key:
        frame = frame.where(array_contains("keys", key))
    if message_id:
        frame = frame.where(col("message_id") == message_id.upper())
    found: pa.Table = frame.select(*PLACE).limit(MOST_PLACES + 1).toArrow()
    _check_count(found.num_rows)
    return found


def _check_count(count: int) -> None:
    if count > MOST_PLACES:
        raise ConfigError(
            f"more than {MOST_PLACES:,} messages would go; choose fewer at a time, or whole days "
            "of a topic by `mqmesh archive expire`"
        )


def _delete_where(archive: str, condition: ds.Expression) -> int:
    gone = delete_rows(archive, MESSAGES, condition)
    if open_table(archive, KEYS) is not None:
        delete_rows(archive, KEYS, condition)
    return gone


def _delete_places(archive: str, name: str, places: pa.Table) -> int:
    """Deletes the rows of places; returns their number."""
    offsets = pc.min_max(places["commitlog_offset"]).as_py()
    condition = (
        ds.field("dt").isin(places["dt"].unique())
        & (ds.field("commitlog_offset") >= offsets["min"])
        & (ds.field("commitlog_offset") <= offsets["max"])
    )
    wanted, values = set(_rows(places)), places["commitlog_offset"].unique()

    def is_gone(batch: pa.RecordBatch) -> pa.BooleanArray:
        # Python looks only at the few rows that Arrow finds by their offsets.
        near = pc.indices_nonzero(pc.is_in(batch["commitlog_offset"], value_set=values))
        found = [row in wanted for row in _rows(batch.select(_IDENTITY).take(near))]
        gone = near.filter(pa.array(found, pa.bool_()))
        return pc.is_in(pa.array(range(batch.num_rows), near.type), value_set=gone)

    return delete_rows(archive, name, condition, columns=_IDENTITY, is_gone=is_gone)


def _rows(table: pa.Table | pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in _IDENTITY), strict=True)


def _days_before(archive: str, before: date) -> set[tuple[str, date]]:
    """Returns which topics have messages or keys of which days, of those before a day."""
    found: set[tuple[str, date]] = set()
    for table in (require_table(archive, MESSAGES), open_table(archive, KEYS)):
        if table is not None:
            batches = dataset_of(table).to_batches(
                filter=ds.field("dt") < before, columns=["topic", "dt"]
            )
            found |= by_topic_and_day(batches).keys()
    return found
