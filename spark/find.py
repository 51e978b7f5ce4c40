"""Looks messages up in an archive without Spark or Java."""

import functools
import itertools
import operator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import pyarrow.dataset as ds

from mqmesh.errors import ConfigError

from .tables import KEYS, MESSAGES, key_hash, require_table, rows_where

PLACES_AT_ONCE: Final = 1_000
"""Places that are looked up in one pass over the messages."""

_PLACE: Final = ["dt", "topic", "store_id", "commitlog_offset", "ordinal"]


class FoundRows(msgspec.Struct, frozen=True):
    """Messages that were found.

    Attributes:
        rows: Rows by column.
        more: True if further messages match, beyond the limit.
    """

    rows: list[dict[str, Any]]
    more: bool


def find(
    archive: str,
    *,
    topic: str = "",
    key: str = "",
    message_id: str = "",
    from_ms: int | None = None,
    to_ms: int | None = None,
    most: int = 32,
) -> FoundRows:
    """Looks messages of an archive up.

    Args:
        archive: Directory of the archive.
        topic: Only of this topic.
        key: Only with this key.
        message_id: Only with this id.
        from_ms: Stored at this time or later.
        to_ms: Stored at this time or before.
        most: Stop when there are so many, from 1.

    Returns:
        Rows by column, oldest place in the log first, and whether more match.

    Raises:
        ConfigError: The directory is no archive, or there is nothing to look for.
    """
    if not (topic or key or message_id or from_ms is not None or to_ms is not None):
        raise ConfigError("say what to look for: --topic, --key, --id, --from or --to")
    conditions = [*_days(from_ms, to_ms), *_times(from_ms, to_ms)]
    if topic:
        conditions.append(ds.field("topic") == topic)
    if message_id:
        conditions.append(ds.field("message_id") == message_id.upper())
    messages = require_table(archive, MESSAGES)
    if not (key or message_id):
        found = list(itertools.islice(rows_where(messages, _all_of(conditions)), most + 1))
    else:
        # First the places, of a few small columns; then whole rows, of the groups these are in.
        if key:
            of_key = [ds.field("key_hash") == key_hash(key), ds.field("key") == key]
            of_key += [ds.field("topic") == topic] if topic else []
            of_key += _days(from_ms, to_ms)
            places = rows_where(require_table(archive, KEYS), _all_of(of_key), _PLACE)
        else:
            places = rows_where(messages, _all_of(conditions), _PLACE)
        found = []
        while len(found) <= most and (some := list(itertools.islice(places, PLACES_AT_ONCE))):
            wanted = {_place_of(place) for place in some}
            rows = rows_where(messages, _all_of([*conditions, *_at(some)]))
            wanted_rows = (row for row in rows if _place_of(row) in wanted)
            found += itertools.islice(wanted_rows, most + 1 - len(found))
    shown = sorted(
        found[:most], key=lambda row: (row["broker"], row["commitlog_offset"], row["ordinal"])
    )
    return FoundRows(shown, more=len(found) > most)


def _place_of(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["store_id"], row["commitlog_offset"], row["ordinal"]


def _all_of(conditions: list[ds.Expression]) -> ds.Expression:
    return functools.reduce(operator.and_, conditions)


def _at(places: list[dict[str, Any]]) -> list[ds.Expression]:
    """Partitions are skipped by day and topic, files and row groups by offset. More may match."""

    def values(name: str) -> list[Any]:
        return sorted({place[name] for place in places})

    names = ("dt", "topic", "commitlog_offset", "ordinal")
    return [ds.field(name).isin(values(name)) for name in names]


def _days(from_ms: int | None, to_ms: int | None) -> list[ds.Expression]:
    day = ds.field("dt")
    found = [] if from_ms is None else [day >= _moment(from_ms).date()]
    return found if to_ms is None else [*found, day <= _moment(to_ms).date()]


def _times(from_ms: int | None, to_ms: int | None) -> list[ds.Expression]:
    time = ds.field("store_timestamp")
    found = [] if from_ms is None else [time >= _moment(from_ms)]
    return found if to_ms is None else [*found, time <= _moment(to_ms)]


def _moment(wall_ms: int) -> datetime:
    return datetime.fromtimestamp(wall_ms / 1_000, UTC)
