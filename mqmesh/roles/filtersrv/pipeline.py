"""One pull on its way through a filter: pulled batches in, matching messages out. Pure."""

from typing import Final

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import check_stored, read_meta, read_payload
from mqmesh.batch.sparse_batch import cut_batch
from mqmesh.protocol.command import Reply, encode_header
from mqmesh.protocol.pulling import PullResponse, PullStatus

QUESTION_MESSAGES: Final = 16_384
"""Messages that a filter gets by one call, unless one batch has more."""


class Question(msgspec.Struct, frozen=True):
    """Messages that a filter gets by one call.

    Attributes:
        parts: Whole batches.
        messages: Number of messages that they hold.
    """

    parts: list[bytes | memoryview]
    messages: int


class FilterPass:
    """The answer of a broker to one pull, being filtered.

    Args:
        answer: Header of the answer, which found messages.
        body: Whole batches.
        queue_offset: The first requested message; earlier ones are left out.

    Raises:
        CorruptBatch: Damage; nothing of it may be passed over.
    """

    def __init__(self, answer: PullResponse, body: memoryview, queue_offset: int) -> None:
        self._answer = answer
        self._queue_offset = queue_offset
        self._batches = list(iter_batches(body, check_stored))
        self._found = bytearray()

    def questions(self) -> list[Question]:
        """Return the questions for the filter, one after the other."""
        questions: list[Question] = []
        parts: list[bytes | memoryview] = []
        messages = 0
        for header, batch in self._batches:
            if parts and messages + header.message_count > QUESTION_MESSAGES:
                questions.append(Question(parts, messages))
                parts, messages = [], 0
            parts.append(batch)
            messages += header.message_count
        if parts:
            questions.append(Question(parts, messages))
        return questions

    def take(self, found: bytes) -> None:
        """Takes the answer to the next question."""
        self._found += found

    def reply(self) -> Reply:
        """Return the consumer's answer: the judged messages, and the next offset behind them."""
        parts: list[bytes | memoryview] = []
        next_queue_offset = self._answer.next_queue_offset
        start = 0
        for header, batch in self._batches:
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
                parts.append(batch)
            else:
                meta = read_meta(batch, header)
                payload = read_payload(batch, header)
                parts += cut_batch(header, meta, payload, bytes(found))
        status = PullStatus.FOUND if parts else PullStatus.NO_MATCHED_MSG
        answer = msgspec.structs.replace(
            self._answer, status=int(status), next_queue_offset=next_queue_offset
        )
        return Reply(encode_header(answer), parts)
