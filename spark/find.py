"""Looks messages up in an archive without Spark or Java."""

import functools
import itertools
import operator
from typing import Any

import pyarrow.dataset as ds
from deltalake import DeltaTable

from mqmesh.errors import ConfigError

from .tables import KEYS, MESSAGES, require_table, rows_where


def find(
    archive: str,
    *,
    topic: str = "",
    key: str = "",
    message_id: str = "",
    from_ms: int | None = None,
    to_ms: int | None = None,
    most: int = 32,
) -> list[dict[str, Any]]:
    """Messages of an archive.

    Args:
        archive: Its directory.
        topic: Only of this topic.
        key: Only with this key.
        message_id: Only with this id.
        from_ms: Stored at this time or later.
        to_ms: Stored at this time or before.
        most: Stop when there are so many, from 1.

    Returns:
        Rows by column, oldest place in the log first.

    Raises:
        ConfigError: It is no archive, or nothing is said to look for.
    """
    if not (topic or key or message_id or from_ms is not None or to_ms is not None):
        raise ConfigError("say what to look for: --topic, --key, --id, --from or --to")
    conditions = []
    if topic:
        conditions.append(ds.field("topic") == topic)
    if message_id:
        conditions.append(ds.field("message_id") == message_id.upper())
    conditions += _times(from_ms, to_ms)
    messages = require_table(archive, MESSAGES)
    if key or message_id:
        # First the places, of a few small columns; then whole rows, of the groups these are in.
        if key:
            places = _places_of(require_table(archive, KEYS), _of_key(key, topic), most)
        else:
            places = _places_of(messages, functools.reduce(operator.and_, conditions), most)
        if not places:
            return []
        conditions.append(_at(places))
    found = []
    for row in rows_where(messages, functools.reduce(operator.and_, conditions)):
        if not key or key in (row["keys"] or ()):
            found.append(row)
            if len(found) >= most:
                break
    return sorted(found, key=lambda row: (row["broker"], row["commitlog_offset"], row["ordinal"]))


def _of_key(key: str, topic: str) -> ds.Expression:
    condition = ds.field("key") == key
    return condition & (ds.field("topic") == topic) if topic else condition


def _places_of(table: DeltaTable, condition: ds.Expression, most: int) -> list[dict[str, Any]]:
    columns = ["dt", "topic", "store_id", "commitlog_offset", "ordinal"]
    return list(itertools.islice(rows_where(table, condition, columns), most))


def _at(places: list[dict[str, Any]]) -> ds.Expression:
    """Partitions are skipped by day and topic, files and row groups by offset."""

    def values(name: str) -> list[Any]:
        return sorted({place[name] for place in places})

    names = ("dt", "topic", "commitlog_offset", "ordinal")
    return functools.reduce(operator.and_, (ds.field(name).isin(values(name)) for name in names))


def _times(from_ms: int | None, to_ms: int | None) -> list[ds.Expression]:
    from datetime import UTC, datetime

    found = []
    if from_ms is not None:
        moment = datetime.fromtimestamp(from_ms / 1_000, UTC)
        found.append(ds.field("store_timestamp") >= moment)
        found.append(ds.field("dt") >= moment.date())
    if to_ms is not None:
        moment = datetime.fromtimestamp(to_ms / 1_000, UTC)
        found.append(ds.field("store_timestamp") <= moment)
        found.append(ds.field("dt") <= moment.date())
    return found
