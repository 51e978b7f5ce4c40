"""CONSUMER_SEND_MSG_BACK: messages that failed come again later, or become dead letters.

Nothing is answered before the store has what was to be written, so a consumer may take
its message for done then.
"""

from typing import Final

import msgspec

from mqmesh.errors import LocalProtocolError, MQMeshError
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
from mqmesh.record_batch import read_header
from mqmesh.redelivery import redeliver
from mqmesh.roles.broker.context import BrokerContext, without_frame
from mqmesh.roles.broker.delays import put_delayed
from mqmesh.roles.broker.inner_send import ensure_topic, inner_send
from mqmesh.roles.broker.retry_plan import RetryStep, plan_retry
from mqmesh.roles.broker.stored_batches import StoredBatch, StoredBatches

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
    batches = StoredBatches(context.store)
    for index, entry in enumerate(back.entries):
        try:
            _send_back_entry(context, back, index, entry, batches, gathering)
        except MQMeshError as error:
            gathering.fail(index, error)
    gathering.end()
    return None


def _send_back_entry(
    context: BrokerContext,
    back: SendBackRequest,
    index: int,
    entry: SendBackEntry,
    batches: StoredBatches,
    gathering: _Gathering,
) -> None:
    context.topics.require(entry.topic)
    most = context.group_table.retry_limit(back.group, back.max_reconsume_times)
    place, end = entry.queue_offset, entry.queue_offset + entry.count
    while place < end:
        found = batches.find(entry.topic, entry.queue_id, place)
        base, behind = found.header.base_queue_offset, found.header.next_queue_offset
        if found.messages is None:
            _bury_whole(context, back.group, found, index, gathering)
        else:
            steps = plan_retry(
                found.messages[place - base : min(end, behind) - base],
                topic=entry.topic,
                max_reconsume_times=most,
                delay_level=entry.delay_level,
                reconsume_times=entry.reconsume_times,
                reason=entry.reason,
            )
            for step in steps:
                _take_step(context, back.group, index, step, gathering)
        place = behind


def _bury_whole(
    context: BrokerContext, group: str, found: StoredBatch, index: int, gathering: _Gathering
) -> None:
    """Nobody can read the batch: it goes to the dead letters as it is."""
    topic = _topic_of(context, group, is_dead=True)
    batch = redeliver(found.data, found.header, topic=topic, queue_id=RETRY_QUEUE)
    count = found.header.message_count
    inner_send(context, [batch], lambda outcomes: gathering.stored(index, outcomes, count))
    gathering.begin()
    context.stats.total.sent_back_messages += count


def _take_step(
    context: BrokerContext, group: str, index: int, step: RetryStep, gathering: _Gathering
) -> None:
    topic = _topic_of(context, group, is_dead=step.is_dead)
    try:
        batch = step.batch(topic, RETRY_QUEUE)
    except LocalProtocolError:
        # With the reason in each message, a full batch is too large.
        if len(step.messages) == 1:
            raise
        for half in step.halves():
            _take_step(context, group, index, half, gathering)
        return
    dead_letters = len(step.messages) if step.is_dead else 0

    def stored(outcomes: list[BatchOutcome]) -> None:
        gathering.stored(index, outcomes, dead_letters)

    if step.is_dead:
        inner_send(context, [batch], stored)
    else:
        # Now, so that the members have found it when the messages are due.
        ensure_topic(context, topic)
        put_delayed(
            context,
            batch,
            read_header(batch),
            topic=topic,
            queue_id=RETRY_QUEUE,
            level=step.level,
            on_stored=stored,
        )
    gathering.begin()
    context.stats.total.sent_back_messages += len(step.messages)


def _topic_of(context: BrokerContext, group: str, *, is_dead: bool) -> str:
    name = dlq_topic(group) if is_dead else retry_topic(group)
    if context.group_table.get(group) is None and context.groups.find(group) is None:
        # The topics of groups that are known are bounded by these; anybody may think of names.
        context.topics.check_room(name)
    return name
