"""Which messages a reader of snapshots wants, and the batches that may have them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqmesh.batch.record_batch import BatchHeader, decode_messages
from mqmesh.errors import ConfigError, CorruptBatch, CorruptRecord
from mqmesh.message import StoredMessage, is_system_topic, parse_message_id
from mqmesh.storage.tools.snapshot_reading import Batch, Damage, LogRange, Snapshot
from mqmesh.units import MAX_OFFSET, MAX_TIMESTAMP_MS, MIB

RANGE_BYTES: Final = 64 * MIB
"""Log that one task reads."""
PLACES_PER_TASK: Final = 1_000

OnSkip = Callable[[Damage], None]

FAIL: Final = "fail"
SKIP: Final = "skip"


@dataclass(frozen=True)
class Selection:
    """Selection of messages; everything by default.

    Attributes:
        topics: Names, or beginnings of names with ``*`` behind; empty for all but system topics.
        include_system: System topics as well: retries, dead letters, delayed and half messages.
        key: Only messages with this key; empty for all.
        message_ids: Only these; None for all.
        from_ms: Stored at this time or later.
        to_ms: Stored at this time or before.
        from_offset: Only batches that begin at this commit-log offset or behind it.
        to_offset: Only batches that begin before this one; None for all.
        leave_out: Topics that are not wanted all the same, named as ``topics``.
        on_damage: ``fail`` or ``skip``.
    """

    topics: tuple[str, ...] = ()
    include_system: bool = False
    key: str = ""
    message_ids: tuple[str, ...] | None = None
    from_ms: int = 0
    to_ms: int = MAX_TIMESTAMP_MS
    from_offset: int = 0
    to_offset: int | None = None
    leave_out: tuple[str, ...] = ()
    on_damage: str = FAIL

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ConfigError: An unknown word for ``on_damage``.
        """
        if self.on_damage not in (FAIL, SKIP):
            raise ConfigError(f"onDamage is {self.on_damage!r}; it may be {FAIL!r} or {SKIP!r}")

    def has_topic(self, physical_topic: str) -> bool:
        """Returns True if messages that are stored in a topic may be wanted."""
        if any(fits(physical_topic, unwanted) for unwanted in self.leave_out):
            return False
        if self.topics:
            if not any(fits(physical_topic, wanted) for wanted in self.topics):
                return False
            if physical_topic in self.topics:
                return True
        return self.include_system or not is_system_topic(physical_topic)

    def has_time(self, store_timestamp: int) -> bool:
        """Returns True if messages that were stored at a time may be wanted."""
        return self.from_ms <= store_timestamp <= self.to_ms

    def pick(self, messages: Sequence[StoredMessage]) -> Sequence[StoredMessage]:
        """Returns the messages of a batch that are wanted."""
        if self.key:
            messages = [one for one in messages if self.key in one.keys]
        if self.message_ids is not None:
            messages = [one for one in messages if one.message_id in self.message_ids]
        return messages


@dataclass(frozen=True)
class ReadTask:
    """Task of one reader: a range of a snapshot's log, or batches at known places.

    Attributes:
        path: The snapshot.
        start_offset: Commit-log offset of the range.
        end_offset: Commit-log offset behind the range.
        places: Commit-log offsets of batches; then the range does not count.
    """

    path: str
    start_offset: int
    end_offset: int
    places: tuple[int, ...] = ()


def plan(path: str, wanted: Selection, *, range_bytes: int = RANGE_BYTES) -> list[ReadTask]:
    """Plans the tasks that read the wanted part of a snapshot.

    Raises:
        ConfigError: The directory is no snapshot.
        StorageError: The snapshot is damaged, or cannot be read.
    """
    snapshot = Snapshot(Path(path))
    places, ranges = _look_up(snapshot, wanted)
    if ranges is None:
        ranges = snapshot.ranges(range_bytes, from_ms=wanted.from_ms, to_ms=wanted.to_ms)
    tasks = [
        ReadTask(path, 0, 0, tuple(places[first : first + PLACES_PER_TASK]))
        for first in range(0, len(places), PLACES_PER_TASK)
    ]
    stop = snapshot.manifest.end_offset if wanted.to_offset is None else wanted.to_offset
    for one in ranges:
        low, high = max(one.start_offset, wanted.from_offset), min(one.end_offset, stop)
        if low < high:
            tasks.append(ReadTask(path, low, high))
    return tasks


def _look_up(snapshot: Snapshot, wanted: Selection) -> tuple[Sequence[int], list[LogRange] | None]:
    """Returns the index's places, and ranges to read beside them; None for everything."""
    answers: list[tuple[list[int], list[LogRange]]] = []
    if wanted.message_ids is not None:
        for message_id in wanted.message_ids:
            # No message has an id that is none.
            with contextlib.suppress(ConfigError):
                answers.append(snapshot.places_of_id(*parse_message_id(message_id)))
    elif wanted.key and wanted.topics and not any("*" in topic for topic in wanted.topics):
        answers += [snapshot.places_of_key(topic, wanted.key) for topic in wanted.topics]
    else:
        return (), None
    # A range that one of the answers does not cover is read for all; it ends with its segment.
    starts: dict[int, int] = {}
    for _, unknown in answers:
        for one in unknown:
            starts[one.end_offset] = min(one.start_offset, starts.get(one.end_offset, MAX_OFFSET))
    ranges = [LogRange(start, end) for end, start in sorted(starts.items())]
    places = {
        place
        for found, _ in answers
        for place in found
        if not any(one.start_offset <= place < one.end_offset for one in ranges)
    }
    return sorted(places), ranges


def _unheard(damage: Damage) -> None:
    """Ignores damage."""


def read_task(
    snapshot: Snapshot, task: ReadTask, wanted: Selection, on_skip: OnSkip = _unheard
) -> Iterator[tuple[BatchHeader, Sequence[StoredMessage]]]:
    """Yields the wanted messages of a task, batch by batch.

    Args:
        snapshot: Snapshot to read.
        task: Range or batches to read.
        wanted: Selection of messages.
        on_skip: Called for damage that is read around.

    Raises:
        CorruptRecord: There is damage, and ``on_damage`` says ``fail``.
        StorageError: The snapshot cannot be read.
    """
    for batch in _batches(snapshot, task, wanted, on_skip):
        header = batch.header
        if not wanted.has_time(header.store_timestamp) or not wanted.has_topic(batch.meta.topic):
            continue
        try:
            messages = decode_messages(
                batch.data, header, containing=wanted.key.encode() if wanted.key else b""
            )
        except CorruptBatch as error:
            damage = Damage(header.commitlog_offset, header.end_offset, str(error))
            _on_damage(snapshot, damage, wanted, on_skip)
            continue
        picked = wanted.pick(messages)
        if picked:
            yield header, picked


def _batches(
    snapshot: Snapshot, task: ReadTask, wanted: Selection, on_skip: OnSkip
) -> Iterator[Batch]:
    if not task.places:
        for found in snapshot.read(LogRange(task.start_offset, task.end_offset)):
            if isinstance(found, Damage):
                _on_damage(snapshot, found, wanted, on_skip)
            else:
                yield found
        return
    for place in task.places:
        batch = snapshot.batch_at(place)
        if batch is None:
            damage = Damage(place, place + 1, "no good batch begins there")
            _on_damage(snapshot, damage, wanted, on_skip)
        else:
            yield batch


def _on_damage(snapshot: Snapshot, damage: Damage, wanted: Selection, on_skip: OnSkip) -> None:
    if wanted.on_damage == FAIL:
        raise CorruptRecord(
            f"{snapshot.directory}: log {damage.start_offset} to {damage.end_offset} is damaged: "
            f"{damage.reason}; --on-damage skip (option onDamage) reads around it"
        )
    on_skip(damage)


def fits(topic: str, wanted: str) -> bool:
    """Returns True if a topic has a name, or begins with the part before a ``*``."""
    if wanted.endswith("*"):
        return topic.startswith(wanted[:-1])
    return topic == wanted
