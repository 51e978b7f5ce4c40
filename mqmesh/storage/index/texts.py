"""Keys that are indexed as they are, to be hashed and sorted later.

When the log grows faster than keys can be hashed and sorted, the keys of a stretch are stored as
the messages have them. That costs a fifth, and a search through them runs at the speed of memory.
When there is time, they become entries like others.

Layout of the value in LMDB (the same table stands in ``docs/storage-format.md``):

======== ===== ======= =========================================================
position bytes type    meaning
======== ===== ======= =========================================================
0        4     u32     crc: CRC-32 of key and value, without these 4 bytes
4        …     msgpack array of three: topics; batches, each an array of place,
                       index of its topic, where its part of the text ends, and
                       how many arrays are in there; the text: the messages'
                       keys, one msgpack array of texts after the other
======== ===== ======= =========================================================

The key of the pair is four zero bytes and the number of the text, u32 big endian: it sorts between
the head and all blocks, whose runs count from 1.
"""

import logging
from bisect import bisect_right
from typing import Annotated, Final

import msgspec

from mqmesh.checksum import crc32
from mqmesh.errors import CorruptBatch, CorruptRecord
from mqmesh.storage.index.entries import distinct_of_raw, key_entries
from mqmesh.storage.lmdb.env import Pair

log = logging.getLogger(__name__)

_PREFIX: Final = bytes(4)
_Word = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    place: _Word
    topic: _Word
    end: _Word
    count: _Word


class _Texts(msgspec.Struct, array_like=True, gc=False):
    topics: list[str]
    batches: list[_Batch]
    text: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Texts)


class TextMaker:
    """Gathers the keys of consecutive batches."""

    def __init__(self) -> None:
        """Starts without keys."""
        self._topics: dict[str, int] = {}
        self._batches: list[_Batch] = []
        self._pieces: list[bytes] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, topic: str, raw: bytes, count: int, place: int) -> None:
        """Adds the keys of a batch.

        Args:
            topic: Physical topic of the batch.
            raw: Keys that ``raw_keys`` returned.
            count: Number of arrays that ``raw_keys`` returned.
            place: Start of the batch in its segment.
        """
        self._pieces.append(raw)
        self._size += len(raw)
        number = self._topics.setdefault(topic, len(self._topics))
        self._batches.append(_Batch(place, number, self._size, count))

    def encode(self, number: int) -> Pair:
        """Encode all gathered keys, as a pair for LMDB.

        Args:
            number: Number of the text, u32.
        """
        texts = _Texts(list(self._topics), self._batches, b"".join(self._pieces))
        data = _encoder.encode(texts)
        key = text_key(number)
        return key, crc32(data, crc32(key)).to_bytes(4, "little") + data


class KeyText:
    """Decoded keys of consecutive batches."""

    def __init__(self, number: int, value: bytes | None) -> None:
        """Decodes the output of ``TextMaker.encode``.

        Args:
            number: Number of the text.
            value: Value of the key ``text_key(number)``.

        Raises:
            CorruptRecord: The value is damaged or missing.
        """
        if value is None:
            raise CorruptRecord(f"text {number} of the index is missing")
        crc = crc32(memoryview(value)[4:], crc32(text_key(number)))
        if crc != int.from_bytes(value[:4], "little"):
            raise CorruptRecord(f"text {number} of the index fails its checksum")
        try:
            self._texts = _decoder.decode(memoryview(value)[4:])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptRecord(f"text {number} of the index cannot be decoded: {error}") from error

    def places(self, topic: str, key: str, *, below: int) -> list[int]:
        """Return the places where batches with a key begin, last first.

        Args:
            topic: Physical topic.
            key: The key.
            below: Only places before this one.

        Raises:
            CorruptRecord: The parts of the batches do not cover the text.
        """
        if topic not in self._texts.topics:
            return []
        number = self._texts.topics.index(topic)
        found: set[int] = set()
        for needle in _needles(key.encode()):
            for batch in self._batches_with(needle):
                one = self._texts.batches[batch]
                # The bytes of the key may also be a part of another key.
                if one.topic == number and one.place < below and key in self._keys(batch):
                    found.add(one.place)
        return sorted(found, reverse=True)

    def entries(self) -> list[bytes]:
        """Return the index entries of all keys, in no order."""
        found: list[bytes] = []
        for index, batch in enumerate(self._texts.batches):
            found += key_entries(self._texts.topics[batch.topic], self._keys(index), batch.place)
        return found

    def _batches_with(self, needle: bytes) -> list[int]:
        """Indexes of the batches whose part of the text contains some bytes."""
        text, batches = self._texts.text, self._texts.batches
        found = []
        at = text.find(needle)
        while at >= 0:
            batch = bisect_right(batches, at, key=_end_of)
            end = batches[batch].end if batch < len(batches) else 0
            if end <= at:
                raise CorruptRecord(f"no batch of the index has byte {at} of its text")
            found.append(batch)
            at = text.find(needle, end)
        return found

    def _keys(self, index: int) -> set[str]:
        batch = self._texts.batches[index]
        start = self._texts.batches[index - 1].end if index else 0
        try:
            return distinct_of_raw(self._texts.text[start : batch.end], batch.count)
        except CorruptBatch as error:
            # The broker accepted the batch like that, so no consumer can read it either.
            log.warning("a batch at place %d cannot be indexed: %s", batch.place, error)
            return set()


def text_key(number: int) -> bytes:
    """Return the key of a text in LMDB."""
    return _PREFIX + number.to_bytes(4, "big")


def _needles(key: bytes) -> list[bytes]:
    """Return the msgpack forms of a text, one for each way to write its length."""
    size = len(key)
    if size >= 256:
        return [size.to_bytes(2, "big") + key]
    # Two, four or eight bytes of length all end with this one; the short form has one of its own.
    long_forms = bytes([size]) + key
    return [long_forms] if size >= 32 else [bytes([0xA0 | size]) + key, long_forms]


def _end_of(batch: _Batch) -> int:
    return batch.end
