"""The schedule service's requests, and the cancelling of delayed messages.

The service alone decides what is due; the broker checks that it is, by its own clock,
reads the bodies and writes them, with a record of it, in one step.
"""

from typing import Final

from mqmesh.batch.delayed_batch import RECORD_QUEUE, SCHEDULE_QUEUES
from mqmesh.batch.schedule_record import Run, ScheduleAction, decode_runs
from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    CancelRefused,
    CorruptBatch,
    CorruptRecord,
    NoPermission,
    OffsetIllegal,
    OffsetOutOfRange,
)
from mqmesh.message import SCHEDULE_TOPIC, format_message_id
from mqmesh.protocol.codes import RequestCode, ResponseCode, error_of
from mqmesh.protocol.command import (
    EMPTY_REPLY,
    Reply,
    Request,
    encode_header,
    reply_with,
)
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.schedule import (
    MAX_RUNS,
    CancelDelayedRequest,
    CancelVerdict,
    DeliverDueRequest,
    DeliverDueResponse,
    OpenScheduleRequest,
    OpenScheduleResponse,
    PullScheduleRequest,
    PullScheduleResponse,
    RefuseCancelRequest,
    ScheduleNews,
)
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.delays.due_messages import Prepared, prepare
from mqmesh.roles.broker.features.delays.schedule_reading import check_cursors, read_schedule
from mqmesh.roles.broker.features.storing.inner_send import inner_send
from mqmesh.units import CommitLogOffset

HOLDER: Final = "the schedule service"
"""The name under which the log's end is kept from retention."""
_OK = int(ResponseCode.SUCCESS)
_NEWS = encode_header(ScheduleNews())
_WHY = {
    CancelVerdict.OVER: "it was delivered or cancelled before",
    CancelVerdict.LEAVING: "it is being delivered just now",
}


def open_schedule(context: BrokerContext, request: Request, asked: OpenScheduleRequest) -> Reply:
    """A schedule service begins."""
    stats = context.store.stats()
    session = context.schedule.open(request.peer)
    return reply_with(
        OpenScheduleResponse(
            session, stats.store_id, context.store.epoch(), context.clock.wall_ms()
        )
    )


def pull_schedule(context: BrokerContext, request: Request, asked: PullScheduleRequest) -> Reply:
    """What came into the schedule topic."""
    desk = context.schedule
    desk.check(asked.session)
    if asked.caught_up:
        desk.pending = asked.pending
        desk.retries.report(asked)
        lowest = asked.lowest_offset
        desk.keep_from = desk.known_end if lowest < 0 else min(lowest, desk.known_end)
        context.store.keep_from(HOLDER, CommitLogOffset(desk.keep_from))
    epoch = context.store.epoch()
    if 0 < asked.epoch < epoch:
        check_cursors(context.store, asked.cursors, asked.settled, asked.epoch)
    found = read_schedule(context.store, asked.cursors)
    stats = context.store.stats()
    if not found.more:
        # What is not visible yet was not read either.
        desk.known_end = context.commit_point.visible(stats.max_commitlog_offset)
    return reply_with(
        PullScheduleResponse(
            context.clock.wall_ms(),
            found.cursors,
            found.entries,
            found.records,
            found.more,
            stats.min_commitlog_offset,
            context.store.retention_wish(),
            epoch,
        )
    )


def deliver_due(context: BrokerContext, request: Request, asked: DeliverDueRequest) -> Reply | None:
    """Delivers, cancels or rolls forward; answered once that is stored."""
    context.schedule.check(asked.session)
    runs = decode_runs(request.command.body)
    if not 0 < len(runs) <= MAX_RUNS or asked.action not in list(ScheduleAction):
        raise BrokerError(
            f"{len(runs)} runs for action {asked.action}; 1 to {MAX_RUNS} are allowed",
            code=ResponseCode.MESSAGE_ILLEGAL,
        )
    action = ScheduleAction(asked.action)
    if action is ScheduleAction.CANCEL and not _may_cancel(context, asked.ticket, runs):
        return _delivered(context, Prepared(bytearray(), []), -1)
    prepared = prepare(context, action, runs)
    context.schedule.gone += prepared.gone
    if not prepared.batches:
        return _delivered(context, prepared, -1)
    request = request.without_frame()

    def on_stored(outcomes: list[BatchOutcome]) -> None:
        context.schedule.storing -= 1
        refused = next((one for one in outcomes if one.code != _OK), None)
        if refused is not None:
            error = error_of(refused.code, refused.remark, refused.retry_after_ms)
            context.wire.fail(request, error)
            canceller = context.schedule.take_cancel(asked.ticket)
            if canceller is not None:
                context.wire.fail(canceller.request, error)
            return
        _count(context, action, prepared.message_count)
        context.wire.reply(request, _delivered(context, prepared, outcomes[-1].base_queue_offset))
        canceller = context.schedule.take_cancel(asked.ticket)
        if canceller is not None:
            context.wire.reply(canceller.request, EMPTY_REPLY)

    inner_send(context, prepared.batches, on_stored)
    context.schedule.storing += 1
    context.schedule.stirred |= action is ScheduleAction.ROLL
    return None


def cancel_delayed(
    context: BrokerContext, request: Request, asked: CancelDelayedRequest
) -> Reply | None:
    """Asks the service whether a message still waits; answered once it is cancelled."""
    desk = context.schedule
    message_id = format_message_id(asked.producer_id, asked.sequence)
    ticket = desk.add_cancel(request.without_frame(), message_id, context.clock.monotonic_ms())
    assert desk.service is not None
    news = ScheduleNews(ticket, asked.producer_id, asked.sequence)
    context.wire.notify(desk.service, RequestCode.NOTIFY_SCHEDULE, encode_header(news))
    return None


def refuse_cancel(context: BrokerContext, request: Request, asked: RefuseCancelRequest) -> Reply:
    """The service says why a message cannot be cancelled."""
    context.schedule.check(asked.session)
    canceller = context.schedule.take_cancel(asked.ticket)
    if canceller is not None:
        message_id = canceller.message_id
        why = _WHY.get(asked.verdict)
        if why is None:
            error: BrokerError = BrokerError(
                f"message {message_id} does not wait here: it is unknown, or not delayed",
                code=ResponseCode.QUERY_NOT_FOUND,
            )
        else:
            error = CancelRefused(f"message {message_id} cannot be cancelled: {why}")
        context.wire.fail(canceller.request, error)
    return EMPTY_REPLY


def tell_schedule_service(context: BrokerContext) -> None:
    """The end of a tick: if something came into the schedule topic, its service is told."""
    desk = context.schedule
    if desk.stirred and desk.service is not None:
        desk.stirred = False
        context.wire.notify(desk.service, RequestCode.NOTIFY_SCHEDULE, _NEWS)


def hold_log(context: BrokerContext) -> None:
    """Has the log kept whole while it is not known what still waits in it; now and then."""
    desk = context.schedule
    if desk.keep_from is None and any(
        low < high
        for low, high in (
            context.store.queue_bounds(SCHEDULE_TOPIC, queue_id)
            for queue_id in range(SCHEDULE_QUEUES)
        )
    ):
        context.store.keep_from(HOLDER, CommitLogOffset(0))


def count_retries(context: BrokerContext) -> None:
    """Count what came into the schedule topic while its service is away; now and then."""
    board = context.schedule.retries
    if board.is_current or not board.cursors:
        return
    try:
        found = read_schedule(context.store, board.cursors)
    except OffsetIllegal:
        board.cursors = []  # the log was cut: the next service reports anew
        return
    board.count(found.entries, found.cursors)


def pending(context: BrokerContext) -> int:
    """Return how many delayed messages wait, those for a retry among them; -1 for unknown."""
    desk = context.schedule
    if desk.pending < 0 or desk.retries.is_current:
        return desk.pending
    ends = [context.store.queue_bounds(SCHEDULE_TOPIC, one)[1] for one in range(RECORD_QUEUE)]
    return desk.pending + desk.retries.unreported(ends)


def fail_cancels(context: BrokerContext, requests: list[Request]) -> None:
    """Nobody answers these any more."""
    for request in requests:
        context.wire.fail(
            request,
            BrokerNotAvailable(
                "the schedule service does not answer; whether the message is cancelled is unknown"
            ),
        )


def _may_cancel(context: BrokerContext, ticket: int, runs: list[Run]) -> bool:
    """Whether whoever wants messages cancelled may; only here it is known what topics they are for.

    If not it is told, and nobody who has stopped waiting has anything cancelled.
    """
    canceller = context.schedule.find_cancel(ticket)
    if canceller is None:
        return False
    try:
        for offset, _, _ in runs:
            meta = context.schedule.opened.open(context.store, offset).meta
            context.wire.permit(canceller.request, meta.real_topic)
    except (CorruptBatch, CorruptRecord, NoPermission, OffsetOutOfRange) as error:
        context.schedule.take_cancel(ticket)
        context.wire.fail(canceller.request, error)
        return False
    return True


def _delivered(context: BrokerContext, prepared: Prepared, record_offset: int) -> Reply:
    statuses = bytes(prepared.statuses)
    return reply_with(DeliverDueResponse(context.clock.wall_ms(), statuses, record_offset))


def _count(context: BrokerContext, action: ScheduleAction, messages: int) -> None:
    desk = context.schedule
    if action is ScheduleAction.DELIVER:
        desk.delivered += messages
    elif action is ScheduleAction.CANCEL:
        desk.cancelled += messages
    else:
        desk.rolled += messages
