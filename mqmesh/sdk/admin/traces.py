"""Message trace: producer and consumers of a message, with times, durations and results."""

import enum
import re
from collections.abc import Iterable
from typing import Final

import msgspec

from mqmesh.errors import InvalidArgument, TopicNotFound
from mqmesh.message import TRACE_TOPIC, StoredMessage, check_topic
from mqmesh.protocol.queries import MAX_QUERY_MESSAGES
from mqmesh.sdk.admin.queries import QueryResult
from mqmesh.sdk.admin.tracks import TrackClient
from mqmesh.sdk.tracing.trace_records import (
    ContextCode,
    TraceKind,
    TraceMessageType,
    TraceRecord,
    decode_records,
)

_NOTHING = "null"
_MESSAGE_ID: Final = re.compile(r"[0-9A-Fa-f]{32,80}")
"""RocketMQ's are of more than one length."""


class SpanKind(enum.StrEnum):
    """Kind of a span."""

    SEND = "SEND"
    """A producer has sent the message."""
    CONSUME = "CONSUME"
    """A consumer was given it."""
    END_TRANSACTION = "END_TRANSACTION"
    """The transaction was committed or rolled back."""
    RECALL = "RECALL"
    """A client of RocketMQ 5 called it back, or tried to."""


_SENT = {
    TraceKind.PUB: SpanKind.SEND,
    TraceKind.END_TRANSACTION: SpanKind.END_TRANSACTION,
    TraceKind.RECALL: SpanKind.RECALL,
}


class TraceSpan(msgspec.Struct, frozen=True):
    """One thing that happened to a message.

    Attributes:
        kind: Kind of event.
        time_ms: When it began, ms since 1970.
        cost_ms: Duration; None while a consumer has not ended, as far as its trace came,
            and where records do not say it: of transactions' ends and recalls.
        group: Producer or consumer group.
        client: Writer of the record, as ``host:pid``; as ``host`` where RocketMQ's client did.
        result: ``SUCCESS``, ``FAILED``, ``EXCEPTION``, ``TIME_OUT``, ``COMMIT``, ``ROLLBACK``,
            ``UNKNOWN``; ``RUNNING`` without an end.
        topic: Topic; "" of consumers, whose records do not say it.
        tag, keys: Of the message, as far as the record says them.
        store_host: The broker that has it; "" of consumers.
        size: Bytes of its body; 0 of consumers.
        message_type: ``NORMAL``, ``HALF``, ``COMMIT``, ``DELAY`` or ``ORDER``; "" of consumers and
            recalls.
        retry_times: Number of times it was sent back before.
        from_check: The decision answers a check of the broker.
    """

    kind: SpanKind
    time_ms: int
    cost_ms: int | None
    group: str
    client: str
    result: str
    topic: str = ""
    tag: str = ""
    keys: str = ""
    store_host: str = ""
    size: int = 0
    message_type: str = ""
    retry_times: int = 0
    from_check: bool = False


class MessageSpans(msgspec.Struct, frozen=True):
    """The trace of one message.

    Attributes:
        message_id: Its id.
        spans: Spans by time; none if no client traced the message, or its trace is gone.
        notes: Reasons why something may be missing, by broker group.
        strange: Number of unreadable records in its trace messages.
    """

    message_id: str
    spans: list[TraceSpan]
    notes: dict[str, str] = {}
    strange: int = 0


class TraceClient(TrackClient):
    """Client that reads the message trace, in the caller's thread; see docs/tracing.md."""

    def trace(self, message_id: str, *, trace_topic: str = TRACE_TOPIC) -> MessageSpans:
        """Return the trace of a message.

        Args:
            message_id: From ``SendResult`` or ``StoredMessage``; also RocketMQ's.
            trace_topic: Topic of the clients' trace.

        Raises:
            InvalidArgument: That cannot be a message id, or a topic.
            TransportError, BrokerError: No broker could answer.
        """
        if not _MESSAGE_ID.fullmatch(message_id):
            raise InvalidArgument(
                f"message id {message_id[:80]!r}: must be 32 hex digits, or 32 to 80 of RocketMQ's"
            )
        return self._trace(message_id, trace_topic)

    def _trace(self, message_id: str, trace_topic: str) -> MessageSpans:
        message_id = message_id.upper()
        found = self._with_key(trace_topic, message_id, MAX_QUERY_MESSAGES)
        records, strange = _records(found.messages)
        mine = [(one, who) for one, who in records if one.message_id.upper() == message_id]
        return MessageSpans(message_id, _spans(mine), found.notes, strange)

    def trace_by_key(
        self, topic: str, key: str, *, trace_topic: str = TRACE_TOPIC, max_count: int = 64
    ) -> list[MessageSpans]:
        """Return the trace of the messages that have a key.

        They are found by their key, or, when they are gone, by that of their trace.

        Args:
            topic: Theirs.
            key: One of their keys.
            trace_topic: Topic of the clients' trace.
            max_count: Messages, 1 to 1,024.

        Returns:
            The oldest first.

        Raises:
            InvalidArgument: An illegal topic, key or number.
            TopicNotFound: The topic does not exist, and there is no trace of such a message either.
            TransportError, BrokerError: No broker could answer.
        """
        check_topic(topic)
        stored = self._with_key(topic, key, max_count)
        ids = {one.message_id: one.store_timestamp for one in reversed(stored.messages)}
        traced = self._with_key(trace_topic, key, max_count)
        for record, _ in _records(traced.messages)[0]:
            if record.topic == topic and f" {key} " in f" {record.keys} ":
                ids.setdefault(record.message_id, record.time_ms)  # type: ignore[arg-type]
        if not ids:
            self.route(topic)
        newest = sorted(ids, key=lambda one: ids[one])[-max_count:]
        return [self._trace(one, trace_topic) for one in newest]

    def _with_key(self, topic: str, key: str, max_count: int) -> QueryResult:
        try:
            return self.by_key(topic, key, max_count=max_count)
        except TopicNotFound:
            return QueryResult([])


def _records(messages: Iterable[StoredMessage]) -> tuple[list[tuple[TraceRecord, str]], int]:
    """Return the records in trace messages, each once, with its writer; and a count of others."""
    found: dict[tuple[TraceRecord, str], None] = {}
    strange = 0
    for message in messages:
        records, others = decode_records(bytes(message.body).decode(errors="replace"))
        strange += others
        found.update(dict.fromkeys((one, message.born_host) for one in records))
    return list(found), strange


def _spans(records: list[tuple[TraceRecord, str]]) -> list[TraceSpan]:
    ends = {
        (one.request_id, one.message_id): one
        for one, _ in records
        if one.kind is TraceKind.SUB_AFTER
    }
    spans = []
    for one, client in records:
        if one.kind is TraceKind.SUB_BEFORE:
            spans.append(_consumed(one, ends.pop((one.request_id, one.message_id), None), client))
        elif one.kind is not TraceKind.SUB_AFTER:
            spans.append(_sent(one, one.client_host or client))
    # A span with an end alone began at its end minus its duration.
    writers = {(one.request_id, one.message_id): client for one, client in records}
    for key, end in ends.items():
        begin = msgspec.structs.replace(end, time_ms=max(end.time_ms - end.cost_ms, 0))
        spans.append(_consumed(begin, end, writers[key]))
    return sorted(spans, key=lambda one: one.time_ms)


def _consumed(begin: TraceRecord, end: TraceRecord | None, client: str) -> TraceSpan:
    result = "RUNNING"
    if end is not None:
        result = "SUCCESS" if end.success else "FAILED"
        if end.context_code in (ContextCode.TIME_OUT, ContextCode.EXCEPTION):
            result = ContextCode(end.context_code).name
    return TraceSpan(
        SpanKind.CONSUME,
        begin.time_ms,
        None if end is None else end.cost_ms,
        begin.group,
        client,
        result,
        keys=_text(begin.keys),
        retry_times=begin.retry_times,
    )


def _sent(one: TraceRecord, client: str) -> TraceSpan:
    result = "SUCCESS" if one.success else "FAILED"
    if one.kind is TraceKind.END_TRANSACTION:
        result = one.state.removesuffix("_MESSAGE").replace("UNKNOW", "UNKNOWN")
    is_recall = one.kind is TraceKind.RECALL
    return TraceSpan(
        _SENT[one.kind],
        one.time_ms,
        one.cost_ms if one.kind is TraceKind.PUB else None,
        one.group,
        client,
        result,
        one.topic,
        _text(one.tag),
        _text(one.keys),
        one.store_host,
        one.size,
        "" if is_recall else TraceMessageType(one.message_type).name,
        from_check=one.from_check,
    )


def _text(text: str) -> str:
    return "" if text == _NOTHING else text
