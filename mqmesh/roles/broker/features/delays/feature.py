"""The schedule service's requests, and the cancelling of delayed messages.

The service alone decides what is due; the broker checks that it is, by its own clock,
reads the bodies and writes them, with a record of it, in one step.
"""

from collections.abc import Mapping
from typing import Final

from mqmesh.batch.delayed_batch import RECORD_QUEUE, SCHEDULE_QUEUES
from mqmesh.batch.schedule_record import Run, ScheduleAction, decode_runs
from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    CancelRefused,
    CorruptBatch,
    CorruptRecord,
    OffsetIllegal,
    OffsetOutOfRange,
)
from mqmesh.message import SCHEDULE_TOPIC, format_message_id
from mqmesh.metrics import counter, gauge, text
from mqmesh.namespaces import is_within
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import EMPTY_REPLY, Answer, Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.request import Peer, PendingReply, Request
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
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.delays.due_messages import DueMessages, Prepared
from mqmesh.roles.broker.features.delays.schedule_link import CANCEL_TIMEOUT_MS, ScheduleLink
from mqmesh.roles.broker.features.delays.schedule_reading import check_cursors, read_schedule
from mqmesh.roles.broker.writing.writes import Writes
from mqmesh.roles.dispatch import Handler
from mqmesh.units import MAX_OFFSET, CommitLogOffset

HOLDER: Final = "the schedule service"
"""The name under which the log's end is kept from retention."""
_OK = int(ResponseCode.SUCCESS)
_CHANGE = encode_header(ScheduleNews())
_WHY = {
    CancelVerdict.OVER: "it was delivered or cancelled before",
    CancelVerdict.LEAVING: "it is being delivered just now",
}


class DelaysFeature(Feature):
    """Delayed messages, and the schedule service that says when they are due.

    The service alone decides what is due; the broker checks that it is, by its own clock,
    reads the bodies and writes them, with a record of it, in one step.
    """

    def __init__(self, core: Core, writes: Writes, schedule: ScheduleLink) -> None:
        self._clock = core.clock
        self._store = core.store
        self._commit_point = core.commit_point
        self._permit = core.dispatch.permit
        self._writes = writes
        self._schedule = schedule
        self._due = DueMessages(core, writes, schedule.opened)

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.OPEN_SCHEDULE: self.open_schedule,
            RequestCode.PULL_SCHEDULE: self.pull_schedule,
            RequestCode.DELIVER_DUE: self.deliver_due,
            RequestCode.CANCEL_DELAYED: self.cancel_delayed,
            RequestCode.REFUSE_CANCEL: self.refuse_cancel,
        }

    def tick(self, now_ms: int) -> None:
        """Fail cancellations that the schedule service did not answer in time."""
        self._fail_cancels(self._schedule.tick(now_ms))

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Fail cancellations whose schedule service went away."""
        self._fail_cancels(self._schedule.on_disconnect(peer))

    def stopping(self) -> None:
        """Fail all cancellations."""
        self._fail_cancels(self._schedule.tick(MAX_OFFSET))

    def open_schedule(self, request: Request, header: OpenScheduleRequest) -> OpenScheduleResponse:
        """A schedule service begins."""
        stats = self._store.stats()
        session = self._schedule.open(request.peer)
        return OpenScheduleResponse(
            session, stats.store_id, self._store.epoch(), self._clock.wall_ms()
        )

    def pull_schedule(self, request: Request, header: PullScheduleRequest) -> PullScheduleResponse:
        """Return new entries of the schedule topic."""
        desk = self._schedule
        desk.check(header.session)
        if header.caught_up:
            desk.pending = header.pending
            desk.retries.report(header)
            lowest = header.lowest_offset
            desk.keep_from = desk.known_end if lowest < 0 else min(lowest, desk.known_end)
            self._store.keep_from(HOLDER, CommitLogOffset(desk.keep_from))
        epoch = self._store.epoch()
        if 0 < header.epoch < epoch:
            check_cursors(self._store, header.cursors, header.settled, header.epoch)
        found = read_schedule(self._store, header.cursors)
        stats = self._store.stats()
        if not found.more:
            # The read ends at the visible end of the log, too.
            desk.known_end = self._commit_point.visible(stats.max_commitlog_offset)
        return PullScheduleResponse(
            self._clock.wall_ms(),
            found.cursors,
            found.entries,
            found.records,
            found.more,
            stats.min_commitlog_offset,
            self._store.retention_wish(),
            epoch,
        )

    def deliver_due(self, request: Request, header: DeliverDueRequest) -> Answer | None:
        """Delivers, cancels or rolls forward; answered once that is stored."""
        self._schedule.check(header.session)
        runs = decode_runs(request.command.body)
        if not 0 < len(runs) <= MAX_RUNS or header.action not in list(ScheduleAction):
            raise BrokerError(
                f"{len(runs)} runs for action {header.action}; 1 to {MAX_RUNS} are allowed",
                code=ResponseCode.MESSAGE_ILLEGAL,
            )
        action = ScheduleAction(header.action)
        if action is ScheduleAction.CANCEL and not self._may_cancel(header.ticket, runs):
            return self._delivered(Prepared(bytearray(), []), -1)
        prepared = self._due.prepare(action, runs)
        self._schedule.gone += prepared.gone
        if not prepared.groups:
            return self._delivered(prepared, -1)
        pending = request.later()

        def on_stored(outcomes: list[BatchOutcome]) -> None:
            self._schedule.storing -= 1
            refused = next((one for one in outcomes if one.code != _OK), None)
            if refused is not None:
                error = error_of(refused.code, refused.remark, refused.retry_after_ms)
                pending.fail(error)
                canceller = self._schedule.take_cancel(header.ticket)
                if canceller is not None:
                    canceller.pending.fail(error)
                return
            self._count(action, prepared.message_count)
            pending.done(self._delivered(prepared, outcomes[-1].base_queue_offset))
            canceller = self._schedule.take_cancel(header.ticket)
            if canceller is not None:
                canceller.pending.done(EMPTY_REPLY)

        self._writes.put_groups(prepared.groups, on_stored)
        self._schedule.storing += 1
        self._schedule.timer_changed |= action is ScheduleAction.ROLL
        return None

    def cancel_delayed(self, request: Request, header: CancelDelayedRequest) -> Reply | None:
        """Cancel a delayed message by the schedule service; answered once it is cancelled."""
        desk = self._schedule
        message_id = format_message_id(header.producer_id, header.sequence)
        deadline_ms = self._clock.monotonic_ms() + CANCEL_TIMEOUT_MS
        ticket = desk.add_cancel(request.later(deadline_ms), message_id)
        assert desk.service is not None
        change = ScheduleNews(ticket, header.producer_id, header.sequence)
        desk.service.notify(RequestCode.NOTIFY_SCHEDULE, encode_header(change))
        return None

    def refuse_cancel(self, request: Request, header: RefuseCancelRequest) -> Reply:
        """The service says why a message cannot be cancelled."""
        self._schedule.check(header.session)
        canceller = self._schedule.take_cancel(header.ticket)
        if canceller is not None:
            message_id = canceller.message_id
            why = _WHY.get(header.verdict)
            if why is None:
                error: BrokerError = _does_not_wait(message_id)
            else:
                error = CancelRefused(f"message {message_id} cannot be cancelled: {why}")
            canceller.pending.fail(error)
        return EMPTY_REPLY

    def notify_service(self) -> None:
        """Notify the schedule service at the end of a tick if its topic has new entries."""
        desk = self._schedule
        if desk.timer_changed and desk.service is not None:
            desk.timer_changed = False
            desk.service.notify(RequestCode.NOTIFY_SCHEDULE, _CHANGE)

    def sample(self) -> None:
        """Keep the log while it is unknown what waits in it; count retries without a service."""
        self._hold_log()
        self._count_retries()

    def pending(self) -> int:
        """Return how many delayed messages wait, those for a retry too; -1 for unknown."""
        link = self._schedule
        if link.pending < 0 or link.retries.is_current:
            return link.pending
        ends = [self._store.queue_bounds(SCHEDULE_TOPIC, one)[1] for one in range(RECORD_QUEUE)]
        return link.pending + link.retries.unreported(ends)

    def _hold_log(self) -> None:
        """Has the log kept whole while it is not known what still waits in it; now and then."""
        desk = self._schedule
        if desk.keep_from is None and any(
            low < high
            for low, high in (
                self._store.queue_bounds(SCHEDULE_TOPIC, queue_id)
                for queue_id in range(SCHEDULE_QUEUES)
            )
        ):
            self._store.keep_from(HOLDER, CommitLogOffset(0))

    def _count_retries(self) -> None:
        """Count what came into the schedule topic while its service is away."""
        board = self._schedule.retries
        if board.is_current or not board.cursors:
            return
        try:
            found = read_schedule(self._store, board.cursors)
        except OffsetIllegal:
            board.cursors = []  # the log was cut: the next service reports anew
            return
        board.count(found.entries, found.cursors)

    def _fail_cancels(self, left: list[PendingReply]) -> None:
        """Fail cancels that the schedule service will not answer."""
        for pending in left:
            pending.fail(
                BrokerNotAvailable(
                    "the schedule service does not answer; whether the message is cancelled is "
                    "unknown"
                ),
            )

    def _may_cancel(self, ticket: int, runs: list[Run]) -> bool:
        """Return whether the client that wants messages cancelled may have that done.

        The topics of the messages are known only here. A client without the right is answered, and
        nothing is cancelled for a client that has stopped waiting.
        """
        canceller = self._schedule.find_cancel(ticket)
        if canceller is None:
            return False
        try:
            for offset, _, _ in runs:
                meta = self._schedule.opened.open(self._store, offset).meta
                peer = canceller.pending.peer
                if not is_within(peer.principal.namespace, meta.real_topic):
                    raise _does_not_wait(canceller.message_id)
                self._permit(peer, canceller.pending.code, meta.real_topic)
        except (BrokerError, CorruptBatch, CorruptRecord, OffsetOutOfRange) as error:
            self._schedule.take_cancel(ticket)
            canceller.pending.fail(error)
            return False
        return True

    def _delivered(self, prepared: Prepared, record_offset: int) -> DeliverDueResponse:
        statuses = bytes(prepared.statuses)
        return DeliverDueResponse(self._clock.wall_ms(), statuses, record_offset)

    def _count(self, action: ScheduleAction, messages: int) -> None:
        desk = self._schedule
        if action is ScheduleAction.DELIVER:
            desk.delivered += messages
        elif action is ScheduleAction.CANCEL:
            desk.cancelled += messages
        else:
            desk.rolled += messages

    metrics = (
        text(
            "schedule_service",
            "whether the schedule service is there: on, off",
            lambda feature: "off" if feature._schedule.service is None else "on",
        ),
        gauge(
            "schedule_sessions",
            "how often the schedule service came",
            lambda feature: feature._schedule.sessions,
        ),
        gauge(
            "schedule_pending",
            "delayed messages that wait, those for a retry too; -1 for unknown",
            lambda feature: feature.pending(),
            unit="messages",
            rocketmq_name="rocketmq_timing_messages",
        ),
        gauge(
            "schedule_retries",
            "of them, messages that wait for a retry",
            lambda feature: feature._schedule.retries.total(),
            unit="messages",
        ),
        counter(
            "schedule_delivered_total",
            "delayed messages that went on their way",
            lambda feature: feature._schedule.delivered,
            unit="messages",
        ),
        counter(
            "schedule_cancelled_total",
            "delayed messages that were cancelled",
            lambda feature: feature._schedule.cancelled,
            unit="messages",
        ),
        counter(
            "schedule_rolled_total",
            "delayed messages written once more so that the log may go",
            lambda feature: feature._schedule.rolled,
            unit="messages",
        ),
        counter(
            "schedule_gone_total",
            "delayed messages that could not be read any more",
            lambda feature: feature._schedule.gone,
            unit="messages",
        ),
    )


def _does_not_wait(message_id: str) -> BrokerError:
    return BrokerError(
        f"message {message_id} does not wait here: it is unknown, or not delayed",
        code=ResponseCode.QUERY_NOT_FOUND,
    )
