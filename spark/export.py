"""Messages of an archive in the order of their places, day by day; without Spark or Java."""

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from mqmesh.errors import ConfigError
from mqmesh.units import MIB

from .tables import MESSAGES, dataset_of, require_table

ROWS_AT_ONCE: Final = 50_000
BYTES_AT_ONCE: Final = 32 * MIB
"""Limits of the messages in memory, by number and by their bodies; one message always fits."""
_PLACE: Final = ["broker", "commitlog_offset", "ordinal"]


def rows(archive: str, topic: str, since: str, until: str) -> Iterator[dict[str, Any]]:
    """Yields rows of a topic, by day, broker and place.

    In memory are the places of one day, about 50 bytes a message, and messages of 32 MiB.

    Args:
        archive: Directory of the archive.
        topic: Topic of the messages.
        since: First day, ``2026-03-01``; empty for the first there is.
        until: Last day; empty for the last there is.

    Raises:
        ConfigError: The directory is no archive, or a text is no day.
    """
    for batch in _batches(archive, topic, since, until):
        yield from batch.to_pylist()


def write_parquet(archive: str, topic: str, since: str, until: str, target: str) -> int:
    """Writes rows into one file; the arguments are those of ``rows``.

    Args:
        archive: Directory of the archive.
        topic: Topic of the messages.
        since: First day.
        until: Last day.
        target: Directory that gets ``<topic>.parquet``; the file must not be there.

    Returns:
        Messages that were written.

    Raises:
        ConfigError: The same as for ``rows``, or the file is there.
    """
    path = Path(target) / f"{topic}.parquet"
    if path.exists():
        raise ConfigError(f"{path} exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    writer = None
    try:
        for batch in _batches(archive, topic, since, until):
            writer = writer or pq.ParquetWriter(path, batch.schema, compression="zstd")
            writer.write_table(batch)
            count += batch.num_rows
    finally:
        if writer is not None:
            writer.close()
    return count


def _batches(archive: str, topic: str, since: str, until: str) -> Iterator[pa.Table]:
    dataset = dataset_of(require_table(archive, MESSAGES))
    wanted = ds.field("topic") == topic
    if since:
        wanted &= ds.field("dt") >= _day(since)
    if until:
        wanted &= ds.field("dt") <= _day(until)
    days = set()
    for batch in dataset.to_batches(filter=wanted, columns=["dt"]):
        days.update(batch.column(0).unique().to_pylist())
    for day in sorted(days):
        of_day = wanted & (ds.field("dt") == day)
        columns = {name: ds.field(name) for name in _PLACE}
        size = {"size": pc.binary_length(ds.field("body"))}
        places = dataset.to_table(filter=of_day, columns=columns | size).sort_by(
            [(name, "ascending") for name in _PLACE]
        )
        yield from _in_order(dataset, of_day, places)


def _in_order(dataset: ds.Dataset, of_day: ds.Expression, places: pa.Table) -> Iterator[pa.Table]:
    for start, count in _slices(places["size"].to_pylist()):
        some = places.slice(start, count)
        first, last = some.slice(0, 1).to_pylist()[0], some.slice(some.num_rows - 1).to_pylist()[0]
        table = dataset.to_table(filter=of_day & _not_before(first) & _not_behind(last))
        yield table.sort_by([(name, "ascending") for name in _PLACE])


def _slices(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yields start and length of stretches within the limits."""
    start = taken = 0
    for number, size in enumerate(sizes):
        if number > start and (number - start == ROWS_AT_ONCE or taken + size > BYTES_AT_ONCE):
            yield start, number - start
            start, taken = number, 0
        taken += size
    if sizes:
        yield start, len(sizes) - start


def _not_before(place: dict[str, Any]) -> ds.Expression:
    broker, offset, ordinal = (ds.field(name) for name in _PLACE)
    same = (broker == place["broker"]) & (offset == place["commitlog_offset"])
    return (
        (broker > place["broker"])
        | ((broker == place["broker"]) & (offset > place["commitlog_offset"]))
        | (same & (ordinal >= place["ordinal"]))
    )


def _not_behind(place: dict[str, Any]) -> ds.Expression:
    broker, offset, ordinal = (ds.field(name) for name in _PLACE)
    same = (broker == place["broker"]) & (offset == place["commitlog_offset"])
    return (
        (broker < place["broker"])
        | ((broker == place["broker"]) & (offset < place["commitlog_offset"]))
        | (same & (ordinal <= place["ordinal"]))
    )


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no day; write 2026-03-01") from None
