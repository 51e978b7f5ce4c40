"""The timetable: waiting messages, sorted by their due times. It does not live in memory.

Pure: the caller's store keeps the pairs of keys and values, in memory for tests and in
LMDB otherwise, all changes of one call in one transaction, together with how far the
schedule topic is covered. So the table always stands at one point of the log.

Keys; numbers are big endian, so that they sort:

==== =================================== ===========================================
     key                                 value
==== =================================== ===========================================
``d`` due u64, place u64, chunk u32       the chunk, see ``chunks.py``
``i`` producer u64, sequence u64, place   message count of the batch, u32
      u64
``p`` place u64, chunk u32                due u64: where the chunk stands under ``d``;
                                          and the group of a retry, in ASCII
``s``                                     state: ``TimetableState`` as msgpack
==== =================================== ===========================================

A place is the commit-log offset of a batch in the schedule topic; ``chunk`` numbers the
chunks of a batch. ``due`` is the time of the chunk's first run. Entries under ``i`` stay
until the log has forgotten the batch, so that a later look-up knows why nothing waits. More
keys stand in ``retry_counts``.
"""

import enum
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.batch.delayed_batch import RECORD_QUEUE, SCHEDULE_QUEUES
from mqmesh.batch.schedule_record import Run
from mqmesh.errors import CorruptRecord
from mqmesh.protocol.schedule import DueStatus, ScheduledEntry
from mqmesh.roles.schedule.chunks import (
    DueRun,
    cut,
    decode_chunk,
    encode_chunk,
    runs_of,
    without,
)
from mqmesh.roles.schedule.retry_counts import ChunkId, Pair, Pairs, RetryCounts

VERSION: Final = 3
MOST_CHUNKS: Final = 2_048
"""Most chunks that are looked at for one request."""
MOST_STEPS: Final = 256
"""Batches of a producer that are looked at for one message."""
MOST_MESSAGES: Final = 65_536
"""Most messages in one request, roughly."""
FORGET_AT_ONCE: Final = 2_000

_DUE: Final = struct.Struct(">cQQI")
_ID: Final = struct.Struct(">cQQQ")
_PLACE: Final = struct.Struct(">cQI")
_U64: Final = struct.Struct(">Q")
_U32: Final = struct.Struct(">I")
_STATE: Final = b"s"
_FIRST_DUE: Final = b"d"
_END_DUE: Final = b"e"
_FIRST_ID: Final = b"i"
_END_ID: Final = b"j"
_FIRST_PLACE: Final = b"p"
_END_PLACE: Final = b"q"


class TimetableState(msgspec.Struct, array_like=True):
    """Position of the table in its log. On disk: positions never change.

    Attributes:
        version: Version of the table's form.
        store_id: Store that the log belongs to.
        epoch: Epoch of the log in which ``cursors`` are right; 0 for a store without epochs.
        cursors: Next queue offset of each queue of the schedule topic.
        pending: Messages that wait.
        boot_id: Boot id of the system that wrote it.
        clean: The table was made durable after the last change.
        settled: Queue offset behind the newest record whose effect the table holds; it may be
            ahead of the cursor of the record queue.
    """

    version: int = VERSION
    store_id: int = 0
    epoch: int = 0
    cursors: Annotated[list[int], msgspec.Meta(max_length=256)] = []
    pending: int = 0
    boot_id: bytes = b""
    clean: bool = False
    settled: int = 0


class Taken(msgspec.Struct):
    """Runs that one request to the broker delivers.

    Attributes:
        runs: In the order of the log.
        chunks: The chunks that they come from, with their keys and all of their runs.
        owners: Chunks, and runs in them, that each run consists of.
    """

    runs: list[Run]
    chunks: list[tuple[ChunkId, bytes, list[DueRun]]]
    owners: list[list[tuple[int, int]]]


class Found(enum.Enum):
    """States of a message that is looked up."""

    WAITS = 0
    UNKNOWN = 1
    OVER = 2
    LEAVING = 3


class Timetable:
    """Delayed messages by due time.

    Args:
        pairs: Store of the table's pairs.

    Raises:
        CorruptRecord: The pairs are no timetable of this version.

    Attributes:
        state: Log that it covers, and how far; saved with the next change.
        retries: Number of messages that wait for a retry, by consumer group.
    """

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self.retries = RetryCounts(pairs)
        data = pairs.get(_STATE)
        self.state = TimetableState() if data is None else _decode_state(data)
        self._leaving: set[ChunkId] = set()
        self._taken_through = _FIRST_DUE
        self._forget_from = _FIRST_ID

    # ---- The log ---------------------------------------------------------------------

    def begin(self, store_id: int, epoch: int, boot_id: bytes) -> str:
        """Begins a session, unless the table must be made anew.

        Whether the log lost messages that the table has is the broker's to say: each pull carries
        ``epoch`` and the cursors.

        Args:
            store_id: Identity of the broker's store.
            epoch: Epoch of the broker's log; a new table begins in it.
            boot_id: Boot id of the running system.

        Returns:
            Why the table cannot be used; empty if it can.
        """
        state = self.state
        if not state.cursors:
            state.store_id, state.epoch, state.boot_id = store_id, epoch, boot_id
            state.cursors = [0] * SCHEDULE_QUEUES
            return ""
        if state.store_id != store_id:
            return f"it is of store {state.store_id:x}, not {store_id:x}"
        # After a power cut the file may hold some changes and lack others that were made before.
        if not (state.clean or state.boot_id == boot_id):
            return "the machine went down before its last changes were on the disk"
        state.boot_id = boot_id
        return ""

    def add(
        self,
        entries: Sequence[ScheduledEntry],
        records: Sequence[Sequence[Run]],
        cursors: Sequence[int],
    ) -> None:
        """Adds what was stored in the schedule topic since the last call.

        Args:
            entries: Batches.
            records: Runs that need not wait any more; they never speak of later entries.
            cursors: Offsets up to which the topic is covered, with this.
        """
        puts: list[Pair] = []
        for entry in entries:
            times = struct.unpack(f"<{len(entry.due_times) // 8}q", entry.due_times)
            place = entry.commitlog_offset
            for number, runs in enumerate(cut(runs_of(times, entry.message_count))):
                puts += _pairs_of((place, number), runs, entry.retry_group)
                if entry.retry_group:
                    self.retries.put(entry.retry_group, (place, number), _count(runs), puts)
            key = _ID.pack(b"i", entry.producer_id, entry.first_sequence, place)
            puts.append((key, _U32.pack(entry.message_count)))
            self.state.pending += entry.message_count
        state = self.state
        record_cursor = state.cursors[RECORD_QUEUE]
        state.cursors = list(cursors)
        if puts:
            # The records may be about these, so they are written first.
            state.cursors[RECORD_QUEUE] = record_cursor
            self._save(puts)
        state.cursors[RECORD_QUEUE] = max(record_cursor, cursors[RECORD_QUEUE])
        state.settled = max(state.settled, state.cursors[RECORD_QUEUE])
        self.remove([run for runs in records for run in runs])

    def _note_record(self, queue_offset: int) -> None:
        state = self.state
        if state.cursors[RECORD_QUEUE] == queue_offset:
            state.cursors[RECORD_QUEUE] += 1  # it need not be read
        state.settled = max(state.settled, queue_offset + 1)

    # ---- What is due -------------------------------------------------------------------

    def next_due_ms(self, *, also_leaving: bool = False) -> int | None:
        """Return when the next chunk, leaving ones aside, or any one is due; None if none waits."""
        most = len(self._leaving) + 1
        begin = _FIRST_DUE if also_leaving else self._taken_through
        for key, _ in self._pairs.range(begin, _END_DUE, most=most):
            _, due, place, number = _DUE.unpack(key)
            if also_leaving or (place, number) not in self._leaving:
                return int(due)
        return None

    def take(self, now_ms: int) -> Taken | None:
        """Takes what is due; ``settle`` or ``put_back`` ends it. None if there is nothing."""
        taken = Taken([], [], [])
        stop = _DUE.pack(b"d", now_ms + 1, 0, 0)
        parts: list[tuple[int, int, int, int, int]] = []
        messages = 0
        most = MOST_CHUNKS + len(self._leaving)
        pairs = self._pairs.range(self._taken_through, stop, most=most)
        for key, value in pairs:
            if messages >= MOST_MESSAGES:
                break
            _, _, place, number = _DUE.unpack(key)
            self._taken_through = key
            if (place, number) in self._leaving:
                continue
            runs = decode_chunk(value)
            for index, (due, first, count) in enumerate(runs):
                if due > now_ms:
                    break
                parts.append((place, first, count, len(taken.chunks), index))
                messages += count
            self._leaving.add((place, number))
            taken.chunks.append(((place, number), key, runs))
        if not parts:
            return None
        parts.sort()
        _merge(parts, taken)
        return taken

    def settle(self, taken: Taken, statuses: bytes, record_offset: int = -1) -> list[Run]:
        """Takes the broker's answer.

        Args:
            taken: Runs of its request.
            statuses: ``DueStatus`` of each run from the first one on; the others wait again.
            record_offset: Queue offset of the broker's record of it, -1 for none.

        Returns:
            The runs that need not wait any more.
        """
        done: dict[int, set[int]] = {}
        over = [i for i, status in enumerate(statuses) if status != DueStatus.NOT_DUE]
        for index in over:
            for chunk, run in taken.owners[index]:
                done.setdefault(chunk, set()).add(run)
        puts: list[Pair] = []
        deletes: list[bytes] = []
        changed: list[Run] = []
        for number, runs in done.items():
            chunk_id, key, all_runs = taken.chunks[number]
            if self._pairs.get(key) != encode_chunk(all_runs):
                # The record came before the answer: with SYNC_FLUSH it may.
                changed += [(chunk_id[0], *all_runs[index][1:]) for index in runs]
                continue
            left = [run for index, run in enumerate(all_runs) if index not in runs]
            self._replace(chunk_id, key, left, puts, deletes)
            self.state.pending -= sum(all_runs[index][2] for index in runs)
        self.put_back(taken)
        self._note_record(record_offset)
        self._save(puts, deletes)
        if changed:
            self.remove(changed)
        return [taken.runs[index] for index in over]

    def put_back(self, taken: Taken) -> None:
        """Puts back what was taken: it waits again."""
        self.release(chunk_id for chunk_id, _, _ in taken.chunks)

    def hold(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Chunks that something else is done with: ``take`` leaves them until ``release``."""
        self._leaving.update(chunk_ids)

    def release(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Ends ``hold``."""
        self._leaving.difference_update(chunk_ids)
        self._taken_through = _FIRST_DUE

    # ---- One message -------------------------------------------------------------------

    def find(self, producer_id: int, sequence: int) -> tuple[Found, list[Run], list[ChunkId]]:
        """Looks for a message by its id.

        Returns:
            State of the message, and its places if it waits: usually one place, in one chunk.
        """
        known = False
        places: list[Run] = []
        chunk_ids: list[ChunkId] = []
        key = _ID.pack(b"i", producer_id, sequence, 2**64 - 1)
        # A batch that was rolled forward, or stored twice, has several places.
        for _ in range(MOST_STEPS):
            pair = self._pairs.at_or_before(key)
            if pair is None or pair[0][:1] != b"i":
                break
            _, producer, first, place = _ID.unpack(pair[0])
            count = _U32.unpack(pair[1])[0]
            if producer != producer_id:
                break
            if first + count <= sequence:
                if first + 65_536 <= sequence:
                    break
            else:
                known = True
                ordinal = sequence - first
                chunk_id = self._chunk_of(place, ordinal)
                if chunk_id in self._leaving:
                    return Found.LEAVING, [], []
                if chunk_id is not None:
                    places.append((place, ordinal, 1))
                    chunk_ids.append(chunk_id)
            key = _ID.pack(b"i", producer, first, place - 1) if place else b"i"
        if places:
            return Found.WAITS, places, chunk_ids
        return (Found.OVER if known else Found.UNKNOWN), [], []

    def _chunk_of(self, place: int, ordinal: int) -> ChunkId | None:
        for chunk_id, _, runs in self._chunks(place):
            if any(first <= ordinal < first + count for _, first, count in runs):
                return chunk_id
        return None

    # ---- Retention ---------------------------------------------------------------------

    def lowest_place(self) -> int | None:
        """Return the place of the oldest batch of which a message waits; None if nothing waits."""
        pairs = self._pairs.range(_FIRST_PLACE, _END_PLACE, most=1)
        return int(_PLACE.unpack(pairs[0][0])[1]) if pairs else None

    def to_roll(self, before_offset: int) -> tuple[list[Run], list[ChunkId]]:
        """Return runs that wait before a commit-log offset, not leaving, and their chunks."""
        stop = _PLACE.pack(b"p", before_offset, 0)
        runs: list[Run] = []
        chunk_ids: list[ChunkId] = []
        messages = 0
        for key, value in self._pairs.range(_FIRST_PLACE, stop, most=MOST_CHUNKS):
            _, place, number = _PLACE.unpack(key)
            if (place, number) in self._leaving:
                continue
            chunk_ids.append((place, number))
            chunk = self._pairs.get(_DUE.pack(b"d", _due_of(value), place, number))
            for _, first, count in decode_chunk(chunk or b""):
                runs.append((place, first, count))
                messages += count
            if messages >= MOST_MESSAGES:
                break
        return _join(sorted(runs)), chunk_ids

    def forget_before(self, start_offset: int) -> bool:
        """Forgets ids of batches that the log does not hold any more, a slice at a time.

        Returns:
            True when there is more to look at.
        """
        pairs = self._pairs.range(self._forget_from, _END_ID, most=FORGET_AT_ONCE)
        deletes = [key for key, _ in pairs if _ID.unpack(key)[3] < start_offset]
        if deletes:
            self._save([], deletes)
        more = len(pairs) == FORGET_AT_ONCE
        self._forget_from = pairs[-1][0] + b"\0" if more else _FIRST_ID
        return more

    # ---- Pairs -------------------------------------------------------------------------

    def mark(self, *, clean: bool) -> None:
        """Notes whether everything is durable."""
        self.state.clean = clean
        self._save([], keep_mark=True)

    def _chunks(self, place: int) -> list[tuple[ChunkId, bytes, list[DueRun]]]:
        found = []
        start, stop = _PLACE.pack(b"p", place, 0), _PLACE.pack(b"p", place + 1, 0)
        for key, value in self._pairs.range(start, stop, most=65_536):
            _, _, number = _PLACE.unpack(key)
            due_key = _DUE.pack(b"d", _due_of(value), place, number)
            chunk = self._pairs.get(due_key)
            if chunk is None:
                raise CorruptRecord(f"chunk {number} of batch {place} has no due time")
            found.append(((place, int(number)), due_key, decode_chunk(chunk)))
        return found

    def remove(self, runs: Sequence[Run], record_offset: int = -1) -> None:
        """Removes messages that need not wait any more.

        Args:
            runs: Which; those that do not wait do no harm.
            record_offset: Queue offset of the broker's record of it, -1 for none, or for those
                that ``add`` was given.
        """
        puts: list[Pair] = []
        deletes: list[bytes] = []
        by_place: dict[int, list[Run]] = {}
        for run in runs:
            by_place.setdefault(run[0], []).append(run)
        for place, gone in by_place.items():
            for chunk_id, key, before in self._chunks(place):
                left = before
                for _, first, count in gone:
                    left = without(left, first, count)
                if left != before:
                    self._replace(chunk_id, key, left, puts, deletes)
                    self.state.pending -= _count(before) - _count(left)
        self._note_record(record_offset)
        self._save(puts, deletes)

    def _replace(
        self,
        chunk_id: ChunkId,
        key: bytes,
        left: list[DueRun],
        puts: list[Pair],
        deletes: list[bytes],
    ) -> None:
        place_key, group = _PLACE.pack(b"p", *chunk_id), ""
        if self.retries.waiting:
            group = (self._pairs.get(place_key) or b"")[_U64.size :].decode("ascii")
        deletes.append(key)
        if left:
            puts += _pairs_of(chunk_id, left, group)
        else:
            deletes.append(place_key)
        if group:
            self.retries.replace(group, chunk_id, _count(left), puts, deletes)

    def _save(
        self, puts: list[Pair], deletes: Iterable[bytes] = (), *, keep_mark: bool = False
    ) -> None:
        if not keep_mark:
            self.state.clean = False
        deletes = list(deletes)
        self.retries.save(puts, deletes)
        puts.append((_STATE, msgspec.msgpack.encode(self.state)))
        puts.sort()
        if puts[0][0][:1] == b"d" and puts[0][0] <= self._taken_through:
            self._taken_through = _FIRST_DUE
        self._pairs.write(puts, deletes)


def _due_of(value: bytes) -> int:
    return int(_U64.unpack_from(value)[0])


def _pairs_of(chunk_id: ChunkId, runs: Sequence[DueRun], retry_group: str) -> list[Pair]:
    place, number = chunk_id
    due = runs[0][0]
    return [
        (_DUE.pack(b"d", due, place, number), encode_chunk(runs)),
        (_PLACE.pack(b"p", place, number), _U64.pack(due) + retry_group.encode("ascii")),
    ]


def _merge(parts: list[tuple[int, int, int, int, int]], taken: Taken) -> None:
    """Joins runs that stand side by side in the log."""
    for place, first, count, chunk, index in parts:
        last = taken.runs[-1] if taken.runs else None
        if last is not None and last[0] == place and last[1] + last[2] == first:
            taken.runs[-1] = (place, last[1], last[2] + count)
            taken.owners[-1].append((chunk, index))
        else:
            taken.runs.append((place, first, count))
            taken.owners.append([(chunk, index)])


def _join(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for place, first, count in runs:
        if joined and joined[-1][0] == place and joined[-1][1] + joined[-1][2] == first:
            joined[-1] = (place, joined[-1][1], joined[-1][2] + count)
        else:
            joined.append((place, first, count))
    return joined


def _count(runs: Iterable[DueRun]) -> int:
    return sum(count for _, _, count in runs)


def _decode_state(data: bytes) -> TimetableState:
    try:
        state = msgspec.msgpack.decode(data, type=TimetableState)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"the timetable's state cannot be read: {error}") from error
    if state.version != VERSION:
        raise CorruptRecord(f"the timetable has version {state.version}, not {VERSION}")
    return state
