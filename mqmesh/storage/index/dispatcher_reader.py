"""Reads the commit log beside the broker: finds its files, and extracts the index's data.

Nothing here writes, and nothing reads beyond the offset that the broker has reported.
Stretches of the log are read as ``LogScanner`` does it, through a map whose pages are
brought in before: that reports a file that was cut, or a bad sector, as an error. Pages that
cannot be brought in, and headers, are read by ``os.pread``.
"""

import contextlib
import logging
import os
from typing import Final

from mqmesh.batch.half_batch import is_half
from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import (
    HEADER_SIZE,
    BatchHeader,
    read_header,
    read_meta,
)
from mqmesh.errors import CorruptBatch, CorruptRecord, OffsetOutOfRange
from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.index.entries import (
    distinct_keys,
    has_keys,
    id_entries,
    key_entries,
    raw_keys,
    width_of,
)
from mqmesh.storage.index.part import Deletion, LogSlice
from mqmesh.storage.index.texts import TextMaker
from mqmesh.storage.log.control_record import ControlKind
from mqmesh.storage.log.mapped_file import ScannedFile
from mqmesh.storage.log.record import MARK_SIZE, Record, RecordCheck, record_size
from mqmesh.storage.log.scan import LogScanner
from mqmesh.storage.log.segments import FoundSegments, Segment
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.units import KIB, MIB

log = logging.getLogger(__name__)

MOST_RAW_BYTES: Final = 32 * MIB
"""Limit of the uncompressed size of a slice's batches with keys; the slice ends behind the batch
that reaches it."""
SKIM_BYTES: Final = 16 * KIB
"""Size from which on a batch without keys is not read as a whole."""
SKIM_BATCHES: Final = 64
"""A slice of such batches ends after so many."""

VIEW_BYTES: Final = 64 * KIB
"""Stretches from this size on are views; a call costs no more for shorter ones."""

_MOST_OPEN: Final = 16


class LogReader:
    """Reads records of a log that another process writes."""

    def __init__(self, segments: FoundSegments, *, key: StoreKey, store_id: int) -> None:
        """Opens nothing yet.

        Args:
            segments: Files of the log.
            key: Key of the store.
            store_id: Store id that records must have.
        """
        self.segments = segments
        self._key = key
        self._store_id = store_id
        self._check = RecordCheck(key, store_id)
        self._files = OpenFiles(_MOST_OPEN)
        self._scanned: tuple[str, ScannedFile] | None = None

    def close(self) -> None:
        """Closes all files."""
        self.forget_files()

    def forget_files(self) -> None:
        """Closes all files; they may be removed or replaced by now."""
        self._files.close()
        self._scanned = None

    def read_batch(self, commitlog_offset: int) -> tuple[BatchHeader, bytes]:
        """Return the stored batch that begins at an offset, and its header.

        Raises:
            OffsetOutOfRange: No file holds this part of the log.
            CorruptRecord: No good batch of this log begins there.
            StorageError: The batch cannot be read.
        """
        segment = self.segments.find(commitlog_offset)
        if segment is None:
            raise OffsetOutOfRange(f"no file holds byte {commitlog_offset} of the log")
        try:
            head = self._pread(segment, commitlog_offset, HEADER_SIZE)
            if not head:
                raise OffsetOutOfRange(f"{segment.path} is gone")
            data = self._pread(segment, commitlog_offset, read_header(head).total_size)
            return self._check.batch(data, commitlog_offset), data
        except (CorruptBatch, CorruptRecord) as error:
            raise CorruptRecord(f"no good batch begins at {commitlog_offset}: {error}") from error

    def mark_at(self, commitlog_offset: int) -> bytes:
        """Return the first ``MARK_SIZE`` bytes of the record at an offset; fewer if the log
        has none there.

        Raises:
            StorageError: The record cannot be read.
        """
        segment = self.segments.find(commitlog_offset)
        if segment is None:
            return b""
        # An open descriptor may be of a file that a cut removed, with another one in its place.
        self._files.close_path(segment.path)
        return self._pread(segment, commitlog_offset, MARK_SIZE)

    def read_slice(
        self,
        segment: Segment,
        start: int,
        stop: int,
        *,
        epoch: int,
        most_bytes: int,
        as_text: bool = False,
    ) -> LogSlice:
        """Extracts the index's data from the next records.

        Args:
            segment: Segment of the records.
            start: Commit-log offset of the first record; in the segment.
            stop: Present end of the log: the offset behind a whole record.
            epoch: Epoch of the record before; 0 if there is none.
            most_bytes: Approximate number of bytes to read; a larger record is taken whole. The
                slice is smaller if batches are compressed very well: memory is bounded, too.
            as_text: Leave the keys as they are, which is quicker.

        Returns:
            Data of at least one record, or a damaged range.

        Raises:
            StorageError: The disk reports an error.
        """
        stop = min(stop, segment.end)
        assert start < stop
        texts = TextMaker() if as_text else None
        learned = LogSlice(start=start, stop=start, epoch=epoch, texts=texts)
        self._skim(segment, stop, learned)
        size = min(most_bytes, stop - start)
        while learned.stop == start:
            data = self._stretch(segment, start, size)
            try:
                wanted = self._learn(data, segment, learned)
            except CorruptRecord as error:
                if learned.stop == start:
                    self._skip(segment, stop, str(error), learned)
                break
            if learned.stop > start:
                break
            # Not even one record: read all of it, however large.
            if wanted <= size or start + wanted > stop:
                reason = f"the record is cut off after {len(data)} bytes"
                self._skip(segment, stop, reason, learned)
                break
            size = wanted
        if learned.stop >= segment.end:
            learned.complete = True
        return learned

    def _skim(self, segment: Segment, stop: int, learned: LogSlice) -> None:
        """Adds large batches without keys, by their headers alone, until another record comes.

        Reading and checking their bodies would cost the machine more than all the rest of
        indexing. This misses damage in a body: the index then has ids of messages that cannot be
        read, which look-ups find out, since they compare every hit with the log. Each header has
        its sizes twice, so damage there never misleads the reader unnoticed.
        """
        while learned.stop < stop and learned.batches < SKIM_BATCHES:
            offset = learned.stop
            head = self._pread(segment, offset, HEADER_SIZE)
            try:
                header = self._check.head(head, offset, epoch=learned.epoch)
                if has_keys(header) or header.total_size < SKIM_BYTES:
                    return
                if offset + header.total_size > stop:
                    return
                self._learn_header(header, offset, segment, learned)
            except CorruptRecord:
                return  # a control record, or damage: found when all of it is read
            learned.stop = offset + header.total_size
            learned.last_offset = offset
            learned.last_mark = head[:MARK_SIZE]

    def _learn(self, data: Buffer, segment: Segment, learned: LogSlice) -> int:
        """Adds whole records from the beginning of some bytes.

        Returns:
            Size of the record that was not whole any more; 0 if there is none.
        """
        view = memoryview(data)
        position, end, origin = 0, len(data), learned.start
        while position < end and learned.raw_bytes < MOST_RAW_BYTES:
            wanted = record_size(view[position : position + HEADER_SIZE])
            if position + wanted > end:
                return wanted
            record = self._check.record(
                view[position : position + wanted],
                origin + position,
                epoch=learned.epoch,
                segment_end=segment.end,
            )
            self._learn_record(record, segment, learned)
            position = record.end - origin
        return 0

    def _learn_record(self, record: Record, segment: Segment, learned: LogSlice) -> None:
        if record.batch is not None:
            self._learn_batch(record.data, record.batch, segment, learned)
        elif record.marker is not None:
            learned.epoch = record.epoch
            if record.marker.kind is ControlKind.TOPIC_DELETED:
                topic = record.marker.data.decode("utf-8", "replace")
                learned.deletions = [*learned.deletions, Deletion(record.start, topic)]
        learned.stop, learned.last_offset = record.end, record.start
        learned.last_mark = bytes(record.data[:MARK_SIZE])

    def _learn_batch(
        self, record: memoryview, header: BatchHeader, segment: Segment, learned: LogSlice
    ) -> None:
        offset = header.commitlog_offset
        place = self._learn_header(header, offset, segment, learned)
        if is_half(header) or not has_keys(header):
            return
        learned.raw_bytes += header.raw_size
        try:
            topic = read_meta(record, header).topic
            if learned.texts is not None:
                learned.texts.add(topic, *raw_keys(record, header), place)
            else:
                learned.entries += key_entries(topic, distinct_keys(record, header), place)
        except CorruptBatch as error:
            # The broker accepted the batch like that, so no consumer can read it either.
            log.warning("the batch at %d cannot be indexed: %s", offset, error)

    def _learn_header(
        self, header: BatchHeader, offset: int, segment: Segment, learned: LogSlice
    ) -> int:
        """Adds everything except the keys; returns the batch's place in its segment."""
        learned.epoch = header.epoch
        learned.batches += 1
        learned.widths |= 1 << width_of(header.message_count)
        stored = header.store_timestamp
        learned.oldest_ms = min(learned.oldest_ms, stored)
        learned.newest_ms = max(learned.newest_ms, stored)
        place = offset - segment.start
        if not is_half(header):  # a message that may never be visible must not be found
            learned.entries += id_entries(header, place)
        return place

    def _skip(self, segment: Segment, stop: int, reason: str, learned: LogSlice) -> None:
        """Skips damage, up to the next good record."""
        scanner = LogScanner(self.segments, key=self._key, store_id=self._store_id)
        try:
            found = scanner.resync(learned.start, stop, epoch=learned.epoch)
        finally:
            scanner.close()
        learned.stop = stop if found is None else found
        learned.skipped_bytes = learned.stop - learned.start
        log.error(
            "bytes %d to %d of the log cannot be indexed: %s", learned.start, learned.stop, reason
        )

    def _stretch(self, segment: Segment, start: int, size: int) -> Buffer:
        """Return bytes from an offset on, fewer where the file ends; many are not copied."""
        if size >= VIEW_BYTES:
            with contextlib.suppress(OSError):  # a read by a call reports the reason
                if self._scanned is None or self._scanned[0] != segment.path:
                    self._scanned = None
                    fd = self._files.get(segment.path)
                    self._scanned = segment.path, ScannedFile(fd)
                view = self._scanned[1].view(start - segment.start, size)
                if view is not None and len(view) == size:
                    return view
        return self._pread(segment, start, size)

    def _pread(self, segment: Segment, start: int, size: int) -> bytes:
        """Return bytes from an offset on, fewer where the file ends."""
        try:
            fd = self._files.get(segment.path)
            data = os.pread(fd, size, start - segment.start)
            while len(data) < size:
                more = os.pread(fd, size - len(data), start - segment.start + len(data))
                if not more:
                    break
                data += more
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise storage_error(error, f"{segment.path} cannot be read") from error
        return data
