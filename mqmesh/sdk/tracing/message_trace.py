"""RocketMQ's message trace of a client's sent and consumed messages."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

from mqmesh.message import Message, MessageQueue, StoredMessage, format_message_id
from mqmesh.protocol.transactions import Decision
from mqmesh.sdk.hooks import ConsumeContext, Hooks, TransactionContext
from mqmesh.sdk.tracing.sampling import Sampler
from mqmesh.sdk.tracing.trace_dispatcher import Traced, TraceDispatcher
from mqmesh.sdk.tracing.trace_records import (
    REGION,
    ContextCode,
    TraceKind,
    TraceMessageType,
    TraceRecord,
    encode_record,
    plain_text,
    pub_format,
    sub_after_format,
    sub_before_format,
)

NOTHING: Final = "null"
"""Text of RocketMQ for no tag and no keys; its decoder fails at an empty last field."""
MAX_COST_MS: Final = (1 << 31) - 1
"""RocketMQ's decoder takes no more."""

_STATES: Final = {
    Decision.COMMIT: "COMMIT_MESSAGE",
    Decision.ROLLBACK: "ROLLBACK_MESSAGE",
}
_queue_offset: Final = attrgetter("queue_offset")

Facts = tuple[int, str, Sequence[str], int]
"""Facts of a sent message: its position in its batch, its tag, its keys, its size in bytes."""
_Delivered = tuple[str, Sequence[str], int]
"""Facts of a consumed message: its id, its keys, and how often it was sent back."""


class MessageTrace(Hooks):
    """Message trace of a share of a client's messages.

    Args:
        group: The client's.
        dispatcher: Takes the records.
        trace_topic: Topic of trace messages; its own messages are not traced.
        sampler: Chooses messages.
        wall_ms: Wall clock.
        host_of: Returns a broker group's address; "" for unknown.
        new_request_id: Makes a unique id.
        timeout_ms: A listener's call of so long was too long; None for no limit.
    """

    def __init__(
        self,
        group: str,
        dispatcher: TraceDispatcher,
        trace_topic: str,
        sampler: Sampler,
        wall_ms: Callable[[], int],
        host_of: Callable[[str], str],
        new_request_id: Callable[[], str],
        *,
        timeout_ms: int | None = None,
    ) -> None:
        self._group = group
        self._dispatcher = dispatcher
        self._trace_topic = trace_topic
        self._sampler = sampler
        self._wall_ms = wall_ms
        self._host_of = host_of
        self._new_request_id = new_request_id
        self._timeout_ms = timeout_ms

    def chosen(self, topic: str, first_id: tuple[int, int], count: int) -> Sequence[int]:
        """Return the positions of messages of a sent batch that are traced.

        Args:
            topic: Topic of the messages.
            first_id: Producer id and sequence of the first one.
            count: Number of messages.
        """
        return () if topic == self._trace_topic else self._sampler.chosen(*first_id, count)

    def stored(
        self,
        facts: Sequence[Facts],
        queue: MessageQueue,
        first_id: tuple[int, int],
        message_type: TraceMessageType,
        began_ms: int,
        commitlog_offset: int,
        *,
        success: bool,
    ) -> None:
        """Record a stored batch; a failed one has no message ids and is not traced, as in RocketMQ.

        Args:
            facts: Of the messages that ``chosen`` has named.
            queue: Queue of the messages.
            first_id: As for ``chosen``.
            message_type: Of all of them.
            began_ms: When the batch was encoded, ms since 1970.
            commitlog_offset: Start of the batch in the broker's log.
            success: It is as safe as it should be.
        """
        cost_ms = self._cost(began_ms)

        def make(chosen: Sequence[Facts]) -> list[Traced]:
            host = self._host_of(queue.broker_name)
            shared = TraceRecord(
                TraceKind.PUB,
                "",
                time_ms=began_ms,
                region=REGION,
                group=self._group,
                topic=queue.topic,
                store_host=host,
                cost_ms=cost_ms,
                message_type=message_type,
                offset_id=f"{host}#{commitlog_offset:X}#",
                success=success,
            )
            return _pub_records(shared, first_id, chosen)

        self._dispatcher.add(facts, make)

    def before_consume(self, batch: ConsumeContext) -> None:
        """Record that a listener is called with messages, or a poll returns them."""
        if batch.topic == self._trace_topic:
            return
        delivered = [
            (one.message_id, one.keys, one.reconsume_times) for one in self._chosen(batch.messages)
        ]
        if not delivered:
            return
        request_id = self._new_request_id()
        batch.state[self] = request_id, delivered
        began_ms, group = batch.began_ms, batch.group

        def make(chosen: Sequence[_Delivered]) -> list[Traced]:
            text = sub_before_format(
                TraceRecord(
                    TraceKind.SUB_BEFORE,
                    "",
                    time_ms=began_ms,
                    region=REGION,
                    group=group,
                    request_id=request_id,
                )
            )
            return [(text % (one, again, _joined(keys)), one, keys) for one, keys, again in chosen]

        self._dispatcher.add(delivered, make)

    def after_consume(self, batch: ConsumeContext) -> None:
        """Record the end of a listener's call."""
        begun: tuple[str, list[_Delivered]] | None = batch.state.get(self)
        if begun is None:
            return
        request_id, delivered = begun
        cost_ms = self._cost(batch.began_ms)
        ended_ms, group, success = batch.began_ms + cost_ms, batch.group, not batch.again
        context_code = self._context_code(batch, cost_ms)

        def make(chosen: Sequence[_Delivered]) -> list[Traced]:
            text = sub_after_format(
                TraceRecord(
                    TraceKind.SUB_AFTER,
                    "",
                    time_ms=ended_ms,
                    region=REGION,
                    group=group,
                    cost_ms=cost_ms,
                    success=success,
                    request_id=request_id,
                    context_code=context_code,
                )
            )
            return [(text % (one, _joined(keys)), one, keys) for one, keys, _ in chosen]

        self._dispatcher.add(delivered, make)

    def after_transaction(self, transaction: TransactionContext) -> None:
        """Record the end of a transaction that was sent to a broker."""
        message = transaction.message
        info = message.info
        if message.topic == self._trace_topic or not self._sampler.wants(
            info.producer_id, info.first_sequence + message.ordinal
        ):
            return
        keys = message.keys
        record = TraceRecord(
            TraceKind.END_TRANSACTION,
            message.message_id,
            time_ms=transaction.began_ms,
            region=REGION,
            group=transaction.group,
            topic=message.topic,
            tag=message.tag or NOTHING,
            keys=_joined(keys),
            store_host=self._host_of(info.broker_name),
            message_type=TraceMessageType.COMMIT,
            transaction_id=message.message_id,
            state=_STATES[transaction.decision],
            from_check=transaction.from_check,
        )
        self._dispatcher.add([record], lambda _: [(encode_record(record), record.message_id, keys)])

    def _chosen(self, messages: Sequence[StoredMessage]) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        begin, end = 0, len(messages)
        while begin < end:
            # Messages of one batch stand together; mostly they are all of one, or of two.
            first = messages[begin]
            info, offset, stop = first.info, first.queue_offset, end
            if messages[-1].batch is not info:
                # Where the last one begins, if all its messages are there; else look for it.
                stop = max(end - 1 - messages[-1].ordinal, begin + 1)
                if messages[stop - 1].batch is not info:
                    stop = bisect_left(range(end), 1, begin, key=partial(_is_other, messages, info))
            count = messages[stop - 1].queue_offset + 1 - offset
            sequence = info.first_sequence + offset - info.base_queue_offset
            places = self._sampler.chosen(info.producer_id, sequence, count)
            if count == stop - begin:
                found += [messages[begin + place] for place in places]
            else:  # a filter has left some out
                for place in places:
                    at = bisect_left(messages, offset + place, begin, stop, key=_queue_offset)
                    if messages[at].queue_offset == offset + place:
                        found.append(messages[at])
            begin = stop
        return found

    def _cost(self, began_ms: int) -> int:
        return min(max(self._wall_ms() - began_ms, 0), MAX_COST_MS)

    def _context_code(self, batch: ConsumeContext, cost_ms: int) -> ContextCode:
        if batch.error is not None:
            return ContextCode.EXCEPTION
        if self._timeout_ms is not None and cost_ms >= self._timeout_ms:
            return ContextCode.TIME_OUT
        return ContextCode.FAILED if batch.again else ContextCode.SUCCESS


def _is_other(messages: Sequence[StoredMessage], info: object, place: int) -> bool:
    return messages[place].batch is not info


def facts_of(message: Message, position: int) -> Facts:
    """Return the traced facts of a sent message: its body may be large, and is not held."""
    return position, message.tag or NOTHING, message.keys, len(message.body)


def _joined(keys: Sequence[str]) -> str:
    return plain_text(" ".join(keys)) if keys else NOTHING


def _pub_records(
    shared: TraceRecord, first_id: tuple[int, int], facts: Sequence[Facts]
) -> list[Traced]:
    producer_id, sequence = first_id
    text, place = pub_format(shared), shared.offset_id
    made = []
    for at, tag, keys, size in facts:
        message_id = format_message_id(producer_id, sequence + at)
        varying = message_id, plain_text(tag), _joined(keys), size, f"{place}{at:X}"
        made.append((text % varying, message_id, keys))
    return made
