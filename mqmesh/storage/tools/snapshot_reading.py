"""Reads a snapshot's log: all of it or a part, record by record, and by the index.

``LogScanner`` checks every record, as in recovery, so a reader gets the same records as the broker.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import HEADER_SIZE, BatchHeader, BatchMeta, read_header, read_meta
from mqmesh.errors import CorruptBatch, CorruptRecord, StorageError
from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.index.part import HEAD_KEY, IndexPart, decode_head
from mqmesh.storage.interface import OnProgress, RecoveryProgress
from mqmesh.storage.lmdb.env import LmdbEnv
from mqmesh.storage.log.control_record import (
    CONTROL_RECORD_SIZE,
    MAX_CONTROL_DATA,
    ControlKind,
    decode_control_record,
)
from mqmesh.storage.log.scan import Damaged, LogScanner
from mqmesh.storage.log.segments import Segment
from mqmesh.storage.log.store_key import StoreKey, read_store_key
from mqmesh.storage.tools.snapshot import (
    Manifest,
    SnapshotFile,
    is_sound,
    load_manifest,
    segments_of,
)
from mqmesh.units import MAX_TIMESTAMP_MS, MIB

PLACES_AT_ONCE: Final = 1_024
PROGRESS_EVERY_BYTES: Final = 4 * MIB
MOST_RANGES: Final = 1_000
"""Damaged ranges that a report names; further ones are only counted."""
_MAP_BYTES: Final = 16 * MIB
_BEYOND: Final = (1 << 32) - 1
_EVERY_EPOCH: Final = 0


class Batch(NamedTuple):
    """A good batch.

    Attributes:
        header: Header of the batch.
        meta: Meta of the batch.
        data: All bytes of the batch; valid until the next one is requested.
    """

    header: BatchHeader
    meta: BatchMeta
    data: Buffer


class Damage(msgspec.Struct, frozen=True):
    """A stretch of the log without a good record.

    Attributes:
        start_offset: Commit-log offset of its first byte.
        end_offset: Commit-log offset of the next good record, or the end of the read.
        reason: Reason why the bytes are not valid.
    """

    start_offset: int
    end_offset: int
    reason: str


class LogRange(msgspec.Struct, frozen=True):
    """Records that begin at or behind ``start_offset`` and before ``end_offset``."""

    start_offset: int
    end_offset: int


class SnapshotReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check.

    Attributes:
        sound: Nothing is damaged.
        batches: Good batches.
        messages: Messages in these batches.
        damage: Stretches of the log, ascending.
        damaged_files: Other files that fail their checksum.
        further_damage: Stretches that are not named because there are too many.
    """

    sound: bool
    batches: int
    messages: int
    damage: list[Damage]
    damaged_files: list[str]
    further_damage: int = 0


class Snapshot:
    """A snapshot that is open for reading. Nothing in it is ever changed.

    Attributes:
        directory: Directory of the snapshot.
        manifest: Manifest of the snapshot.
        log: Segments of the snapshot.
    """

    def __init__(self, directory: Path) -> None:
        """Reads the manifest.

        Args:
            directory: Directory of the snapshot.

        Raises:
            ConfigError: The directory is no snapshot, or of a later format.
            CorruptRecord: The snapshot is damaged.
            StorageError: The snapshot cannot be read.
        """
        self.directory = directory
        self.manifest: Manifest = load_manifest(directory)
        self.log = segments_of(directory, self.manifest)
        # A snapshot of a store without a log has no record to check, and perhaps no key.
        self._key = read_store_key(directory) if list(self.log) else StoreKey.random()
        self._sound: dict[str, bool] = {}

    def read(self, wanted: LogRange | None = None) -> Iterator[Batch | Damage]:
        """Batches and damaged stretches, in the order of the log.

        Args:
            wanted: A part of the log; None for all of it.

        Raises:
            StorageError: A record is of a later version, or the disk reports a read error.
        """
        manifest = self.manifest
        position, stop = manifest.start_offset, manifest.end_offset
        if wanted is not None:
            position, stop = max(position, wanted.start_offset), min(stop, wanted.end_offset)
        scanner = LogScanner(self.log, key=self._key, store_id=manifest.store_id)

        def beyond(position: int, epoch: int) -> int:
            return scanner.resync(position, stop, epoch=epoch) or stop

        try:
            for found in scanner.walk(position, epoch=_EVERY_EPOCH, beyond=beyond, stop=stop):
                if isinstance(found, Damaged):
                    yield Damage(found.start, found.end, found.reason)
                elif found.batch is not None:
                    try:
                        meta = read_meta(found.data, found.batch)
                    except CorruptBatch as error:
                        yield Damage(found.start, found.end, str(error))
                        continue
                    yield Batch(found.batch, meta, found.data)
        finally:
            scanner.close()

    def batch_at(self, commitlog_offset: int) -> Batch | None:
        """Return the batch that begins at an offset, None if there is no good one."""
        for found in self.read(LogRange(commitlog_offset, commitlog_offset + 1)):
            return found if isinstance(found, Batch) else None
        return None

    def last_mark(self, end_offset: int) -> tuple[int, str]:
        """Return a mark of the last batch that begins before an offset, to recognise this log
        later.

        Only headers are read for it. A log that was cut there and continued differently has
        another.

        Args:
            end_offset: Commit-log offset.

        Returns:
            Commit-log offset of the batch, and its mark; -1 and "" if none is found.
        """
        files = OpenFiles(1)
        try:
            for segment in reversed(list(self.log)):
                last = -1
                for position, header in _headers(segment, files):
                    if position >= end_offset:
                        break
                    last = position if header is not None else last
                if last >= 0:
                    return last, _mark(_pread(segment, files, last, HEADER_SIZE))
            return -1, ""
        finally:
            files.close()

    def went_otherwise(self, commitlog_offset: int, mark: str) -> bool:
        """Return True if this log has another batch at an offset than the one with a mark.

        Where this log has no good record there, the answer is unknown, and False is returned.
        """
        segment = self.log.find(commitlog_offset)
        if segment is None:
            return False
        for found in self.read(LogRange(segment.start, commitlog_offset + 1)):
            if isinstance(found, Damage):
                if found.end_offset > commitlog_offset:
                    return False
            elif found.header.commitlog_offset == commitlog_offset:
                return _mark(bytes(found.data[:HEADER_SIZE])) != mark
        return True

    def ranges(
        self, most_bytes: int, *, from_ms: int = 0, to_ms: int = MAX_TIMESTAMP_MS
    ) -> list[LogRange]:
        """Cuts the log into ranges that can be read in parallel.

        Only headers are read for it. If one is damaged, the rest of its segment becomes one
        range: its reader finds the damage.

        Args:
            most_bytes: Size of a range; one batch may exceed it.
            from_ms: Only ranges with batches stored at or after this, ms; others may be among them.
            to_ms: Only ranges with batches stored at or before this, ms; others may be among them.
        """
        files = OpenFiles(1)
        try:
            found: list[LogRange] = []
            for segment in self.log:
                found += _cut(segment, files, most_bytes, from_ms, to_ms)
            return found
        finally:
            files.close()

    def places_of_key(self, topic: str, key: str) -> tuple[list[int], list[LogRange]]:
        """Return the places of batches that may have a key, and unindexed ranges that must be read.

        Args:
            topic: Physical topic.
            key: One of a message's keys.

        Returns:
            Commit-log offsets, ascending; and ranges of the log.
        """
        return self._places(
            lambda part, below: part.key_places(topic, key, below=below, most=PLACES_AT_ONCE)
        )

    def places_of_id(self, producer_id: int, sequence: int) -> tuple[list[int], list[LogRange]]:
        """Return the places of batches that may have a message id; else as ``places_of_key``."""
        return self._places(
            lambda part, below: part.id_places(
                producer_id, sequence, below=below, most=PLACES_AT_ONCE
            )
        )

    def _places(
        self, ask: Callable[[IndexPart, int], tuple[list[int], int]]
    ) -> tuple[list[int], list[LogRange]]:
        offsets: list[int] = []
        unknown: list[LogRange] = []
        for segment in self.log:
            covered = segment.start
            try:
                part = self._part(segment)
                if part is not None:
                    try:
                        places, through = _ask(part, ask)
                    finally:
                        part.env.close()
                    offsets += [segment.start + place for place in places]
                    covered = segment.start + through
            except StorageError:
                covered = segment.start  # where the index is damaged, the log is read
            if covered < segment.end:
                unknown.append(LogRange(covered, segment.end))
        return sorted(offset for offset in offsets if not _in_any(offset, unknown)), unknown

    def _part(self, segment: Segment) -> IndexPart | None:
        """Return the index of a segment, if there is one that can be trusted."""
        name = f"index/{segment.start:020d}."
        files = [f for f in self.manifest.files if f.path.startswith(name)]
        data = next((f for f in files if f.path.endswith("data.mdb")), None)
        # LMDB trusts the file that it reads, so the file is checked before LMDB opens it.
        if data is None or data.crc32 is None or not self._is_sound(data):
            return None
        directory = (self.directory / data.path).parent
        env = LmdbEnv(directory, map_size=_MAP_BYTES, read_only=True)
        try:
            part = IndexPart(env, decode_head(env.get(HEAD_KEY)))
        except BaseException:
            env.close()
            raise
        head = part.head
        is_ours = head.store_id == self.manifest.store_id and head.segment_start == segment.start
        if not is_ours or (head.through > segment.size and not head.complete):
            env.close()
            return None
        return part

    def _is_sound(self, file: SnapshotFile) -> bool:
        """Check like ``is_sound``, which reads all of a file, but only once for each file."""
        if file.path not in self._sound:
            self._sound[file.path] = is_sound(self.directory, file)
        return self._sound[file.path]


def verify_snapshot(snapshot: Snapshot, on_progress: OnProgress) -> SnapshotReport:
    """Reads all of a snapshot and checks it.

    Args:
        snapshot: The snapshot.
        on_progress: Called now and then with the progress.

    Raises:
        StorageError: The snapshot cannot be read.
    """
    directory = snapshot.directory
    files = [file.path for file in snapshot.manifest.files if not is_sound(directory, file)]
    log = verify_log(snapshot, on_progress)
    return msgspec.structs.replace(log, sound=log.sound and not files, damaged_files=files)


def verify_log(snapshot: Snapshot, on_progress: OnProgress) -> SnapshotReport:
    """Check the log of a snapshot, and no other files; else as ``verify_snapshot``."""
    manifest = snapshot.manifest
    damage: list[Damage] = []
    batches = messages = further = 0
    reported = manifest.start_offset
    for found in snapshot.read():
        if isinstance(found, Damage):
            if len(damage) < MOST_RANGES:
                damage.append(found)
            else:
                further += 1
            continue
        header = found.header
        batches += 1
        messages += header.message_count
        if header.end_offset - reported >= PROGRESS_EVERY_BYTES:
            reported = header.end_offset
            done = reported - manifest.start_offset
            on_progress(RecoveryProgress("reading the log", done, manifest.log_bytes))
    return SnapshotReport(
        sound=not damage,
        batches=batches,
        messages=messages,
        damage=damage,
        damaged_files=[],
        further_damage=further,
    )


def _ask(
    part: IndexPart, ask: Callable[[IndexPart, int], tuple[list[int], int]]
) -> tuple[list[int], int]:
    places: list[int] = []
    below = _BEYOND
    while below > 0:
        some, below = ask(part, below)
        places += some
    return places, part.head.through


def _in_any(offset: int, ranges: list[LogRange]) -> bool:
    return any(one.start_offset <= offset < one.end_offset for one in ranges)


def _mark(header: bytes) -> str:
    return hashlib.blake2b(header, digest_size=8).hexdigest()


def _cut(
    segment: Segment, files: OpenFiles, most_bytes: int, from_ms: int, to_ms: int
) -> list[LogRange]:
    """Return the ranges of one segment."""
    found: list[LogRange] = []
    start, wanted = segment.start, False
    for position, header in _headers(segment, files):
        # The batches behind a damaged header are not known, so that part is read.
        fits = header is None or from_ms <= header.store_timestamp <= to_ms
        if fits is not wanted or position - start >= most_bytes:
            if wanted and position > start:
                found.append(LogRange(start, position))
            start, wanted = position, fits
    if wanted:
        found.append(LogRange(start, segment.end))
    return found


def _headers(segment: Segment, files: OpenFiles) -> Iterator[tuple[int, BatchHeader | None]]:
    """Yield starts of batches, with their headers; None if the rest cannot be walked through."""
    position = segment.start
    while position < segment.end:
        data = _pread(segment, files, position, CONTROL_RECORD_SIZE + MAX_CONTROL_DATA)
        try:
            header = read_header(data)
        except CorruptBatch:
            try:
                marker = decode_control_record(data)
            except CorruptRecord:
                yield position, None
                return
            if marker.kind is ControlKind.END:
                return
            position += marker.total_size
            continue
        if header.commitlog_offset != position:
            yield position, None
            return
        yield position, header
        position += header.total_size


def _pread(segment: Segment, files: OpenFiles, position: int, size: int) -> bytes:
    try:
        return os.pread(files.get(segment.path), size, position - segment.start)
    except OSError as error:
        raise storage_error(error, f"{segment.path} cannot be read") from error
