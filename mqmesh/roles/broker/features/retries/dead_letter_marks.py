"""Marks of dead letters that were resent, so that none is resent twice by accident.

A mark is a message of ``DEAD_LETTER_MARKS_TOPIC``, written together with the message that it
names. So marks are as durable as messages, and go when those do; in memory they go when their
dead letters have gone.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from random import Random
from typing import Annotated, Final

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import Attributes, check_stored, decode_messages, encode_batch
from mqmesh.errors import CorruptBatch
from mqmesh.message import DEAD_LETTER_MARKS_TOPIC, Message
from mqmesh.storage.interface import GetStatus, MessageStore
from mqmesh.units import MIB

READ_BYTES: Final = 1 * MIB
FORGOTTEN_AT_ONCE: Final = 2_000
"""Marks and groups that one call of ``forget`` looks at; some milliseconds."""


class ResentMark(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A dead letter that was resent. On disk: fields are added at the end only.

    Attributes:
        group: Consumer group of the dead letter.
        queue_offset: In queue 0 of its topic.
        message_id: Its id: a topic that is made anew has other messages at the same offsets.
        resent_ms: When, wall clock.
        target: ``ResendTarget``.
    """

    group: str
    queue_offset: int
    message_id: str
    resent_ms: int
    target: str = ""


_Marks = Annotated[list[ResentMark], msgspec.Meta(max_length=65_536)]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Marks)


class _GroupMarks:
    """The marks of one group: when, by place and id, 0 for not; and the places, lowest on top."""

    def __init__(self) -> None:
        self.resent_ms: dict[tuple[int, str], int] = {}
        self.heap: list[tuple[int, str]] = []


class DeadLetterMarks:
    """The marks of one broker, in memory once somebody asked for one.

    Args:
        chance: Makes the id under which they are written.

    Attributes:
        unreadable: Messages of the topic that hold no marks.
    """

    def __init__(self, chance: Random) -> None:
        self.unreadable = 0
        self._groups: dict[str, _GroupMarks] = {}
        self._loaded = False
        self._producer_id = chance.getrandbits(64)
        self._sequence = 0

    def __len__(self) -> int:
        return sum(
            map(bool, (ms for one in self._groups.values() for ms in one.resent_ms.values()))
        )

    def load(self, store: MessageStore) -> None:
        """Reads the marks from the store, unless that was done.

        Raises:
            CorruptRecord: The queue leads to a place where its batch is not.
        """
        if self._loaded:
            return
        next_offset, _ = store.queue_bounds(DEAD_LETTER_MARKS_TOPIC, 0)
        while True:
            found = store.get(DEAD_LETTER_MARKS_TOPIC, 0, next_offset, max_bytes=READ_BYTES)
            if found.status is not GetStatus.FOUND:
                break
            for data in found.data:
                self._take(data)
            next_offset = found.next_queue_offset
        self._loaded = True

    def resent_ms(self, group: str, queue_offset: int, message_id: str) -> int:
        """When a dead letter was resent, wall clock in ms; 0 if it was not."""
        marks = self._groups.get(group)
        return 0 if marks is None else marks.resent_ms.get((queue_offset, message_id), 0)

    def add(self, marks: Iterable[ResentMark]) -> None:
        """Notes that dead letters are resent; ``remove`` undoes it if that fails."""
        for mark in marks:
            known = self._groups.get(mark.group)
            if known is None:
                known = self._groups[mark.group] = _GroupMarks()
            place = (mark.queue_offset, mark.message_id)
            if place not in known.resent_ms:
                heapq.heappush(known.heap, place)
            known.resent_ms[place] = mark.resent_ms

    def remove(self, marks: Iterable[ResentMark]) -> None:
        """Forgets marks whose messages were not stored."""
        for mark in marks:
            known = self._groups.get(mark.group)
            place = (mark.queue_offset, mark.message_id)
            if known is not None and place in known.resent_ms:
                known.resent_ms[place] = 0  # its place stays in the heap, once

    def forget(self, first_offset_of: Callable[[str], int | None]) -> None:
        """Forgets marks whose dead letters are gone, some at a time; to be called now and then.

        Args:
            first_offset_of: Queue offset of a group's first dead letter that is still there;
                None when the group has no dead letters at all.
        """
        left = FORGOTTEN_AT_ONCE
        for group in list(islice(self._groups, left)):
            first_offset = first_offset_of(group)
            known = self._groups.pop(group)
            while known.heap and left > 0:
                if first_offset is not None and known.heap[0][0] >= first_offset:
                    break
                del known.resent_ms[heapq.heappop(known.heap)]
                left -= 1
            if known.heap:
                self._groups[group] = known  # behind the others: each has its turn
            left -= 1
            if left <= 0:
                return

    def encode(self, marks: Sequence[ResentMark], now_ms: int) -> bytes:
        """The batch that makes marks durable.

        Returns:
            Layout: record batch, its broker part blank.
        """
        self._sequence += 1
        return encode_batch(
            [Message(DEAD_LETTER_MARKS_TOPIC, _encoder.encode(marks))],
            topic=DEAD_LETTER_MARKS_TOPIC,
            queue_id=0,
            producer_id=self._producer_id,
            first_sequence=self._sequence,
            born_timestamp=now_ms,
            attributes=Attributes.REDELIVERED,
        )

    def _take(self, data: Buffer) -> None:
        for header, batch in iter_batches(data, check_stored):
            try:
                for message in decode_messages(batch, header):
                    self.add(_decoder.decode(message.body))
            except (CorruptBatch, msgspec.MsgspecError):
                self.unreadable += 1
