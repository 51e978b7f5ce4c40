"""RocketMQ's message trace of what a client sends and consumes."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

from mqmesh.message import Message, StoredMessage, format_message_id
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.transactions import Decision
from mqmesh.sdk.hooks import ConsumeContext, Hooks, SendContext, TransactionContext
from mqmesh.sdk.tracing.sampling import Sampler
from mqmesh.sdk.tracing.trace_dispatcher import Traced, TraceDispatcher
from mqmesh.sdk.tracing.trace_records import (
    REGION,
    ContextCode,
    TraceKind,
    TraceMessageType,
    TraceRecord,
    plain_text,
)

NOTHING: Final = "null"
"""What RocketMQ writes for no tag and no keys; its decoder fails at an empty last field."""
MAX_COST_MS: Final = (1 << 31) - 1
"""RocketMQ's decoder takes no more."""

_STATES: Final = {
    Decision.COMMIT: "COMMIT_MESSAGE",
    Decision.ROLLBACK: "ROLLBACK_MESSAGE",
}
_queue_offset: Final = attrgetter("queue_offset")

_Delivered = tuple[str, Sequence[str], int]
"""Of a message that is consumed: its id, its keys, and how often it was sent back."""


class MessageTrace(Hooks):
    """Writes the trace of a share of a client's messages.

    Args:
        dispatcher: Takes the records.
        trace_topic: Where it sends them: what goes to this topic, or comes from it, is not traced.
        sampler: Chooses messages.
        wall_ms: Wall clock.
        host_of: Tells a broker group's address; "" for unknown.
        new_request_id: Makes an id that nobody else has.
        timeout_ms: A listener's call of so long was too long; None for no limit.
    """

    def __init__(
        self,
        dispatcher: TraceDispatcher,
        trace_topic: str,
        sampler: Sampler,
        wall_ms: Callable[[], int],
        host_of: Callable[[str], str],
        new_request_id: Callable[[], str],
        *,
        timeout_ms: int | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._trace_topic = trace_topic
        self._sampler = sampler
        self._wall_ms = wall_ms
        self._host_of = host_of
        self._new_request_id = new_request_id
        self._timeout_ms = timeout_ms

    def after_send(self, batch: SendContext) -> None:
        """A batch is stored; what failed has no message id, and is not traced, as in RocketMQ."""
        if batch.status is None or batch.topic == self._trace_topic:
            return
        producer_id, sequence = batch.first_id
        chosen = self._sampler.chosen(producer_id, sequence, len(batch.messages))
        if not chosen:
            return
        chosen = chosen[: self._dispatcher.room(len(chosen))]
        assert batch.queue is not None
        host = self._host_of(batch.queue.broker_name)
        # Bodies may be large, and are not held until the records are written.
        parts = [
            (format_message_id(producer_id, sequence + index), index, _facts(batch.messages[index]))
            for index in chosen
        ]
        shared = TraceRecord(
            TraceKind.PUB,
            "",
            time_ms=batch.began_ms,
            region=REGION,
            group=batch.group,
            topic=batch.topic,
            store_host=host,
            cost_ms=self._cost(batch.began_ms),
            message_type=_message_type(batch),
            offset_id=f"{host}#{batch.commitlog_offset:X}",
            success=batch.status is SendStatus.SEND_OK,
        )
        self._dispatcher.add(len(parts), partial(_pub_records, shared, parts))

    def before_consume(self, batch: ConsumeContext) -> None:
        """A listener is called with messages, or a poll returns them."""
        if batch.topic == self._trace_topic:
            return
        delivered = [
            (message.message_id, message.keys, message.reconsume_times)
            for message in self._chosen(batch.messages)
        ]
        if not delivered:
            return
        request_id = self._new_request_id()
        batch.state[self] = request_id, delivered
        delivered = delivered[: self._dispatcher.room(len(delivered))]
        shared = TraceRecord(
            TraceKind.SUB_BEFORE,
            "",
            time_ms=batch.began_ms,
            region=REGION,
            group=batch.group,
            request_id=request_id,
        )
        self._dispatcher.add(len(delivered), partial(_sub_records, shared, delivered))

    def after_consume(self, batch: ConsumeContext) -> None:
        """The listener has ended."""
        begun: tuple[str, list[_Delivered]] | None = batch.state.get(self)
        if begun is None:
            return
        request_id, delivered = begun
        cost_ms = self._cost(batch.began_ms)
        delivered = delivered[: self._dispatcher.room(len(delivered))]
        shared = TraceRecord(
            TraceKind.SUB_AFTER,
            "",
            time_ms=batch.began_ms + cost_ms,
            region=REGION,
            group=batch.group,
            cost_ms=cost_ms,
            success=not batch.again,
            request_id=request_id,
            context_code=self._context_code(batch, cost_ms),
        )
        self._dispatcher.add(len(delivered), partial(_sub_records, shared, delivered))

    def after_transaction(self, transaction: TransactionContext) -> None:
        """A broker was told how a transaction ended."""
        message = transaction.message
        info = message.info
        if message.topic == self._trace_topic or not self._sampler.wants(
            info.producer_id, info.first_sequence + message.ordinal
        ):
            return
        tag, keys, _ = _facts(message)
        record = TraceRecord(
            TraceKind.END_TRANSACTION,
            message.message_id,
            time_ms=transaction.began_ms,
            region=REGION,
            group=transaction.group,
            topic=message.topic,
            tag=tag,
            keys=_joined(keys),
            store_host=self._host_of(info.broker_name),
            message_type=TraceMessageType.COMMIT,
            transaction_id=message.message_id,
            state=_STATES[transaction.decision],
            from_check=transaction.from_check,
        )
        self._dispatcher.add(1, lambda: (Traced(record, keys),))

    def _chosen(self, messages: Sequence[StoredMessage]) -> Iterator[StoredMessage]:
        begin, end = 0, len(messages)
        while begin < end:
            # Messages of one batch stand together; mostly they are all of one.
            info = messages[begin].info
            stop = end
            if messages[-1].batch is not info:
                stop = bisect_left(range(end), 1, begin, key=partial(_is_other, messages, info))
            first = messages[begin].ordinal
            count = messages[stop - 1].ordinal + 1 - first
            sequence = info.first_sequence + first
            for place in self._sampler.chosen(info.producer_id, sequence, count):
                offset = messages[begin].queue_offset + place
                at = bisect_left(messages, offset, begin, stop, key=_queue_offset)
                if messages[at].queue_offset == offset:  # a filter may have left it out
                    yield messages[at]
            begin = stop

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


def _facts(message: Message) -> tuple[str, Sequence[str], int]:
    return message.tag or NOTHING, message.keys, len(message.body)


def _message_type(batch: SendContext) -> TraceMessageType:
    if batch.is_half:
        return TraceMessageType.HALF
    first = batch.messages[0]
    return (
        TraceMessageType.DELAY
        if first.delay_level or first.deliver_at_ms
        else TraceMessageType.NORMAL
    )


def _joined(keys: Sequence[str]) -> str:
    return plain_text(" ".join(keys)) or NOTHING


def _pub_records(
    shared: TraceRecord, parts: list[tuple[str, int, tuple[str, Sequence[str], int]]]
) -> Iterator[Traced]:
    one = shared
    for message_id, ordinal, (tag, keys, size) in parts:
        yield Traced(
            TraceRecord(
                TraceKind.PUB,
                message_id,
                one.time_ms,
                one.region,
                one.group,
                one.topic,
                plain_text(tag),
                _joined(keys),
                one.store_host,
                size,
                one.cost_ms,
                one.message_type,
                f"{one.offset_id}#{ordinal:X}",
                one.success,
            ),
            keys,
        )


def _sub_records(shared: TraceRecord, delivered: list[_Delivered]) -> Iterator[Traced]:
    one = shared
    for message_id, keys, retry_times in delivered:
        yield Traced(
            TraceRecord(
                one.kind,
                message_id,
                one.time_ms,
                one.region,
                one.group,
                keys=_joined(keys),
                cost_ms=one.cost_ms,
                success=one.success,
                request_id=one.request_id,
                retry_times=retry_times,
                context_code=one.context_code,
            ),
            keys,
        )
