"""The index of one log segment: an LMDB environment with its head and its runs.

The head names the part of the log that the entries cover. It is written in the same transaction as
the entries, so neither is ever ahead of the other. New entries are a run of their own, one for each
slice of the log; ``merge.py`` merges many into few.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord
from mqmesh.storage.index.blocks import RunReader, encode_run
from mqmesh.storage.index.entries import id_hash, key_hash
from mqmesh.storage.index.texts import KeyText, TextMaker, text_key
from mqmesh.storage.lmdb.env import LmdbEnv, Pair
from mqmesh.units import MIB

FORMAT_VERSION: Final = 2
HEAD_KEY: Final = b"\0"
"""Key that sorts before all blocks."""

MOST_TIDIED_ENTRIES: Final = 65_536
"""Approximate number of entries of a run made of texts: the fewer runs, the quicker a search."""
SPAN_BYTES: Final = 4 * MIB
"""Times are kept for stretches of the log of about this size."""

IDS: Final = 1
KEYS: Final = 2

_NO_TIME: Final = (1 << 63) - 1
_Word = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class SortedRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sorted entries of consecutive batches.

    Attributes:
        number: Number of the run, the beginning of the keys of its blocks, u32.
        count: Number of entries, at least 1.
        start: Place before which none of its batches begins.
        stop: Place behind all of them.
        kinds: Kinds of the entries: 1 ids, 2 keys, 3 both.
    """

    number: _Word
    count: int
    start: int
    stop: int
    kinds: int


class WaitingKeys(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Keys of consecutive batches that wait to become a run.

    Attributes:
        number: Number of the text, u32.
        start: Place before which none of its batches begins.
        stop: Place behind all of them.
    """

    number: _Word
    start: int
    stop: int


class TimeSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Store timestamps of the batches of a stretch.

    Attributes:
        stop: Place where the stretch ends; it begins where the one before ends.
        oldest_ms: Smallest store timestamp; larger than ``newest_ms`` if there is no batch.
        newest_ms: Largest store timestamp.
    """

    stop: int
    oldest_ms: int
    newest_ms: int


class Deletion(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A topic was deleted: its batches before this offset do not count any more."""

    commitlog_offset: int
    topic: str


class PartHead(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """Coverage of an index environment. A place counts bytes from where the segment begins.

    Attributes:
        version: ``FORMAT_VERSION``.
        store_id: Id of the store that the log belongs to.
        boot_id: Boot id of the system that wrote it; empty once everything is synced.
        segment_start: Commit-log offset of the segment's first byte.
        through: Place to which the entries cover the log.
        complete: ``through`` is the segment's end.
        epoch: Epoch of the last record covered.
        last_place: Place at which that record begins, -1 if there is none.
        last_mark: First 8 bytes of that record: magic and checksum.
        widths: Bit w is set when there is a batch of width w.
        next_run: Number for the next run.
        runs: All runs, in no order.
        next_text: Number for the next text.
        texts: Keys that are not in runs yet, in the order of the log.
        spans: Times of the stretches from the segment's start to ``through``.
        deletions: Topics that were deleted in this segment.
        batches: Number of batches covered.
    """

    version: int = FORMAT_VERSION
    store_id: int
    boot_id: bytes
    segment_start: int
    through: _Natural = 0
    complete: bool = False
    epoch: int = 0
    last_place: int = -1
    last_mark: bytes = b""
    widths: _Natural = 0
    next_run: int = 1
    runs: list[SortedRun] = []
    next_text: int = 0
    texts: list[WaitingKeys] = []
    spans: list[TimeSpan] = []
    deletions: list[Deletion] = []
    batches: int = 0


class LogSlice(msgspec.Struct, kw_only=True, gc=False):
    """Content of a stretch of one segment, as far as the index needs it.

    Attributes:
        start: Commit-log offset where the stretch begins.
        stop: Commit-log offset of the record behind the stretch.
        complete: ``stop`` is the segment's end.
        entries: Entries of its batches; layout: entries, in no order.
        texts: Keys of its batches that are not among the entries.
        oldest_ms: Smallest store timestamp.
        newest_ms: Largest store timestamp; -1 if there is no batch.
        widths: Bits of the batches' widths.
        epoch: Epoch of the last record.
        last_offset: Commit-log offset of the last record, -1 if there is none.
        last_mark: First 8 bytes of the last record.
        deletions: Topics that were deleted.
        batches: Number of batches.
        skipped_bytes: Damaged bytes that were skipped.
        raw_bytes: Size of the batches with keys before they were compressed.
    """

    start: int
    stop: int
    complete: bool = False
    entries: list[bytes] = []
    texts: TextMaker | None = None
    oldest_ms: int = _NO_TIME
    newest_ms: int = -1
    widths: int = 0
    epoch: int = 0
    last_offset: int = -1
    last_mark: bytes = b""
    deletions: list[Deletion] = []
    batches: int = 0
    skipped_bytes: int = 0
    raw_bytes: int = 0


_Unit = TypeVar("_Unit", SortedRun, WaitingKeys)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PartHead)


def encode_head(head: PartHead) -> bytes:
    """Encode the value under ``HEAD_KEY``: CRC-32, little endian, and the head in msgpack."""
    data = _encoder.encode(head)
    return crc32(data).to_bytes(4, "little") + data


def decode_head(value: bytes | None) -> PartHead:
    """Reads the output of ``encode_head``.

    Raises:
        CorruptRecord: The head is damaged, missing, or of another version; or its values are
            impossible, and would make a look-up take any time or memory.
    """
    if value is None:
        raise CorruptRecord("the index has no head")
    if crc32(memoryview(value)[4:]) != int.from_bytes(value[:4], "little"):
        raise CorruptRecord("the head of the index fails its checksum")
    try:
        head = _decoder.decode(memoryview(value)[4:])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"the head of the index cannot be decoded: {error}") from error
    if head.version != FORMAT_VERSION:
        raise CorruptRecord(f"the index is of version {head.version}, not {FORMAT_VERSION}")
    for units in (head.runs, head.texts):
        if len({unit.number for unit in units}) < len(units):
            raise CorruptRecord("the head of the index has a run or a text twice")
    return head


class IndexPart:
    """The index of one segment.

    Attributes:
        head: Coverage of the part.
    """

    def __init__(self, env: LmdbEnv, head: PartHead) -> None:
        """Takes over an environment; see ``create`` and ``open``."""
        self.head = head
        self.env = env
        self.reader = RunReader(env)

    @classmethod
    def create(cls, directory: Path, head: PartHead, *, map_size: int) -> "IndexPart":
        """Makes an empty part.

        Args:
            directory: Directory of the part alone; it does not exist yet.
            head: A head that covers nothing.
            map_size: First size of the map, in bytes.

        Raises:
            DiskFull: No room.
            StorageError: The part cannot be made.
        """
        env = LmdbEnv(directory, map_size=map_size)
        try:
            env.write([(HEAD_KEY, encode_head(head))])
        except BaseException:
            env.close()
            raise
        return cls(env, head)

    @classmethod
    def open(cls, directory: Path, *, map_size: int) -> "IndexPart":
        """Opens an existing part.

        Raises:
            CorruptRecord: The part is damaged.
            StorageError: The part cannot be opened.
        """
        env = LmdbEnv(directory, map_size=map_size)
        try:
            return cls(env, decode_head(env.get(HEAD_KEY)))
        except BaseException:
            env.close()
            raise

    @property
    def entry_count(self) -> int:
        """Number of entries in all runs."""
        return sum(run.count for run in self.head.runs)

    def append(self, slice_: LogSlice) -> None:
        """Adds the next slice of the log, in one transaction.

        Raises:
            DiskFull: No room; nothing was added.
            CorruptRecord: The part is damaged.
            StorageError: Nothing was added, and the content of the file is unknown.
        """
        head = self.head
        origin = head.segment_start
        assert slice_.start == origin + head.through
        assert not head.complete
        stop = slice_.stop - origin
        puts: list[Pair] = []
        runs = list(head.runs)
        if slice_.entries:
            puts = encode_run(head.next_run, sorted(slice_.entries))
            kinds = IDS if slice_.texts is not None else IDS | KEYS
            runs.append(SortedRun(head.next_run, len(slice_.entries), head.through, stop, kinds))
        texts = list(head.texts)
        if slice_.texts:
            puts.append(slice_.texts.encode(head.next_text))
            texts.append(WaitingKeys(head.next_text, head.through, stop))
        last = slice_.last_offset
        head = msgspec.structs.replace(
            head,
            through=stop,
            complete=slice_.complete,
            epoch=max(head.epoch, slice_.epoch),
            last_place=head.last_place if last < 0 else last - origin,
            last_mark=head.last_mark if last < 0 else slice_.last_mark,
            widths=head.widths | slice_.widths,
            next_run=head.next_run + bool(slice_.entries),
            runs=runs,
            next_text=head.next_text + len(texts) - len(head.texts),
            texts=texts,
            spans=_add_span(head, slice_),
            deletions=[*head.deletions, *slice_.deletions],
            batches=head.batches + slice_.batches,
        )
        # The head comes last among the arguments, but its key sorts first: LMDB does not mind.
        self._write_head(head, puts)

    def tidy(self) -> bool:
        """Makes a run of the oldest texts, in one transaction.

        Returns:
            True if there are more texts.

        Raises:
            DiskFull: No room; nothing has changed.
            CorruptRecord: The part is damaged.
            StorageError: Nothing has changed, and the content of the file is unknown.
        """
        head = self.head
        if not head.texts:
            return False
        entries: list[bytes] = []
        done: list[WaitingKeys] = []
        for text in head.texts:
            more = self._text(text).entries()
            if done and len(entries) + len(more) > MOST_TIDIED_ENTRIES:
                break
            entries += more
            done.append(text)
        entries.sort()
        start, stop = min(text.start for text in done), max(text.stop for text in done)
        run = SortedRun(head.next_run, len(entries), start, stop, KEYS)
        others = head.texts[len(done) :]
        head = msgspec.structs.replace(
            head, runs=[*head.runs, run], next_run=head.next_run + 1, texts=others
        )
        gone = [text_key(text.number) for text in done]
        self._write_head(head, encode_run(run.number, entries), gone)
        return bool(others)

    def reserve_run(self) -> int:
        """Reserve a number for a run that will be there later.

        Raises:
            DiskFull: No room; nothing has changed.
            StorageError: Nothing has changed, and the content of the file is unknown.
        """
        number = self.head.next_run
        self._write_head(msgspec.structs.replace(self.head, next_run=number + 1))
        return number

    def replace_runs(self, runs: Sequence[SortedRun], merged: SortedRun) -> None:
        """Puts a run in place of others, in one transaction.

        Args:
            runs: Runs of this part; their blocks are removed.
            merged: The new run; its blocks are there, under a reserved number.

        Raises:
            DiskFull: No room; nothing has changed.
            StorageError: Nothing has changed, and the content of the file is unknown.
        """
        gone = {run.number for run in runs}
        left = [run for run in self.head.runs if run.number not in gone]
        assert len(left) == len(self.head.runs) - len(runs)
        deletes = [key for run in runs for key in self.reader.keys(run.number)]
        self._write_head(msgspec.structs.replace(self.head, runs=[*left, merged]), (), deletes)

    def _write_head(
        self, head: PartHead, puts: Sequence[Pair] = (), deletes: Sequence[bytes] = ()
    ) -> None:
        # The head comes last among the arguments, but its key sorts first: LMDB does not mind.
        self.env.write([*puts, (HEAD_KEY, encode_head(head))], deletes)
        self.head = head

    def _text(self, text: WaitingKeys) -> KeyText:
        return KeyText(text.number, self.env.get(text_key(text.number)))

    def id_places(
        self, producer_id: int, sequence: int, *, below: int, most: int
    ) -> tuple[list[int], int]:
        """Return the places where batches with the message of an id may begin, last first.

        Args:
            producer_id: First half of the id.
            sequence: Second half of the id.
            below: Only places before this one.
            most: Stop at about this number of places.

        Returns:
            The places, and the place before which there may be others; 0 if there are none.

        Raises:
            CorruptRecord: The part is damaged.
            StorageError: The part cannot be read.
        """
        found: set[int] = set()
        floor = 0
        widths = self.head.widths
        for width in range(widths.bit_length()):
            if widths >> width & 1:
                wanted = id_hash(producer_id, sequence, width)
                places = self._places(IDS, wanted, below, most)
                found.update(places)
                if len(places) >= most:
                    floor = max(floor, places[-1])
        # Below the floor one of the hashes may have places that were not returned.
        return sorted((place for place in found if place >= floor), reverse=True), floor

    def key_places(self, topic: str, key: str, *, below: int, most: int) -> tuple[list[int], int]:
        """Return the places where batches with a key may begin, last first; else as ``id_places``.

        Args:
            topic: Physical topic.
            key: The key.
            below: Only places before this one.
            most: Stop at about this number of places.
        """
        head = self.head

        def in_text(text: WaitingKeys) -> list[int]:
            return self._text(text).places(topic, key, below=below)

        found = self._places(KEYS, key_hash(topic, key), below, most)
        found += _newest(head.texts, in_text, below, most)
        found.sort(reverse=True)
        del found[most:]
        return found, found[-1] if len(found) >= most else 0

    def _places(self, kind: int, wanted: bytes, below: int, most: int) -> list[int]:
        runs = [run for run in self.head.runs if run.kinds & kind]

        def in_run(run: SortedRun) -> list[int]:
            return self.reader.places(run.number, wanted, below=below, most=most)

        with self.env.reading():
            return _newest(runs, in_run, below, most)

    def windows(self, from_ms: int, to_ms: int) -> list[tuple[int, int]]:
        """Return the ranges of places in which batches of a time may begin, last first.

        Args:
            from_ms: Smallest store timestamp.
            to_ms: Largest store timestamp.
        """
        found: list[tuple[int, int]] = []
        start = 0
        for span in self.head.spans:
            if span.oldest_ms <= to_ms and from_ms <= span.newest_ms:
                if found and found[-1][1] == start:
                    found[-1] = (found[-1][0], span.stop)
                else:
                    found.append((start, span.stop))
            start = span.stop
        found.reverse()
        return found

    def close(self) -> None:
        """Closes the environment; may be called again."""
        self.env.close()


def _newest(
    units: Sequence[_Unit], look: Callable[[_Unit], list[int]], below: int, most: int
) -> list[int]:
    """Return the last places that runs or texts have, last first.

    Args:
        units: Runs or texts to search; their stretches of the log may overlap.
        look: Finds all places in one of them, or the last ``most``.
        below: Only places before this one count.
        most: Number of places to return.
    """
    found: list[int] = []
    for unit in sorted(units, key=_stop, reverse=True):
        if len(found) >= most and found[most - 1] >= unit.stop:
            break  # no place in this unit, or in the following ones, is newer
        if unit.start < below:
            places = look(unit)
            if places:
                found += places
                found.sort(reverse=True)
    return found[:most]


def _stop(unit: SortedRun | WaitingKeys) -> int:
    return unit.stop


def _add_span(head: PartHead, slice_: LogSlice) -> Sequence[TimeSpan]:
    spans = list(head.spans)
    new = TimeSpan(slice_.stop - head.segment_start, slice_.oldest_ms, slice_.newest_ms)
    if spans:
        start = spans[-2].stop if len(spans) > 1 else 0
        last = spans[-1]
        if new.stop - start <= SPAN_BYTES:
            oldest, newest = min(last.oldest_ms, new.oldest_ms), max(last.newest_ms, new.newest_ms)
            spans[-1] = TimeSpan(new.stop, oldest, newest)
            return spans
    spans.append(new)
    return spans
