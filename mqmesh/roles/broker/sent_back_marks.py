"""What groups have sent back, so that each delivery has at most one retry or dead letter.

A message may be delivered a second time at the same place: its consumer died, or the broker
did, before the group's offset went on. When it fails there again, its retry is on its way
already, and a second one would fork the chain of retries down to the dead letters.

A mark is a message of ``SENT_BACK_TOPIC``, written behind the retries that it tells of, in the
same write. It names batches by their places in the log, which never stand for other ones: what
a power cut takes from the log, it takes with all marks about it, because they stand behind.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.errors import CorruptBatch
from mqmesh.message import SENT_BACK_TOPIC, Message
from mqmesh.payload import Buffer
from mqmesh.record_batch import Attributes, check_stored, decode_messages, encode_batch
from mqmesh.storage.interface import GetStatus, MessageStore
from mqmesh.units import MIB

READ_BYTES: Final = 1 * MIB
MAX_MARKS: Final = 200_000
"""Messages whose marks are remembered, the newest; some 250 bytes of memory each."""
MARKS_QUEUE: Final = 0

RETRIED: Final = 0
"""A message that was sent back: it is to come again."""
DEAD: Final = 1
"""It is a dead letter."""
UNDER_WAY: Final = 2
"""It is being written."""

_WHOLE_GROUP: Final = -1


class SentBackMark(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages that were sent back. On disk: fields are added at the end only.

    Attributes:
        group: Consumer group.
        commitlog_offset: Where their batch begins in the log; -1: everything that the group
            has sent back so far is forgotten, because its offsets were moved.
        first: Ordinal of the first one in the batch.
        count: How many.
        is_dead: They became dead letters.
    """

    group: str
    commitlog_offset: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
    first: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    is_dead: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SentBackMark)
_Key = tuple[str, int, int]


class SentBackMarks:
    """The marks of one broker, in memory once somebody asked for one.

    Args:
        most: Messages to remember; the oldest are forgotten first.

    Attributes:
        unreadable: Messages of the topic that hold no mark.
    """

    def __init__(self, most: int = MAX_MARKS) -> None:
        self.unreadable = 0
        self._most = most
        self._states: OrderedDict[_Key, int] = OrderedDict()
        self._loaded = False

    def __len__(self) -> int:
        return len(self._states)

    def load(self, store: MessageStore) -> None:
        """Reads the newest marks from the store, unless that was done.

        Raises:
            CorruptRecord: The queue leads to a place where its batch is not.
        """
        if self._loaded:
            return
        first, end = store.queue_bounds(SENT_BACK_TOPIC, MARKS_QUEUE)
        place: int = max(first, end - self._most)
        while True:
            found = store.get(SENT_BACK_TOPIC, MARKS_QUEUE, place, max_bytes=READ_BYTES)
            if found.status is not GetStatus.FOUND:
                break
            for data in found.data:
                self._take(data)
            place = found.next_queue_offset
        self._loaded = True

    def runs(
        self, group: str, commitlog_offset: int, first: int, stop: int
    ) -> Iterator[tuple[int, int, int | None]]:
        """Divides messages of a batch by what became of them.

        Yields:
            Ordinal of the first, ordinal behind the last, and ``RETRIED``, ``DEAD``,
            ``UNDER_WAY``, or None for those that were not sent back.
        """
        states = self._states
        start = first
        before = states.get((group, commitlog_offset, first))
        for ordinal in range(first + 1, stop):
            state = states.get((group, commitlog_offset, ordinal))
            if state != before:
                yield start, ordinal, before
                start, before = ordinal, state
        if first < stop:
            yield start, stop, before

    def begin(self, mark: SentBackMark) -> None:
        """Messages are being sent back; ``settle`` or ``withdraw`` follows."""
        self._set(mark, UNDER_WAY)

    def settle(self, mark: SentBackMark) -> None:
        """They were sent back."""
        self._set(mark, DEAD if mark.is_dead else RETRIED)

    def withdraw(self, mark: SentBackMark) -> None:
        """They could not be."""
        for key in _keys(mark):
            self._states.pop(key, None)

    def forget_group(self, group: str) -> SentBackMark:
        """A group's offsets were moved: what comes again, comes for the first time.

        Returns:
            The mark that says so.
        """
        for key in [key for key in self._states if key[0] == group]:
            del self._states[key]
        return SentBackMark(group, _WHOLE_GROUP)

    def _set(self, mark: SentBackMark, state: int) -> None:
        states = self._states
        for key in _keys(mark):
            states[key] = state
        while len(states) > self._most:
            states.popitem(last=False)

    def _take(self, data: Buffer) -> None:
        position = 0
        while position < len(data):
            header = check_stored(data, position)
            try:
                for message in decode_messages(data, header, position=position):
                    mark = _decoder.decode(message.body)
                    if mark.commitlog_offset == _WHOLE_GROUP:
                        self.forget_group(mark.group)
                    else:
                        self.settle(mark)
            except (CorruptBatch, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                self.unreadable += 1
            position += header.total_size


def encode_marks(marks: Sequence[SentBackMark], *, producer_id: int, now_ms: int) -> bytes:
    """The batch that makes marks durable.

    Returns:
        Layout: record batch, its broker part blank.
    """
    return encode_batch(
        [Message(SENT_BACK_TOPIC, _encoder.encode(mark)) for mark in marks],
        topic=SENT_BACK_TOPIC,
        queue_id=MARKS_QUEUE,
        producer_id=producer_id,
        first_sequence=0,
        born_timestamp=now_ms,
        attributes=Attributes.REDELIVERED,
    )


def _keys(mark: SentBackMark) -> Iterable[_Key]:
    for ordinal in range(mark.first, mark.first + mark.count):
        yield mark.group, mark.commitlog_offset, ordinal
