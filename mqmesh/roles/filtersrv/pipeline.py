"""One pull on its way through a filter: pulled batches in, what matches out. Pure."""

from typing import Final

import msgspec

from mqmesh.batch.record_batch import BatchHeader, check_stored, read_meta, read_payload
from mqmesh.batch.sparse_batch import cut_batch
from mqmesh.protocol.command import Reply, encode_header
from mqmesh.protocol.pulling import PullResponse, PullStatus

QUESTION_MESSAGES: Final = 16_384
"""A filter is asked about so many messages at once, or about one batch if that has more."""


class Question(msgspec.Struct, frozen=True):
    """What a filter is asked at once.

    Attributes:
        parts: Whole batches.
        messages: How many they hold.
    """

    parts: list[bytes | memoryview]
    messages: int


class Passage:
    """The answer of a broker to one pull, being filtered.

    Args:
        answer: Its header; it found messages.
        body: Whole batches.
        queue_offset: The first message that was asked for; what stands before is left out.

    Raises:
        CorruptBatch: Damage; nothing of it may be passed over.
    """

    def __init__(self, answer: PullResponse, body: memoryview, queue_offset: int) -> None:
        self._answer = answer
        self._body = body
        self._queue_offset = queue_offset
        self._batches: list[tuple[int, BatchHeader]] = []
        position = 0
        while position < len(body):
            header = check_stored(body, position)
            self._batches.append((position, header))
            position += header.total_size
        self._found = bytearray()

    def questions(self) -> list[Question]:
        """What to ask the filter, one after the other."""
        questions: list[Question] = []
        parts: list[bytes | memoryview] = []
        messages = 0
        for position, header in self._batches:
            if parts and messages + header.message_count > QUESTION_MESSAGES:
                questions.append(Question(parts, messages))
                parts, messages = [], 0
            parts.append(self._body[position : position + header.total_size])
            messages += header.message_count
        if parts:
            questions.append(Question(parts, messages))
        return questions

    def take(self, found: bytes) -> None:
        """The answer to the next question."""
        self._found += found

    def reply(self) -> Reply:
        """What the consumer gets: what was judged, and where to go on behind it."""
        parts: list[bytes | memoryview] = []
        next_queue_offset = self._answer.next_queue_offset
        start = 0
        for position, header in self._batches:
            if start == len(self._found):
                next_queue_offset = max(header.base_queue_offset, self._queue_offset)
                break
            found = self._found[start : start + header.message_count]
            start += header.message_count
            before = self._queue_offset - header.base_queue_offset
            if before > 0:
                found[:before] = bytes(min(before, len(found)))
            if 1 not in found:
                continue
            if 0 not in found:
                parts.append(self._body[position : position + header.total_size])
            else:
                meta = read_meta(self._body, header, position)
                payload = read_payload(self._body, header, position)
                parts += cut_batch(header, meta, payload, bytes(found))
        status = PullStatus.FOUND if parts else PullStatus.NO_MATCHED_MSG
        answer = msgspec.structs.replace(
            self._answer, status=int(status), next_queue_offset=next_queue_offset
        )
        return Reply(encode_header(answer), parts)
