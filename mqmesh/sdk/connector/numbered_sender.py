"""Sender of batches whose ids the caller chooses, so that work that is done again adds nothing.

A producer counts by itself, and its ids end with it. Here the caller says by which key and under
which sequences messages go: when the same is sent again, by another process and much later, the
broker recognises what it stored last, and what is older is found by its id.
"""

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import DelayedMeta, pack_due_times
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts
from mqmesh.errors import MQMeshError, RequestTimeout
from mqmesh.message import MAX_MESSAGE_BYTES_DEFAULT, Message, MessageQueue, format_message_id
from mqmesh.message_checks import check_messages
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus, decode_outcomes, encode_send
from mqmesh.sdk.client.options import NamesrvAddr
from mqmesh.sdk.connector.patient_client import PATIENCE_MS, PatientClient
from mqmesh.security.keys import Credentials

COMPRESS_OVER_BYTES: Final = 4_096

_OK: Final = int(ResponseCode.SUCCESS)
_CONFLICT: Final = int(ResponseCode.SEQUENCE_CONFLICT)
_log = logging.getLogger(__name__)


class NumberedBatch(msgspec.Struct, frozen=True):
    """Messages that go to one queue, and their ids.

    Attributes:
        queue: Queue they go to.
        messages: At least one; all with one delay level, all with points in time, or neither.
        first_sequence: Second half of the first message's id; the others follow by one.
    """

    queue: MessageQueue
    messages: list[Message]
    first_sequence: int


class NumberedSender(PatientClient):
    """Sender of batches under ids of the caller's choice, in the caller's thread.

    Nobody may use the same key at the same time, and batches of one queue must be sent in the
    order of their sequences, each after the one before was stored.

    Args:
        namesrv_addr: As of ``AdminClient``.
        key: 16 bytes that nobody else can guess; the producer id is made of it.
        born_host: Sender, as the messages name it; the same whenever the work is repeated.
        max_message_size: Largest body in bytes.
        timeout_ms: For each try.
        patience_ms: For all tries together.
        credentials: As of ``AdminClient``.
    """

    def __init__(
        self,
        namesrv_addr: NamesrvAddr,
        key: bytes,
        *,
        born_host: str,
        max_message_size: int = MAX_MESSAGE_BYTES_DEFAULT,
        timeout_ms: int = 3_000,
        patience_ms: int = PATIENCE_MS,
        credentials: str | Credentials = "",
    ) -> None:
        super().__init__(
            namesrv_addr, timeout_ms=timeout_ms, patience_ms=patience_ms, credentials=credentials
        )
        self.producer_id = producer_id_of(key)
        self._key = key
        self._born_host = born_host
        self._max_message_size = max_message_size

    def is_stored(self, sequence: int) -> bool:
        """Return True if a message was stored under this key and sequence, and is still there.

        Raises:
            RequestTimeout: A broker did not answer in time, or its index lacks a part of its log.
        """
        message_id = format_message_id(self.producer_id, sequence)

        def look() -> bool:
            found = self.by_id(message_id, max_count=1, with_system=True)
            if found.messages:
                return True
            if found.notes:
                name, note = next(iter(found.notes.items()))
                raise RequestTimeout(f"whether {message_id} is stored at broker {name}: {note}")
            return False

        return self.patiently(look, "the index of messages")

    def send(self, batches: Sequence[NumberedBatch]) -> None:
        """Stores batches, at most one of a queue; returns when all of them are stored.

        Raises:
            InvalidArgument: A message is illegal; nothing of these batches was sent.
            SequenceConflict: Other messages are stored under these ids.
            RequestTimeout: A broker was away for too long; whether its part is stored is unknown.
            BrokerError: A broker refused.
        """
        now_ms = self._transport.clock.wall_ms()
        waiting = [(one, b"".join(self._encode(one, now_ms))) for one in batches]

        def once() -> None:
            for broker_name in sorted({one.queue.broker_name for one, _ in waiting}):
                self._send_to(broker_name, waiting)

        self.patiently(once, "a broker that is sent to")

    def _send_to(self, broker_name: str, waiting: list[tuple[NumberedBatch, bytes]]) -> None:
        """Sends what waits for a broker; what is stored waits no more."""
        mine = [item for item in waiting if item[0].queue.broker_name == broker_name]
        answer = self.ask(
            broker_name,
            RequestCode.SEND_MESSAGE,
            encode_send(self._timeout_ms, len(mine), self._key),
            [data for _, data in mine],
        )
        failure: MQMeshError | None = None
        outcomes = decode_outcomes(answer.header, answer.body)
        for item, outcome in zip(mine, outcomes, strict=True):
            batch = item[0]
            if outcome.code == _OK:
                if outcome.status:
                    status = SendStatus(outcome.status)
                    _log.warning("%d messages to %s: %s", len(batch.messages), batch.queue, status)
                waiting.remove(item)
            elif outcome.code == _CONFLICT and self._is_whole(batch):
                # Sent before by another process, at another time: these bytes differ.
                waiting.remove(item)
            else:
                error = error_of(outcome.code, outcome.remark, outcome.retry_after_ms)
                if failure is None or failure.retriable:
                    failure = error
        if failure is not None:
            raise failure

    def _is_whole(self, batch: NumberedBatch) -> bool:
        last = batch.first_sequence + len(batch.messages) - 1
        return self.is_stored(batch.first_sequence) and self.is_stored(last)

    def _encode(self, batch: NumberedBatch, now_ms: int) -> tuple[bytes, ...]:
        messages = check_messages(batch.messages, max_message_size=self._max_message_size)
        payload = encode_payload(messages, compress_over_bytes=COMPRESS_OVER_BYTES)
        meta = None
        attributes = 0
        first = messages[0]
        if first.delay_level or first.deliver_at_ms:
            attributes = int(Attributes.HAS_DELAY)
            times = [one.deliver_at_ms for one in messages]
            meta = DelayedMeta(
                batch.queue.topic,
                payload.tag_hashes,
                self._born_host,
                first.delay_level,
                pack_due_times(times) if first.deliver_at_ms else b"",
            )
        return batch_parts(
            payload,
            topic=batch.queue.topic,
            queue_id=batch.queue.queue_id,
            producer_id=self.producer_id,
            first_sequence=batch.first_sequence,
            born_timestamp=now_ms,
            born_host=self._born_host,
            attributes=attributes,
            meta=meta,
        )
