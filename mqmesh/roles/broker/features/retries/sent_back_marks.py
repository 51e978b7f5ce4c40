"""Marks of what groups have sent back, so that each delivery has at most one retry or dead letter.

A message may be delivered a second time at the same place: its consumer died, or the broker
did, before the group's offset went on. When it fails there again, its retry is on its way
already, and a second one would fork the chain of retries down to the dead letters.

A mark is a message of ``SENT_BACK_TOPIC``, in a group with the retry or dead letter that it
reports: of both all is in the log or nothing. Marks name batches by their places in the log, which
never stand for other ones: what a power cut takes from the log, it takes with all marks about it.

Where a group's offsets were moved, what it gets once more may be sent back once more: the marks
from before do not count. That is noted with the offsets (``consumer_offsets``), in one document,
so that neither is ever on the disk without the other.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import Attributes, check_stored, decode_messages, encode_batch
from mqmesh.errors import CorruptBatch
from mqmesh.message import SENT_BACK_TOPIC, Message
from mqmesh.roles.broker.group_state.committed_offsets import MAX_MARKS
from mqmesh.storage.interface import GetStatus, MessageStore
from mqmesh.units import MIB

READ_BYTES: Final = 1 * MIB
MARKS_QUEUE: Final = 0

RETRIED: Final = 0
"""A message that was sent back: it is to come again."""
DEAD: Final = 1
"""A message that is a dead letter."""
UNDER_WAY: Final = 2
"""A message whose retry or dead letter is being written."""


class SentBackMark(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages that were sent back. On disk: fields are added at the end only.

    Elements 5 to 7, counted from 0, are free for no other meaning: earlier programs wrote
    a topic, a queue and a checksum there, which are skipped.

    Attributes:
        group: Consumer group.
        commitlog_offset: Where their batch begins in the log.
        first: Ordinal of the first one in the batch.
        count: How many.
        is_dead: They became dead letters.
    """

    group: str
    commitlog_offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
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

    def load(self, store: MessageStore, counts_from: Callable[[str], int]) -> None:
        """Reads the newest marks from the store, unless that was done.

        Args:
            store: Where they and the retries are.
            counts_from: Of a group, the queue offset from which on its marks count.

        Raises:
            CorruptRecord: The queue leads to a place where its batch is not.
        """
        if self._loaded:
            return
        for place, mark in self._stored(store):
            if place >= counts_from(mark.group):
                self.settle(mark)
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
        """Note that the messages of a mark were sent back."""
        self._set(mark, DEAD if mark.is_dead else RETRIED)

    def withdraw(self, mark: SentBackMark) -> None:
        """Drop a mark whose messages could not be sent back."""
        for key in _keys(mark):
            self._states.pop(key, None)

    def forget_group(self, group: str) -> bool:
        """A group's offsets were moved: what comes again, comes for the first time.

        Returns:
            True if there was anything to forget.
        """
        keys = [key for key in self._states if key[0] == group]
        for key in keys:
            del self._states[key]
        return bool(keys)

    def _set(self, mark: SentBackMark, state: int) -> None:
        states = self._states
        for key in _keys(mark):
            states[key] = state
        while len(states) > self._most:
            states.popitem(last=False)

    def _stored(self, store: MessageStore) -> Iterator[tuple[int, SentBackMark]]:
        """The newest marks, with their queue offsets."""
        first, end = store.queue_bounds(SENT_BACK_TOPIC, MARKS_QUEUE)
        place: int = max(first, end - self._most)
        while True:
            found = store.get(SENT_BACK_TOPIC, MARKS_QUEUE, place, max_bytes=READ_BYTES)
            if found.status is not GetStatus.FOUND:
                return
            for data in found.data:
                yield from self._decoded(data)
            place = found.next_queue_offset

    def _decoded(self, data: Buffer) -> Iterator[tuple[int, SentBackMark]]:
        for header, batch in iter_batches(data, check_stored):
            try:
                for message in decode_messages(batch, header):
                    yield message.queue_offset, _decoder.decode(message.body)
            except (CorruptBatch, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                self.unreadable += 1


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
