"""CONSUMER_SEND_MSG_BACK: messages that failed come again later, or become dead letters.

Nothing is answered before the store has what was to be written, so a consumer may take
its message for done then.
"""

from typing import Final

import msgspec

from mqmesh.errors import LocalProtocolError, MQMeshError, OffsetIllegal
from mqmesh.message import check_group, dlq_topic, retry_topic
from mqmesh.protocol.codes import ResponseCode, code_of, error_of
from mqmesh.protocol.command import MAX_REMARK_CHARACTERS, Reply, Request, decode_header, reply_with
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.retries import (
    SendBackEntry,
    SendBackRequest,
    SendBackResponse,
    SendBackResult,
)
from mqmesh.record_batch import BatchHeader, check_stored
from mqmesh.redelivery import redeliver
from mqmesh.roles.broker.context import BrokerContext, without_frame
from mqmesh.roles.broker.delays import put_delayed
from mqmesh.roles.broker.inner_send import ensure_topic, inner_send
from mqmesh.roles.broker.retry_plan import RetryStep, halves_of, ordinal_of, plan_retry
from mqmesh.storage.interface import GetStatus

RETRY_QUEUE: Final = 0
"""Retry and dead-letter topics have one queue on each broker."""

_OK: Final = int(ResponseCode.SUCCESS)


class _Gathering:
    """The outcomes of a request's writes, until the last one is there."""

    def __init__(self, context: BrokerContext, request: Request, back: SendBackRequest) -> None:
        self._context = context
        self._request = without_frame(request)
        self._back = back
        self._results = [SendBackResult(_OK) for _ in back.entries]
        self._open = 1  # so that it does not end before everything was begun

    def begin(self) -> None:
        self._open += 1

    def stored(self, index: int, outcomes: list[BatchOutcome], dead_letters: int) -> None:
        for outcome in outcomes:
            if outcome.code != _OK:
                self.fail(index, error_of(outcome.code, outcome.remark))
            elif dead_letters:
                result = self._results[index]
                self._results[index] = msgspec.structs.replace(
                    result, dead_letters=result.dead_letters + dead_letters
                )
                self._context.stats.total.dead_letters += dead_letters
        self.end()

    def fail(self, index: int, error: MQMeshError) -> None:
        code = vars(error).get("code") or code_of(error)
        self._results[index] = SendBackResult(code, str(error)[:MAX_REMARK_CHARACTERS])

    def end(self) -> None:
        self._open -= 1
        if self._open:
            return
        answer = SendBackResponse(self._results)
        if all(result.code == _OK for result in self._results):
            # What failed may be asked for again under the same token.
            self._context.retries.tokens.note(self._back.group, self._back.token, answer)
        self._context.wire.reply(self._request, reply_with(answer))


def send_back(context: BrokerContext, request: Request) -> Reply | None:
    """Plans the next try of messages that failed, or makes them dead letters."""
    back = decode_header(SendBackRequest, request.command.header)
    check_group(back.group)
    known = context.retries.tokens.get(back.group, back.token)
    if known is not None:
        return reply_with(known)
    gathering = _Gathering(context, request, back)
    for index, entry in enumerate(back.entries):
        try:
            _send_back_entry(context, back, index, entry, gathering)
        except MQMeshError as error:
            gathering.fail(index, error)
    gathering.end()
    return None


def read_batch(
    context: BrokerContext, topic: str, queue_id: int, queue_offset: int
) -> tuple[memoryview, BatchHeader]:
    """The stored batch that holds a message.

    Raises:
        OffsetIllegal: There is no such message, or not any more.
        CorruptBatch, CorruptRecord: It is damaged.
    """
    found = context.store.get(topic, queue_id, queue_offset, max_bytes=1)
    if found.status is not GetStatus.FOUND:
        raise OffsetIllegal(
            f"queue {queue_id} of {topic!r} has no message at {queue_offset}; it has those from "
            f"{found.min_queue_offset} and before {found.max_queue_offset}"
        )
    data = memoryview(found.data[0])
    header = check_stored(data)
    return data[: header.total_size], header


def _send_back_entry(
    context: BrokerContext,
    back: SendBackRequest,
    index: int,
    entry: SendBackEntry,
    gathering: _Gathering,
) -> None:
    context.topics.require(entry.topic)
    place, end = entry.queue_offset, entry.queue_offset + entry.count
    while place < end:
        data, header = read_batch(context, entry.topic, entry.queue_id, place)
        steps = plan_retry(
            data,
            header,
            topic=entry.topic,
            first=ordinal_of(header, place),
            count=min(end, header.next_queue_offset) - place,
            max_reconsume_times=context.group_table.retry_limit(
                back.group, back.max_reconsume_times
            ),
            delay_level=entry.delay_level,
            reconsume_times=entry.reconsume_times,
            reason=entry.reason,
        )
        for step in steps:
            _take_step(context, back.group, data, header, index, step, gathering)
        place = header.next_queue_offset


def _take_step(
    context: BrokerContext,
    group: str,
    data: memoryview,
    header: BatchHeader,
    index: int,
    step: RetryStep,
    gathering: _Gathering,
) -> None:
    dead_letters = step.count if step.is_dead else 0

    def stored(outcomes: list[BatchOutcome]) -> None:
        gathering.stored(index, outcomes, dead_letters)

    try:
        if step.is_dead:
            batch = redeliver(
                data,
                header,
                first=step.first,
                count=step.count,
                topic=dlq_topic(group),
                queue_id=RETRY_QUEUE,
                change=step.change,
            )
            inner_send(context, [batch], stored)
        else:
            # Now, so that the members have found it when the messages are due.
            ensure_topic(context, retry_topic(group))
            put_delayed(
                context,
                data,
                header,
                first=step.first,
                count=step.count,
                topic=retry_topic(group),
                queue_id=RETRY_QUEUE,
                level=step.level,
                change=step.change,
                on_stored=stored,
            )
    except LocalProtocolError:
        # With the reason in each message, a full batch is too large.
        if step.count == 1:
            raise
        for half in halves_of(step):
            _take_step(context, group, data, header, index, half, gathering)
        return
    gathering.begin()
    context.stats.total.sent_back_messages += step.count
