"""Keys that are indexed as they are, to be hashed and sorted later.

When the log grows faster than keys can be hashed and sorted, the keys of a
stretch of it are put down as text. That costs a fifth, and a search through them
runs at the speed of memory; when there is time, they become entries like others.

Layout of the value in LMDB (the same table stands in ``docs/storage-format.md``):

======== ===== ======= =========================================================
position bytes type    meaning
======== ===== ======= =========================================================
0        4     u32     crc: CRC-32 of key and value, without these 4 bytes
4        …     msgpack array of four: topics; batches, each an array of place,
                       index of its topic, and where its keys end in the text;
                       number of keys; the text: each key in UTF-8 between two
                       bytes of 255, which no UTF-8 has
======== ===== ======= =========================================================

Its key is four zero bytes and the number of the text, u32 big endian: it stands
between the head and all blocks, whose runs count from 1.
"""

import zlib
from bisect import bisect_right
from collections.abc import Collection
from typing import Final

import msgspec

from mqmesh.errors import CorruptRecord
from mqmesh.storage.lmdb_env import Pair
from mqmesh.storage.message_index_entries import key_entries

SEPARATOR: Final = b"\xff"
_PREFIX: Final = bytes(4)


class _Texts(msgspec.Struct, array_like=True, gc=False):
    topics: list[str]
    batches: list[tuple[int, int, int]]
    count: int
    text: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Texts)


class TextMaker:
    """Gathers the keys of consecutive batches.

    Attributes:
        count: Keys so far.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self._topics: dict[str, int] = {}
        self._batches: list[tuple[int, int, int]] = []
        self._pieces: list[bytes] = []
        self._size = 1
        self.count = 0

    def add(self, topic: str, keys: Collection[str], place: int) -> None:
        """Adds the keys of a batch.

        Args:
            topic: Its physical topic.
            keys: Each once, at least one.
            place: Where it begins in its segment.
        """
        count = len(keys)
        piece = "\0".join(keys).encode()
        if piece.count(b"\0") == count - 1:
            piece = piece.replace(b"\0", SEPARATOR)
        else:
            piece = SEPARATOR.join([key.encode() for key in keys])  # a key has such a byte
        self._pieces.append(piece)
        self._size += len(piece) + 1
        self.count += count
        number = self._topics.setdefault(topic, len(self._topics))
        self._batches.append((place, number, self._size))

    def encode(self, number: int) -> Pair:
        """Everything gathered, as a pair for LMDB.

        Args:
            number: Of the text, u32.
        """
        text = SEPARATOR + SEPARATOR.join(self._pieces) + SEPARATOR
        data = _encoder.encode(_Texts(list(self._topics), self._batches, self.count, text))
        key = text_key(number)
        return key, zlib.crc32(data, zlib.crc32(key)).to_bytes(4, "little") + data


class KeyText:
    """Keys of consecutive batches, read again."""

    def __init__(self, number: int, value: bytes | None) -> None:
        """Decodes what ``TextMaker.encode`` made.

        Args:
            number: Of the text.
            value: Found under ``text_key(number)``.

        Raises:
            CorruptRecord: It is damaged or missing.
        """
        if value is None:
            raise CorruptRecord(f"text {number} of the index is missing")
        crc = zlib.crc32(memoryview(value)[4:], zlib.crc32(text_key(number)))
        if crc != int.from_bytes(value[:4], "little"):
            raise CorruptRecord(f"text {number} of the index fails its checksum")
        try:
            self._texts = _decoder.decode(memoryview(value)[4:])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptRecord(f"text {number} of the index cannot be decoded: {error}") from error

    def places(self, topic: str, key: str, *, below: int) -> list[int]:
        """Where batches with a key begin, last first.

        Args:
            topic: Physical topic.
            key: The key.
            below: Only places before this one.
        """
        texts = self._texts
        if topic not in texts.topics:
            return []
        number = texts.topics.index(topic)
        wanted = SEPARATOR + key.encode() + SEPARATOR
        found = []
        at = texts.text.find(wanted)
        while at >= 0:
            place, topic_number, end = texts.batches[
                bisect_right(texts.batches, at, key=_last_separator)
            ]
            if topic_number == number and place < below:
                found.append(place)
            # Once in a batch is enough; the separator before the next one belongs to both.
            at = texts.text.find(wanted, end - 1)
        found.reverse()
        return found

    def entries(self) -> list[bytes]:
        """The same as entries, in no order."""
        texts = self._texts
        found: list[bytes] = []
        start = 1
        for place, number, end in texts.batches:
            keys = texts.text[start : end - 1].split(SEPARATOR)
            found += key_entries(texts.topics[number], keys, place)
            start = end
        return found


def text_key(number: int) -> bytes:
    """The key of a text in LMDB."""
    return _PREFIX + number.to_bytes(4, "big")


def _last_separator(batch: tuple[int, int, int]) -> int:
    return batch[2] - 1
