"""Writes what a turn has staged, once, and answers when the store has it and it is safe.

Nothing is answered before the commit point says that it is safe, or the time for that is over.
"""

from mqmesh.errors import MQMeshError, StorageError, StoreClosed, SystemBusy
from mqmesh.message import SCHEDULE_TOPIC, TRANS_HALF_TOPIC
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.command import MAX_REMARK_CHARACTERS, ONEWAY, Reply
from mqmesh.protocol.messaging import BatchOutcome, SendStatus, encode_outcomes
from mqmesh.roles.broker.commit_point import QueueKey
from mqmesh.roles.broker.context import BrokerContext, store_stopped
from mqmesh.roles.broker.features.pulls.pull import wake_pulls
from mqmesh.roles.broker.features.storing.staging import (
    OpenSend,
    fill_in,
    fill_in_refusal,
    fill_in_status,
)
from mqmesh.roles.broker.state_answers import write_state
from mqmesh.storage.interface import BatchToPut, PutResult, PutStatus


def finish_sends(context: BrokerContext) -> None:
    """Writes what is staged, and answers or lets wait; the end of each tick."""
    if context.state.is_urgent:
        write_state(context)  # what is sent may need it, so that it has to stand in front
    if not context.stage.sends:
        return
    batches, sends = context.stage.take()
    context.transactions.table.staged_halves = 0
    late = context.admission.count_refused(len(sends), context.clock.monotonic_ms())
    if late:
        batches, sends = _refuse_late(context, batches, sends, late)
    try:
        results = context.store.put(batches, context.clock.wall_ms()) if batches else []
    except StorageError as error:
        context.stats.total.put_refused += len(batches)
        refused = store_stopped(error) if isinstance(error, StoreClosed) else error
        fill_in_refusal(sends, _outcome_of(refused))
        for send in sends:
            _answer(context, send)
        return
    fill_in(sends, batches, results)
    safe_offset = context.commit_point.offset()
    arrived = _account(context, batches, results, context.commit_point.shown_offset())
    for send in sends:
        if send.end_offset > safe_offset:
            _wait(context, send)
        else:
            _answer_safe(context, send)
    for key in arrived:
        wake_pulls(context, *key)


def _refuse_late(
    context: BrokerContext, batches: list[BatchToPut], sends: list[OpenSend], count: int
) -> tuple[list[BatchToPut], list[OpenSend]]:
    """Refuses the oldest sends; returns what is left.

    Order does not suffer: a producer waits for its answer before it sends to the queue again.
    """
    config = context.config
    late, left = sends[:count], sends[count:]
    refused = sum(send.outcomes.count(None) for send in late)
    context.stats.total.busy_refusals += count
    context.stats.total.put_refused += refused
    error = SystemBusy(
        f"the log is too slow for all sends: some waited for {context.admission.longest_wait_ms} "
        f"ms (wait_time_mills_in_send_queue = {config.wait_time_mills_in_send_queue})",
        retry_after_ms=config.busy_retry_after_ms,
    )
    fill_in_refusal(late, _outcome_of(error))
    for send in late:
        _answer(context, send)
    return batches[refused:], left


def answer_confirmed(context: BrokerContext) -> None:
    """More of the log is safe: answers the sends that waited for it, and wakes pulls."""
    for send in context.commit_point.confirmed(context.clock.monotonic_ms()):
        _answer_safe(context, send)
    for key in context.commit_point.arrivals():
        if key[0] == SCHEDULE_TOPIC:
            context.schedule.stirred = True
        if key in context.holds.queues:
            wake_pulls(context, *key)


def answer_expired(context: BrokerContext, now_ms: int) -> None:
    """Answers sends that waited for too long; they say who is late.

    None in a group that elects its master: the next election may take back what is not confirmed,
    so no answer could say that it is stored. Those sends wait until they are confirmed, or until
    another replica leads, and their producers no longer than their own timeouts.
    """
    point = context.commit_point
    if context.leadership is not None:
        return
    for send, late in point.expired(now_ms):
        if late is not None:
            context.stats.note_unsafe(late.status)
            remark = f"{late.name} took over {point.timeout_ms} ms ({late.setting})"
            context.wire.note_refusal(ResponseCode[late.status.name], remark)
            fill_in_status(send, late.status)
        _answer(context, send)


def refuse_all(context: BrokerContext, error: MQMeshError) -> None:
    """This broker leads no more: sends that have no answer yet get none but this error.

    What is written of them may be lost, or may be there: who repeats them at the next master does
    not store them twice.
    """
    _, staged = context.stage.take()
    context.transactions.table.staged_halves = 0
    fill_in_refusal(staged, _outcome_of(error))
    waiting = context.commit_point.take_all()
    for send in waiting:
        # What the broker sent itself is not done, as whoever asked for it hears.
        send.outcomes[:] = [_outcome_of(error)] * len(send.outcomes)
    for send in (*staged, *waiting):
        if send.request is None:
            _answer(context, send)
        elif not send.request.command.flags & ONEWAY:
            context.wire.fail(send.request, error)


def refuse_waiting(context: BrokerContext, error: MQMeshError) -> None:
    """Sends that wait have no answer but this error: who repeats them does not store them twice.

    What the broker sent itself waits on: it is told as done, or not at all.
    """
    for send in context.commit_point.take_all():
        if send.request is None:
            _wait(context, send)
        else:
            context.wire.fail(send.request, error)


def _account(
    context: BrokerContext,
    batches: list[BatchToPut],
    results: list[PutResult],
    shown_offset: int,
) -> dict[QueueKey, None]:
    """Counts what was stored; returns the queues that somebody waits at and can see it."""
    arrived: dict[QueueKey, None] = {}
    total = context.stats.total
    waited_for = context.holds.queues
    for batch, result in zip(batches, results, strict=True):
        if result.status is not PutStatus.PUT_OK:
            if result.status is PutStatus.DUPLICATE:
                total.put_duplicates += 1
            else:
                total.put_refused += 1
            continue
        name, queue_id, header = batch.topic, batch.queue_id, batch.header
        count, size = header.message_count, header.total_size
        total.put_batches += 1
        total.put_messages += count
        total.put_bytes += size
        topic = context.topics.get(name)
        if topic is not None:
            topic.put_messages += count
            topic.put_bytes += size
            topic.sizes.observe(size / count, count)
            topic.last_update[queue_id] = result.store_timestamp
        if name == TRANS_HALF_TOPIC:
            context.transactions.note_half(batch, result, context.clock.monotonic_ms())
        if result.end_offset > shown_offset:
            context.commit_point.note_arrival((name, queue_id), result.end_offset)
        elif waited_for and (name, queue_id) in waited_for:
            arrived[name, queue_id] = None
    return arrived


def _wait(context: BrokerContext, send: OpenSend) -> None:
    if send.request is not None:
        if send.request.command.flags & ONEWAY:
            return
        send.request = send.request.without_frame()
    context.commit_point.wait(send, send.end_offset, context.clock.monotonic_ms())


def _answer_safe(context: BrokerContext, send: OpenSend) -> None:
    """Answers a send that is safe, or that nobody is there to make safer."""
    status = context.commit_point.status_of(send.end_offset)
    if status and send.request is not None:
        context.stats.note_unsafe(status)
        fill_in_status(send, status)
    _answer(context, send)


def _answer(context: BrokerContext, send: OpenSend) -> None:
    request = send.request
    outcomes = [outcome for outcome in send.outcomes if outcome is not None]
    if request is not None and request.command.flags & ONEWAY:
        _note_refusals(context, outcomes)  # nobody else is told
        return
    assert len(outcomes) == len(send.outcomes)
    if request is None:
        assert send.on_stored is not None
        send.on_stored(outcomes)
        return
    header, remarks = encode_outcomes(outcomes)
    if remarks:
        _note_refusals(context, outcomes)
    context.wire.reply(request, Reply(header, (remarks,) if remarks else ()))


def _note_refusals(context: BrokerContext, outcomes: list[BatchOutcome]) -> None:
    for outcome in outcomes:
        if outcome.code:
            context.wire.note_refusal(outcome.code, outcome.remark)


def refusal_of(context: BrokerContext, error: MQMeshError) -> BatchOutcome:
    """What becomes of a batch that is not stored; counted."""
    context.stats.total.put_refused += 1
    return _outcome_of(error)


def _outcome_of(error: MQMeshError) -> BatchOutcome:
    return BatchOutcome(
        vars(error).get("code") or code_of(error),
        int(SendStatus.SEND_OK),
        getattr(error, "retry_after_ms", 0),
        remark=str(error)[:MAX_REMARK_CHARACTERS].encode(errors="replace").decode(),
    )
