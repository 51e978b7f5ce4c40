"""Sender of batches whose ids the caller chooses, so that work that is done again adds nothing.

A producer counts by itself, and its ids end with it. Here the caller says by which key and under
which sequences messages go: when the same is sent again, by another process and much later, the
broker recognises its last batches, and older ones are found by their ids.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import DelayedMeta, pack_due_times
from mqmesh.batch.payload import COMPRESS_OVER_BYTES, encode_payload
from mqmesh.batch.record_batch import MAX_BATCH_BYTES, Attributes, batch_parts
from mqmesh.errors import (
    InvalidArgument,
    LocalProtocolError,
    MQMeshError,
    NoPermission,
    NoRoute,
    RemoteProtocolError,
    RequestTimeout,
    SendInDoubt,
    SystemBusy,
    TopicNotFound,
    UnsupportedCommand,
)
from mqmesh.message import (
    MAX_MESSAGE_BYTES_DEFAULT,
    SCHEDULE_TOPIC,
    Message,
    MessageQueue,
    format_message_id,
)
from mqmesh.message_checks import check_messages
from mqmesh.namespaces import prefix_of
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import (
    MAX_BATCHES_PER_REQUEST,
    BatchOutcome,
    ProducerInfo,
    ProducerRequest,
    SendStatus,
    decode_outcomes,
    encode_send,
)
from mqmesh.protocol.pulling import QueueBoundsRequest
from mqmesh.protocol.queries import QueryMessageByIdRequest, QueryMessageResponse
from mqmesh.sdk.client.options import NamesrvAddr
from mqmesh.sdk.connector.patient_client import PATIENCE_MS, PatientClient
from mqmesh.security.keys import Credentials

_OK: Final = int(ResponseCode.SUCCESS)
_CONFLICT: Final = int(ResponseCode.SEQUENCE_CONFLICT)
_log = logging.getLogger(__name__)


class NumberedBatch(msgspec.Struct, frozen=True):
    """Messages that go to one queue, and their ids.

    Attributes:
        queue: Queue they go to.
        messages: At least one; all with one delay level, all with points in time, or neither. None
            for ``is_sent`` when they cannot be read any more.
        first_sequence: Second half of the first message's id; the others follow by one.
    """

    queue: MessageQueue
    messages: list[Message]
    first_sequence: int


class NumberedSender(PatientClient):
    """Sender of batches under ids of the caller's choice, in the caller's thread.

    No other sender may use the same key at the same time, and batches of one queue must be sent in
    the order of their sequences, each after the one before was stored.

    Args:
        namesrv_addr: As of ``AdminClient``.
        key: 16 secret bytes; the producer id is made of them.
        born_host: Sender, as the messages name it; the same whenever the work is repeated.
        max_message_size: Largest body in bytes.
        timeout_ms: For each try.
        patience_ms: For all tries together.
        credentials, namespace: As of ``AdminClient``.
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
        namespace: str | None = None,
    ) -> None:
        super().__init__(
            namesrv_addr,
            timeout_ms=timeout_ms,
            patience_ms=patience_ms,
            credentials=credentials,
            namespace=namespace,
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

    def is_stored_at(self, broker_name: str, sequence: int) -> bool:
        """Return True if a broker group's index has a message of this key and sequence.

        Raises:
            RequestTimeout: The broker did not answer in time.
            SystemBusy: Its index lacks a part of its log.
            UnsupportedCommand: It has no index.
        """
        message_id = format_message_id(self.producer_id, sequence)
        header = encode_header(QueryMessageByIdRequest(message_id, 1))

        def look() -> bool:
            answer = self.ask_once(broker_name, RequestCode.QUERY_MESSAGE_BY_ID, header)
            found = decode_header(QueryMessageResponse, answer.header)
            if not found.message_count and found.missing_bytes:
                raise SystemBusy(
                    f"whether {message_id} is stored is not known: {found.missing_bytes:,} bytes "
                    f"of the log of broker {broker_name} are not indexed yet"
                )
            return found.message_count > 0

        return self.patiently(look, "the index of messages")

    def log_end(self, queue: MessageQueue) -> int:
        """Return the commit-log offset where the log of a queue's broker ends, for ``is_sent``.

        Raises:
            TopicNotFound: The broker does not know the topic.
            RequestTimeout: The broker was away for too long.
        """
        return self._remembered(queue, delayed=False).end_offset

    def is_sent(self, batch: NumberedBatch, log_end: int) -> bool:
        """Return True if a batch is stored and safe, however long ago it was sent.

        The sender looks among the batches that the broker remembers of this key; when it remembers
        none, in the broker's index. It must be the last batch that was sent to its queue under this
        key. A batch is safe when a send of it would be answered with ``SEND_OK`` by now.

        Args:
            batch: The batch; its messages are not compared.
            log_end: Where the broker's log ended before it was sent, of ``log_end``.

        Raises:
            SendInDoubt: The broker has forgotten the key, and it has no index, or retention has
                removed a part of the log in which the batch may have been, or it may not be read.
            SystemBusy: It is stored and not safe yet, or the index lacks a part of the log.
            TopicNotFound: The broker does not know the topic.
            RequestTimeout: A broker did not answer in time.
        """
        first = batch.first_sequence
        kinds = [_is_delayed(one) for one in batch.messages[:1]] or [False, True]
        for delayed in kinds:
            known = self._remembered(batch.queue, delayed=delayed)
            for one in known.batches:
                if one.first_sequence <= first < one.first_sequence + one.message_count:
                    if one.status:
                        raise _unsafe(batch, one.status)
                    return True
            if known.batches and kinds == [False]:
                return False  # the newest ones of its queue; delayed ones are in one of several
        if known.end_offset <= log_end:
            return False
        try:
            if self.is_stored_at(batch.queue.broker_name, first):
                return True
            doubt = self._doubt_of(batch, known, log_end)
        except UnsupportedCommand as error:
            doubt = str(error)
        if doubt:
            message_id = format_message_id(self.producer_id, first)
            raise SendInDoubt(
                f"message {message_id} for {batch.queue} may be stored or not: the broker does not "
                f"know its producer any more, and {doubt}"
            )
        return False

    def _doubt_of(self, batch: NumberedBatch, known: ProducerInfo, log_end: int) -> str:
        """Return why the index may miss a batch that is stored; "" if it does not."""
        if known.min_offset > log_end:
            return f"its log begins at {known.min_offset}, behind {log_end}, where it ended then"
        if not self._is_visible(batch):
            return "this user may not look messages of the topic up (right SUB)"
        return ""

    def _is_visible(self, batch: NumberedBatch) -> bool:
        """Return True if the index would show the messages of a batch to this user."""
        topic = batch.queue.topic
        may_be_delayed = not batch.messages or _is_delayed(batch.messages[0])
        for name in (topic, SCHEDULE_TOPIC) if may_be_delayed else (topic,):
            header = encode_header(QueueBoundsRequest(name, 0))
            try:
                self.ask(batch.queue.broker_name, RequestCode.QUERY_QUEUE_BOUNDS, header)
            except NoPermission:
                return False
            except TopicNotFound:
                continue  # the right comes first
        try:
            return bool(self.readable_queues(topic))
        except TopicNotFound as error:
            raise NoRoute(str(error)) from error

    def _remembered(self, queue: MessageQueue, *, delayed: bool) -> ProducerInfo:
        request = ProducerRequest(queue.topic, queue.queue_id, self.producer_id, delayed)

        def look() -> ProducerInfo:
            answer = self.ask(queue.broker_name, RequestCode.QUERY_PRODUCER, encode_header(request))
            return decode_header(ProducerInfo, answer.header)

        return self.patiently(look, f"broker {queue.broker_name}")

    def try_send(
        self, batches: Sequence[NumberedBatch]
    ) -> list[tuple[NumberedBatch, MQMeshError | None]]:
        """Sends batches once to each of their brokers, and says of each how it went.

        Returns:
            Each batch with None if it is stored and safe. ``InvalidArgument`` and
            ``LocalProtocolError``: it cannot be encoded, and was not sent. After any other error
            only ``is_sent`` knows whether it is stored.
        """
        now_ms = self._transport.clock.wall_ms()
        ended: list[tuple[NumberedBatch, MQMeshError | None]] = []
        ready: dict[str, list[tuple[NumberedBatch, bytes]]] = {}
        for one in batches:
            try:
                data = b"".join(self._encode(one, now_ms))
            except (InvalidArgument, LocalProtocolError) as error:
                ended.append((one, error))
            else:
                ready.setdefault(one.queue.broker_name, []).append((one, data))
        for broker_name, items in ready.items():
            failure: MQMeshError | None = None
            for some in _requests(items):
                if failure is None:
                    try:
                        ended += self._try_request(broker_name, some)
                        continue
                    except MQMeshError as error:
                        failure = _as_unknown(error)
                ended += [(one, failure) for one, _ in some]
        return ended

    def _try_request(
        self, broker_name: str, items: Sequence[tuple[NumberedBatch, bytes]]
    ) -> list[tuple[NumberedBatch, MQMeshError | None]]:
        """Sends a request once: a second try could be refused for batches that the first stored."""
        header = encode_send(self._timeout_ms, len(items), self._key)
        data = [data for _, data in items]
        answer = self.ask_once(broker_name, RequestCode.SEND_MESSAGE, header, data)
        ended: list[tuple[NumberedBatch, MQMeshError | None]] = []
        for (batch, _), outcome in zip(items, _outcomes(answer, len(items)), strict=True):
            try:
                status = self._status(batch, outcome)
                ended.append((batch, _unsafe(batch, status) if status else None))
            except MQMeshError as error:
                ended.append((batch, _as_unknown(error)))
        return ended

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
        """Sends batches that wait for a broker; stored ones wait no more."""
        mine = [item for item in waiting if item[0].queue.broker_name == broker_name]
        header = encode_send(self._timeout_ms, len(mine), self._key)
        answer = self.ask(broker_name, RequestCode.SEND_MESSAGE, header, [data for _, data in mine])
        failure: MQMeshError | None = None
        for item, outcome in zip(mine, _outcomes(answer, len(mine)), strict=True):
            batch = item[0]
            try:
                status = self._status(batch, outcome)
            except MQMeshError as error:
                if failure is None or failure.retriable:
                    failure = error
                continue
            waiting.remove(item)
            if status:
                name = SendStatus(status)
                _log.warning("%d messages to %s: %s", len(batch.messages), batch.queue, name)
        if failure is not None:
            raise failure

    def _status(self, batch: NumberedBatch, outcome: BatchOutcome) -> int:
        """Return the ``SendStatus`` of a batch that is stored.

        Raises:
            MQMeshError: It was refused, or cannot be compared with the batch stored in its place.
        """
        if outcome.code == _OK:
            return outcome.status
        if outcome.code == _CONFLICT:
            # Sent before by another process, at another time, these bytes differ.
            known = self._remembered(batch.queue, delayed=_is_delayed(batch.messages[0]))
            count = len(batch.messages)
            for one in known.batches:
                if (one.first_sequence, one.message_count) == (batch.first_sequence, count):
                    return one.status
            last = batch.first_sequence + count - 1
            name = batch.queue.broker_name
            if self.is_stored_at(name, batch.first_sequence) and self.is_stored_at(name, last):
                return 0
        raise error_of(outcome.code, outcome.remark, outcome.retry_after_ms)

    def _encode(self, batch: NumberedBatch, now_ms: int) -> tuple[bytes, ...]:
        messages = check_messages(batch.messages, max_message_size=self._max_message_size)
        prefix = prefix_of(self.namespace)
        topic = prefix + batch.queue.topic
        payload = encode_payload(messages, compress_over_bytes=COMPRESS_OVER_BYTES, prefix=prefix)
        meta = None
        attributes = 0
        first = messages[0]
        if _is_delayed(first):
            attributes = int(Attributes.HAS_DELAY)
            times = [one.deliver_at_ms for one in messages]
            meta = DelayedMeta(
                topic,
                payload.tag_hashes,
                self._born_host,
                first.delay_level,
                pack_due_times(times) if first.deliver_at_ms else b"",
            )
        return batch_parts(
            payload,
            topic=topic,
            queue_id=batch.queue.queue_id,
            producer_id=self.producer_id,
            first_sequence=batch.first_sequence,
            born_timestamp=now_ms,
            born_host=self._born_host,
            attributes=attributes,
            meta=meta,
        )


def _is_delayed(message: Message) -> bool:
    return bool(message.delay_level or message.deliver_at_ms)


def _requests(
    items: Sequence[tuple[NumberedBatch, bytes]],
) -> Iterator[list[tuple[NumberedBatch, bytes]]]:
    """Divide batches so that each request fits into a frame."""
    some: list[tuple[NumberedBatch, bytes]] = []
    size = 0
    for item in items:
        size += len(item[1])
        if some and (size > MAX_BATCH_BYTES or len(some) == MAX_BATCHES_PER_REQUEST):
            yield some
            some, size = [], len(item[1])
        some.append(item)
    if some:
        yield some


def _outcomes(answer: Command, count: int) -> list[BatchOutcome]:
    found = decode_outcomes(answer.header, answer.body)
    if len(found) != count:
        raise RemoteProtocolError(f"a send of {count} batches is answered for {len(found)}")
    return found


def _as_unknown(error: MQMeshError) -> MQMeshError:
    """Return an error that does not say that a batch was never sent."""
    if isinstance(error, InvalidArgument | LocalProtocolError):
        return RequestTimeout(f"{type(error).__name__}: {error}")
    return error


def _unsafe(batch: NumberedBatch, status: int) -> SystemBusy:
    return SystemBusy(
        f"{len(batch.messages)} messages are stored in {batch.queue}, but not as safely as the "
        f"broker should: {SendStatus(status)}"
    )
