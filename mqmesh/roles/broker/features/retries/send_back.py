"""CONSUMER_SEND_MSG_BACK: messages that failed come again later, or become dead letters.

Nothing is answered before the store has what was to be written, so a consumer may take
its message for done then. What was sent back from one place is not sent back from there again,
whoever asks: the retries and the marks that tell of them are one write.
"""

from functools import partial
from typing import Final

import msgspec

from mqmesh.batch.redelivery import redeliver
from mqmesh.errors import BrokerNotAvailable, LocalProtocolError, MQMeshError
from mqmesh.message import SENT_BACK_TOPIC, check_group, dlq_topic, retry_topic
from mqmesh.protocol.codes import ResponseCode, code_of, error_of
from mqmesh.protocol.command import MAX_REMARK_CHARACTERS, Reply, Request, reply_with
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.retries import (
    SendBackEntry,
    SendBackRequest,
    SendBackResponse,
    SendBackResult,
)
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.delays.delays import place_delayed
from mqmesh.roles.broker.features.retries.retry_plan import RetryStep, plan_retry
from mqmesh.roles.broker.features.retries.sent_back_marks import (
    DEAD,
    MARKS_QUEUE,
    UNDER_WAY,
    SentBackMark,
    encode_marks,
)
from mqmesh.roles.broker.features.retries.stored_batches import BatchInStore, StoredBatches
from mqmesh.roles.broker.features.storing.inner_send import (
    batch_to_put,
    ensure_topic,
    inner_put,
)
from mqmesh.storage.interface import BatchToPut

RETRY_QUEUE: Final = 0
"""Retry and dead-letter topics have one queue on each broker."""
MARKS_A_BATCH: Final = 10_000

_OK: Final = int(ResponseCode.SUCCESS)


class _Gathering:
    """What a request has written, and its outcomes."""

    def __init__(self, context: BrokerContext, request: Request, back: SendBackRequest) -> None:
        self._context = context
        self._request = request.without_frame()
        self._results = [SendBackResult(_OK) for _ in back.entries]
        self._writes: list[tuple[int, SentBackMark]] = []
        self._batches: list[BatchToPut] = []

    def add(self, index: int, batch: BatchToPut, mark: SentBackMark) -> None:
        limit = self._context.config.storage.max_batch_bytes
        if batch.header.total_size > limit:
            # The store would refuse it alone, and take the mark that says that it is there.
            raise LocalProtocolError(
                f"a retry of {batch.header.total_size} bytes does not fit a segment of the log, "
                f"which takes {limit} (storage.mapped_file_size_commit_log)"
            )
        mark = msgspec.structs.replace(
            mark,
            topic=batch.topic,
            queue_id=batch.queue_id,
            producer_crc=batch.header.producer_crc,
        )
        self._context.retries.sent_back.begin(mark)
        self._writes.append((index, mark))
        self._batches.append(batch)

    def note_dead(self, index: int, count: int) -> None:
        result = self._results[index]
        self._results[index] = msgspec.structs.replace(
            result, dead_letters=result.dead_letters + count
        )

    def fail(self, index: int, error: MQMeshError) -> None:
        code = vars(error).get("code") or code_of(error)
        self._results[index] = SendBackResult(code, str(error)[:MAX_REMARK_CHARACTERS])

    def write(self) -> None:
        """Has everything stored at once, then answers."""
        if not self._writes:
            self._answer()
            return
        try:
            inner_put(self._context, self._with_marks(), self._stored)
        except MQMeshError:
            for _, mark in self._writes:
                self._context.retries.sent_back.withdraw(mark)
            raise

    def _with_marks(self) -> list[BatchToPut]:
        """Marks, and behind them what they tell of; some at a time."""
        context = self._context
        batches: list[BatchToPut] = []
        for start in range(0, len(self._writes), MARKS_A_BATCH):
            stop = start + MARKS_A_BATCH
            marks = [mark for _, mark in self._writes[start:stop]]
            now_ms = context.clock.wall_ms()
            data = encode_marks(marks, producer_id=context.instance_id, now_ms=now_ms)
            batches.append(batch_to_put(data))
            batches += self._batches[start:stop]
        return batches

    def _stored(self, outcomes: list[BatchOutcome]) -> None:
        context, total = self._context, self._context.stats.total
        # One write: the store took all of it or nothing.
        bad = next((outcome for outcome in outcomes if outcome.code != _OK), None)
        for index, mark in self._writes:
            if bad is not None:
                context.retries.sent_back.withdraw(mark)
                self.fail(index, error_of(bad.code, bad.remark))
                continue
            context.retries.sent_back.settle(mark)
            total.sent_back_messages += mark.count
            if mark.is_dead:
                self.note_dead(index, mark.count)
                total.dead_letters += mark.count
        self._answer()

    def _answer(self) -> None:
        self._context.wire.reply(self._request, reply_with(SendBackResponse(self._results)))


def send_back(context: BrokerContext, request: Request, back: SendBackRequest) -> Reply | None:
    """Plans the next try of messages that failed, or makes them dead letters."""
    check_group(back.group)
    context.retries.sent_back.load(context.store, context.offsets.sent_back.counts_from)
    gathering = _Gathering(context, request, back)
    batches = StoredBatches(context.store)
    for index, entry in enumerate(back.entries):
        try:
            _send_back_entry(context, back, index, entry, batches, gathering)
        except MQMeshError as error:
            gathering.fail(index, error)
    gathering.write()
    return None


def forget_sent_back(context: BrokerContext, group: str) -> None:
    """A group's offsets are moved: what it gets once more may be sent back once more.

    Raises:
        CorruptRecord: The marks cannot be read just now; nothing was changed.
    """
    known = context.retries.sent_back
    known.load(context.store, context.offsets.sent_back.counts_from)
    if known.forget_group(group):
        _, end = context.store.queue_bounds(SENT_BACK_TOPIC, MARKS_QUEUE)
        context.offsets.sent_back.forget(group, end)


def _send_back_entry(
    context: BrokerContext,
    back: SendBackRequest,
    index: int,
    entry: SendBackEntry,
    batches: StoredBatches,
    gathering: _Gathering,
) -> None:
    context.topics.require(entry.topic)
    place, end = entry.queue_offset, entry.queue_offset + entry.count
    known = context.retries.sent_back
    while place < end:
        found = batches.find(entry.topic, entry.queue_id, place)
        header = found.header
        base, behind = header.base_queue_offset, header.next_queue_offset
        whole = found.messages is None
        first, stop = place - base, min(end, behind) - base
        if whole:
            first, stop = 0, header.message_count
        for start, after, state in list(
            known.runs(back.group, header.commitlog_offset, first, stop)
        ):
            if state == UNDER_WAY:
                raise BrokerNotAvailable("the same messages are being sent back just now")
            if state == DEAD:
                gathering.note_dead(index, after - start)
            elif state is None and whole:
                _bury_whole(context, back.group, found, index, gathering)
            elif state is None:
                _retry(context, back, index, entry, found, start, after, gathering)
        place = behind


def _retry(
    context: BrokerContext,
    back: SendBackRequest,
    index: int,
    entry: SendBackEntry,
    found: BatchInStore,
    first: int,
    stop: int,
    gathering: _Gathering,
) -> None:
    assert found.messages is not None
    steps = plan_retry(
        found.messages[first:stop],
        topic=entry.topic,
        max_reconsume_times=context.group_table.retry_limit(back.group, back.max_reconsume_times),
        delay_level=entry.delay_level,
        reconsume_times=entry.reconsume_times,
        reason=entry.reason,
    )
    for step in steps:
        _take_step(context, back.group, index, step, gathering)


def _bury_whole(
    context: BrokerContext, group: str, found: BatchInStore, index: int, gathering: _Gathering
) -> None:
    """Nobody can read the batch: it goes to the dead letters as it is."""
    topic = _topic_of(context, group, is_dead=True)
    header = found.header
    batch = redeliver(found.data, header, topic=topic, queue_id=RETRY_QUEUE)
    mark = SentBackMark(group, header.commitlog_offset, 0, header.message_count, True)
    gathering.add(index, batch_to_put(batch), mark)


def _take_step(
    context: BrokerContext, group: str, index: int, step: RetryStep, gathering: _Gathering
) -> None:
    topic = _topic_of(context, group, is_dead=step.is_dead)
    try:
        batch = step.batch(topic, RETRY_QUEUE, partial(place_delayed, context))
    except LocalProtocolError:
        # With the reason in each message, a full batch is too large.
        if len(step.messages) == 1:
            raise
        for half in step.halves():
            _take_step(context, group, index, half, gathering)
        return
    if not step.is_dead:
        # Now, so that the members have found it when the messages are due.
        ensure_topic(context, topic)
    source = step.messages[0]
    mark = SentBackMark(
        group, source.commitlog_offset, source.ordinal, len(step.messages), step.is_dead
    )
    gathering.add(index, batch, mark)


def _topic_of(context: BrokerContext, group: str, *, is_dead: bool) -> str:
    name = dlq_topic(group) if is_dead else retry_topic(group)
    if context.group_table.get(group) is None and context.groups.find(group) is None:
        # The topics of groups that are known are bounded by these; anybody may think of names.
        context.topics.check_room(name)
    return name
