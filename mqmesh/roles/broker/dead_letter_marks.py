"""Which dead letters were resent, so that none is resent twice by accident.

A mark is a message of ``DEAD_LETTER_MARKS_TOPIC``, written together with the message that it
tells of. So marks are as durable as messages, and go when those do.
"""

import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.errors import CorruptBatch
from mqmesh.message import DEAD_LETTER_MARKS_TOPIC, Message
from mqmesh.payload import Buffer
from mqmesh.record_batch import Attributes, check_stored, decode_messages, encode_batch
from mqmesh.storage.interface import GetStatus, MessageStore
from mqmesh.units import MIB

READ_BYTES: Final = 1 * MIB


class ResentMark(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A dead letter that was resent. On disk: fields are added at the end only.

    Attributes:
        group: Whose dead letter.
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


class DeadLetterMarks:
    """The marks of one broker, in memory once somebody asked for one.

    Attributes:
        unreadable: Messages of the topic that hold no marks.
    """

    def __init__(self) -> None:
        self.unreadable = 0
        self._resent_ms: dict[tuple[str, int, str], int] = {}
        self._loaded = False
        self._producer_id = secrets.randbits(64)
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._resent_ms)

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
        return self._resent_ms.get((group, queue_offset, message_id), 0)

    def add(self, marks: Iterable[ResentMark]) -> None:
        """Notes that dead letters are resent; ``remove`` undoes it if that fails."""
        for mark in marks:
            self._resent_ms[mark.group, mark.queue_offset, mark.message_id] = mark.resent_ms

    def remove(self, marks: Iterable[ResentMark]) -> None:
        """Forgets marks whose messages were not stored."""
        for mark in marks:
            self._resent_ms.pop((mark.group, mark.queue_offset, mark.message_id), None)

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
        position = 0
        while position < len(data):
            header = check_stored(data, position)
            try:
                for message in decode_messages(data, header, position=position):
                    self.add(_decoder.decode(message.body))
            except (CorruptBatch, msgspec.MsgspecError):
                self.unreadable += 1
            position += header.total_size
